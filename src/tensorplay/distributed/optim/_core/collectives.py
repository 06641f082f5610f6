"""The only place that issues collectives: four verbs for tensors, two for small agreements.

Note [Strategies]
    Backends differ more than their names promise. On gloo, sending every slice from its owner to
    each other rank is three to four times faster than ``all_gather_into_tensor`` and moves the same
    bytes, and it takes uneven slices. Broadcasts are as fast inside a host; but only two run at a
    time, and where their slices go the same way, half of a link is idle. On NCCL an even all-gather
    is one kernel, in place. So the verb chooses by backend and by the cuts; callers see no difference.
    What is large goes through memory between ranks of one host, on gloo, which would take sockets:
    ``host_memory.py``.

Note [Control group]
    Agreements are a few integers that the host must read. On a group without a CPU backend they
    would wait for the device's queue, so such a group gets a gloo companion of the same members.

Note [Order of waiting]
    A backend receives as soon as a receive is launched. What finds no room in shared memory is
    received when it is awaited, and its sender waits for that: ranks must await such exchanges in
    the same order, with nothing in between that waits for other ranks. Where a user's program decides
    who waits when, for instance one rank evaluates while the others wait for it, it is the backend
    that carries everything.

Every method here must be called by all ranks of the group, in the same order, unless it says
otherwise. Payloads that aren't reduced travel as bytes, so that every dtype works everywhere.
"""

import copy
import ctypes
import math
import weakref
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, Protocol

import torch
import torch.distributed as dist

from tensorplay.distributed.optim._core.host_average import AverageThroughMemory
from tensorplay.distributed.optim._core.host_messages import HostMessages, Incoming
from tensorplay.distributed.optim._core.host_peers import HostPeers, meet
from tensorplay.distributed.optim._core.ranks import GroupMembers, GroupRank
from tensorplay.distributed.optim._core.works import (
    CommunicationError,
    Launched,
    Waitable,
    Works,
)

__all__ = [
    "CommunicationError",
    "Communicator",
    "Exchange",
    "GroupCommunicator",
    "PendingMaximum",
    "Waitable",
    "connect",
    "start_all_reduce_",
]

# The name that torch gave the same collective in 2.13, or the older one, which 2.13 deprecates.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


MOST_ALL_TO_ALL = 16
"""Ranks of a host that reduce small tensors by sending them to each other."""


class Communicator(Protocol):
    """The verbs that the rest of the package may use; tests pass a fake."""

    members: GroupMembers

    def can_send(self, device: torch.device) -> bool:
        """Whether tensors on ``device`` can take part. No communication."""

    def describe_backend(self) -> str:
        """How messages call the backend. No communication."""

    def gather_from_owners(self, flat: torch.Tensor, cuts: Sequence[int]) -> Waitable:
        """Fills ``flat`` in place: each rank's slice ``[cuts[r], cuts[r+1])`` comes from rank r."""

    def average_(self, flat: torch.Tensor, contributors: Sequence[GroupRank]) -> Waitable:
        """Gives every rank the mean of the contributors' ``flat``, in place.

        It must be awaited, on every rank, in the order of launch.

        Args:
            flat: ``(numel,)`` real floating-point numbers, as many on every rank.
            contributors: whose values count, at least one; the same on every rank.
        """

    def send(self, tensor: torch.Tensor, target: GroupRank) -> Waitable:
        """Sends a contiguous tensor; only the sender and ``target`` call."""

    def receive_(self, tensor: torch.Tensor, source: GroupRank) -> Waitable:
        """Receives into a contiguous tensor; only the receiver and ``source`` call."""

    def exchange(
        self,
        outgoing: Sequence[tuple[GroupRank, torch.Tensor]],
        incoming: Sequence[tuple[GroupRank, torch.Tensor]],
    ) -> "Exchange":
        """Sends contiguous tensors to some ranks while it receives into others from some ranks.

        Each message should be a tensor object of its own, unless several ranks get the same. One
        that is received on the device "meta" may be anywhere; look at it through :meth:`Exchange.parts`.
        """

    def all_reduce_(self, tensor: torch.Tensor, op: Literal["sum", "max"]) -> Waitable:
        """Replaces a small contiguous tensor by the sum or the maximum over ranks."""

    def send_bytes(self, payload: bytes, target: GroupRank) -> None:
        """Sends bytes of any length; only the sender and ``target`` call."""

    def receive_bytes(self, source: GroupRank) -> bytes:
        """Receives what ``send_bytes`` sent; only the receiver and ``source`` call."""

    def transport_device(self) -> torch.device:
        """A device whose tensors can take part, the CPU where it can. No communication."""

    def max_(self, values: list[int]) -> "PendingMaximum":
        """The element-wise maximum over ranks, which blocks the host when it's awaited."""

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Every rank's payload by group rank, of any lengths; blocks the host."""

    def room_nbytes(self) -> float:
        """How much a rank should have under way at a time, so that it finds room; maybe infinite."""

    def awaited_in_any_order(self) -> "Communicator":
        """The same verbs, where no rank's waiting depends on whether another waits yet, or for what.

        See Note [Order of waiting]. No communication.
        """


