"""Hooks -> buckets -> owners' averaged gradients, when ``backward()`` returns.

Each rank's gradients stay its own until the outermost backward ends. Then every bucket is exchanged:
each rank sends every other the slice that this one owns, and sums in rank order what it gets. Two
exchanges are under way at a time, so that the memory beyond the gradients is two buckets.

Note [Reduced and own gradients]
    After a reduction ``.grad`` holds averages. What a later backward adds must not mix with them
    before it has been averaged too. So when a pass begins, averages that are still there are set
    aside, and added to the new ones when these have been reduced.

Note [Unused parameters]
    A gradient that no rank has stays ``None``; where only some lack it, it counts as zero there.
    Ranks tell each other which they have only if any of them lacks one.
"""

import itertools
import operator
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from tensorplay.distributed.optim._core.agreement import (
    Agreement,
    PeerError,
    RankDisagreementError,
    Settlement,
)
from tensorplay.distributed.optim._core.backward_pass import BackwardPass
from tensorplay.distributed.optim._core.bucket_layout import (
    BucketLayout,
    Slot,
    extents_in_rounds,
    take_turns,
)
from tensorplay.distributed.optim._core.collectives import (
    CommunicationError,
    Communicator,
)
from tensorplay.distributed.optim._core.gradient_buckets import (
    AveragedMark,
    GradientBucket,
    PackedGradients,
    PackedWhenSent,
    SoleGradient,
    assign,
)
from tensorplay.distributed.optim._core.parameter_spec import ParameterSpec
from tensorplay.distributed.optim._core.partial_gradient import PartialGradient
from tensorplay.distributed.optim._core.rank_order_sum import average_
from tensorplay.distributed.optim._core.receive_memory import ReceiveMemory
from tensorplay.distributed.optim._core.reduction_schedule import (
    AfterBackward,
    DuringBackward,
    Schedule,
)
from tensorplay.distributed.optim._core.sentinels import Sentinels
from tensorplay.distributed.optim._core.step_schedule import Stage, StepInBackward
from tensorplay.distributed.optim._core.tagged_json import Json
from tensorplay.distributed.optim._core.transfers import InFlight, Transfer, loads_of
from tensorplay.distributed.optim._core.usage import Usage

LEAST_KEPT_BYTES = 16 * 1024 * 1024
"""Smaller pieces of memory are kept by the C library."""

ROUND_BYTES = 4 * 1024 * 1024
"""What a rank receives at a time, so that it can average while the next is under way."""

LEAST_MESSAGE_BYTES = 1024 * 1024
"""Shorter messages aren't made for that."""

NUM_KEPT = 2
"""Flat buffers that stay allocated between passes."""


