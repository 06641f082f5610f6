"""Tickets between two ranks: in order, in time, and told when the other has gone."""

import os
import socket
import threading
import time
from unittest import mock

import pytest

from tensorplay.distributed.optim._core.host_links import Channel, Links
from tensorplay.distributed.optim._core.ranks import GlobalRank, GroupMembers, GroupRank

ZERO, ONE = GroupRank(0), GroupRank(1)


def make(timeout_s: float = 5.0) -> tuple[Links, Links]:
    sockets = socket.socketpair()
    ranks = (GlobalRank(4), GlobalRank(6))
    first, second = (
        Links(GroupMembers(ranks, own), {peer: each}, timeout_s)
        for own, peer, each in ((ZERO, ONE, sockets[0]), (ONE, ZERO, sockets[1]))
    )
    return first, second


def test_tickets_come_in_the_order_in_which_they_are_expected() -> None:
    first, second = make()
    for number in range(5):
        first.send(ONE, (number, -number, 1))
    numbers = [second.expect(ZERO) for _ in range(5)]
    assert [second.take(ZERO, n) for n in reversed(numbers)] == [
        (n, -n, 1) for n in range(4, -1, -1)
    ]


def test_channels_do_not_mix() -> None:
    first, second = make()
    for number in range(3):
        first.send(ONE, (number, 0, 1), Channel.REDUCTIONS)
        first.send(ONE, (number, 1, 1))
    numbers = [second.expect(ZERO) for _ in range(3)]
    reductions = [second.expect(ZERO, Channel.REDUCTIONS) for _ in range(3)]
    assert [second.take(ZERO, number)[1] for number in numbers] == [1] * 3
    assert [second.take(ZERO, number) for number in reductions] == [(n, 0, 1) for n in range(3)]


def test_whether_one_has_come() -> None:
    first, second = make()
    number = second.expect(ZERO)
    assert not second.has_come(ZERO, number)
    first.send(ONE, (1, 2, 3))
    assert second.has_come(ZERO, number)
    assert second.take(ZERO, number) == (1, 2, 3)


def test_a_ticket_that_does_not_come_times_out_and_names_the_rank() -> None:
    _, second = make(timeout_s=0.05)
    since = time.monotonic()
    with pytest.raises(RuntimeError, match=r"Timed out waiting 50ms .* rank 0 \(global rank 4\)"):
        second.take(ZERO, second.expect(ZERO))
    assert time.monotonic() - since < 3


def test_a_rank_that_is_gone_is_named_at_once_but_what_it_had_sent_counts() -> None:
    first, second = make(timeout_s=60)
    first.send(ONE, (3, 4, 5))
    first.close()
    early, late = second.expect(ZERO), second.expect(ZERO)
    assert second.take(ZERO, early) == (3, 4, 5)
    with pytest.raises(RuntimeError, match=r"rank 0 \(global rank 4\) has ended"):
        second.take(ZERO, late)
    for _ in range(1000):
        second.send(ZERO, (0, 0, 0))  # nobody reads, nobody is told here


def test_a_rank_that_goes_while_another_waits_wakes_it() -> None:
    first, second = make(timeout_s=60)
    threading.Timer(0.05, first.close).start()
    with pytest.raises(RuntimeError, match="has ended"):
        second.take(ZERO, second.expect(ZERO))


def test_both_may_send_more_than_fits() -> None:
    links, count = make(), 20_000
    results: list[list[tuple[int, int, int]]] = [[], []]

    def talk(own: int, peer: GroupRank) -> None:
        for number in range(count):
            links[own].send(peer, (number, own, 9))
        expected = [links[own].expect(peer) for _ in range(count)]
        results[own] = [links[own].take(peer, number) for number in expected]

    threads = [threading.Thread(target=talk, args=each) for each in ((0, ONE), (1, ZERO))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert results == [[(number, other, 9) for number in range(count)] for other in (1, 0)]


def make_three(timeout_s: float) -> list[Links]:
    pairs = {pair: socket.socketpair() for pair in ((0, 1), (0, 2), (1, 2))}
    ranks = tuple(GlobalRank(each) for each in range(3))
    return [
        Links(
            GroupMembers(ranks, GroupRank(own)),
            {
                GroupRank(sum(pair) - own): ends[own != min(pair)]
                for pair, ends in pairs.items()
                if own in pair
            },
            timeout_s,
        )
        for own in range(3)
    ]


def test_who_waits_to_send_is_not_kept_awake_by_a_rank_that_is_gone() -> None:
    first, second, third = make_three(timeout_s=0.2)
    third.close()
    with mock.patch.object(Links, "_wait", autospec=True, side_effect=Links._wait) as wait:
        for _ in range(20_000):  # more than fits, and nobody reads
            first.send(ONE, (0, 0, 0))
            if wait.called:
                break
    assert 0 < wait.call_count < 10
    with pytest.raises(RuntimeError, match="rank 2 has ended"):
        first.take(GroupRank(2), first.expect(GroupRank(2)))
    assert second.take(ZERO, second.expect(ZERO)) == (0, 0, 0)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # Python 3.12's
def test_a_forked_process_does_not_keep_links_open() -> None:
    first, second = make(timeout_s=60)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:  # stays until it is told to go
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    try:
        first.send(ONE, (1, 2, 3))
        assert second.take(ZERO, second.expect(ZERO)) == (1, 2, 3)
        first.close()
        with (
            mock.patch.object(second, "_timeout_s", 5.0),
            pytest.raises(RuntimeError, match="ended"),
        ):
            second.take(ZERO, second.expect(ZERO))
    finally:
        os.close(writer)
        os.close(reader)
        os.waitpid(child, 0)