class Exchange(Waitable, Protocol):
    """Messages under way. Await them by :meth:`wait`, or by :meth:`parts` and :meth:`let_go`."""

    def parts(self) -> list[torch.Tensor]:
        """Waits; what has come, in the order in which it was asked for.

        It is where it was to be received, or still in memory of its sender. Where each message went
        to one rank only, it may be written to. Valid until :meth:`let_go`.
        """

    def let_go(self) -> None:
        """Nobody looks at the parts any more. To be called soon: senders need the memory."""


class PendingMaximum(Protocol):
    """Integers under way."""

    def wait(self) -> list[int]:
        """Blocks the host until they are there."""


class GroupCommunicator:
    """The verbs over a ``torch.distributed`` process group, of which this rank is a member.

    Construction is collective.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.process_group = process_group
        self.members = GroupMembers.of(process_group)
        self._backends = dist.distributed_c10d.BackendConfig(
            dist.Backend(dist.get_backend_config(process_group))
        ).get_device_backend_map()
        self._on_host: HostMessages | None = None
        self._control_group = (
            process_group
            if "cpu" in self._backends
            else dist.new_group(
                list(self.members.global_ranks),
                backend="gloo",
                use_local_synchronization=True,
                sort_ranks=False,  # the companion's group ranks are the group's own
            )
        )
        peers = self._host_peers()
        self._on_host = (
            None if peers is None else HostMessages(peers, self.members, _Messages(self))
        )

    def _host_peers(self) -> HostPeers | None:
        if self._backends.get("cpu") != "gloo" or self.members.world_size == 1:
            return None
        group = self.process_group
        if group not in _met:
            timeout = group._get_backend(torch.device("cpu")).options._timeout  # noqa: SLF001 - torch has no public name for it
            try:
                _met[group] = meet(
                    self.members,
                    self.all_gather_bytes,
                    lambda value: self.max_([value]).wait()[0],
                    timeout.total_seconds(),
                )
            except RuntimeError as error:
                raise CommunicationError(
                    f"not every rank of the process group has come to use it: {error}"
                ) from error
        return _met[group]

    def can_send(self, device: torch.device) -> bool:
        """Whether the group has a backend for ``device``."""
        return device.type in self._backends

    def describe_backend(self) -> str:
        """The backend of each device type, as ``init_process_group`` takes it."""
        return ",".join(f"{device}:{backend}" for device, backend in self._backends.items())

    def transport_device(self) -> torch.device:
        """The CPU where the group can send from it, else its first device type's current device."""
        if "cpu" in self._backends:
            return torch.device("cpu")
        device_type = next(iter(self._backends))
        index = torch.get_device_module(device_type).current_device()
        return torch.device(device_type, index)

    def room_nbytes(self) -> float:
        """See :class:`Communicator`."""
        return math.inf if self._on_host is None else self._on_host.room_nbytes()

    def awaited_in_any_order(self) -> "GroupCommunicator":
        """See :class:`Communicator`."""
        backend_only = copy.copy(self)
        backend_only._on_host = None  # noqa: SLF001 - its own class
        return backend_only

    def gather_from_owners(self, flat: torch.Tensor, cuts: Sequence[int]) -> Waitable:
        """See :class:`Communicator`; Note [Strategies] says how."""
        payload, scale = _as_bytes(flat), flat.element_size()
        extents = [(start * scale, end * scale) for start, end in pairwise(cuts)]
        even = len({end - start for start, end in extents}) == 1
        if even and self._backends[flat.device.type] == "nccl":
            start, end = extents[self.members.group_rank]
            whole, own = payload[: cuts[-1] * scale], payload[start:end]
            work = _all_gather(whole, own, group=self.process_group, async_op=True)
            return Works([Launched(work, "from all ranks")])
        if self._backends[flat.device.type] == "gloo":
            stretches = [
                (GroupRank(r), payload[slice(*extent)]) for r, extent in enumerate(extents)
            ]
            own = stretches.pop(self.members.group_rank)[1]
            return self._exchange(
                [(rank, own) for rank, _ in stretches if own.numel()],
                [(rank, stretch) for rank, stretch in stretches if stretch.numel()],
            )
        return Works(
            [
                Launched(
                    dist.broadcast(
                        payload[start:end],
                        self.members.to_global(GroupRank(owner)),
                        group=self.process_group,
                        async_op=True,
                    ),
                    "to the other ranks"
                    if owner == self.members.group_rank
                    else f"from {self.members.name(GroupRank(owner))}",
                )
                for owner, (start, end) in enumerate(extents)
                if start < end
            ]
        )

    def average_(self, flat: torch.Tensor, contributors: Sequence[GroupRank]) -> Waitable:
        """See :class:`Communicator`."""
        messages = self._on_host
        if messages is not None and messages.reach_all() and flat.device.type == "cpu":
            return AverageThroughMemory(self, flat, contributors)
        everyone = len(contributors) == self.members.world_size
        if everyone and self._backends[flat.device.type] == "nccl":
            op, divisor = dist.ReduceOp.AVG, 1
        else:
            op, divisor = dist.ReduceOp.SUM, len(contributors)
        if self.members.group_rank not in contributors:
            flat.zero_()
        work = dist.all_reduce(flat, op, group=self.process_group, async_op=True)
        return _Divided(_launched(work, "from all ranks"), flat, divisor)

    def send(self, tensor: torch.Tensor, target: GroupRank) -> Waitable:
        """See :class:`Communicator`."""
        peer = self.members.to_global(target)
        work = dist.isend(_as_bytes(tensor), peer, group=self.process_group)
        return _launched(work, f"to {self.members.name(target)}")

    def receive_(self, tensor: torch.Tensor, source: GroupRank) -> Waitable:
        """See :class:`Communicator`."""
        peer = self.members.to_global(source)
        work = dist.irecv(_as_bytes(tensor), peer, group=self.process_group)
        return _launched(work, f"from {self.members.name(source)}")

    def exchange(
        self,
        outgoing: Sequence[tuple[GroupRank, torch.Tensor]],
        incoming: Sequence[tuple[GroupRank, torch.Tensor]],
    ) -> "Exchange":
        """See :class:`Communicator`; NCCL wants sends and receives in one group, or it may hang."""
        return self._exchange(outgoing, incoming)

    def _exchange(
        self,
        outgoing: Sequence[tuple[GroupRank, torch.Tensor]],
        incoming: Sequence[tuple[GroupRank, torch.Tensor]],
    ) -> "_Exchange":
        messages = self._on_host
        if messages is None:
            return _Exchange(self._launch(outgoing, incoming), [part for _, part in incoming], {})
        launched: list[Launched] = []
        through: dict[int, Incoming] = {}
        for place, (source, part) in enumerate(incoming):
            if messages.carry(part, source):
                through[place] = messages.receive(_as_bytes(part), source)
                launched += through[place].launched
            else:
                launched += self._launch([], [(source, part)])
        readers: dict[int, list[GroupRank]] = {}
        for target, part in outgoing:
            if messages.carry(part, target):
                readers.setdefault(id(part), []).append(target)
            else:
                launched += self._launch([(target, part)], [])
        for _, part in outgoing:
            if targets := readers.pop(id(part), None):
                launched += messages.send(_as_bytes(part), targets)
        return _Exchange(launched, [part for _, part in incoming], through)

    def _launch(
        self,
        outgoing: Sequence[tuple[GroupRank, torch.Tensor]],
        incoming: Sequence[tuple[GroupRank, torch.Tensor]],
    ) -> list[Launched]:
        members = self.members
        operations = [
            (dist.irecv, tensor, source, f"from {members.name(source)}")
            for source, tensor in incoming
        ] + [
            (dist.isend, tensor, target, f"to {members.name(target)}")
            for target, tensor in outgoing
        ]
        batch = [
            (verb, _as_bytes(tensor), members.to_global(peer), what)
            for verb, tensor, peer, what in operations
        ]
        if batch and self._backends[batch[0][1].device.type] == "nccl":
            works = dist.batch_isend_irecv(
                [dist.P2POp(verb, part, peer, self.process_group) for verb, part, peer, _ in batch]
            )
            return [Launched(work, "to and from its peers") for work in works]
        launched = [
            (verb(part, peer, self.process_group), what) for verb, part, peer, what in batch
        ]
        return [Launched(work, what) for work, what in launched if work is not None]

    def all_reduce_(self, tensor: torch.Tensor, op: Literal["sum", "max"]) -> Waitable:
        """See :class:`Communicator`."""
        if (messages := self._reducing(tensor)) is not None:
            return messages.all_reduce_(tensor, op)
        operation = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
        work = dist.all_reduce(tensor, operation, group=self.process_group, async_op=True)
        return _launched(work, "to and from all ranks")

    def _reducing(self, tensor: torch.Tensor) -> HostMessages | None:
        """What reduces a small tensor, if not the backend."""
        messages = self._on_host
        if messages is None or self.members.world_size > MOST_ALL_TO_ALL:
            return None
        return messages if messages.reach_all() and tensor.device.type == "cpu" else None

    def send_bytes(self, payload: bytes, target: GroupRank) -> None:
        """See :class:`Communicator`."""
        peer = self.members.to_global(target)
        dist.send(torch.tensor([len(payload)], device="cpu"), peer, group=self._control_group)
        if payload:
            dist.send(_tensor_of(payload), peer, group=self._control_group)

    def receive_bytes(self, source: GroupRank) -> bytes:
        """See :class:`Communicator`."""
        peer = self.members.to_global(source)
        length = torch.empty(1, dtype=torch.int64, device="cpu")
        dist.recv(length, peer, group=self._control_group)
        payload = torch.empty(int(length.item()), dtype=torch.uint8, device="cpu")
        if payload.numel():
            dist.recv(payload, peer, group=self._control_group)
        return _bytes_of(payload)

    def max_(self, values: list[int]) -> PendingMaximum:
        """See :class:`Communicator`."""
        tensor = torch.tensor(values, dtype=torch.int64, device="cpu")
        if (messages := self._reducing(tensor)) is not None:
            return _Maximum(messages.all_reduce_(tensor, "max"), tensor)
        work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._control_group, async_op=True)
        return _Maximum(work, tensor)

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """See :class:`Communicator`."""
        (longest,) = self.max_([len(payload)]).wait()
        framed = len(payload).to_bytes(8, "little") + payload + bytes(longest - len(payload))
        own = _tensor_of(framed)
        gathered = [torch.empty_like(own) for _ in self.members]
        dist.all_gather(gathered, own, group=self._control_group)
        messages = [_bytes_of(message) for message in gathered]
        return [message[8:][: int.from_bytes(message[:8], "little")] for message in messages]


