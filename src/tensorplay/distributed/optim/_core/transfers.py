"""Rounds of buckets' exchanges, and how many of them are under way."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tensorplay.distributed.optim._core.collectives import Exchange
from tensorplay.distributed.optim._core.gradient_buckets import GradientBucket

NUM_IN_FLIGHT = 2
"""Exchanges under way at a time, if they are large."""


@dataclass
class Transfer:
    """What was launched, and what to do with it when it has come.

    Attributes:
        bucket: whose slices travel.
        exchange: await it before anything else.
        local: ``(numel,)`` this rank's gradients of the bucket, kept until they are sent.
        payload: ``(numel,)`` what other ranks get of it: ``local`` itself, or a compressed copy.
        destination: where the average of this round's stretch belongs; ``None`` if it's another's.
        own_part: this rank's part of that stretch.
        lent: memory in which others' parts may have come, to be given back.
        result: all of this rank's slice of the bucket; ``None`` if it owns nothing.
        loads: how many bytes of this round each rank receives, and how many it sends.
        is_last: whether the bucket is complete with this round.
    """

    bucket: GradientBucket
    exchange: Exchange
    local: torch.Tensor
    payload: torch.Tensor
    destination: torch.Tensor | None
    own_part: torch.Tensor | None
    lent: torch.Tensor | None
    result: torch.Tensor | None
    loads: tuple[int, ...]
    is_last: bool


class InFlight:
    """Transfers under way: few large ones, or as many as are no more than some bytes for any rank.

    Directions count apart, so that none is idle because another has enough to do.

    Args:
        limit_bytes: what a rank receives at a time, and what it sends.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._transfers: deque[Transfer] = deque()

    def __len__(self) -> int:
        return len(self._transfers)

    @property
    def is_full(self) -> bool:
        """Whether the oldest is to be awaited before another begins; the same on every rank."""
        if len(self._transfers) < NUM_IN_FLIGHT:
            return False
        loads = map(sum, zip(*(each.loads for each in self._transfers), strict=True))
        return max(loads) > self._limit_bytes

    def append(self, transfer: Transfer) -> None:
        """A transfer has begun."""
        self._transfers.append(transfer)

    def popleft(self) -> Transfer:
        """The oldest, which is to be awaited."""
        return self._transfers.popleft()


def loads_of(lengths: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """How many bytes each rank receives, and how many it sends, if each gets a part of a slice from all.

    Args:
        lengths: elements of each rank's slice.
        itemsize: bytes of an element.
    """
    num_peers, total = max(1, len(lengths) - 1), sum(lengths)
    received = [num_peers * length * itemsize for length in lengths]
    return (*received, *((total - length) * itemsize for length in lengths))
