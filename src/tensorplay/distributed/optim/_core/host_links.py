"""Sockets between the ranks of one host: tickets travel through them, in order.

A message of a few bytes takes the backend's sockets fractions of a millisecond; these take some
microseconds. When a rank's process ends, its links end too, and whoever waits for it is told.
"""

import enum
import itertools
import os
import select
import socket
import struct
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress

from tensorplay.distributed.optim._core.ranks import GroupMembers, GroupRank

_TICKET = struct.Struct("<qqqq")


class Channel(enum.IntEnum):
    """Messages of one channel are numbered by themselves: order matters inside it only."""

    MESSAGES = 0
    REDUCTIONS = 1

    def number(self, place: int) -> int:
        """A number that no other message has."""
        return place * len(Channel) + self


class Links:
    """One socket to each other rank of the host.

    Args:
        members: of the group.
        sockets: connected, to each of the others.
        timeout_s: how long to wait for a message.
    """

    def __init__(
        self, members: GroupMembers, sockets: dict[GroupRank, socket.socket], timeout_s: float
    ) -> None:
        self.ranks = sockets.keys()
        self._members = members
        self._sockets = sockets
        self._timeout_s = timeout_s
        self._sent: defaultdict[tuple[GroupRank, Channel], Iterator[int]]
        self._expected: defaultdict[tuple[GroupRank, Channel], Iterator[int]]
        self._sent, self._expected = defaultdict(itertools.count), defaultdict(itertools.count)
        self._unfinished: defaultdict[GroupRank, bytes] = defaultdict(bytes)
        self._come: defaultdict[GroupRank, dict[int, tuple[int, int, int]]] = defaultdict(dict)
        self.abandoned: deque[tuple[GroupRank, int]] = deque()
        """Numbers of messages for which nobody will wait, whoever expected them."""
        self._ended: set[GroupRank] = set()
        """From which nothing more can come; a wait for them would return at once."""
        for each in sockets.values():
            each.setblocking(False)
        self.close = weakref.finalize(self, _close, list(sockets.values()))
        """Others that wait for this rank are told."""
        _open.add(self)

    def send(
        self, target: GroupRank, ticket: tuple[int, int, int], channel: Channel = Channel.MESSAGES
    ) -> None:
        """Sends three integers; what has gone wrong shows when ``target`` is waited for."""
        number = channel.number(next(self._sent[target, channel]))
        message = memoryview(_TICKET.pack(number, *ticket))
        deadline = time.monotonic() + self._timeout_s
        with suppress(ConnectionError):
            while message:
                message = message[self._send_some(target, message) :]
                # It may have too many to read. So may we: who reads while he waits stops nobody.
                reading = self.ranks - self._ended
                if message and not self._wait(reading, [target], deadline):
                    return

    def _send_some(self, target: GroupRank, message: memoryview) -> int:
        try:
            return self._sockets[target].send(message)
        except BlockingIOError:
            return 0

    def expect(self, source: GroupRank, channel: Channel = Channel.MESSAGES) -> int:
        """The number of the next message from ``source`` that nobody else expects."""
        return channel.number(next(self._expected[source, channel]))

    def has_come(self, source: GroupRank, number: int) -> bool:
        """Whether a message is there. Doesn't wait."""
        self._read(source)
        return number in self._come[source]

    def take(self, source: GroupRank, number: int) -> tuple[int, int, int]:
        """Waits for a message.

        Raises:
            RuntimeError: if it doesn't come in time, or the process has ended.
        """
        come = self._come[source]
        deadline = time.monotonic() + self._timeout_s
        while number not in come:
            if not self._read(source):
                raise RuntimeError(
                    f"Connection closed by peer: the process of {self._members.name(source)} has "
                    "ended, or has closed the group"
                )
            if number not in come and not self._wait([source], [], deadline):
                raise RuntimeError(
                    f"Timed out waiting {self._timeout_s * 1000:.0f}ms for a message of "
                    f"{self._members.name(source)}"
                )
        return come.pop(number)

    def drop(self, source: GroupRank, number: int) -> tuple[int, int, int] | None:
        """A message for which nobody will wait, if it has come. Neither waits nor reads."""
        return self._come[source].pop(number, None)

    def _wait(
        self, sources: Iterable[GroupRank], targets: Iterable[GroupRank], deadline: float
    ) -> bool:
        """Whether one of them can be read from, or written to, before the deadline; reads."""
        poll = select.poll()
        by_descriptor = {self._sockets[source].fileno(): source for source in sources}
        for descriptor in by_descriptor:
            poll.register(descriptor, select.POLLIN)
        for target in targets:
            poll.register(self._sockets[target].fileno(), select.POLLIN | select.POLLOUT)
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            return False
        ready = poll.poll(remaining_s * 1000)
        for descriptor, events in ready:
            if events & select.POLLIN and descriptor in by_descriptor:
                self._read(by_descriptor[descriptor])
        return bool(ready)

    def _read(self, source: GroupRank) -> bool:
        """Takes in what is there; whether more may come."""
        try:
            received = self._sockets[source].recv(1 << 16)
        except BlockingIOError:
            return True
        except OSError:
            received = b""
        if not received:
            self._ended.add(source)
            return False
        stream = self._unfinished[source] + received
        end = len(stream) - len(stream) % _TICKET.size
        for number, *ticket in _TICKET.iter_unpack(stream[:end]):
            self._come[source][number] = ticket[0], ticket[1], ticket[2]
        self._unfinished[source] = stream[end:]
        return True


def _close(sockets: Iterable[socket.socket]) -> None:
    for each in sockets:
        each.close()


_open: "weakref.WeakSet[Links]" = weakref.WeakSet()


def _close_in_child() -> None:
    """A process that was forked, for instance to load data, must not outlive this rank's links."""
    for each in list(_open):
        each.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
