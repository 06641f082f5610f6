"""The norm of gradients that are spread over ranks, accurate for billions of elements.

In float32 a sum over 29 million squares is off by 1e-3; sums over stretches of 64 K elements, added
up in float64, by 2e-6.
"""

import math
from collections.abc import Iterator, Sequence

import torch

from tensorplay.distributed.optim._core.collectives import Communicator

STRETCH_NUMEL = 64 * 1024
"""Elements whose powers are summed in the gradients' own precision."""


@torch.no_grad()
def norm_across_ranks(
    communicator: Communicator,
    gradients: Sequence[torch.Tensor],
    norm_type: float,
    device: torch.device,
) -> torch.Tensor:
    """The norm of all ranks' gradients together, on every rank. Every rank must call it.

    Args:
        communicator: carries one scalar.
        gradients: those that count here; each element counts on one rank.
        norm_type: p > 0 of the p-norm, or ``inf``.
        device: where to compute; the group must be able to send from it.

    Returns:
        A float32 scalar on ``device`` (float64 if a gradient is); nothing waits for the device.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault((gradient.device, gradient.dtype), []).extend(_stretches(gradient))
    partial = torch.zeros((), dtype=torch.float64, device=device)
    for stretches in kinds.values():
        precise = torch.float64 if stretches[0].dtype.to_real() is torch.float64 else torch.float32
        norms = torch.stack(
            torch._foreach_norm(stretches, norm_type, dtype=_like(stretches[0], precise))  # noqa: SLF001 - torch has no public name for it
        )
        norms = norms.to(device).double()
        if math.isinf(norm_type):
            partial = torch.maximum(partial, norms.max())
        else:
            partial = partial + norms.pow(norm_type).sum()
    partial = partial.view(1)
    communicator.all_reduce_(partial, "max" if math.isinf(norm_type) else "sum").wait()
    total = partial[0] if math.isinf(norm_type) else partial[0].pow(1 / norm_type)
    is_double = any(gradient.dtype.to_real() is torch.float64 for gradient in gradients)
    return total if is_double else total.float()


def _like(stretch: torch.Tensor, real: torch.dtype) -> torch.dtype:
    return real.to_complex() if stretch.is_complex() else real


def _stretches(gradient: torch.Tensor) -> Iterator[torch.Tensor]:
    gradient = gradient.detach()
    if gradient.numel() <= STRETCH_NUMEL:
        if gradient.numel():
            yield gradient
        return
    yield from torch.split(_flat(gradient), STRETCH_NUMEL)


def _flat(gradient: torch.Tensor) -> torch.Tensor:
    """All elements in any order, without a copy if they are dense in some order."""
    order = sorted(range(gradient.ndim), key=gradient.stride, reverse=True)
    return gradient.permute(order).reshape(-1)
