"""Uneven inputs: a rank that has joined goes on stepping its shard, with what the active ranks have.

Under ``Join`` a rank without inputs shadows the others' collectives. DDP lets it take part in the
all-reduce of gradients, but doesn't give it the result; and its own scheduler has stopped. So in
each step the first active rank sends every joined one the averaged gradients of its shard and the
options of all groups. Then all of them step as always. Where the optimizer
reduces gradients itself, joined ranks follow each of its collective calls, told by the active ones.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from tensorplay.distributed.optim._core import tagged_json
from tensorplay.distributed.optim._core.agreement import Agreement
from tensorplay.distributed.optim._core.collectives import Communicator
from tensorplay.distributed.optim._core.joined_calls import JoinedCalls
from tensorplay.distributed.optim._core.local_shard import rewrap, unwrap
from tensorplay.distributed.optim._core.partial_gradient import PartialGradient
from tensorplay.distributed.optim._core.partition import IN_PARTS
from tensorplay.distributed.optim._core.ranks import GroupRank
from tensorplay.distributed.optim._core.tagged_json import Json
from tensorplay.distributed.optim._core.wrapped_optimizer import options_of
from tensorplay.distributed.optim.zero.checkpoint import Shard, receive_tensors_, send_tensors
from tensorplay.distributed.optim.zero.flat_slices import in_memory_order
from tensorplay.distributed.optim.zero.gradients import Gradients
from tensorplay.distributed.optim.zero.sharded_parameters import ShardedParameters


class StepWhenJoined(JoinHook):
    """Makes a joined rank take part in every step."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self._step = step

    def main_hook(self) -> None:
        """Shadows one iteration of the active ranks."""
        self._step()


class JoinRound:
    """What the ranks exchange before a step inside ``Join``; every rank must run it.

    Args:
        communicator: carries it.
        agreement: settles whether anybody has joined at all.
        sharded: all parameters, and who owns what of them.
    """

    def __init__(
        self,
        communicator: Communicator,
        agreement: Agreement,
        sharded: ShardedParameters,
    ) -> None:
        self._communicator = communicator
        self._agreement = agreement
        self._sharded = sharded

    def run(
        self,
        groups: Sequence[dict[str, Any]],
        *,
        joined: bool,
        error: Exception | None = None,
        gradients: bool = True,
    ) -> None:
        """Gives joined ranks gradients and options; on them, ``groups`` and ``.grad`` are written.

        Args:
            groups: all param groups.
            joined: whether this rank has joined.
            error: what is wrong on this rank, if anything.
            gradients: whether joined ranks need their shard's gradients.
        """
        if not self._agreement.settle("step (join)", error=error, flag=int(joined)):
            return
        members = self._communicator.members
        flags = self._communicator.all_gather_bytes(b"joined" if joined else b"")
        active = [rank for rank, flag in zip(members, flags, strict=True) if not flag]
        if not active or members.group_rank not in {active[0], *self._joined(active)}:
            return
        if joined:
            self._receive(groups, active[0], gradients=gradients)
            return
        for rank in self._joined(active):
            self._send(groups, rank, gradients=gradients)

    def _joined(self, active: Sequence[GroupRank]) -> list[GroupRank]:
        return [rank for rank in self._communicator.members if rank not in active]

    def _send(
        self, groups: Sequence[Mapping[str, Any]], target: GroupRank, *, gradients: bool
    ) -> None:
        sent = {
            index: _to_plain(gradient)
            for index, gradient in (self._gradients_of(target) if gradients else ())
            if gradient is not None
        }
        shard = Shard.encode({0: sent, 1: [_sendable_options(group) for group in groups]})
        self._communicator.send_bytes(shard.header(), target)
        send_tensors(self._communicator, shard.tensors, target)

    def _gradients_of(self, rank: GroupRank) -> Iterator[tuple[int, torch.Tensor | None]]:
        """What a rank steps on, by parameter: whole gradients, and flat stretches of some."""
        for index, parameter in enumerate(self._sharded.parameters):
            owner, gradient = self._sharded.plan.partition.owners[index], parameter.grad
            if owner == rank:
                yield index, gradient
            elif owner == IN_PARTS and gradient is not None:
                start, end = self._sharded.plan.cuts_of(index)[rank : rank + 2]
                if start < end:
                    yield (
                        index,
                        in_memory_order(gradient, self._sharded.plan.specs[index])[start:end],
                    )

    def _receive(
        self, groups: Sequence[dict[str, Any]], source: GroupRank, *, gradients: bool
    ) -> None:
        header = self._communicator.receive_bytes(source)
        shard = Shard.allocate(header, self._sharded.device_of_type)
        receive_tensors_(self._communicator, shard.tensors, source)
        received = shard.decode()
        rank = self._communicator.members.group_rank
        for index, parameter in enumerate(self._sharded.parameters):
            owner = self._sharded.plan.partition.owners[index]
            if not gradients or owner not in {rank, IN_PARTS}:
                continue
            gradient = received[0].get(index)
            if gradient is None:
                parameter.grad = None
            elif owner == IN_PARTS:
                parameter.grad = PartialGradient(parameter, (gradient,), gradient)
            else:
                parameter.grad = _from_plain(gradient, parameter)
        for group, options in zip(groups, received[1], strict=True):
            group.update(options)


