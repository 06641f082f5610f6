"""Blocks of memory that ranks of a host share: found, read and used again."""

import torch

from tensorplay.distributed.optim._core.host_memory import (
    ARENA_BYTES,
    NUM_BLOCKS,
    SMALL_BYTES,
    HostMemory,
    Ticket,
    make_memory,
)
from tensorplay.distributed.optim._core.ranks import GlobalRank, GroupMembers, GroupRank

RANKS = [GroupRank(rank) for rank in range(3)]
THIRD = ARENA_BYTES // 3 // 64 * 64


def make() -> list[HostMemory]:
    """Those of three ranks, in one process."""
    mappings = [make_memory(len(RANKS))[1] for _ in RANKS]
    return [
        HostMemory(
            GroupMembers(tuple(GlobalRank(rank) for rank in RANKS), own),
            mappings[own],
            {rank: mapping for rank, mapping in zip(RANKS, mappings, strict=True) if rank != own},
        )
        for own in RANKS
    ]


def payload(nbytes: int, value: int = 7) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


def write(memory: HostMemory, nbytes: int, readers: list[GroupRank], value: int = 7) -> Ticket:
    ticket = memory.write(payload(nbytes, value), readers)
    assert ticket is not None
    return ticket


def test_readers_find_what_was_written() -> None:
    first, second, third = make()
    tickets = [write(first, nbytes, RANKS[1:], nbytes % 200) for nbytes in (1, 100, 5000)]
    for reader in (second, third):
        for ticket, nbytes in zip(tickets, (1, 100, 5000), strict=True):
            found = reader.look(RANKS[0], ticket)
            assert torch.equal(found, payload(nbytes, nbytes % 200))
            assert ticket.offset % 64 == 0


def test_memory_is_used_again_when_all_have_read() -> None:
    first, second, third = make()
    tickets = [write(first, THIRD, RANKS[1:], number) for number in range(3)]
    assert first.write(payload(THIRD), RANKS[1:]) is None
    second.mark_as_read(RANKS[0], tickets[1])
    assert first.write(payload(THIRD), RANKS[1:]) is None
    third.mark_as_read(RANKS[0], tickets[1])
    again = write(first, THIRD, RANKS[1:], 9)
    assert again.offset == tickets[1].offset
    for number, ticket in ((0, tickets[0]), (9, again), (2, tickets[2])):
        assert torch.equal(second.look(RANKS[0], ticket), payload(THIRD, number))


def test_small_messages_fill_the_gaps() -> None:
    first, second, _ = make()
    tickets = [write(first, THIRD, [RANKS[1]]) for _ in range(3)]
    second.mark_as_read(RANKS[0], tickets[0])
    small = [write(first, THIRD // 4, [RANKS[1]], 4) for _ in range(3)]
    assert max(ticket.offset for ticket in small) < tickets[1].offset
    assert len({ticket.offset for ticket in small}) == 3
    for ticket in small:
        assert torch.equal(second.look(RANKS[0], ticket), payload(THIRD // 4, 4))


def test_what_is_too_large_or_one_too_many_is_not_written() -> None:
    first, second, _ = make()
    assert first.write(payload(ARENA_BYTES + 1), [RANKS[1]]) is None
    tickets = [write(first, 1, [RANKS[1]]) for _ in range(NUM_BLOCKS)]
    assert first.write(payload(1), [RANKS[1]]) is None
    second.mark_as_read(RANKS[0], tickets[100])
    assert write(first, 1, [RANKS[1]]).block == tickets[100].block


def test_small_messages_find_room_where_large_ones_do_not() -> None:
    first, second, _ = make()
    write(first, ARENA_BYTES, [RANKS[1]])
    assert first.write(payload(SMALL_BYTES + 1), [RANKS[1]]) is None
    tickets = [write(first, SMALL_BYTES, [RANKS[1]], number) for number in range(20)]
    for number, ticket in enumerate(tickets):
        assert torch.equal(second.look(RANKS[0], ticket), payload(SMALL_BYTES, number))
    first, second, _ = make()
    tickets = [write(first, SMALL_BYTES + 1, [RANKS[1]]) for _ in range(384)]
    assert first.write(payload(SMALL_BYTES + 1), [RANKS[1]]) is None
    write(first, SMALL_BYTES, [RANKS[1]])


def test_a_reader_may_write_where_it_reads() -> None:
    first, second, _ = make()
    ticket = write(first, 8, [RANKS[1]])
    second.look(RANKS[0], ticket).add_(1)
    assert second.look(RANKS[0], ticket).tolist() == [8] * 8
