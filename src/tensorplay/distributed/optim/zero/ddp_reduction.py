"""Gradients that pass through DDP's buckets, reduced to their owners instead of to everyone.

DDP accumulates, lays out its buckets and writes their contents to ``.grad`` when backward ends; in
between, each rank sends every other what that one owns, and sums in rank order what it gets. What
DDP then writes to the gradients of other ranks' parameters is of no use: a placeholder takes its
place, which raises if it's taken for a gradient.

Note [Averages that are still there]
    What a later backward adds must not mix with averages before it has been averaged too, since only
    the owner has them. So when a pass begins, averages that are still there are set aside, and added
    to the new ones when these have been reduced.

Note [Everything in the hooks]
    All collectives are issued inside DDP's hooks, so that a rank that has run out of inputs, for which
    DDP calls the hooks with zeros, issues the same. The hook of the last bucket waits for all of them:
    DDP may conclude right after it.

Note [Whole at first]
    Where gradients are views of DDP's buckets, DDP copies them when it forms its buckets anew, after
    the first passes. A placeholder can't be copied, so until then every rank gets all averages. Passes
    are counted here, where also a rank that has run out of inputs counts them.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch._C._distributed_c10d import GradBucket

from tensorplay.distributed.optim._core.backward_pass import BackwardPass, call_at_end
from tensorplay.distributed.optim._core.bucket_layout import BucketLayout
from tensorplay.distributed.optim._core.collectives import (
    CommunicationError,
    Exchange,
    GroupCommunicator,
    Waitable,
    start_all_reduce_,
)
from tensorplay.distributed.optim._core.ddp_buckets import elements_of, offsets_of, views_of
from tensorplay.distributed.optim._core.gradient_buckets import AveragedMark
from tensorplay.distributed.optim._core.partial_gradient import PartialGradient
from tensorplay.distributed.optim._core.rank_order_sum import average_
from tensorplay.distributed.optim._core.ranks import GroupRank
from tensorplay.distributed.optim.zero.bucket_messages import BucketPlan, Stretch
from tensorplay.distributed.optim.zero.gradients import AveragedElsewhere
from tensorplay.distributed.optim.zero.sharding_plan import CAPACITY_BYTES, ShardingPlan

Future = torch.futures.Future[torch.Tensor]


@dataclass
class _Exchange:
    """A round under way.

    Attributes:
        bucket: ``(numel,)``, of DDP.
        work: the sends and receives.
        own: where each message that this rank averages belongs, and its own part of it.
        sent: keeps what is being sent.
        done: the bucket's, if this is its last round.
    """

    bucket: torch.Tensor
    work: Exchange
    own: list[tuple[list[torch.Tensor], torch.Tensor]]
    sent: list[torch.Tensor]
    done: Future | None

    @property
    def averaged_nbytes(self) -> int:
        return sum(local.nbytes for _, local in self.own)


class ReducedInHooks(AveragedElsewhere):
    """DDP averages each gradient to the rank that owns the parameter.

    Parameters that don't come in a bucket have whole gradients from elsewhere, as without this.

    Args:
        communicator: carries them.
        parameters: all parameters, by index.
        plan: their owners.
        model: the parameters that DDP has, so that the beginning of any backward is noticed.
    """

    reduces_to_owners = True

    def __init__(
        self,
        communicator: GroupCommunicator,
        parameters: Sequence[torch.Tensor],
        plan: ShardingPlan,
        model: Sequence[torch.Tensor],
    ) -> None:
        super().__init__(communicator.members.group_rank, None)
        self._communicator = communicator
        self._num_whole_passes = 0
        self._plans: dict[tuple[int, ...], BucketPlan] = {}
        self._index_of: dict[int, int] = {}
        self._partial: dict[int, PartialGradient] = {}
        self._exchanges: deque[_Exchange] = deque()
        self._finite: list[torch.Tensor] = []
        self._buckets: list[tuple[GradBucket, Future]] = []
        self._uses: list[tuple[torch.Tensor, Waitable]] = []
        self._reduced: list[int] = []
        self._set_aside: dict[int, torch.Tensor] = {}
        self._sentinels: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self._mark = AveragedMark()
        self._adds_up = self._has_unreduced_passes = self._is_unfinished = False
        self._backward_pass = BackwardPass(self)
        self._watched: set[int] = set()
        self._watch_backward(model)
        self.watch(parameters, plan, ())

    def watch(
        self,
        parameters: Sequence[torch.Tensor],
        plan: ShardingPlan,
        layouts: Sequence[BucketLayout],
    ) -> None:
        """See :class:`Gradients`."""
        super().watch(parameters, plan, layouts)
        self._sharding = plan
        self._watch_backward(parameters)
        self._index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        stretches = [plan.stretches_of(index) for index in range(len(parameters))]
        self._own_extents, self._other_extents = (
            [
                tuple((s, e) for s, e, owner in each if (owner == self._group_rank) == own)
                for each in stretches
            ]
            for own in (True, False)
        )
        self._plans.clear()

    def _watch_backward(self, parameters: Sequence[torch.Tensor]) -> None:
        added = [p for p in dict.fromkeys(parameters) if id(p) not in self._watched]
        self._backward_pass.watch(added)
        self._watched.update(map(id, added))

    # What DDP's hook calls

    def reduce_whole(self, num_passes: int) -> None:
        """So many passes from now every rank gets all averages (Note [Whole at first])."""
        self._num_whole_passes = num_passes

    @torch.no_grad()
    def reduce_bucket(self, bucket: GradBucket, *, joined: bool, shares_uses: bool) -> Future:
        """Launches the reduction of a bucket of DDP. Every rank must call it.

        Args:
            bucket: all ranks have the same parameters in it.
            joined: whether this rank has run out of inputs.
            shares_uses: whether ranks that have joined must hear which parameters are used.
        """
        if bucket.index() == 0:
            self._require_not_replaced()
            self._discard()
        indices = [self._index_of.get(id(parameter)) for parameter in bucket.parameters()]
        buffer = bucket.buffer()
        done = _future_of(buffer)
        if shares_uses:
            self._uses.append(self._share_uses(bucket, joined=joined))
        known = [index for index in indices if index is not None]
        if (
            buffer.layout is not torch.strided
            or len(known) < len(indices)  # other optimizers need the others
            or self._num_whole_passes
        ):
            done = self._reduce_whole(buffer)
        else:
            self._reduced.extend(known)
            self._launch(bucket, self._plan_of(bucket, tuple(known)), done)
        self._buckets.append((bucket, done))
        if bucket.is_last():
            self._finish(0)
            for _, sharing in self._uses:  # a rank that has joined waits until all have heard
                sharing.wait()
            self._agree_on_finiteness(buffer.device)
            self._num_whole_passes = max(0, self._num_whole_passes - 1)
            if joined:
                self._show_to_joined()
        else:
            self._finish(2 * CAPACITY_BYTES)
        return done

    def _require_not_replaced(self) -> None:
        if self._backward_pass.was_replaced:
            raise RuntimeError(
                "another hook or optimizer has been made for these parameters, and takes care of their "
                "gradients now; register that hook, on a model that is wrapped anew"
            )

    def _launch(self, bucket: GradBucket, plan: BucketPlan, done: Future) -> None:
        members, buffer = self._communicator.members, bucket.buffer()
        pieces = elements_of(buffer, bucket.parameters()).split_with_sizes(plan.sizes)
        for number, messages in enumerate(plan.rounds):
            outgoing: list[tuple[GroupRank, torch.Tensor]] = []
            incoming: list[tuple[GroupRank, torch.Tensor]] = []
            own: list[tuple[list[torch.Tensor], torch.Tensor]] = []
            for message in messages:
                places = plan.pieces_of(message, pieces)
                local = places[0] if len(places) == 1 else torch.cat(places)
                if message.owner != members.group_rank:
                    outgoing.append((message.owner, local))
                    continue
                own.append((places, local))
                incoming.extend(
                    (rank, torch.empty_like(local))
                    for rank in members
                    if rank != members.group_rank
                )
            work = self._communicator.exchange(outgoing, incoming)
            self._exchanges.append(
                _Exchange(
                    buffer,
                    work,
                    own,
                    [local for _, local in outgoing],
                    done if number == len(plan.rounds) - 1 else None,
                )
            )
        if not plan.rounds:
            done.set_result(buffer)

    def _plan_of(self, bucket: GradBucket, indices: tuple[int, ...]) -> BucketPlan:
        if indices not in self._plans:
            elements = elements_of(bucket.buffer(), bucket.parameters())
            stretches = [
                Stretch(offset + start, offset + end, owner)
                for index, offset in zip(indices, offsets_of(bucket.parameters()), strict=True)
                for start, end, owner in self._sharding.stretches_of(index)
            ]
            peers = max(1, self._communicator.members.world_size - 1)
            longest = max(1, CAPACITY_BYTES // elements.itemsize // peers)
            self._plans[indices] = BucketPlan.of(stretches, elements.numel(), longest)
        return self._plans[indices]

    def _reduce_whole(self, buffer: torch.Tensor) -> Future:
        buffer.div_(self._communicator.members.world_size)
        summing = start_all_reduce_(buffer, self._communicator.process_group)
        averaged: Future = summing.then(lambda done: done.value()[0])  # what DDP can read
        return averaged

    def _share_uses(self, bucket: GradBucket, *, joined: bool) -> tuple[torch.Tensor, Waitable]:
        uses = torch.tensor(
            [parameter.grad is not None and not joined for parameter in bucket.parameters()],
            dtype=torch.uint8,
        ).to(bucket.buffer().device)
        return uses, self._communicator.all_reduce_(uses, "max")

    def _finish(self, nbytes: int) -> None:
        """Waits for rounds, oldest first, until what the others receive is no more than that."""
        members = self._communicator.members
        under_way = sum(each.averaged_nbytes * members.world_size for each in self._exchanges)
        while self._exchanges and (under_way > nbytes or not nbytes):
            exchange = self._exchanges.popleft()
            under_way -= exchange.averaged_nbytes * members.world_size
            try:
                parts = iter(exchange.work.parts())
            except CommunicationError as error:
                raise CommunicationError(
                    f"reducing the gradients of a bucket of DistributedDataParallel failed, {error}"
                ) from error
            for places, local in exchange.own:
                contributions = [
                    local if rank == members.group_rank else next(parts) for rank in members
                ]
                finite = average_(local, contributions, members.world_size)
                if finite is not None:
                    self._finite.append(finite)
                if len(places) > 1:
                    torch._foreach_copy_(
                        places, local.split_with_sizes([p.numel() for p in places])
                    )
            exchange.work.let_go()
            if exchange.done is not None:
                exchange.done.set_result(exchange.bucket)

    def _agree_on_finiteness(self, device: torch.device) -> None:
        """Lets every partial gradient show whether some rank's are infinite or not a number."""
        infinite = torch.zeros(1, dtype=torch.uint8, device=device)
        if self._finite:
            local = torch.stack([scalar.to(device).double() for scalar in self._finite])
            infinite += ~torch.isfinite(local).all()  # a sum might overflow
        self._finite.clear()
        self._communicator.all_reduce_(infinite, "max").wait()
        self._worst = torch.where(infinite.bool(), torch.inf, 0.0)

    # What autograd tells

    def begin(self) -> None:
        """See :class:`BackwardObserver` and Note [Averages that are still there]."""
        for index in [i for i in self._set_aside if self._parameters[i].grad is None]:
            del self._set_aside[index]  # a model's zero_grad() can't see what was set aside
        for index, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            if gradient is None or not self._is_averaged(gradient):
                continue
            if not isinstance(gradient, PartialGradient):
                gradient = gradient.clone()  # DDP may use the memory for the new one
                self._mark.set_(gradient)
            self._set_aside[index] = gradient
            parameter.grad = None

    def receive_sparse(self, index: int) -> None:
        """See :class:`BackwardObserver`."""

    def end(self) -> None:
        """See :class:`BackwardObserver`; DDP has yet to write to the gradients."""
        call_at_end(self._conclude)

    def abandon(self) -> None:
        """See :class:`BackwardObserver`."""
        self._is_unfinished = True
        self._finish(0)
        self._discard()
        self._restore_unfired()

    @torch.no_grad()
    def _conclude(self) -> None:
        if not self._buckets:
            self._has_unreduced_passes = True
            self._restore_unfired()
            return
        self._has_unreduced_passes = self._is_unfinished = False
        self._adds_up = bool(self._set_aside)
        self._set_sentinels()
        for index in dict.fromkeys(self._reduced):
            self._show(index, self._set_aside.pop(index, None))
        for index in list(self._set_aside):  # whole ones, and those that no bucket had
            self._add_whole(index, self._set_aside.pop(index))
        self._discard()

    def _show(self, index: int, before: torch.Tensor | None) -> None:
        parameter, own = self._parameters[index], self._own_extents[index]
        gradient = parameter.grad
        if gradient is None:  # no rank has used it
            parameter.grad = before
            return
        if own == ((0, parameter.numel()),) or not parameter.numel():
            if before is not None:
                gradient.add_(before)
            self._mark.set_(gradient)
            return
        if not own:
            if index not in self._partial:
                self._partial[index] = PartialGradient(parameter, (self._sentinel(parameter),))
            parameter.grad = self._partial[index]
            return
        parts = [part.clone() for part in _parts(gradient, own)]
        if isinstance(before, PartialGradient):
            for part, former in zip(parts, before.parts, strict=False):
                part.add_(former)
        sentinel = self._sentinel(parameter)
        parameter.grad = PartialGradient(
            parameter, (*parts, sentinel), parts[0] if len(parts) == 1 else None
        )

    def _add_whole(self, index: int, before: torch.Tensor) -> None:
        gradient = self._parameters[index].grad
        self._parameters[index].grad = before if gradient is None else gradient.add_(before)

    def _show_to_joined(self) -> None:
        """DDP writes nothing on a rank that has joined."""
        for number, (bucket, done) in enumerate(self._buckets):
            parameters, result = bucket.parameters(), done.wait()
            gradients = (
                views_of(elements_of(result, parameters), parameters)
                if result.layout is torch.strided
                else [result]
            )
            used = [True] * len(parameters)
            if self._uses:
                used = self._uses[number][0].tolist()
            for parameter, gradient, is_used in zip(parameters, gradients, used, strict=True):
                index = self._index_of.get(id(parameter))
                if index is not None:
                    parameter.grad = gradient if is_used and self._own_extents[index] else None
        self._discard()

    def _restore_unfired(self) -> None:
        for index in [i for i in self._set_aside if self._parameters[i].grad is None]:
            self._parameters[index].grad = self._set_aside.pop(index)

    def _discard(self) -> None:
        self._buckets, self._reduced, self._uses = [], [], []

    def _is_averaged(self, gradient: torch.Tensor) -> bool:
        return isinstance(gradient, PartialGradient) or self._mark.is_on(gradient)

    def _sentinel(self, parameter: torch.Tensor) -> torch.Tensor:
        kind = parameter.dtype, parameter.device
        if kind not in self._sentinels:
            made = torch.zeros(1, dtype=kind[0], device=kind[1])
            self._sentinels[kind] = made.copy_(self._worst)
        return self._sentinels[kind]

    def _set_sentinels(self) -> None:
        for sentinel in self._sentinels.values():
            worst = self._worst.to(sentinel)
            sentinel.copy_(sentinel + worst if self._adds_up else worst)

    # What the optimizer asks

    def find_unfinished(self) -> Exception | None:
        """See :class:`Gradients`."""
        if self._backward_pass.was_replaced:
            return RuntimeError(
                "another optimizer has been built on these parameters and reduces their gradients "
                "now; go on with that one"
            )
        self._is_unfinished |= self._backward_pass.settle_aborted()
        if self._is_unfinished:
            return RuntimeError(
                "the last backward pass ended in an exception, so that its gradients were not "
                "reduced; call zero_grad() and repeat forward and backward before step()"
            )
        if self._has_unreduced_passes:
            return RuntimeError(
                "the last backward pass ran under no_sync() of DistributedDataParallel, so that its "
                "gradients were not reduced to their owners; run one more outside of it before this"
            )
        return None

    def owned_stretches(self) -> list[torch.Tensor]:
        """See :class:`Gradients`."""
        return self._stretches(own=True)

    def others(self) -> list[torch.Tensor]:
        """See :class:`Gradients`; only of whole gradients."""
        return self._stretches(own=False)

    def _stretches(self, *, own: bool) -> list[torch.Tensor]:
        stretches: list[torch.Tensor] = []
        all_extents = self._own_extents if own else self._other_extents
        for parameter, extents in zip(self._parameters, all_extents, strict=True):
            gradient = parameter.grad
            if isinstance(gradient, PartialGradient):
                stretches += gradient.parts[:-1] if own else ()
            elif gradient is not None:
                stretches += _parts(gradient, extents)
        return stretches

    def forget(self) -> None:
        """See :class:`Gradients`."""
        self._backward_pass.settle_aborted()
        self._set_aside.clear()
        self._has_unreduced_passes = self._is_unfinished = False

    def no_sync(self) -> AbstractContextManager[None]:
        """See :class:`Gradients`."""
        raise RuntimeError(
            "no_sync() needs shard_gradients=True; here DistributedDataParallel reduces the "
            "gradients: use its no_sync()"
        )


def _parts(gradient: torch.Tensor, extents: Sequence[tuple[int, int]]) -> Sequence[torch.Tensor]:
    """Views of a gradient that is dense in some order; itself for all of it, also if it's sparse."""
    if tuple(extents) == ((0, gradient.numel()),):
        return [gradient]
    if not extents:
        return []
    flat = gradient.as_strided((gradient.numel(),), (1,))
    return [flat[start:end] for start, end in extents]


def _future_of(buffer: torch.Tensor) -> Future:
    devices: list[int | str | torch.device] = [buffer.device]
    return torch.futures.Future(devices=None if buffer.device.type == "cpu" else devices)
