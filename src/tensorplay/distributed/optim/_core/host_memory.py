"""Memory of each rank of a host, which the others can read: what is large needs no socket.

A sender copies what it sends into a block of its own memory, and tells the receiver where. That one
reads the block where it is, or copies it, and marks it as read. Nobody waits long for memory: what
finds no room takes another way.
"""

import mmap
import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tensorplay.distributed.optim._core.ranks import GroupMembers, GroupRank

ARENA_BYTES = 48 * 1024 * 1024
"""Of each rank, for what it has sent and others haven't read yet."""

NUM_BLOCKS = 512
"""Messages that may be there at a time."""

SMALL_BYTES = 4 * 1024
"""Messages up to this length find room where larger ones have none left."""

RESERVED_BYTES = 256 * 1024
"""For small ones."""

NUM_RESERVED_BLOCKS = 128
"""Likewise."""

_ALIGNMENT = 64
_PATIENCE_S = 0.005
_PAUSE_S = 0.00005


class Ticket(NamedTuple):
    """Where a message is, and how long."""

    offset: int
    block: int
    nbytes: int


class HostMemory:
    """This rank's memory, and that of those ranks of a group that share theirs with it.

    Args:
        members: of the group.
        own: this rank's.
        others: those of other ranks of this host.
    """

    def __init__(
        self, members: GroupMembers, own: mmap.mmap, others: dict[GroupRank, mmap.mmap]
    ) -> None:
        self._own = own
        self._others = others
        self._num_members = members.world_size
        self._reader = members.group_rank
        self._start = _header_bytes(members.world_size)
        self._bytes = torch.frombuffer(own, dtype=torch.uint8)
        self._others_bytes = {
            rank: torch.frombuffer(each, dtype=torch.uint8) for rank, each in others.items()
        }
        self._is_read = bytes(members.world_size)
        self._in_use: list[_Block] = []
        self._free_blocks = list(range(NUM_BLOCKS))
        self._is_patient = True
        self.num_written_bytes = 0
        """Of all messages so far, each counted once for every reader."""

    def write(self, payload: torch.Tensor, readers: Sequence[GroupRank]) -> Ticket | None:
        """Copies ``(nbytes,)`` bytes to where ``readers`` can read them; ``None`` if there is no room."""
        nbytes = payload.numel()
        ticket = self._reserve(nbytes)
        if ticket is None:
            return None
        for reader in readers:
            self._own[_flag(ticket.block, self._num_members, reader)] = 1
        self._bytes[ticket.offset : ticket.offset + nbytes].copy_(payload)
        self.num_written_bytes += nbytes * len(readers)
        return ticket

    def look(self, source: GroupRank, ticket: Ticket) -> torch.Tensor:
        """``(nbytes,)``: a message, in the memory of ``source``, until it is marked as read.

        If it has only one reader, that may write there.
        """
        return self._others_bytes[source][ticket.offset : ticket.offset + ticket.nbytes]

    def mark_as_read(self, source: GroupRank, ticket: Ticket) -> None:
        """Nobody here looks at the message any more."""
        self._others[source][_flag(ticket.block, self._num_members, self._reader)] = 0

    def _reserve(self, nbytes: int) -> Ticket | None:
        if nbytes > max(ARENA_BYTES, SMALL_BYTES):
            return None
        found = self._find_room(nbytes)
        deadline = time.monotonic() + _PATIENCE_S
        while found is None and self._is_patient and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
            found = self._find_room(nbytes)
        self._is_patient = found is not None
        if found is None:
            return None
        place, offset = found
        block = self._free_blocks.pop()
        self._in_use.insert(place, _Block(offset, offset + nbytes, block))
        return Ticket(offset, block, nbytes)

    def _find_room(self, nbytes: int) -> tuple[int, int] | None:
        """Where among the blocks, and at which offset, in the first gap that is large enough."""
        self._drop_read()
        is_small = nbytes <= SMALL_BYTES
        if len(self._free_blocks) <= (0 if is_small else NUM_RESERVED_BLOCKS):
            return None
        end = self._start + ARENA_BYTES + (RESERVED_BYTES if is_small else 0)
        offset = self._start
        for place, block in enumerate(self._in_use):
            if min(block.offset, end) - offset >= nbytes:
                return place, offset
            offset = -(-block.end // _ALIGNMENT) * _ALIGNMENT
        if end - offset >= nbytes:
            return len(self._in_use), offset
        return None

    def _drop_read(self) -> None:
        unread = []
        for block in self._in_use:
            first = _flag(block.number, self._num_members, GroupRank(0))
            if self._own[first : first + self._num_members] == self._is_read:
                self._free_blocks.append(block.number)
            else:
                unread.append(block)
        self._in_use = unread


class _Block(NamedTuple):
    """A stretch of the arena that somebody has yet to read."""

    offset: int
    end: int
    number: int


def make_memory(world_size: int) -> tuple[int, mmap.mmap]:
    """Memory for a rank, and a descriptor by which others can map it; ``OSError`` if there is none.

    The descriptor is to be closed when all others have mapped it.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memory without a name")
    descriptor = os.memfd_create("tensorplay", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, _nbytes(world_size))
        return descriptor, map_memory(descriptor, world_size)
    except OSError:
        os.close(descriptor)
        raise


def map_memory(descriptor: int, world_size: int) -> mmap.mmap:
    """Another rank's memory; ``OSError`` or ``ValueError`` if it can't be mapped."""
    return mmap.mmap(descriptor, _nbytes(world_size))


def _nbytes(world_size: int) -> int:
    return _header_bytes(world_size) + ARENA_BYTES + RESERVED_BYTES


def _header_bytes(world_size: int) -> int:
    return -(-NUM_BLOCKS * world_size // mmap.PAGESIZE) * mmap.PAGESIZE


def _flag(block: int, world_size: int, reader: GroupRank) -> int:
    """Where it says whether ``reader`` has yet to read a block."""
    return block * world_size + reader
