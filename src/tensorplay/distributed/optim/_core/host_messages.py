"""Messages between the ranks of a host: written to memory, and announced through a link.

Reductions and other messages are apart, as they are on a backend: ranks may launch one of each in
either order. What finds no room in memory is sent by the backend, after its ticket. It is asked for when that has
been read, perhaps later than what was sent after it, and so has a tag of its own.
"""

import math
from collections.abc import Sequence
from typing import Literal, Protocol

import torch
import torch.distributed as dist

from tensorplay.distributed.optim._core.host_links import Channel
from tensorplay.distributed.optim._core.host_memory import ARENA_BYTES, Ticket
from tensorplay.distributed.optim._core.host_peers import HostPeers
from tensorplay.distributed.optim._core.ranks import GroupMembers, GroupRank
from tensorplay.distributed.optim._core.works import Launched, Works

PIECE_BYTES = 4 * 1024 * 1024
"""What is larger is sent in pieces, so that one is read while the next is written."""

ROOM_BYTES = ARENA_BYTES * 2 // 3
"""Of messages that a rank may send before any is read, so that they find room."""

_NO_ROOM = -1


class Transport(Protocol):
    """The backend's messages."""

    def isend(self, payload: torch.Tensor, target: GroupRank, tag: int) -> dist.Work:
        """Begins to send bytes."""

    def irecv(self, memory: torch.Tensor, source: GroupRank, tag: int) -> dist.Work:
        """Begins to receive bytes."""


class HostMessages:
    """Sends to and receives from the ranks of a group that run on this host.

    Args:
        peers: the ways to them.
        members: of the group.
        transport: carries what finds no room.
    """

    def __init__(self, peers: HostPeers, members: GroupMembers, transport: Transport) -> None:
        self._memory, self._links, self._tags = peers
        self._abandoned = peers.links.abandoned
        self._members = members
        self._transport = transport

    def carry(self, payload: torch.Tensor, peer: GroupRank) -> bool:
        """Whether such a message goes this way: the same on both sides."""
        return (
            payload.device.type in {"cpu", "meta"}
            and bool(payload.nbytes)
            and peer in self._links.ranks
        )

    def reach_all(self) -> bool:
        """Whether all ranks of the group run on this host."""
        return len(self._links.ranks) == self._members.world_size - 1

    def room_nbytes(self) -> float:
        """How much finds room at a time beside what is being read."""
        return ROOM_BYTES if self._links.ranks else math.inf

    def send(self, payload: torch.Tensor, targets: Sequence[GroupRank]) -> list[Launched]:
        """Sends the same ``(nbytes,)`` bytes to several ranks; returns what is still to be awaited."""
        return self._send(payload, targets, Channel.MESSAGES)

    def _send(
        self, payload: torch.Tensor, targets: Sequence[GroupRank], channel: Channel
    ) -> list[Launched]:
        self._drop_abandoned()
        launched: list[Launched] = []
        for piece in torch.split(payload, PIECE_BYTES):
            ticket = self._memory.write(piece, targets)
            for target in targets:
                announced = ticket or Ticket(_NO_ROOM, next(self._tags), piece.numel())
                self._links.send(target, announced, channel)
                if ticket is None:
                    work = self._transport.isend(piece, target, announced.block)
                    launched.append(Launched(work, f"to {self._members.name(target)}"))
        return launched

    def receive(self, target: torch.Tensor, source: GroupRank) -> "Incoming":
        """Begins to receive ``(nbytes,)`` bytes; on the device "meta": to wherever there is memory."""
        return Incoming(self, target, source, Channel.MESSAGES)

    def all_reduce_(self, tensor: torch.Tensor, op: Literal["sum", "max"]) -> "SmallReduction":
        """Begins to reduce a small tensor over all ranks, which must be reached; in rank order."""
        payload = tensor.view(-1).view(torch.uint8)
        peers = [rank for rank in self._members if rank != self._members.group_rank]
        channel = Channel.REDUCTIONS
        incoming = [Incoming(self, torch.empty_like(payload), peer, channel) for peer in peers]
        sent = self._send(payload, peers, channel)
        return SmallReduction(tensor, op, incoming, sent, self._members)

    # What an incoming message needs

    def expect(self, source: GroupRank, channel: Channel) -> int:
        """The number of the next ticket from ``source``."""
        return self._links.expect(source, channel)

    def has_come(self, source: GroupRank, number: int) -> bool:
        """Whether that ticket is there."""
        return self._links.has_come(source, number)

    def find(
        self, source: GroupRank, number: int, target: torch.Tensor
    ) -> tuple[torch.Tensor, Ticket | None]:
        """Waits for a ticket; where its message is, in ``target`` if there was no room for it."""
        ticket = Ticket(*self._links.take(source, number))
        if ticket.nbytes != target.numel():
            self._drop(source, ticket)
            raise RuntimeError(
                f"{ticket.nbytes} bytes have come where {target.numel()} were expected: the ranks "
                "have called different things, or the same in different order"
            )
        if ticket.offset == _NO_ROOM:
            if target.is_meta:
                target = torch.empty_like(target, device="cpu")
            self._transport.irecv(target, source, ticket.block).wait()
            return target, None
        return self._memory.look(source, ticket), ticket

    def let_go(self, source: GroupRank, ticket: Ticket) -> None:
        """A message has been read."""
        self._memory.mark_as_read(source, ticket)

    def abandon(self, source: GroupRank, number: int) -> None:
        """Nobody will wait for that message: its memory is given back when it has come."""
        self._abandoned.append((source, number))

    def _drop_abandoned(self) -> None:
        for _ in range(len(self._abandoned)):
            source, number = self._abandoned.popleft()
            ticket = self._links.drop(source, number)
            if ticket is None:
                self._abandoned.append((source, number))
            else:
                self._drop(source, Ticket(*ticket))

    def _drop(self, source: GroupRank, ticket: Ticket) -> None:
        if ticket.offset != _NO_ROOM:
            self.let_go(source, ticket)

    def name(self, source: GroupRank) -> str:
        """How errors call it."""
        return self._members.name(source)


