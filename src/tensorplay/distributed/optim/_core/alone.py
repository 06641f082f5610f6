"""The verbs of ``collectives`` where there is one process and no process group."""

# ruff: noqa: ARG002 - the protocol has the arguments

import math
from collections.abc import Sequence
from typing import Literal

import torch

from tensorplay.distributed.optim._core.collectives import Exchange, PendingMaximum, Waitable
from tensorplay.distributed.optim._core.ranks import GlobalRank, GroupMembers, GroupRank


class Done:
    """Something that had nothing to wait for."""

    def wait(self) -> None:
        """Returns at once."""


class _NothingExchanged(Done):
    """Messages from and to nobody."""

    def parts(self) -> list[torch.Tensor]:
        """There are none."""
        return []

    def let_go(self) -> None:
        """There is nothing."""


class _Known:
    def __init__(self, values: list[int]) -> None:
        self._values = values

    def wait(self) -> list[int]:
        return self._values


class Alone:
    """The verbs in a process that is the only rank and needs no process group: nothing is sent."""

    process_group = None

    def __init__(self) -> None:
        self.members = GroupMembers((GlobalRank(0),), GroupRank(0))

    def can_send(self, device: torch.device) -> bool:
        """It never needs to."""
        return True

    def describe_backend(self) -> str:
        """See :class:`Communicator`."""
        return "no process group"

    def transport_device(self) -> torch.device:
        """See :class:`Communicator`."""
        return torch.device("cpu")

    def gather_from_owners(self, flat: torch.Tensor, cuts: Sequence[int]) -> Waitable:
        """All of it is here."""
        return Done()

    def average_(self, flat: torch.Tensor, contributors: Sequence[GroupRank]) -> Waitable:
        """It is its own mean."""
        return Done()

    def send(self, tensor: torch.Tensor, target: GroupRank) -> Waitable:
        """There is nobody."""
        raise AssertionError("there is no other rank")

    def receive_(self, tensor: torch.Tensor, source: GroupRank) -> Waitable:
        """There is nobody."""
        raise AssertionError("there is no other rank")

    def exchange(
        self,
        outgoing: Sequence[tuple[GroupRank, torch.Tensor]],
        incoming: Sequence[tuple[GroupRank, torch.Tensor]],
    ) -> Exchange:
        """With nobody."""
        return _NothingExchanged()

    def all_reduce_(self, tensor: torch.Tensor, op: Literal["sum", "max"]) -> Waitable:
        """It is its own sum and maximum."""
        return Done()

    def send_bytes(self, payload: bytes, target: GroupRank) -> None:
        """There is nobody."""
        raise AssertionError("there is no other rank")

    def receive_bytes(self, source: GroupRank) -> bytes:
        """There is nobody."""
        raise AssertionError("there is no other rank")

    def max_(self, values: list[int]) -> PendingMaximum:
        """They are their own."""
        return _Known(values)

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """See :class:`Communicator`."""
        return [payload]

    def room_nbytes(self) -> float:
        """Any: nothing travels."""
        return math.inf

    def awaited_in_any_order(self) -> "Alone":
        """Nobody is waited for."""
        return self
