"""Turns on one worker: first come first served, taken back when their time is up."""

import threading

import pytest

from tensorplay.distributed.optim.remote.turns import BusyError, Turn, Turns


class Log:
    """What happened, in order; ``wait`` waits for an entry."""

    def __init__(self) -> None:
        self.entries: list[str] = []
        self._added = threading.Condition()

    def add(self, entry: str) -> None:
        with self._added:
            self.entries.append(entry)
            self._added.notify_all()

    def wait(self, entry: str) -> None:
        with self._added:
            assert self._added.wait_for(lambda: entry in self.entries, timeout=10.0)


def take(turns: Turns, log: Log, token: str, lease_s: float = 60.0) -> None:
    turns.take(Turn(token, lease_s, lambda: log.add(token)))


def test_turns_come_in_the_order_in_which_they_were_asked_for() -> None:
    turns, log = Turns(), Log()
    for token in ("a", "b", "c"):
        take(turns, log, token)
    assert log.entries == ["a"]
    turns.end("a", keep=True)
    turns.end("b", keep=False)
    assert log.entries == ["a", "b", "c"]


def test_a_change_without_a_turn_is_refused_during_one_and_runs_after_it() -> None:
    turns, log = Turns(), Log()
    take(turns, log, "a")
    with pytest.raises(BusyError), turns.alone():
        log.add("ran too early")
    turns.end("a", keep=True)
    with turns.alone():
        log.add("ran")
    assert log.entries == ["a", "ran"]


@pytest.mark.parametrize("keep", [True, False])
def test_ending_undoes_unless_it_keeps(keep: bool) -> None:
    turns, log = Turns(), Log()
    take(turns, log, "a")
    with turns.during("a") as turn:
        turn.undo = lambda: log.add("undone")
    turns.end("a", keep=keep)
    assert log.entries == (["a"] if keep else ["a", "undone"])


def test_a_turn_that_lasts_too_long_is_undone_and_the_next_begins() -> None:
    turns, log = Turns(), Log()
    take(turns, log, "a", lease_s=0.05)
    with turns.during("a") as turn:
        turn.undo = lambda: log.add("undone")
    take(turns, log, "b")
    log.wait("b")
    assert log.entries == ["a", "undone", "b"]
    with pytest.raises(RuntimeError, match="the time for this call is up"):
        turns.end("a", keep=True)


def test_who_has_stopped_waiting_gets_no_turn() -> None:
    turns, log = Turns(), Log()
    take(turns, log, "a")
    take(turns, log, "gone", lease_s=0.0)
    take(turns, log, "c")
    turns.end("a", keep=True)
    assert log.entries == ["a", "c"]


def test_an_undo_that_fails_doesn_t_stop_the_others() -> None:
    turns, log = Turns(), Log()
    take(turns, log, "a")
    take(turns, log, "b")

    def fail() -> None:
        raise ValueError("no way back")

    with turns.during("a") as turn:
        turn.undo = fail
    with pytest.raises(ValueError, match="no way back"):
        turns.end("a", keep=False)
    assert log.entries == ["a", "b"]
