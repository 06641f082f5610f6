"""The mean of what ranks have sent: summed in rank order, so that every run gives the same bits."""

import math
from collections.abc import Iterator, Sequence

import torch

CHUNK_NUMEL = 512 * 1024
"""Elements that a CPU handles at a time: few calls, and the later ones find them in its cache."""

_LOW_PRECISION = frozenset({torch.float16, torch.bfloat16})


def average_(
    destination: torch.Tensor,
    contributions: Sequence[torch.Tensor],
    divisor: float,
    *,
    tell_finiteness: bool = True,
) -> torch.Tensor | None:
    """Writes the sum of ``contributions``, in their order, divided by ``divisor``.

    16-bit floats are summed and divided in float32, or in a wider type of ``destination``, and
    rounded once.

    Args:
        destination: ``(numel,)``, contiguous; it may be one of the contributions.
        contributions: ``(numel,)`` each, of the same dtype or a narrower one; the first is used as
            scratch memory.
        divisor: usually the number of ranks.
        tell_finiteness: whether to look at what was written.

    Returns:
        A scalar that is finite if and only if all elements written are; ``None`` if not asked for.
    """
    squares = []
    for target, parts in _chunks(destination, contributions):
        _average_chunk_(target, parts, divisor)
        if tell_finiteness and target.device.type == "cpu":
            real = _real(target)
            squares.append(torch.dot(real, real))  # reads a cache, unlike a pass over everything
    if not tell_finiteness:
        return None
    if squares:
        total = torch.stack(squares).sum()
        if total.isfinite():
            return total
    largest: torch.Tensor = torch.linalg.vector_norm(_real(destination), torch.inf)
    return largest


def _real(values: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(values).view(-1) if values.is_complex() else values
    return real.float() if real.dtype in _LOW_PRECISION else real


def _average_chunk_(target: torch.Tensor, parts: Sequence[torch.Tensor], divisor: float) -> None:
    first, *others = parts
    precise = torch.float32 if target.dtype in _LOW_PRECISION else target.dtype
    if any(part.dtype is not precise for part in parts):
        total = first.to(precise, copy=True)
        for part in others:
            total.add_(part)
        target.copy_(total.div_(divisor))
        return
    for part in others[:-1]:
        first.add_(part)
    if others:
        torch.add(first, others[-1], out=target)
    elif first.data_ptr() != target.data_ptr():
        target.copy_(first)
    if divisor != 1:
        # The reciprocal of a power of two is exact, and multiplying is faster.
        target.mul_(1 / divisor) if _is_power_of_two(divisor) else target.div_(divisor)


def _is_power_of_two(number: float) -> bool:
    return math.frexp(number)[0] == 0.5


def _chunks(
    destination: torch.Tensor, contributions: Sequence[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, Sequence[torch.Tensor]]]:
    if destination.device.type != "cpu":
        yield destination, contributions
        return
    pieces = [torch.split(part, CHUNK_NUMEL) for part in (destination, *contributions)]
    for target, *parts in zip(*pieces, strict=True):
        yield target, parts
