"""Who may change the parameters of this worker, when several trainers want to.

Note [Turns]
~~~~~~~~~~~~
A single change (a step) runs under ``Turns.alone``, which blocks its thread only while another change
is running. A change that must hold on several workers or on none takes a *turn* on each of them, in
the order of their names, so that two trainers can't wait for each other. During a turn nobody else
changes anything; who asks for a turn meanwhile waits in a queue, without occupying a thread, since RPC
has few of them and the turn's holder needs one to end it. A turn that isn't given back in time, most
likely because its trainer has died, is taken back, and what was done in it is undone.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


class BusyError(Exception):
    """It is another trainer's turn."""


@dataclass
class Turn:
    """One trainer's right to change this worker's parameters.

    Args:
        token: names it; unique among all trainers.
        lease_s: seconds that it may last, and that its trainer waits to get it.
        grant: called once it has begun; must not block.
    """

    token: str
    lease_s: float
    grant: Callable[[], None]
    undo: Callable[[], None] | None = None
    asked_at: float = field(default_factory=time.monotonic)
    timer: threading.Timer | None = None

    def is_awaited(self) -> bool:
        """Whether its trainer can still be waiting for it."""
        return time.monotonic() < self.asked_at + self.lease_s


class Turns:
    """See Note [Turns]."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: Turn | None = None
        self._waiting: deque[Turn] = deque()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Runs the body, a change that needs no turn, while nobody else changes anything.

        Raises:
            BusyError: if it is somebody's turn.
        """
        with self._lock:
            if self._current is not None:
                raise BusyError
            yield

    @contextmanager
    def during(self, token: str) -> Iterator[Turn]:
        """Runs the body while nobody else changes anything, in the turn of ``token``.

        Raises:
            RuntimeError: if it has no turn, or no longer.
        """
        with self._lock:
            if self._current is None or self._current.token != token:
                raise RuntimeError(
                    "the time for this call is up: it took longer than the RPC time-out, so this "
                    "worker has undone its part to let others go on"
                )
            yield self._current

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Runs the body, which changes no parameter, while no change is running; turns go on."""
        with self._lock:
            yield

    def take(self, turn: Turn) -> None:
        """Begins a turn now, or when those before it have ended."""
        with self._lock:
            self._waiting.append(turn)
            if self._current is None:
                self._begin_next()

    def end(self, token: str, *, keep: bool) -> None:
        """Ends a turn; what was done in it is undone unless ``keep``.

        Raises:
            RuntimeError: if it has ended before.
        """
        with self.during(token) as turn:
            self._end(turn, keep=keep)

    def _end(self, turn: Turn, *, keep: bool) -> None:
        self._current = None
        try:
            if turn.timer is not None:
                turn.timer.cancel()
            if turn.undo is not None and not keep:
                turn.undo()
        finally:
            self._begin_next()

    def _begin_next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if turn.is_awaited():
                self._current = turn
                turn.timer = threading.Timer(turn.lease_s, self._expire, (turn,))
                turn.timer.daemon = True
                turn.timer.start()
                turn.grant()
                return

    def _expire(self, turn: Turn) -> None:
        with self._lock:
            if self._current is turn:
                self._end(turn, keep=False)