class GradientReducer:
    """Averages the gradients of parameters to the ranks that own them, at the end of backward.

    Args:
        communicator: carries them.
        agreement: settles that all ranks reduce, and what.
        capacity_bytes: how much is received at a time.
        during_backward: whether buckets are sent while backward goes on, or when it has ended; if
            ``None``, while it goes on where parameters are on an accelerator.
        num_kept: how many flat buffers stay allocated between passes.
        stage: steps each bucket inside backward, so that no gradients are left; ``None`` to leave
            the averages in ``.grad``.
    """

    _tells_finiteness = True
    """Whether :meth:`_conclude` needs to know which averages are finite."""

    def __init__(
        self,
        communicator: Communicator,
        agreement: Agreement,
        capacity_bytes: int,
        *,
        during_backward: bool | None = None,
        num_kept: int = NUM_KEPT,
        stage: Stage | None = None,
    ) -> None:
        self.divisor: float = communicator.members.world_size
        """What sums are divided by."""
        self.number = 0
        """Tells reducers on one group apart, should ranks disagree about whose turn it is."""
        self._communicator = communicator
        self._agreement = agreement
        self._capacity_bytes = capacity_bytes
        self._num_kept = num_kept
        self.parameters: list[torch.Tensor] = []
        self.buckets: list[GradientBucket] = []
        self._reduced_by_default: dict[int, bool] = {}
        self._watched: list[torch.Tensor] = []
        self._foreign: list[torch.Tensor] = []
        self._set_aside: dict[int, torch.Tensor] = {}
        self._cut: dict[GradientBucket, tuple[Slot, ...]] = {}
        self._indices_of: dict[GradientBucket, list[int]] = {}
        self._num_kept_bytes = 0
        self._receive_memory = ReceiveMemory(capacity_bytes)
        self._partial: dict[int, PartialGradient] = {}
        self._sentinels = Sentinels(communicator)
        self._mark = AveragedMark()
        self._syncs = True
        self._has_unreduced_passes = False
        self._adds_up = False
        self._has_more = False
        self._is_unfinished = False
        self._holds_no_averages = False
        """Whether the running pass has set all aside, so that nobody need look again at its end."""
        self._counted_from = (0, 0)
        self.backward_pass = BackwardPass(self)
        self._during_backward = during_backward
        self._stage = stage
        if stage is not None:
            self._tells_finiteness = False
        self._schedule: Schedule = AfterBackward(weakref.proxy(self))

    def add(
        self,
        parameters: Sequence[torch.Tensor],
        specs: Sequence[ParameterSpec],
        layouts: Sequence[BucketLayout],
    ) -> None:
        """Watches further parameters.

        Args:
            parameters: all of them by index, those that were added earlier first.
            specs: their specs.
            layouts: the buckets of the new ones; a bucket of one parameter is sent from its memory.
        """
        added = parameters[len(self.parameters) :]
        if self._during_backward is None:
            self._during_backward = overlaps_by_default(added)
        if not self.parameters:
            self._schedule = self._make_schedule(during_backward=self._during_backward)
        self.parameters.extend(added)
        self.lay_out(specs, layouts)
        start = len(self.parameters) - len(added)
        self.backward_pass.watch(added)
        if self._schedule.hears_ready:
            reference = weakref.ref(self._schedule)

            def ready(place: int) -> None:
                if (schedule := reference()) is not None:
                    schedule.ready(start + place)

            self.backward_pass.notify_ready(added, ready)

    def lay_out(self, specs: Sequence[ParameterSpec], layouts: Sequence[BucketLayout]) -> None:
        """Adds buckets for parameters that are watched."""
        for layout in layouts:
            start, end = self._own_extent(layout)
            self._foreign.extend(
                self.parameters[slot.parameter]
                for slot in layout.slots
                if not slot.is_within(start, end)
            )
        num_kept = sum(isinstance(bucket, PackedGradients) for bucket in self.buckets)
        for layout in layouts:
            for slot in layout.slots:
                self._reduced_by_default[slot.parameter] = layout.trainable
            if len(layout.slots) == 1:
                keep = self._keeps_slice(layout)
                self.buckets.append(SoleGradient(layout, specs, self.parameters, keep=keep))
            elif self._stage is not None and self._during_backward:
                self.buckets.append(PackedWhenSent(layout, specs, self.parameters))
            else:
                keep = layout.trainable and num_kept < self._num_kept
                num_kept += 1
                self.buckets.append(PackedGradients(layout, specs, self.parameters, keep=keep))
        self._watched = [self.parameters[index] for index in self._reduced_by_default]
        for bucket in self.buckets[len(self.buckets) - len(layouts) :]:
            self._indices_of[bucket] = [slot.parameter for slot in bucket.layout.slots]
            cut = bucket.layout.cut_slots(*self._own_extent(bucket.layout))
            if cut:
                self._cut[bucket] = cut

    def _keeps_slice(self, layout: BucketLayout) -> bool:
        """Whether the average of a large parameter's slice keeps its memory from step to step.

        On CPUs fresh memory of that size costs more than the transfer; other devices have
        allocators that keep it.
        """
        start, end = self._own_extent(layout)
        nbytes = (end - start) * layout.dtype.itemsize
        is_fresh = nbytes >= LEAST_KEPT_BYTES and nbytes < layout.nbytes
        fits = self._num_kept_bytes + nbytes <= NUM_KEPT * self._capacity_bytes
        keeps = self._stage is None and layout.device.type == "cpu" and is_fresh and fits
        if keeps:
            self._num_kept_bytes += nbytes
        return keeps

    def _make_schedule(self, *, during_backward: bool) -> Schedule:
        me = weakref.proxy(self)
        if self._stage is not None:
            return StepInBackward(me, self._stage, self._capacity_bytes, early=during_backward)
        return DuringBackward(me, self._capacity_bytes) if during_backward else AfterBackward(me)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes that end inside accumulate this rank's own gradients, and reduce nothing."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def begin(self) -> None:
        """See :class:`BackwardObserver`."""
        self._is_unfinished = False
        self._count_from(self.backward_pass.num_begun - 1)
        self._drop_cleared()
        self.set_averages_aside()
        self._holds_no_averages = True
        for bucket in self.buckets:
            if bucket.layout.trainable:
                bucket.arm_()
        self._schedule.begin(syncs=self._reduces_this_pass())

    def receive_sparse(self, index: int) -> None:
        """See :class:`BackwardObserver`; here it will be refused."""

    def _reduces_this_pass(self) -> bool:
        """Whether the gradients are reduced when the pass that has begun ends."""
        return self._syncs

    def end(self) -> None:
        """See :class:`BackwardObserver`."""
        self._disarm()
        if self._reduces_this_pass():
            self._schedule.end()
        else:
            self._has_unreduced_passes = True
        self._holds_no_averages = False

    def abandon(self) -> None:
        """See :class:`BackwardObserver`."""
        gradients = [parameter.grad for parameter in self.parameters]
        if not any(self._is_own(gradient) and _has_values(gradient) for gradient in gradients):  # type: ignore[arg-type] # None is no own one
            self.forget()  # somebody has zeroed them, who couldn't see what was set aside
        self._holds_no_averages = False
        self._disarm()
        self._schedule.abandon()
        self._put_back()

    def _disarm(self) -> None:
        for bucket in self.buckets:
            bucket.disarm_()
        self._put_back()

    def _put_back(self) -> None:
        """Shows averages again that were set aside for gradients that haven't come."""
        for index in [index for index in self._set_aside if self.parameters[index].grad is None]:
            self.parameters[index].grad = self._set_aside.pop(index)
            self._holds_no_averages = False

    def before_backward_reduces(self) -> None:
        """Called when a backward pass has ended whose gradients are about to be reduced."""

    def after_reduction(self) -> None:
        """Called after each reduction, on every rank."""

    def forget(self) -> None:
        """Drops what isn't in any ``.grad``, and what is left of an aborted pass; for ``zero_grad``."""
        self.backward_pass.settle_aborted()
        self._is_unfinished = False
        self._set_aside.clear()
        self._has_unreduced_passes = False

    def settle_aborted(self) -> None:
        """Ends, with the other ranks, a backward pass that an exception has ended here."""
        self.backward_pass.settle_aborted()

    def find_unfinished(self) -> Exception | None:
        """An error after a backward pass that ended in an exception, or where nothing is noticed."""
        if self.backward_pass.was_replaced:
            return RuntimeError(
                "another optimizer has been built on these parameters and reduces their gradients "
                "now; go on with that one"
            )
        self._is_unfinished |= self.backward_pass.settle_aborted()
        if not self._is_unfinished:
            return None
        return RuntimeError(
            "the last backward pass ended in an exception, so that its gradients were not reduced; "
            "call zero_grad() and repeat forward and backward before step()"
        )

    def closure_returned(self, error: Exception | None) -> None:
        """Settles that a closure has succeeded on every rank; every rank must call it."""
        if isinstance(error, (PeerError, RankDisagreementError, CommunicationError)):
            raise error  # every rank knows
        self._agreement.settle("step (closure)", error=error)

    def has_unreduced(self) -> bool:
        """Whether ``no_sync``, or the caller, left gradients here that haven't been averaged.

        A gradient that the caller assigned is noticed where another rank owns the parameter; where
        this one does, it may be an averaged one that the caller has changed.
        """
        kinds = set(map(type, map(_grad_of, self._foreign)))
        return self._has_unreduced_passes or not kinds <= {type(None), PartialGradient}

    def owned_stretches(self) -> list[torch.Tensor]:
        """Tensors that together hold the averaged gradients of what this rank owns, as few as can be."""
        return [stretch for bucket in self.buckets for stretch in self._stretches(bucket)]

    def _stretches(self, bucket: GradientBucket) -> list[torch.Tensor]:
        start, end = self._own_extent(bucket.layout)
        cut = self._cut.get(bucket, ())
        flat = bucket.whole(start, end)
        if flat is not None and all(
            (own := _own_part(self.parameters[slot.parameter])) is not None
            and own.data_ptr() == flat[slot.overlap(start, end, start)[0] :].data_ptr()
            for slot in cut
        ):
            return [flat]
        owned = (
            self.parameters[slot.parameter].grad
            if slot.is_within(start, end)
            else _own_part(self.parameters[slot.parameter])
            for slot in bucket.layout.slots
            if slot.meets(start, end)
        )
        return [each for each in owned if each is not None]

    def _own_extent(self, layout: BucketLayout) -> tuple[int, int]:
        rank = self._communicator.members.group_rank
        return layout.cuts[rank], layout.cuts[rank + 1]

    @torch.no_grad()
    def reduce(self, call: str) -> None:
        """Averages all gradients that haven't been yet. Every rank must call it.

        Args:
            call: what messages call it.

        Raises:
            RankDisagreementError: if another rank is in another call, or has begun another number
                of backward passes; on every rank, and the gradients stay as they were.
            CommunicationError: if the backend fails or a rank doesn't come in time.
        """
        self._has_unreduced_passes = False
        self._drop_cleared()
        if not self._holds_no_averages:
            self.set_averages_aside()
        self._holds_no_averages = False
        self._adds_up = bool(self._set_aside)
        used = self._agree_on_used(call)
        finite = []
        for transfer in self._transfers(used):
            finite.append(self.finish(transfer))
            if transfer.is_last:
                self.show(transfer, used)
        self.conclude(finite)

    def conclude(self, finite: Sequence[torch.Tensor | None]) -> None:
        """See :class:`Reductions`."""
        self._holds_no_averages = False
        self._conclude([scalar for scalar in finite if scalar is not None])
        for index in list(self._set_aside):  # no rank had anything to add to them
            self.parameters[index].grad = self._set_aside.pop(index)
        self.after_reduction()

    def settle_start(
        self, description: dict[str, Json] | None = None, error: Exception | None = None
    ) -> None:
        """See :class:`Reductions`."""
        self._has_unreduced_passes = False
        self._adds_up = bool(self._set_aside)
        described = {**self._describe_passes(), **(description or {})}
        self._agreement.settle("backward", described, error)

    def settle_used(self, description: dict[str, Json], error: Exception | None) -> set[int]:
        """See :class:`StepInBackward`."""
        self._has_unreduced_passes = False
        self._adds_up = bool(self._set_aside)
        kinds = self._agree_on_kinds("backward", description, error)
        return {index for index, kind in kinds.items() if kind}

    def settle_end(self, has: dict[int, bool], *, was_aborted: bool, is_late: bool) -> set[int]:
        """See :class:`Reductions`."""
        has = {
            index: has.get(index, False) or self.parameters[index].grad is not None
            for index in self._reduced_by_default
        }
        has_more = is_late or any(
            has[index] for index, by_default in self._reduced_by_default.items() if not by_default
        )
        flag = 2 if has_more else int(has != self._reduced_by_default)
        unusual = self._agreement.settle(
            "backward (end)",
            {"ended by an exception": was_aborted},
            self.find_unreducible(),
            flag,
        )
        self._has_more = unusual > 1
        kinds = self._kinds_anywhere(
            {index: int(is_used) for index, is_used in has.items()}, unusual=bool(unusual)
        )
        return {index for index, kind in kinds.items() if kind}

    def settle_steps(self, error: Exception | None, *, was_aborted: bool, flag: int) -> Settlement:
        """See :class:`StepInBackward`."""
        description: dict[str, Json] = {"ended by an exception": was_aborted}
        return self._agreement.start("backward (end)", description, error, flag)

    def exchange_usage(
        self, bucket: GradientBucket, has: Sequence[bool], *, stopped: bool
    ) -> Usage:
        """See :class:`StepInBackward`."""
        readers = list(self._communicator.members)
        if self._stage is not None and not self._stage.steps_everywhere:
            readers = [rank for rank in readers if bucket.layout.slots_of(rank)]
        return Usage(self._communicator, has, readers, stopped=stopped)

    def share(self, message: bytes) -> bytes:
        """See :class:`StepInBackward`."""
        return self._communicator.all_gather_bytes(message if self.is_first_rank else b"")[0]

    @property
    def is_first_rank(self) -> bool:
        """Whether this is group rank 0."""
        return self._communicator.members.group_rank == 0

    def add_late(self, gradients: dict[int, torch.Tensor]) -> None:
        """See :class:`Reductions`; Note [Late gradients]. Also those of thawed parameters."""
        if not self._has_more:
            return
        for index, gradient in gradients.items():
            self._set_aside_one(index)
            self.parameters[index].grad = gradient
        self.reduce("backward (late gradients)")

    def _describe_passes(self) -> dict[str, Json]:
        self._count_from(self.num_begun)
        return {
            "optimizer number": self.number,
            "backward passes begun (one more where an exception ended one)": self.num_begun
            - self._counted_from[1],
        }

    def _agree_on_used(self, call: str) -> set[int]:
        """The parameters of which some rank has a gradient (Note [Unused parameters])."""
        return {index for index, kind in self._agree_on_kinds(call).items() if kind}

    def _agree_on_kinds(
        self,
        call: str,
        description: dict[str, Json] | None = None,
        error: Exception | None = None,
    ) -> dict[int, int]:
        """The largest of :meth:`_kinds_of` each parameter's gradients on all ranks."""
        described = {**self._describe_passes(), **(description or {})}
        kinds = self._kinds_of(list(map(_grad_of, self._watched)))
        has = dict(zip(self._reduced_by_default, kinds, strict=True))
        unusual = self._agreement.settle(
            call,
            described,
            error or self.find_unreducible(),
            flag=int(has != self._reduced_by_default),
        )
        return self._kinds_anywhere(has, unusual=bool(unusual))

    def _kinds_anywhere(self, has: dict[int, int], *, unusual: bool) -> dict[int, int]:
        if unusual:
            flags = torch.tensor(
                list(map(int, has.values())),
                dtype=torch.uint8,
                device=self._communicator.transport_device(),
            )
            self._communicator.all_reduce_(flags, "max").wait()
            has = dict(zip(has, map(int, flags.tolist()), strict=True))
        return has

    def _kinds_of(self, gradients: Sequence[torch.Tensor | None]) -> Iterable[int]:
        """0 for none, 1 for a usual one."""
        return map(operator.is_not, gradients, itertools.repeat(None))

    def _count_from(self, num_begun: int) -> None:
        """Begins to count passes anew once all ranks have been told of a disagreement."""
        if self._agreement.num_refused != self._counted_from[0]:
            self._counted_from = self._agreement.num_refused, num_begun

    def _transfers(self, used: set[int]) -> Iterator[Transfer]:
        """Launches exchanges, and yields them in order, while the next are under way."""
        in_flight = InFlight(self._capacity_bytes)
        buckets = [
            bucket for bucket in self.buckets if not used.isdisjoint(self._indices_of[bucket])
        ]
        for transfer in self._launch_all(buckets):
            in_flight.append(transfer)
            while in_flight.is_full:
                yield in_flight.popleft()
        while in_flight:
            yield in_flight.popleft()

    def _launch_all(self, buckets: Iterable[GradientBucket]) -> Iterator[Transfer]:
        """Launches exchanges of several buckets in turn."""
        launching = [(bucket.layout, self.launch(bucket)) for bucket in buckets]
        rounds = [
            (transfers, [end - start for start, end in extents])
            for layout, transfers in launching
            for extents in self._rounds(layout, ROUND_BYTES)
        ]
        for place in take_turns([lengths for _, lengths in rounds]):
            yield next(rounds[place][0])

    def _rounds(
        self, layout: BucketLayout, round_nbytes: int | None
    ) -> list[tuple[tuple[int, int], ...]]:
        """What of each owner's slice travels in each round."""
        num_peers = max(1, self._communicator.members.world_size - 1)
        nbytes = self._capacity_bytes // num_peers
        if round_nbytes is not None:
            nbytes = min(nbytes, max(round_nbytes // num_peers, LEAST_MESSAGE_BYTES))
        return extents_in_rounds(layout.cuts, max(1, nbytes // layout.dtype.itemsize))

    def launch(
        self, bucket: GradientBucket, round_nbytes: int | None = ROUND_BYTES
    ) -> Iterator[Transfer]:
        """See :class:`Reductions`.

        Args:
            bucket: whose gradients are there.
            round_nbytes: how much a rank receives at a time; as much as it may, if ``None``.
        """
        members, layout = self._communicator.members, bucket.layout
        num_peers = max(1, members.world_size - 1)
        own_start, own_end = self._own_extent(layout)
        rounds = self._rounds(layout, round_nbytes)
        longest = max(end - start for start, end in rounds[0])
        local = bucket.local()
        payload = self._payload(local)
        result = self._result(bucket, local, own_start, own_end) if own_start < own_end else None
        fills = (
            result is not None
            and result.dtype == payload.dtype
            and result.untyped_storage().data_ptr() != payload.untyped_storage().data_ptr()
        )
        # The first peer's part is received where the average belongs, if that's apart.
        first_peer = int(members.group_rank == 0) if fills else None
        for number, extents in enumerate(rounds):
            start, end = extents[members.group_rank]
            lengths = [end - start for start, end in extents]
            destination = None if result is None else result[start - own_start : end - own_start]
            outgoing = [
                (rank, payload[slice(*extents[rank])])
                for rank in members
                if rank != members.group_rank and extents[rank][0] < extents[rank][1]
            ]
            lent: torch.Tensor | None = None
            parts: Iterator[torch.Tensor] = iter(())
            num_lent = (num_peers - fills) * (end - start)
            if num_lent and members.world_size > 1:
                size = payload.element_size()
                lent = self._receive_memory.lend(
                    num_lent * size, num_peers * longest * size, layout.device
                )
                flat = lent[: num_lent * size].view(payload.dtype)
                parts = iter(torch.split(flat, end - start))
            incoming = [
                (
                    rank,
                    destination if rank == first_peer and destination is not None else next(parts),
                )
                for rank in members
                if rank != members.group_rank and start < end
            ]
            yield Transfer(
                bucket,
                self._communicator.exchange(outgoing, incoming),
                local,
                payload,
                destination,
                local[start:end] if start < end else None,
                lent,
                result,
                loads_of(lengths, layout.dtype.itemsize),
                is_last=number == len(rounds) - 1,
            )

    def _payload(self, local: torch.Tensor) -> torch.Tensor:
        """``(numel,)``: what other ranks get of a bucket; it may be ``local`` itself."""
        return local

    def _result(
        self, bucket: GradientBucket, local: torch.Tensor, start: int, end: int
    ) -> torch.Tensor:
        """``(end - start,)``: memory for what this rank averages."""
        reuse = self._set_aside.keys().isdisjoint(self._indices_of[bucket])
        return bucket.destination(local, start, end, reuse=reuse)

    def room_nbytes(self) -> float:
        """See :class:`Reductions`."""
        return self._communicator.room_nbytes()

    def finish(self, transfer: Transfer) -> torch.Tensor | None:
        """See :class:`Reductions`."""
        layout = transfer.bucket.layout
        try:
            contributions = transfer.exchange.parts()
        except CommunicationError as error:
            raise CommunicationError(
                f"reducing gradients failed in the bucket that holds {len(layout.slots)} parameters "
                f"(the first is number {layout.slots[0].parameter}), {error}"
            ) from error
        finite = None
        if transfer.own_part is not None and transfer.destination is not None:
            contributions.insert(self._communicator.members.group_rank, transfer.own_part)
            finite = average_(
                transfer.destination,
                contributions,
                self.divisor,
                tell_finiteness=self._tells_finiteness,
            )
        transfer.own_part = None
        transfer.exchange.let_go()
        if transfer.lent is not None:
            self._receive_memory.take_back(transfer.lent)
        return finite

    def as_dense(self, gradient: torch.Tensor) -> torch.Tensor | None:  # noqa: ARG002 - others do
        """See :class:`Reductions`."""
        return None

    def averaged(self, transfer: Transfer) -> None:
        """See :class:`Reductions`."""

    def show(self, transfer: Transfer, used: set[int]) -> None:
        """See :class:`Reductions`."""
        bucket, result = transfer.bucket, transfer.result
        start, end = self._own_extent(bucket.layout)
        whole = {} if result is None else bucket.views(result, start)
        parts = {
            slot.parameter: result[slice(*slot.overlap(start, end, start))]
            for slot in self._cut.get(bucket, ())
            if result is not None
        }
        bucket.release()
        indices = self._indices_of[bucket]
        if self._set_aside or not used.issuperset(indices):
            for index in indices:
                if index in used:
                    self._show_one(index, whole.get(index), parts.get(index))
            return
        self._mark.set_all_(whole.values())  # as many at once as there may be
        assign(map(self.parameters.__getitem__, whole), "grad", whole.values())
        others = [index for index in indices if index not in whole]
        if not parts and self._partial.keys() >= set(others):
            partial = map(self._partial.__getitem__, others)
            assign(map(self.parameters.__getitem__, others), "grad", partial)
            return
        for index in others:
            self._show_one(index, None, parts.get(index))

    def _show_one(
        self, index: int, gradient: torch.Tensor | None, part: torch.Tensor | None
    ) -> None:
        parameter = self.parameters[index]
        before = self._set_aside.pop(index, None)
        if gradient is None:
            parameter.grad = self._partial_gradient(index, part, before)
            return
        if before is not None:
            gradient.add_(before)
        self._mark.set_(gradient)
        parameter.grad = gradient

    def _partial_gradient(
        self, index: int, part: torch.Tensor | None, before: torch.Tensor | None
    ) -> PartialGradient:
        """The gradient of a parameter that another rank owns, or of which this one has ``part``."""
        parameter = self.parameters[index]
        if part is not None:
            if isinstance(before, PartialGradient) and before.own is not None:
                part.add_(before.own)
            return self._sentinels.partial(parameter, part)
        if index not in self._partial:
            self._partial[index] = self._sentinels.partial(parameter)
        return self._partial[index]

    def _conclude(self, finite: Sequence[torch.Tensor]) -> None:
        """When all buckets have been averaged; scalars say which of them are finite."""
        devices = dict.fromkeys(bucket.layout.device for bucket in self.buckets)
        self._sentinels.agree(finite, devices, adds_up=self._adds_up)

    def _drop_cleared(self) -> None:
        """Follows a model's ``zero_grad()``, which can't see what was set aside."""
        for index in list(self._set_aside):
            if self.parameters[index].grad is None:
                del self._set_aside[index]

    def set_averages_aside(self) -> None:
        """See :class:`Reductions` and Note [Reduced and own gradients]."""
        gradients = list(map(_grad_of, self._watched))
        kinds = set(map(type, gradients))  # of thousands, so the loops aren't Python's
        if kinds <= {type(None), torch.Tensor} and not self._mark.is_on_any(gradients):
            return
        for index in self._reduced_by_default:
            if not self._is_own(self.parameters[index].grad):
                self._set_aside_one(index)

    def _set_aside_one(self, index: int) -> None:
        parameter = self.parameters[index]
        gradient = parameter.grad
        if gradient is not None and not self._is_own(gradient):
            if not isinstance(gradient, PartialGradient):
                gradient = self._apart(gradient)
            elif gradient.own is not None:
                own = self._apart(gradient.own)
                gradient = self._sentinels.partial(parameter, own)
            self._set_aside[index] = gradient
            parameter.grad = None

    def _apart(self, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient in memory of its own: a slot of a bucket is about to be used again."""
        if gradient.is_sparse or gradient.untyped_storage().nbytes() == gradient.nbytes:
            return gradient
        copy = gradient.clone()
        self._mark.set_(copy)
        return copy

    def _is_own(self, gradient: torch.Tensor | None) -> bool:
        return not (
            gradient is None or isinstance(gradient, PartialGradient) or self._mark.is_on(gradient)
        )

    def find_unreducible(self) -> Exception | None:
        """An error that names a parameter whose gradient, of this pass, can't be reduced."""
        layouts = self.backward_pass.layouts  # before they were added to dense ones
        gradients = list(map(_grad_of, self._watched))
        are_all_there = all(map(operator.is_not, gradients, itertools.repeat(None)))
        if are_all_there and not layouts and {*map(_layout_of, gradients)} <= {torch.strided}:
            return None
        found = zip(self._reduced_by_default, gradients, strict=True)
        kinds = {index: gradient.layout for index, gradient in found if gradient is not None}
        kinds.update(layouts)
        for index in filter(kinds.__contains__, self._reduced_by_default):
            layout = kinds[index]
            if layout is not torch.strided:
                return TypeError(
                    f"the gradient of parameter {index} has layout {layout}; only dense "
                    "gradients can be reduced to their owners: build the embedding with "
                    "sparse=False, or let DistributedDataParallel average the gradients"
                )
        return None

    @property
    def num_begun(self) -> int:
        """How many backward passes have begun on this rank."""
        return self.backward_pass.num_begun


def overlaps_by_default(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether sending gradients of these in backward takes nothing from it: on accelerators."""
    return any(parameter.device.type != "cpu" for parameter in parameters)


_grad_of = operator.attrgetter("grad")
_layout_of = operator.attrgetter("layout")


def _own_part(parameter: torch.Tensor) -> torch.Tensor | None:
    """What this rank has of a gradient that is cut."""
    gradient = parameter.grad
    return gradient.own if isinstance(gradient, PartialGradient) else None


def _has_values(gradient: torch.Tensor) -> bool:
    values = gradient._values() if gradient.is_sparse else gradient  # noqa: SLF001 - of one that needn't be coalesced
    return bool(values.any())
