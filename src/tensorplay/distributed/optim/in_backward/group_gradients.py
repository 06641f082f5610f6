"""Gradients averaged over a process group by the core's reducer: each bucket is passed on at once.

Every rank averages an even slice of a bucket, as an owner would, in the memory of its own gradients;
the slices are gathered, every rank steps the bucket, and its memory is free for the next.
"""

import hashlib
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from tensorplay.distributed.optim._core.agreement import Agreement
from tensorplay.distributed.optim._core.bucket_layout import (
    BucketLayout,
    cut_evenly,
    layout_buckets,
)
from tensorplay.distributed.optim._core.collectives import Communicator, Waitable, connect
from tensorplay.distributed.optim._core.gradient_buckets import GradientBucket
from tensorplay.distributed.optim._core.gradient_reducer import GradientReducer
from tensorplay.distributed.optim._core.local_shard import is_dtensor
from tensorplay.distributed.optim._core.parameter_checks import (
    Groups,
    describe_options,
    refuse_unsendable,
)
from tensorplay.distributed.optim._core.parameter_checks import (
    describe_parameters as describe_all,
)
from tensorplay.distributed.optim._core.parameter_spec import ParameterSpec, describe_parameters
from tensorplay.distributed.optim._core.ranks import GroupRank
from tensorplay.distributed.optim._core.replication import replicate_
from tensorplay.distributed.optim._core.step_schedule import StepInBackward
from tensorplay.distributed.optim._core.tagged_json import Json
from tensorplay.distributed.optim._core.transfers import Transfer
from tensorplay.distributed.optim.in_backward.local_gradients import Consumer

CAPACITY_BYTES = 25 * 1024 * 1024 // 3
"""Of a bucket, and of what travels at a time.

While one fills, others are reduced: together less than two of 25 MB.
"""

ALONE_BYTES = 512 * 1024
"""Of a parameter whose gradient is sent from its own memory: copying it would take longer."""

_metadata_of = operator.attrgetter("dtype", "shape", "device")
_last_number = 0


class GroupConsumer(Consumer, Protocol):
    """Who steps; the ranks' must have the same options."""

    def options(self) -> list[Groups]:
        """The groups of all optimizers that step."""


class Group:
    """The ranks that average.

    Args:
        process_group: theirs.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.process_group = process_group
        self.communicator: Communicator = connect(process_group, "apply_optimizer_in_backward")
        self.agreement = Agreement(self.communicator, "apply_optimizer_in_backward")
        self.number = 0
        """Tells optimizers on one group apart."""

    def refuse(self, parameters: Sequence[torch.Tensor], groups: Groups) -> None:
        """Raises for parameters whose gradients can't be averaged here."""
        for index, parameter in enumerate(parameters):
            if is_dtensor(parameter):
                raise TypeError(
                    f"parameter {index} is a DTensor, whose gradient process_group= can't average; "
                    "leave it out for FSDP2 modules, which average by themselves"
                )
        refuse_unsendable(parameters, groups, self.communicator)

    def settle(
        self,
        call: str,
        groups: Groups,
        facts: dict[str, Json],
        error: Exception | None,
    ) -> None:
        """Settles what is registered. Every rank must call it."""
        description: dict[str, Json] | None = None
        if error is None:
            parameters = list(dict.fromkeys(p for group in groups for p in group["params"]))
            specs = describe_parameters(parameters)
            described = describe_all(groups, parameters, specs, resident=False)
            description = {**facts, **described, **describe_options(groups)}
        global _last_number  # noqa: PLW0603 - a count for the whole process
        number = 1 + self.agreement.settle(call, description, error, flag=_last_number)
        self.number = self.number or number
        _last_number = max(_last_number, number)

    def replicate_(self, parameters: Sequence[torch.Tensor], module: nn.Module | None) -> None:
        """Gives every rank the values of group rank 0, as DDP does. Every rank must call it."""
        others = [] if module is None else [*module.parameters(), *module.buffers()]
        tensors = dict.fromkeys([*parameters, *others])
        replicate_(self.communicator, tensors, GroupRank(0), CAPACITY_BYTES)


