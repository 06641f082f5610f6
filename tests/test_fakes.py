"""The fake communicator itself: what it exchanges, and that a bug fails instead of hanging."""

from typing import Any

import pytest
import torch

from tensorplay.distributed.optim._core.ranks import GroupRank
from tests.fakes import FakeCommunicator, FakeRankError, FakeTimeoutError, run_fake_ranks


def test_results_come_back_in_rank_order() -> None:
    assert run_fake_ranks(3, lambda c: c.members.group_rank * 10) == [0, 10, 20]


def test_a_gather_arrives_when_it_is_awaited_and_not_earlier() -> None:
    def gather(communicator: FakeCommunicator) -> tuple[list[int], list[int]]:
        rank = communicator.members.group_rank
        flat = torch.full((4,), rank)
        gathering = communicator.gather_from_owners(flat, [0, 1, 4])
        early = flat.tolist()
        gathering.wait()
        return early, flat.tolist()

    assert run_fake_ranks(2, gather) == [([0] * 4, [0, 1, 1, 1]), ([1] * 4, [0, 1, 1, 1])]


def test_gathers_may_be_awaited_in_any_order() -> None:
    def gather(communicator: FakeCommunicator) -> list[list[int]]:
        rank = communicator.members.group_rank
        flats = [torch.full((2,), rank + 10 * number) for number in range(3)]
        launched = [communicator.gather_from_owners(flat, [0, 1, 2]) for flat in flats]
        for gathering in launched if rank else reversed(launched):
            gathering.wait()
        return [flat.tolist() for flat in flats]

    assert run_fake_ranks(2, gather) == [[[0, 1], [10, 11], [20, 21]]] * 2


def test_calls_and_bytes_are_counted() -> None:
    def gather(communicator: FakeCommunicator) -> tuple[Any, int, int]:
        communicator.gather_from_owners(torch.zeros(4), [0, 1, 4]).wait()
        communicator.max_([1, 2]).wait()
        return (
            dict(communicator.calls),
            sum(message.nbytes for message in communicator.sent),
            sum(message.nbytes for message in communicator.received),
        )

    calls = {"gather_from_owners": 1, "max_": 1}
    assert run_fake_ranks(2, gather) == [(calls, 4 + 16, 12), (calls, 12 + 16, 4)]


def test_the_rank_that_failed_first_is_reported_and_the_others_are_aborted() -> None:
    def fail(communicator: FakeCommunicator) -> None:
        if communicator.members.group_rank == 1:
            raise ValueError("seventeen")
        communicator.max_([1]).wait()

    with pytest.raises(FakeRankError, match="rank 1 failed first: ValueError: seventeen"):
        run_fake_ranks(3, fail)


def test_ranks_that_issue_different_collectives_are_told() -> None:
    def differ(communicator: FakeCommunicator) -> None:
        if communicator.members.group_rank:
            communicator.max_([1]).wait()
        else:
            communicator.all_gather_bytes(b"")

    with pytest.raises(FakeRankError, match="different collectives"):
        run_fake_ranks(2, differ)


def test_a_message_that_nobody_receives_times_out() -> None:
    def send(communicator: FakeCommunicator) -> None:
        if communicator.members.group_rank == 0:
            communicator.send(torch.zeros(1), GroupRank(1)).wait()

    with pytest.raises(FakeRankError, match="waited for rank 1 to receive") as caught:
        run_fake_ranks(2, send, timeout_s=0.1)
    assert isinstance(caught.value.__cause__, FakeTimeoutError)