class UnevenInputs:
    """A sharded optimizer's part in ``Join``: what ranks with inputs tell those without, and when.

    Each method gets the optimizer, the ``joinable``, and its source of gradients as they are.

    Args:
        communicator: carries it.
        agreement: settles whether anybody has joined at all.
        sharded: all parameters, and who owns what of them.
    """

    def __init__(
        self, communicator: Communicator, agreement: Agreement, sharded: ShardedParameters
    ) -> None:
        self._calls = JoinedCalls(communicator, "with shard_gradients=True the optimizer")
        self.round = JoinRound(communicator, agreement, sharded)

    @property
    def has_joined(self) -> bool:
        """Whether this rank takes part in a call of the others, without inputs of its own."""
        return self._calls.has_joined

    def announce(
        self, joinable: Joinable, gradients: Gradients, call: str, **arguments: Json
    ) -> None:
        """Inside ``Join``, tells the ranks that have joined what the active ones do."""
        if gradients.can_follow:
            active = self._calls.announce(joinable, call, arguments)
            if active is not None:
                gradients.divide_among(active)

    def follow(self, gradients: Gradients) -> tuple[str, dict[str, Any]]:
        """On a rank that has joined: the active ones' call, to be made :meth:`taking_part`."""
        call, arguments, active = self._calls.follow()
        gradients.divide_among(active)
        return call, arguments

    def taking_part(self) -> AbstractContextManager[None]:
        """On a rank that has joined: what it calls inside, it calls as one that has."""
        return self._calls.taking_part()

    def begin_step(
        self,
        joinable: Joinable,
        gradients: Gradients,
        groups: Sequence[dict[str, Any]],
        *,
        has_closure: bool,
    ) -> None:
        """Before a step inside ``Join``; every rank must call it.

        Raises:
            ValueError: if a rank has a closure; the other ranks raise too.
        """
        if gradients.can_follow:
            self.announce(joinable, gradients, "step")
        elif not self.has_joined:
            Join.notify_join_context(joinable)
        error = None
        if has_closure:
            error = ValueError(
                "a closure can't be used inside Join: a rank that has joined could not follow its "
                "forward and backward passes. Run them before step()"
            )
        self.round.run(
            groups,
            joined=self.has_joined,
            error=error,
            gradients=not gradients.reduces_to_owners,
        )


def _sendable_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group that are plain data; others stay as they are on the joined rank."""
    sendable = {}
    for key, value in options_of(group).items():
        try:
            tagged_json.encode(value, [])
        except TypeError:
            continue
        sendable[key] = value
    return sendable


def _to_plain(gradient: torch.Tensor) -> Any:
    if gradient.layout is torch.sparse_coo:
        coalesced = gradient.coalesce()
        return (coalesced.indices(), coalesced.values(), tuple(gradient.shape))
    return unwrap(gradient)


def _from_plain(gradient: Any, parameter: torch.Tensor) -> torch.Tensor:
    if isinstance(gradient, tuple):
        indices, values, shape = gradient
        return torch.sparse_coo_tensor(
            indices, values, shape, is_coalesced=True, check_invariants=False
        )
    wrapped: torch.Tensor = rewrap(gradient, parameter)
    return wrapped
