"""Large messages between ranks of this host: any size and dtype, any order, and no room left."""

import gc
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import accumulate
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tensorplay.distributed.optim._core import host_average, host_memory, host_messages, host_peers
from tensorplay.distributed.optim._core.collectives import (
    CommunicationError,
    GroupCommunicator,
    connect,
)
from tensorplay.distributed.optim._core.host_messages import HostMessages
from tensorplay.distributed.optim._core.ranks import GroupRank
from tests.launch import run_ranks

PIECE = 4096
SIZES = (1, 7, PIECE // 4, PIECE // 4 + 1, 5 * PIECE // 4 + 3)
"""Numbers of float32 elements."""


@contextmanager
def small(arena_bytes: int = 64 * PIECE) -> Iterator[GroupCommunicator]:
    """A communicator of a new group whose memory is small, so that tensors needn't be large."""
    with (
        mock.patch.object(host_messages, "PIECE_BYTES", PIECE),
        mock.patch.object(host_average, "PIECE_BYTES", PIECE),
        mock.patch.multiple(
            host_memory, ARENA_BYTES=arena_bytes, RESERVED_BYTES=0, _PATIENCE_S=0.001
        ),
    ):
        yield connect(dist.new_group(), "Test")


def values(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return ((torch.arange(numel) * 3 + rank) % 100).to(dtype)


def messages_of(communicator: GroupCommunicator) -> HostMessages:
    messages = communicator._on_host
    assert messages is not None
    return messages


def written(communicator: GroupCommunicator) -> int:
    return messages_of(communicator)._memory.num_written_bytes


def _gather(communicator: GroupCommunicator) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int64):
        for numel in SIZES:
            cuts = list(accumulate([numel + each for each in range(num_ranks)], initial=0))
            expected = torch.cat([values(each, numel + each, dtype) for each in range(num_ranks)])
            flat = torch.zeros_like(expected)
            flat[cuts[rank] : cuts[rank + 1]] = values(rank, numel + rank, dtype)
            communicator.gather_from_owners(flat, cuts).wait()
            assert torch.equal(flat, expected), (dtype, numel)


def _exchange(communicator: GroupCommunicator, *, looks: bool) -> None:
    """Everybody to everybody, several at a time, awaited in another order."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    peers = [GroupRank(each) for each in range(num_ranks) if each != rank]
    under_way = []
    for numel in SIZES:
        outgoing = [(peer, values(rank + 10 * peer, numel)) for peer in peers]
        incoming = [(peer, torch.zeros(numel)) for peer in peers]
        under_way.append((incoming, communicator.exchange(outgoing, incoming)))
    for numel, (incoming, exchange) in reversed(list(zip(SIZES, under_way, strict=True))):
        parts = [part for _, part in incoming]
        if looks:
            parts = exchange.parts()
        else:
            exchange.wait()
        for (peer, place), part in zip(incoming, parts, strict=True):
            assert part.shape == place.shape
            assert torch.equal(part, values(peer + 10 * rank, numel)), (peer, numel)
            part.zero_()  # it may be written to
        exchange.let_go()


def _average(communicator: GroupCommunicator) -> None:
    num_ranks = dist.get_world_size()
    for contributors in (list(range(num_ranks)), [num_ranks - 1], [0, num_ranks - 1]):
        for dtype in (torch.float32, torch.float64):
            for numel in (1, 2, *SIZES):
                flat = values(dist.get_rank(), numel, dtype)
                communicator.average_(flat, [GroupRank(each) for each in contributors]).wait()
                expected = sum(values(each, numel, dtype) for each in contributors)
                assert torch.equal(flat, expected / len(contributors)), (contributors, numel)


def _all(arena_bytes: int) -> tuple[int, bool]:
    with small(arena_bytes) as communicator:
        for _ in range(3):
            _gather(communicator)
            _exchange(communicator, looks=False)
            _exchange(communicator, looks=True)
            _average(communicator)
        dist.barrier()
        memory = messages_of(communicator)._memory
        memory._drop_read()
        return written(communicator), not memory._in_use


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("arena_bytes", [64 * PIECE, 2 * PIECE + 64, 0])
def test_every_verb_whatever_room_there_is(world_size: int, arena_bytes: int) -> None:
    for num_bytes, is_empty in run_ranks(world_size, _all, arena_bytes):
        assert is_empty
        assert (num_bytes > 0) == (arena_bytes > 0)


def _on_a_subgroup() -> int:
    with mock.patch.object(host_messages, "PIECE_BYTES", PIECE):
        group = dist.new_group([2, 0], sort_ranks=False)
        if dist.get_rank() == 1:
            return 0
        communicator = connect(group, "Test")
        own, peer = communicator.members.group_rank, GroupRank(1 - communicator.members.group_rank)
        incoming = [(peer, torch.zeros(1000))]
        communicator.exchange([(peer, values(own, 1000))], incoming).wait()
        assert torch.equal(incoming[0][1], values(peer, 1000))
        return written(communicator)


def test_on_a_subgroup_whose_ranks_are_others() -> None:
    assert run_ranks(3, _on_a_subgroup) == [4000, 0, 4000]


def _average_one_by_one(numel: int) -> bytes:
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(dist.get_rank()))
    with small() as communicator:
        communicator.average_(flat, list(communicator.members)).wait()
    return flat.numpy().tobytes()


def test_every_rank_has_the_same_bits_and_every_run() -> None:
    first, again = (run_ranks(3, _average_one_by_one, 10_007) for _ in range(2))
    assert len({*first, *again}) == 1


# Who shares


def _connected(disabled: list[int]) -> list[int]:
    rank = dist.get_rank()
    variables = {host_peers.VARIABLE: "0"} if rank in disabled else {}
    with mock.patch.dict(os.environ, variables), small() as communicator:
        _gather(communicator)
        _average(communicator)
        _exchange(communicator, looks=True)
        messages = communicator._on_host
        return [] if messages is None else sorted(messages._links.ranks)


@pytest.mark.parametrize(
    ("disabled", "expected"),
    [
        ([], [[1, 2], [0, 2], [0, 1]]),
        ([1], [[2], [], [0]]),
        ([0, 1], [[], [], []]),
        ([0, 1, 2], [[], [], []]),
    ],
)
def test_ranks_that_share_no_memory_are_reached_by_the_backend(
    disabled: list[int], expected: list[list[int]]
) -> None:
    assert run_ranks(3, _connected, disabled) == expected


def _on_hosts(hosts: list[str]) -> list[int]:
    with mock.patch.object(host_peers, "_host", return_value=hosts[dist.get_rank()]):
        return _connected([])


def test_hosts_are_told_apart() -> None:
    assert run_ranks(4, _on_hosts, ["a", "b", "a", "b"]) == [[2], [3], [0], [1]]


def test_another_network_namespace_is_another_host() -> None:
    own = host_peers._host()
    read = os.readlink
    with mock.patch.object(os, "readlink", lambda path: f"{read(path)}!" * path.endswith("net")):
        assert host_peers._host() != own
    assert host_peers._host() == own


def _fail_to_map(failing: int) -> bool:
    def refuse(*_: object) -> None:
        raise OSError("no memory")

    what = "map_memory" if failing >= 0 else "make_memory"
    if dist.get_rank() == abs(failing):
        with mock.patch.object(host_peers, what, refuse):
            return connect(dist.new_group(), "Test")._on_host is None
    return connect(dist.new_group(), "Test")._on_host is None


def test_if_one_rank_cannot_map_nobody_shares() -> None:
    assert run_ranks(3, _fail_to_map, 1) == [True] * 3


def _fail_to_call() -> bool:
    """On a group whose time-out is shorter than a rank would wait to be called."""
    group = dist.new_group(timeout=timedelta(seconds=10))
    if dist.get_rank() != 1:
        return connect(group, "Test")._on_host is None
    with mock.patch.object(socket.socket, "connect", side_effect=PermissionError("no sockets")):
        return connect(group, "Test")._on_host is None


def test_if_one_rank_cannot_call_another_nobody_shares() -> None:
    assert run_ranks(3, _fail_to_call) == [True] * 3


def test_a_rank_that_has_no_memory_is_left_out() -> None:
    assert run_ranks(3, _fail_to_map, -1) == [False, True, False]


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _leaves_nothing_open() -> int:
    for _ in range(2):  # the first opens the backend's
        group = dist.new_group()
        communicator = connect(group, "Test")
        before = _open_files()
        del communicator
        dist.destroy_process_group(group)
        del group
    return _open_files() - before


def test_sockets_go_with_the_group() -> None:
    assert all(number < 0 for number in run_ranks(2, _leaves_nothing_open))


# In which order ranks wait


def _gather_in_any_order() -> list[float]:
    """Where nothing finds room, rank 0 awaits while the other waits for it, and in another order."""
    rank = dist.get_rank()
    with small(arena_bytes=0) as communicator:
        unordered = communicator.awaited_in_any_order()
        flats = [torch.full((2, 1000), number + rank * 10.0) for number in range(3)]
        launched = [unordered.gather_from_owners(flat.view(-1), [0, 1000, 2000]) for flat in flats]
        if rank == 0:
            launched.pop().wait()
        dist.barrier()
        for each in launched if rank else reversed(launched):
            each.wait()
        _gather(communicator)
    return [value for flat in flats for value in flat[:, 0].tolist()]


def test_who_waits_when_may_be_left_to_each_rank() -> None:
    assert run_ranks(2, _gather_in_any_order) == [[0, 10, 1, 11, 2, 12]] * 2


def _two_on_one_group() -> tuple[float, float]:
    """What two communicators receive that share memory, and find no room there."""
    peer = GroupRank(1 - dist.get_rank())
    with small(arena_bytes=0) as first:
        second = connect(first.process_group, "Test")
        places = [torch.zeros(1000), torch.zeros(1000)]
        launched = [
            each.exchange([(peer, torch.full((1000,), value))], [(peer, place)])
            for each, value, place in zip((first, second), (1.0, 2.0), places, strict=True)
        ]
        for each in reversed(launched):
            each.wait()
    return places[0][0].item(), places[1][0].item()


def test_two_on_one_group_get_what_is_theirs() -> None:
    assert run_ranks(2, _two_on_one_group) == [(1.0, 2.0)] * 2


# What is left behind


def _abandons() -> tuple[int, int]:
    """Blocks in use after messages that nobody awaited, and whether later ones are right."""
    with small() as communicator:
        peer = GroupRank(1 - dist.get_rank())
        for _ in range(20):
            another = connect(communicator.process_group, "Test")
            another.max_([1, 2])
            another.exchange([(peer, values(0, 3000))], [(peer, torch.zeros(3000))])
        del another
        gc.collect()
        dist.barrier()
        communicator.max_([3]).wait()  # reads the announcements
        communicator.max_([3]).wait()  # drops what nobody waits for
        dist.barrier()
        _gather(communicator)
        dist.barrier()
        messages = messages_of(communicator)
        messages._memory._drop_read()
        return len(messages._memory._in_use), len(messages._links._come[peer])


def test_what_nobody_awaits_gives_its_memory_back() -> None:
    assert run_ranks(2, _abandons) == [(0, 0)] * 2


def _leaves_to_the_garbage_collector() -> list[str]:
    with small() as communicator:
        gc.collect()
        gc.disable()
        _gather(communicator)
        _exchange(communicator, looks=True)
        communicator.max_([1]).wait()
        gc.enable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        left = [type(each).__name__ for each in gc.garbage]
        gc.garbage.clear()
        return [name for name in left if name in {"Incoming", "_Piece", "Tensor"}]


def test_what_is_awaited_needs_no_garbage_collector() -> None:
    assert run_ranks(2, _leaves_to_the_garbage_collector) == [[], []]


# Failures


def _wait_for_rank_2(leaves: bool) -> tuple[str, float]:
    """What the others are told, and how soon, when rank 2 takes no part any more."""
    everyone = dist.new_group(timeout=timedelta(seconds=60 if leaves else 1))
    communicator = connect(everyone, "Test")
    rank = communicator.members.group_rank
    message, since = "", time.monotonic()
    if rank == 2:
        if leaves:
            messages_of(communicator)._links.close()  # as when its process ends
    else:
        peers = [GroupRank(each) for each in communicator.members if each != rank]
        exchange = communicator.exchange(
            [(peer, values(rank, 5000)) for peer in peers],
            [(peer, torch.zeros(5000)) for peer in peers],
        )
        with pytest.raises(CommunicationError) as caught:
            exchange.wait()
        message = str(caught.value)
    seconds = time.monotonic() - since
    dist.barrier()
    return message, seconds


@pytest.mark.parametrize("leaves", [True, False])
def test_a_rank_that_sends_nothing_is_named(leaves: bool) -> None:
    *others, _ = run_ranks(3, _wait_for_rank_2, leaves)
    for message, seconds in others:
        assert message.startswith("from rank 2: ")
        assert ("has ended" if leaves else "Timed out waiting 1000ms") in message
        assert seconds < 20