_met: "weakref.WeakKeyDictionary[dist.ProcessGroup, HostPeers | None]" = weakref.WeakKeyDictionary()
"""The ways to ranks of this host, by group."""


def num_bytes_through_memory() -> int:
    """How much this process has sent to ranks of its host through memory, for all groups together."""
    return sum(peers.memory.num_written_bytes for peers in _met.values() if peers is not None)


class _Messages:
    """Point-to-point messages of a group; a ``Transport`` of ``host_messages.py``."""

    def __init__(self, communicator: GroupCommunicator) -> None:
        self._group = communicator.process_group
        self._members = communicator.members

    def isend(self, payload: torch.Tensor, target: GroupRank, tag: int) -> dist.Work:
        work = dist.isend(payload, self._members.to_global(target), self._group, tag)
        assert work is not None  # noqa: S101 - narrows a type; this rank is a member
        return work

    def irecv(self, memory: torch.Tensor, source: GroupRank, tag: int) -> dist.Work:
        work = dist.irecv(memory, self._members.to_global(source), self._group, tag)
        assert work is not None  # noqa: S101 - narrows a type; this rank is a member
        return work


class _Exchange:
    """See :class:`Exchange`.

    Args:
        launched: all operations.
        parts: where each incoming message is received.
        through: those among them that come through memory, by place.
    """

    def __init__(
        self, launched: list[Launched], parts: list[torch.Tensor], through: dict[int, Incoming]
    ) -> None:
        self._works = Works(launched)
        self._parts = parts
        self._through = through

    def wait(self) -> None:
        self._works.wait()

    def parts(self) -> list[torch.Tensor]:
        for incoming in self._through.values():
            incoming.let_stay()
        self._works.wait()
        return [
            self._through[place].look().view(part.dtype).view(part.shape)
            if place in self._through
            else part
            for place, part in enumerate(self._parts)
        ]

    def let_go(self) -> None:
        for incoming in self._through.values():
            incoming.let_go()


