"""Uneven inputs where the active ranks make several collective calls: joined ranks follow each."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from tensorplay.distributed.optim._core.collectives import Communicator
from tensorplay.distributed.optim._core.ranks import GroupRank
from tensorplay.distributed.optim._core.tagged_json import Json


class FollowWhenJoined(JoinHook):
    """Makes a joined rank take part in whatever the active ranks do next.

    Args:
        begin: called once, before the first call is followed.
        follow: follows one call.
    """

    def __init__(self, begin: Callable[[], None], follow: Callable[[], None]) -> None:
        self._begin = begin
        self._follow = follow
        self._is_following = False

    def main_hook(self) -> None:
        """Shadows one call of the active ranks."""
        if not self._is_following:
            self._is_following = True
            self._begin()
        self._follow()


class JoinedCalls:
    """Tells joined ranks which call the active ones are in, with its arguments.

    Args:
        communicator: carries it.
        subject: who must be the first joinable of ``Join``, in the words of the error.

    Attributes:
        has_joined: whether this rank takes part in a call of the others, without inputs of its own.
    """

    def __init__(self, communicator: Communicator, subject: str) -> None:
        self._communicator = communicator
        self._subject = subject
        self.has_joined = False

    def announce(
        self, joinable: Joinable, call: str, arguments: Mapping[str, Json]
    ) -> list[GroupRank] | None:
        """On an active rank; returns which ranks are active, ``None`` where nobody needs to know.

        Raises:
            RuntimeError: if another joinable comes before ``joinable``.
        """
        config = joinable._join_config  # noqa: SLF001 - where Join puts it; torch has no public name
        if not config.enable or self.has_joined:
            return None
        if not config.is_first_joinable:
            raise RuntimeError(f"{self._subject} must be the first or only joinable of Join")
        Join.notify_join_context(joinable)
        payload = json.dumps({"call": call, "arguments": arguments}).encode()
        return self._active(self._communicator.all_gather_bytes(payload))

    def follow(self) -> tuple[str, dict[str, Any], list[GroupRank]]:
        """On a joined rank: the first active rank's call and arguments, and which ranks are active."""
        payloads = self._communicator.all_gather_bytes(b"")
        active = self._active(payloads)
        announced = json.loads(payloads[active[0]])
        return announced["call"], announced["arguments"], active

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        """On a joined rank: what it calls inside, it calls as one that has joined."""
        self.has_joined = True
        try:
            yield
        finally:
            self.has_joined = False

    def _active(self, payloads: Sequence[bytes]) -> list[GroupRank]:
        members = self._communicator.members
        return [rank for rank, payload in zip(members, payloads, strict=True) if payload]
