"""Whole averaged gradients on every rank, when ``backward()`` returns.

Each rank averages an even slice of every bucket, as an owner would, in the memory of its own
gradients; then the slices are gathered. On gloo this sends what an all-reduce sends, and is faster.
Both may begin while backward goes on: then a bucket is gathered as soon as it has been averaged,
and shown when backward has ended and all ranks know which gradients there are. Where nobody has
asked for it, the first reduction waits for the end, and shows whether some rank has sparse
gradients, which can't be averaged earlier; then the others wait too.
"""

import itertools
import operator
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple
from weakref import WeakMethod

import torch

from tensorplay.distributed.optim._core.agreement import Agreement
from tensorplay.distributed.optim._core.bucket_layout import BucketLayout
from tensorplay.distributed.optim._core.collectives import (
    CommunicationError,
    Communicator,
    Waitable,
)
from tensorplay.distributed.optim._core.gradient_buckets import (
    AveragedMark,
    GradientBucket,
    assign,
)
from tensorplay.distributed.optim._core.gradient_reducer import GradientReducer
from tensorplay.distributed.optim._core.parameter_spec import ParameterSpec, is_dense
from tensorplay.distributed.optim._core.ranks import GroupRank
from tensorplay.distributed.optim._core.reduction_schedule import Schedule
from tensorplay.distributed.optim._core.transfers import Transfer
from tensorplay.distributed.optim.data_parallel.reduction_plan import CAPACITY_BYTES
from tensorplay.distributed.optim.data_parallel.reduction_policy import ReductionPolicy
from tensorplay.distributed.optim.data_parallel.sparse_gradients import average_sparse
from tensorplay.distributed.optim.data_parallel.step_times import StepTimes

NUM_GATHERED = 2
"""Buckets whose averages are under way at a time."""

_NONE, _DENSE, _SPARSE = range(3)

_is_sparse = operator.attrgetter("is_sparse")
_kind_of_sparse = {False: _DENSE, True: _SPARSE}


class _Gathering(NamedTuple):
    """Averages under way to every rank."""

    transfer: Transfer
    waitable: Waitable
    used: set[int] | None
    """Which parameters get them; ``None`` while that isn't known."""