class GroupGradients:
    """Passes buckets of parameters on when their gradients have been averaged.

    Args:
        group: over which.
        module: whose buffers follow those of group rank 0, if given.
        find_consumer: returns who steps, or ``None`` when nobody is left.
    """

    def __init__(
        self,
        group: Group,
        module: nn.Module | None,
        find_consumer: Callable[[], GroupConsumer | None],
    ) -> None:
        self._group = group
        self._module = module
        self._find_consumer = find_consumer
        self._parameters: list[torch.Tensor] = []
        self._places: dict[int, int] = {}
        self._reducer: _Averaging | None = None
        self._is_current = True

    def watch(self, parameters: Sequence[torch.Tensor]) -> None:
        """Also takes care of ``parameters``."""
        self._parameters.extend(parameters)
        self._rebuild()

    def unwatch(self, parameters: Sequence[torch.Tensor]) -> None:
        """Takes care of ``parameters`` no longer."""
        gone = set(map(id, parameters))
        self._parameters = [p for p in self._parameters if id(p) not in gone]
        self._rebuild()

    def replace(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """``new`` takes the place of ``old``, from the next forward on."""
        self._parameters = [new if p is old else p for p in self._parameters]
        self._is_current = False

    def begin_forward(self) -> None:
        """Before a forward: brings an aborted backward to its end, as far as others wait for it."""
        if not self._is_current:
            self._rebuild()
        if self._reducer is not None:
            self._reducer.settle_aborted()

    def postpone(self, parameter: torch.Tensor) -> None:
        """The next backward steps ``parameter`` only when it ends."""
        if self._reducer is not None and id(parameter) in self._places:
            self._reducer.postpone(self._places[id(parameter)])

    def has_kept(self) -> bool:
        """Whether gradients are left from an earlier backward."""
        return any(parameter.grad is not None for parameter in self._parameters)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside add to this rank's gradients, and pass nothing on."""
        assert self._reducer is not None  # noqa: S101 - narrows a type; it listens to some
        return self._reducer.no_sync()

    def _rebuild(self) -> None:
        self._is_current = True
        self._places = {id(p): place for place, p in enumerate(self._parameters)}
        if self._reducer is not None:
            self._reducer.backward_pass.remove()
        self._reducer = None
        if self._parameters:
            self._reducer = _Averaging(self._group, self._module, self._find_consumer)
            self._reducer.plan(self._parameters)


class _Averaging(GradientReducer):
    """A reducer of which each rank owns an even slice of every bucket, and averages it in place."""

    def __init__(
        self,
        group: Group,
        module: nn.Module | None,
        find_consumer: Callable[[], GroupConsumer | None],
    ) -> None:
        self._step_everywhere = _StepEverywhere(group.communicator, find_consumer)
        super().__init__(
            group.communicator,
            group.agreement,
            CAPACITY_BYTES,
            during_backward=True,  # so that gradients don't pile up
            stage=self._step_everywhere,
        )
        self._step_everywhere.parameters = self.parameters
        self.number = group.number
        self._module = module

    def plan(self, parameters: Sequence[torch.Tensor]) -> None:
        """Watches ``parameters``."""
        specs, layouts = self._plan(parameters)
        self.add(parameters, specs, layouts)

    def _plan(
        self, parameters: Sequence[torch.Tensor]
    ) -> tuple[Sequence[ParameterSpec], list[BucketLayout]]:
        self._metadata = list(map(_metadata_of, parameters))
        num_ranks = self._communicator.members.world_size
        specs = describe_parameters(parameters)
        anybody = [GroupRank(0)] * len(specs)
        layouts = layout_buckets(specs, anybody, num_ranks, CAPACITY_BYTES, alone_bytes=ALONE_BYTES)
        facts = [(spec.shape, str(spec.dtype), spec.device.type, spec.trainable) for spec in specs]
        digest = hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()
        self._step_everywhere.plan_digest = digest
        return specs, [cut_evenly(layout, num_ranks) for layout in layouts]

    def postpone(self, index: int) -> None:
        """The next pass steps a parameter only when it ends."""
        assert isinstance(self._schedule, StepInBackward)  # noqa: S101 - narrows a type
        self._schedule.postpone(index)

    def begin(self) -> None:
        """See :class:`BackwardObserver`; ``.double()`` and the like call for another plan."""
        if list(map(_metadata_of, self.parameters)) != self._metadata:
            self.buckets.clear()
            self.lay_out(*self._plan(self.parameters))
        super().begin()

    def _result(
        self,
        bucket: GradientBucket,  # noqa: ARG002 - the base class decides by it
        local: torch.Tensor,
        start: int,
        end: int,
    ) -> torch.Tensor:
        return local[start:end]

    def after_reduction(self) -> None:
        """Brings the module's buffers in step, as DDP does before the next forward."""
        if self._module is not None:
            # Autograd doesn't see these writes, as under ZeroRedundancyOptimizer.
            buffers = [buffer.data for buffer in self._module.buffers()]
            replicate_(self._communicator, buffers, GroupRank(0), CAPACITY_BYTES)


class _StepEverywhere:
    """Gathers a bucket's averages, and has all of it stepped; a ``Stage`` of ``step_schedule.py``."""

    steps_everywhere = True

    def __init__(
        self,
        communicator: Communicator,
        find_consumer: Callable[[], GroupConsumer | None],
    ) -> None:
        self._communicator = communicator
        self.parameters: Sequence[torch.Tensor] = ()
        self._find_consumer = find_consumer
        self.plan_digest = ""

    def describe(self) -> dict[str, Json]:
        """See :class:`Stage`."""
        consumer = self._find_consumer()
        options = [] if consumer is None else [describe_options(g) for g in consumer.options()]
        return {
            "digest of the parameters' shapes and dtypes": self.plan_digest,
            "optimizers": [*options],
        }

    def find_problem(self) -> Exception | None:
        """See :class:`Stage`."""
        return None

    def begin(self) -> None:
        """See :class:`Stage`."""

    def step(self, averaged: Sequence[tuple[Transfer, set[int]]]) -> None:
        """See :class:`Stage`: not before the averages have been gathered."""

    def gather(self, transfer: Transfer, used: set[int]) -> Waitable:
        """See :class:`Stage`."""
        cuts = transfer.bucket.layout.cuts
        gathering = self._communicator.gather_from_owners(transfer.local, cuts)
        return _StepWhenGathered(self, gathering, transfer, used)

    def step_gathered(self, transfer: Transfer, used: set[int]) -> None:
        """Steps a bucket of which ``transfer.local`` holds all averages."""
        averages = transfer.bucket.views(transfer.local, 0)
        members = [slot.parameter for slot in transfer.bucket.layout.slots]
        for index in members:
            if index in used:
                self.parameters[index].grad = averages[index]
        self.step_empty([self.parameters[index] for index in members if index in used])

    def step_empty(self, parameters: list[torch.Tensor]) -> None:
        """See :class:`Stage`."""
        consumer = self._find_consumer()
        try:
            if consumer is not None and parameters:
                consumer.step_bucket(parameters)
        finally:
            for parameter in parameters:
                parameter.grad = None

    def end(self, *, succeeded: bool) -> None:  # noqa: ARG002 - it ends in either case
        """See :class:`Stage`."""
        consumer = self._find_consumer()
        if consumer is not None:
            consumer.end_backward()


class _StepWhenGathered:
    """A gather of averages; to wait for it steps."""

    def __init__(
        self, stage: _StepEverywhere, gathering: Waitable, transfer: Transfer, used: set[int]
    ) -> None:
        self._stage = stage
        self._gathering = gathering
        self._transfer = transfer
        self._used = used

    def wait(self) -> None:
        """See :class:`Waitable`."""
        self._gathering.wait()
        self._stage.step_gathered(self._transfer, self._used)
