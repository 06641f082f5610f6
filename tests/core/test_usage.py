"""Which parameters of a bucket some rank has gradients of: told to those that need to know."""

from typing import Any

from tensorplay.distributed.optim._core.ranks import GroupRank
from tensorplay.distributed.optim._core.usage import Usage
from tests.fakes import FakeCommunicator, run_fake_ranks

HAS = [[True, False, False, False], [False, False, True, False], [True, False, True, False]]


def tell(readers: list[int], stopped: list[bool]) -> list[Any]:
    """What each of three ranks hears, and how many bytes it sends."""

    def run(communicator: FakeCommunicator) -> Any:
        rank = communicator.members.group_rank
        usage = Usage(
            communicator, HAS[rank], [GroupRank(r) for r in readers], stopped=stopped[rank]
        )
        return usage.wait(), sum(message.nbytes for message in communicator.sent)

    return run_fake_ranks(3, run)


def test_a_parameter_is_used_if_some_rank_has_a_gradient() -> None:
    heard = tell([0, 1, 2], [False] * 3)
    assert [used for used, _ in heard] == [[True, False, True, False]] * 3


def test_a_byte_per_parameter_and_one_more_goes_to_each_reader_only() -> None:
    (first, _), (second, sent_by_reader), (third, sent) = tell([1], [False] * 3)
    assert (first, second, third) == (HAS[0], [True, False, True, False], HAS[2])
    assert (sent_by_reader, sent) == (0, 5)


def test_readers_hear_that_some_rank_has_stopped() -> None:
    heard = tell([0, 1], [False, False, True])
    assert [used for used, _ in heard] == [None, None, None]  # rank 2 knows that it has itself


def test_nothing_is_sent_to_nobody() -> None:
    heard = tell([], [False] * 3)
    assert heard == [(has, 0) for has in HAS]