class AveragedEverywhere(GradientReducer):
    """Averages gradients of every rank's backward passes, for every rank.

    Args:
        communicator: carries them.
        agreement: settles each reduction.
        policy: how.
        times: learns how long backward passes and reductions take.
        announce: refers to what is called before backward reduces.
        check: refers to what raises if a parameter has been replaced.

    Attributes:
        divides_by_world_size: whether ranks that have joined count as having contributed zeros.
    """

    def __init__(
        self,
        communicator: Communicator,
        agreement: Agreement,
        policy: ReductionPolicy,
        times: StepTimes,
        announce: WeakMethod[Callable[[], None]],
        check: WeakMethod[Callable[[], None]],
    ) -> None:
        # The averages lie in the buffers, so that keeping all of them costs nothing while they do.
        super().__init__(
            communicator,
            agreement,
            CAPACITY_BYTES,
            during_backward=policy.overlap_with_backward,
            num_kept=sys.maxsize,
        )
        self._policy = policy
        self._times = times
        self._announce = announce
        self._check = check
        self._num_passes = 0
        self._gathering: deque[_Gathering] = deque()
        self._gathered: set[GradientBucket] = set()
        self._sparse: dict[int, torch.Tensor | None] = {}
        self._bucket_of: dict[int, GradientBucket] = {}
        self._early_schedule: Schedule | None = None
        """What follows the first reduction, if that shows no sparse gradient."""
        self.divides_by_world_size = True
        self.divide_among(list(communicator.members))

    def add(
        self,
        parameters: Sequence[torch.Tensor],
        specs: Sequence[ParameterSpec],
        layouts: Sequence[BucketLayout],
    ) -> None:
        """See :class:`GradientReducer`."""
        is_first = not self.parameters
        after_backward = self._schedule
        if self._early_schedule is not None:  # so that the new ones report to it
            self._schedule = self._early_schedule
        super().add(parameters, specs, layouts)
        if is_first and self._policy.overlap_with_backward is None and self._schedule.hears_ready:
            self._early_schedule = self._schedule
        if self._early_schedule is not None:
            self._schedule = after_backward
        for bucket in self.buckets:
            self._bucket_of.update((slot.parameter, bucket) for slot in bucket.layout.slots)

    def divide_among(self, active: Sequence[GroupRank]) -> None:
        """Notes which ranks have inputs: these may be the divisor."""
        num_all = self._communicator.members.world_size
        num_ranks = num_all if self.divides_by_world_size else len(active)
        self.divisor = self._policy.divisor(num_ranks) if num_all > 1 else 1
        self._sparse_divisor = num_ranks if self._policy.op == "average" else 1

    _tells_finiteness = False  # every rank sees all averages

    # Backward passes

    def begin(self) -> None:
        """See :class:`BackwardObserver`."""
        self._num_passes += 1
        self._times.begin("backward")
        try:
            super().begin()
        except RuntimeError:  # a gradient can't be what it was to be: let us say why, if we know
            if (check := self._check()) is not None:
                check()
            raise

    def end(self) -> None:
        """See :class:`BackwardObserver`."""
        self._times.end("backward")
        if self._schedule.hears_ready and self._reduces_this_pass():
            with self._times.measure("reduction"):
                super().end()
        else:
            super().end()

    def abandon(self) -> None:
        """See :class:`BackwardObserver`."""
        self._times.discard("backward")
        super().abandon()

    def _reduces_this_pass(self) -> bool:
        return self._syncs and self._num_passes >= self._policy.backward_passes_per_step

    def receive_sparse(self, index: int) -> None:
        """Lets a sparse gradient be one, unless it shall become dense."""
        if not self._policy.sparse_as_dense and index in self._bucket_of:
            self._bucket_of[index].retract_(index)

    def before_backward_reduces(self) -> None:
        """Tells the ranks without inputs."""
        if (announce := self._announce()) is not None:
            announce()

    def after_reduction(self) -> None:
        """The next window of passes begins."""
        self._num_passes = 0

    def forget(self) -> None:
        """See :class:`GradientReducer`."""
        super().forget()
        self._num_passes = 0

    def forget_zeroed(self) -> None:
        """After gradients were filled with zeros: they are nobody's average any more."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                AveragedMark.clear_(parameter.grad)

    def has_unreduced(self) -> bool:
        """Whether backward passes have left gradients here that haven't been averaged.

        What the caller has assigned is taken as it is, as with any other optimizer.
        """
        return self._has_unreduced_passes

    def reduce_nothing(self, num_begun: int) -> None:
        """Takes part in the reduction of a backward pass of other ranks."""
        self.backward_pass.num_begun = num_begun
        if self._schedule.hears_ready:
            self._schedule.begin(syncs=True)
            self._schedule.end()
        else:
            self.reduce("backward")

    # Reductions

    def reduce(self, call: str) -> None:
        """See :class:`GradientReducer`."""
        with self._times.measure("reduction"):
            super().reduce(call)

    def _agree_on_used(self, call: str) -> set[int]:
        if self._policy.sparse_as_dense:
            for parameter in self.parameters:
                if parameter.grad is not None and parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_dense()
        kinds = self._agree_on_kinds(call)
        if self._early_schedule is not None:  # the same on every rank
            if _SPARSE not in kinds.values():
                self._schedule = self._early_schedule
            self._early_schedule = None
        for index in sorted(index for index, kind in kinds.items() if kind == _SPARSE):
            self._sparse[index] = self.parameters[index].grad
            self.parameters[index].grad = None
        return {index for index, kind in kinds.items() if kind == _DENSE}

    def _kinds_of(self, gradients: Sequence[torch.Tensor | None]) -> Iterable[int]:
        if all(map(operator.is_not, gradients, itertools.repeat(None))):  # usually, of thousands
            return map(_kind_of_sparse.__getitem__, map(_is_sparse, gradients))
        return [
            _NONE if gradient is None else _SPARSE if gradient.is_sparse else _DENSE
            for gradient in gradients
        ]

    def find_unreducible(self) -> Exception | None:
        """See :class:`GradientReducer`."""
        is_open_to_sparse = self._policy.sparse_as_dense or not self._schedule.hears_ready
        for index, layout in self.backward_pass.layouts.items():
            if not is_open_to_sparse:
                return TypeError(
                    f"the gradient of parameter {index} has layout {layout}; while backward goes on "
                    "only dense gradients can be averaged: pass sparse_as_dense=True, or "
                    "overlap_with_backward=False"
                )
            if layout is not torch.sparse_coo:
                return TypeError(
                    f"the gradient of parameter {index} has layout {layout}; only dense and COO "
                    "gradients can be averaged"
                )
        return None

    def _payload(self, local: torch.Tensor) -> torch.Tensor:
        if self._communicator.members.world_size == 1:  # nothing travels, nor is divided
            return local
        factor = self._policy.gradient_predivide_factor
        if factor != 1:
            local.div_(factor)
        return local.to(self._policy.wire_dtype(local.dtype))

    def _result(
        self,
        bucket: GradientBucket,  # noqa: ARG002 - the base class decides by it
        local: torch.Tensor,
        start: int,
        end: int,
    ) -> torch.Tensor:
        return local[start:end]

    def as_dense(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """See :class:`GradientReducer`."""
        is_wanted = self._policy.sparse_as_dense and gradient.is_sparse
        return gradient.to_dense() if is_wanted else None

    def averaged(self, transfer: Transfer) -> None:
        """See :class:`GradientReducer`: it launches the gather of a bucket's averages."""
        self._launch_gather(transfer)
        while len(self._gathering) > NUM_GATHERED:
            self._await_oldest()

    def settle_end(self, has: dict[int, bool], *, was_aborted: bool, is_late: bool) -> set[int]:
        """See :class:`GradientReducer`."""
        while self._gathering:
            self._await_oldest()
        try:
            return super().settle_end(has, was_aborted=was_aborted, is_late=is_late)
        except BaseException:
            self._gathered.clear()
            raise
        finally:
            if was_aborted:
                self._gathered.clear()

    def show(self, transfer: Transfer, used: set[int]) -> None:
        """See :class:`GradientReducer`. What hasn't been gathered yet is shown a little later."""
        if transfer.bucket in self._gathered:
            self._gathered.remove(transfer.bucket)
            self._show_averages(transfer, used)
            return
        self._launch_gather(transfer, used)
        if len(self._gathering) > NUM_GATHERED:
            self._await_oldest()

    def _launch_gather(self, transfer: Transfer, used: set[int] | None = None) -> None:
        start, end = self._own_extent(transfer.bucket.layout)
        if transfer.payload is not transfer.local:
            transfer.payload[start:end].copy_(transfer.local[start:end])
        cuts = transfer.bucket.layout.cuts
        gathering = self._communicator.gather_from_owners(transfer.payload, cuts)
        self._gathering.append(_Gathering(transfer, gathering, used))

    def _await_oldest(self) -> None:
        oldest = self._gathering.popleft()
        transfer, bucket = oldest.transfer, oldest.transfer.bucket
        try:
            oldest.waitable.wait()
        except CommunicationError as error:
            raise CommunicationError(
                f"gathering averaged gradients failed in the bucket that holds "
                f"{len(bucket.layout.slots)} parameters (the first is number "
                f"{bucket.layout.slots[0].parameter}), {error}"
            ) from error
        if transfer.payload is not transfer.local:
            transfer.local.copy_(transfer.payload)
        if oldest.used is None:
            self._gathered.add(bucket)
        else:
            self._show_averages(transfer, oldest.used)

    def _show_averages(self, transfer: Transfer, used: set[int]) -> None:
        bucket = transfer.bucket
        averages = bucket.views(transfer.local, 0)
        bucket.release()
        if not self._set_aside and used.issuperset(averages):
            self._mark.set_all_(averages.values())
            assign(map(self.parameters.__getitem__, averages), "grad", averages.values())
            return
        for slot in bucket.layout.slots:
            if slot.parameter in used:
                self._show_average(slot.parameter, averages[slot.parameter])

    def _show_average(self, index: int, average: torch.Tensor) -> None:
        before = self._set_aside.pop(index, None)
        if before is not None:
            average = before + average if before.is_sparse else average.add_(before)
        self._mark.set_(average)
        self.parameters[index].grad = average

    def _conclude(self, finite: Sequence[torch.Tensor]) -> None:  # noqa: ARG002 - every rank sees them all
        while self._gathering:
            self._await_oldest()
        own, self._sparse = self._sparse, {}
        if own:
            averages = average_sparse(
                self._communicator,
                [self.parameters[index] for index in own],
                list(own.values()),
                self._sparse_divisor,  # sparse gradients aren't predivided
            )
            for index, average in zip(own, averages, strict=True):
                self._show_average(index, average)

    # All gradients together

    def counted_and_all(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Tensors that hold what this rank counts in a norm, and tensors that hold all gradients.

        Each element counts on one rank; both are as few tensors as can be.
        """
        counted, everything = [], []
        for bucket in self.buckets:
            start, end = self._own_extent(bucket.layout)
            flat = bucket.whole(0, bucket.layout.numel)
            if flat is not None:
                counted.append(flat[start:end])
                everything.append(flat)
                continue
            length = bucket.layout.numel
            for offset, gradient in self._gradients_in(bucket):
                everything.append(gradient)
                if gradient.numel() == length and is_dense(gradient):
                    counted.append(gradient.as_strided((length,), (1,))[start:end])
                elif start <= offset < end:
                    counted.append(gradient)
        return counted, everything

    def _gradients_in(self, bucket: GradientBucket) -> Iterator[tuple[int, torch.Tensor]]:
        for slot in bucket.layout.slots:
            parameter = self.parameters[slot.parameter]
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.is_sparse:
                if not gradient.is_coalesced():
                    gradient = parameter.grad = gradient.coalesce()
                gradient = gradient.values()
            yield slot.offset, gradient