class Incoming:
    """A message that comes piece by piece.

    Args:
        messages: through which.
        target: ``(nbytes,)``: where it is to be received; on "meta" if it may be anywhere.
        source: from whom.
        channel: among which.

    Attributes:
        launched: to be awaited, in order; then it has come.
    """

    def __init__(
        self,
        messages: HostMessages,
        target: torch.Tensor,
        source: GroupRank,
        channel: Channel,
    ) -> None:
        self._messages = messages
        self._source = source
        self._channel = channel
        self._target = target
        self._stays = False
        self._place = target
        self._ticket: Ticket | None = None
        what = f"from {messages.name(source)}"
        self.launched = [
            Launched(_Piece(self, piece), what) for piece in torch.split(target, PIECE_BYTES)
        ]

    def let_stay(self) -> None:
        """It may stay where it is, if it comes as one piece; to be called before awaiting."""
        self._stays = len(self.launched) == 1

    def look(self) -> torch.Tensor:
        """``(nbytes,)``: where it is, when it has come."""
        return self._place

    def let_go(self) -> None:
        """Gives the sender's memory back, if it has stayed there."""
        if self._ticket is not None:
            self._messages.let_go(self._source, self._ticket)
            self._place, self._ticket = self._target, None

    def expect(self) -> int:
        """The number of the next ticket."""
        return self._messages.expect(self._source, self._channel)

    def has_come(self, number: int) -> bool:
        """Whether that ticket is there."""
        return self._messages.has_come(self._source, number)

    def abandon(self, number: int) -> None:
        """Nobody will wait for that piece."""
        self._messages.abandon(self._source, number)

    def take(self, piece: torch.Tensor, number: int) -> None:
        """Waits for a piece."""
        place, ticket = self._messages.find(self._source, number, piece)
        if self._stays:
            self._place, self._ticket = place, ticket
            return
        if ticket is None:
            return
        piece.copy_(place)
        self._messages.let_go(self._source, ticket)


class SmallReduction:
    """Everybody sends to everybody, and reduces in rank order: the same bits everywhere.

    Args:
        tensor: what is reduced, in place.
        op: how.
        incoming: from the others, by rank.
        sent: what was sent to them.
        members: of the group.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        op: Literal["sum", "max"],
        incoming: Sequence[Incoming],
        sent: Sequence[Launched],
        members: GroupMembers,
    ) -> None:
        self._tensor = tensor
        self._op = op
        self._incoming = incoming
        self._works = Works([*(each for one in incoming for each in one.launched), *sent])
        self._members = members
        self._is_done = False

    def wait(self) -> None:
        """Waits until ``tensor`` holds the result."""
        if self._is_done:
            return
        self._is_done = True
        for incoming in self._incoming:
            incoming.let_stay()
        self._works.wait()
        values = [
            incoming.look().view(self._tensor.dtype).view(self._tensor.shape)
            for incoming in self._incoming
        ]
        values.insert(self._members.group_rank, self._tensor.clone())
        stacked = torch.stack(values)
        self._tensor.copy_(stacked.sum(0) if self._op == "sum" else stacked.amax(0))
        for incoming in self._incoming:
            incoming.let_go()


class _Piece:
    """A piece under way, which can be awaited as the backend's operations can."""

    def __init__(self, incoming: Incoming, piece: torch.Tensor) -> None:
        # Dropped when it is here: it holds this, and nobody should need a garbage collector.
        self._incoming: Incoming | None = incoming
        self._piece = piece
        self._number = incoming.expect()

    def wait(self) -> None:
        if self._incoming is not None:
            self._incoming.take(self._piece, self._number)
            self._incoming = None

    def is_completed(self) -> bool:
        return self._incoming is None or self._incoming.has_come(self._number)

    def __del__(self) -> None:
        if self._incoming is not None:
            self._incoming.abandon(self._number)
