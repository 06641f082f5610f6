"""One round of a bucket's exchange."""

from dataclasses import dataclass

import torch

from tensorplay.distributed.optim._core.collectives import Exchange
from tensorplay.distributed.optim._core.gradient_buckets import GradientBucket


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
        nbytes: how much travels in this round to the rank that gets most; the same on every rank.
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
    nbytes: int
    is_last: bool
