"""Uneven inputs where the active ranks make several collective calls: joined ranks follow each."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed.algorithms.join import JoinHook

from tensorplay.distributed.optim._core.collectives import Communicator
from tensorplay.distributed.optim._core.ranks import GroupRank
from tensorplay.distributed.optim._core.tagged_json import Json


class FollowWhenJoined(JoinHook):
    """Makes a joined rank take part in whatever the active ranks do next."""

    def __init__(self, follow: Callable[[], None]) -> None:
        self._follow = follow

    def main_hook(self) -> None:
        """Shadows one call of the active ranks."""
        self._follow()


class JoinedCalls:
    """Tells joined ranks which call the active ones are in, with its arguments.

    Args:
        communicator: carries it.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def announce(self, call: str, arguments: Mapping[str, Json]) -> list[GroupRank]:
        """On an active rank; returns which ranks are active."""
        payload = json.dumps({"call": call, "arguments": arguments}).encode()
        return self._active(self._communicator.all_gather_bytes(payload))

    def follow(self) -> tuple[str, dict[str, Any], list[GroupRank]]:
        """On a joined rank: the first active rank's call and arguments, and which ranks are active."""
        payloads = self._communicator.all_gather_bytes(b"")
        active = self._active(payloads)
        announced = json.loads(payloads[active[0]])
        return announced["call"], announced["arguments"], active

    def _active(self, payloads: Sequence[bytes]) -> list[GroupRank]:
        members = self._communicator.members
        return [rank for rank, payload in zip(members, payloads, strict=True) if payload]
