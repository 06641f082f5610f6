"""The ranks that run on one host find each other, and open ways between them.

Note [Who is on a host]
    Processes of one user that see the same running kernel, processes and network interfaces: ranks in
    different network namespaces are kept apart, as if they were on different hosts. Memory and
    sockets have no name in any file system, and go with the processes.
"""

import itertools
import json
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import NamedTuple

from tensorplay.distributed.optim._core.host_links import Links
from tensorplay.distributed.optim._core.host_memory import HostMemory, make_memory, map_memory
from tensorplay.distributed.optim._core.ranks import GroupMembers, GroupRank

VARIABLE = "TENSORPLAY_SHARED_MEMORY"
"""If the environment sets it to 0, this rank shares no memory."""

_MEETING_S = 60
_FIRST_TAG = 1 << 20
_NUM_TAGS = 1 << 20
_RANK = struct.Struct("<q")
_CREDENTIALS = struct.Struct("3i")


class HostPeers(NamedTuple):
    """The ways to the other ranks of this host."""

    memory: HostMemory
    links: Links
    tags: Iterator[int]
    """Of what finds no room: one for each message, whoever sends it on the group."""


def meet(
    members: GroupMembers,
    all_gather_bytes: Callable[[bytes], list[bytes]],
    max_: Callable[[int], int],
    timeout_s: float,
) -> HostPeers | None:
    """Opens ways to those ranks of a group that run on this host; every rank must call it.

    Args:
        members: of the group.
        all_gather_bytes: returns every rank's bytes.
        max_: returns the largest of every rank's numbers.
        timeout_s: how long to wait for a message, later.

    Returns:
        ``None`` on a rank that is alone on its host or doesn't share memory; and on every rank if
        one of them couldn't get to another of its host.
    """
    with ExitStack() as until_met:
        own = _Offer.make(members.world_size, until_met)
        message = json.dumps([own.host, own.address]).encode()
        offers = [json.loads(each) for each in all_gather_bytes(message)]
        peers = {
            rank: address
            for rank, (host, address) in zip(members, offers, strict=True)
            if own.host and host == own.host and rank != members.group_rank
        }
        sockets: dict[GroupRank, socket.socket] = {}
        others: dict[GroupRank, mmap.mmap] = {}
        called: dict[GroupRank, socket.socket] = {}
        has_failed = False
        try:
            own.call(members.group_rank, peers, called)
        except OSError:
            has_failed = True
        if max_(int(has_failed)):  # before anybody waits to be called
            _close(called)
            return None
        try:
            for rank, each, descriptor in own.meet(members.group_rank, peers, called):
                sockets[rank] = each
                try:
                    others[rank] = map_memory(descriptor, members.world_size)
                finally:
                    os.close(descriptor)
        except (OSError, ValueError):
            has_failed = True
        if max_(int(has_failed)) or not peers or own.memory is None:
            _close({**called, **sockets})
            return None
        memory = HostMemory(members, own.memory, others)
        tags = itertools.cycle(range(_FIRST_TAG, _FIRST_TAG + _NUM_TAGS))
        return HostPeers(memory, Links(members, sockets, timeout_s), tags)


class _Offer(NamedTuple):
    """What a rank has for others of its host; nothing if ``host`` is empty."""

    host: str = ""
    address: str = ""
    descriptor: int = -1
    memory: mmap.mmap | None = None
    listener: socket.socket | None = None

    @classmethod
    def make(cls, world_size: int, until_met: ExitStack) -> "_Offer":
        """Makes memory and listens, if that's possible here."""
        if os.environ.get(VARIABLE, "1") == "0":
            return cls()
        try:
            host = _host()
            descriptor, memory = make_memory(world_size)
            until_met.callback(os.close, descriptor)
            listener = until_met.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            address = f"tensorplay-{secrets.token_hex(16)}"
            listener.bind(f"\0{address}")
            listener.listen(world_size)
        except OSError:
            return cls()
        return cls(host, address, descriptor, memory, listener)

    def call(
        self,
        rank: GroupRank,
        peers: dict[GroupRank, str],
        called: dict[GroupRank, socket.socket],
    ) -> None:
        """Calls the lower ranks, which needn't answer yet; adds their sockets to ``called``."""
        for peer, address in peers.items():
            if peer < rank:
                called[peer] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                called[peer].settimeout(_MEETING_S)
                called[peer].connect(f"\0{address}")
                self._introduce(rank, called[peer])

    def meet(
        self,
        rank: GroupRank,
        peers: dict[GroupRank, str],
        called: dict[GroupRank, socket.socket],
    ) -> Iterator[tuple[GroupRank, socket.socket, int]]:
        """Is called by the higher ranks; yields all peers' sockets and descriptors."""
        if not peers or self.listener is None:
            return
        callers = {peer for peer in peers if peer > rank}
        self.listener.settimeout(_MEETING_S)
        while callers:
            caller, _ = self.listener.accept()
            caller.settimeout(_MEETING_S)
            if not _is_ours(caller):
                caller.close()
                continue
            peer, descriptor = _get_introduced(caller)
            callers.remove(peer)
            self._introduce(rank, caller)
            yield peer, caller, descriptor
        for peer, each in called.items():
            yield peer, each, _get_introduced(each)[1]

    def _introduce(self, rank: GroupRank, peer: socket.socket) -> None:
        socket.send_fds(peer, [_RANK.pack(rank)], [self.descriptor])


def _close(sockets: dict[GroupRank, socket.socket]) -> None:
    for each in sockets.values():
        each.close()


def _get_introduced(peer: socket.socket) -> tuple[GroupRank, int]:
    """The rank of a peer, and the descriptor of its memory, which is to be closed."""
    message, descriptors, *_ = socket.recv_fds(peer, _RANK.size, 1)
    if len(message) != _RANK.size or len(descriptors) != 1:
        raise OSError("a rank of this host has introduced itself in another way")
    return GroupRank(_RANK.unpack(message)[0]), descriptors[0]


def _is_ours(caller: socket.socket) -> bool:
    """Whether a process of the same user calls."""
    credentials = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.getuid())


def _host() -> str:
    """Note [Who is on a host]."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        kernel = file.read().strip()
    namespaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net")]
    return " ".join((kernel, *namespaces, str(os.getuid())))
