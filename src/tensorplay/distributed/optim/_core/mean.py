"""The mean of flat tensors: exact where they are equal, whatever their number.

Summing W equal numbers and dividing by W changes the last bit for most W (3, 5, 6, 7, 8, ...). A
running mean, ``mean - (mean - value) / k``, doesn't: replicas that are equal stay as they are.
"""

import math
from collections.abc import Sequence

import torch

BLOCK_NUMEL = 64 * 1024
"""Arithmetic goes block by block, so that what a block needs twice is still in the cache."""


@torch.no_grad()
def mean_(values: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Writes the element-wise mean of ``values`` to ``out``, which may be one of them.

    Types below 32 bits are averaged in float32. Infinities give what a sum would give.

    Args:
        values: flat contiguous tensors of one length and dtype, floating or complex, at least one;
            their order decides about the last bit.
        out: as long, of the same dtype.
    """
    if out.is_complex():
        values, out = (
            [torch.view_as_real(each).view(-1) for each in values],
            torch.view_as_real(out),
        )
        out = out.view(-1)
    for start in range(0, out.numel(), BLOCK_NUMEL):
        block = slice(start, start + BLOCK_NUMEL)
        _mean_of_block_([value[block] for value in values], out[block])


def _mean_of_block_(values: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    if len(values) == 1:
        if out is not values[0]:
            out.copy_(values[0])
        return
    if out.element_size() < torch.float32.itemsize:
        values = [value.float() for value in values]
    target = out if out.dtype == values[0].dtype else None
    *firsts, last = values
    # A sum is finite only if all of its terms are; it is cheaper than looking at each.
    if not all(math.isfinite(value.sum().item()) for value in firsts):
        target = None
    mean = firsts[0]
    for number, value in enumerate(firsts[1:], start=1):
        mean = _next_mean(mean, value, number)
    if target is not None:
        _next_mean(mean, last, len(firsts), out=target)
        return
    mean = _next_mean(mean, last, len(firsts))
    # The difference of two infinities is NaN, where their mean is not.
    out.copy_(torch.where(mean.isnan(), torch.stack(tuple(values)).mean(0), mean))


def _next_mean(
    mean: torch.Tensor, value: torch.Tensor, number: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The mean of ``number + 1`` values, from that of ``number`` and one more."""
    # In this order `lerp` computes mean - (mean - value) / (number + 1), which also keeps -0.0.
    return torch.lerp(value, mean, number / (number + 1), out=out)