class _Maximum:
    """Integers in a tensor, when the work is done."""

    def __init__(self, work: dist.Work | Waitable | None, tensor: torch.Tensor) -> None:
        self._work = work
        self._tensor = tensor

    def wait(self) -> list[int]:
        if self._work is not None:
            self._work.wait()
        return [int(value) for value in self._tensor.tolist()]


class _Divided:
    """A sum that becomes a mean when it is awaited."""

    def __init__(self, works: Works, flat: torch.Tensor, divisor: int) -> None:
        self._works = works
        self._flat = flat
        self._divisor = divisor

    def wait(self) -> None:
        self._works.wait()
        if self._divisor & (self._divisor - 1):
            self._flat.div_(self._divisor)
        elif self._divisor != 1:
            self._flat.mul_(1 / self._divisor)  # exact for powers of two, and faster


def connect(process_group: dist.ProcessGroup | None, user: str) -> GroupCommunicator:
    """The communicator of ``process_group``, or of the default group.

    Args:
        process_group: the group, or ``None`` for the default one.
        user: whose name messages carry.

    Raises:
        RuntimeError: if there is no process group to use.
        ValueError: if this rank isn't a member of the group.
    """
    if not dist.is_available():
        raise RuntimeError(f"{user} needs torch.distributed, which this build of torch lacks")
    if not dist.is_initialized():
        raise RuntimeError(
            f"{user} needs a process group, and none is initialised: call "
            "torch.distributed.init_process_group('gloo') (or 'nccl' on GPUs) first and start the "
            "script with torchrun, which sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        )
    group = process_group or dist.group.WORLD
    assert group is not None  # noqa: S101 - narrows a type; it is initialised
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"global rank {dist.get_rank()} is not a member of the process_group given to {user}; "
            "construct it on the members only"
        )
    try:
        return GroupCommunicator(group)
    except CommunicationError as error:
        raise CommunicationError(f"{user}: {error}") from error


def start_all_reduce_(
    tensor: torch.Tensor, process_group: dist.ProcessGroup
) -> torch.futures.Future[torch.Tensor]:
    """Sums ``tensor`` over the ranks in place, for a communication hook of DDP, which wants a future."""
    work = dist.all_reduce(tensor, group=process_group, async_op=True)
    assert work is not None  # noqa: S101 - narrows a type; this rank is a member
    future: torch.futures.Future[torch.Tensor] = work.get_future()
    return future


def _launched(work: dist.Work | None, what: str) -> Works:
    return Works([Launched(work, what)] if work is not None else [])


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def _tensor_of(payload: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel())
