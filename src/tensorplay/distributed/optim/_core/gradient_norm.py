"""The norm of gradients that are spread over ranks, accurate for billions of elements, and clipping.

In float32 a sum over 29 million squares is off by 1e-3; sums over stretches of 64 K elements, added
up in float64, by 2e-6.
"""

import math
import operator
from collections.abc import Iterable, Iterator, Sequence

import torch

from tensorplay.distributed.optim._core.collectives import Communicator
from tensorplay.distributed.optim._core.local_shard import any_is_dtensor

STRETCH_NUMEL = 64 * 1024
"""Elements whose powers are summed in the gradients' own precision."""


@torch.no_grad()
def norm_of_own(
    gradients: Sequence[torch.Tensor], norm_type: float, device: torch.device
) -> torch.Tensor:
    """What this rank contributes to the norm of all gradients. No communication.

    Args:
        gradients: those that count here; each element counts on one rank.
        norm_type: p > 0 of the p-norm, or ``inf``.
        device: where to compute.

    Returns:
        A float64 scalar on ``device``: the sum of powers, or the maximum. Nothing waits for the
        device.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        if not gradient.numel():
            continue
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
    return partial


@torch.no_grad()
def norm_across_ranks(
    communicator: Communicator,
    partial: torch.Tensor,
    norm_type: float,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The norm of all ranks' gradients together, on every rank. Every rank must call it.

    Args:
        communicator: carries one scalar; the group must be able to send from its device.
        partial: what :func:`norm_of_own` has returned.
        norm_type: p > 0 of the p-norm, or ``inf``.
        dtype: of the result, the same on every rank.

    Returns:
        A scalar on ``partial``'s device; nothing waits for the device.
    """
    if math.isinf(norm_type):
        # A maximum over ranks may lose what isn't a number: that travels beside it.
        facts = torch.stack([partial.nan_to_num(0.0, torch.inf), partial.isnan().double()])
        communicator.all_reduce_(facts, "max").wait()
        return torch.where(facts[1] > 0, torch.nan, facts[0]).to(dtype)
    total = partial.view(1)
    communicator.all_reduce_(total, "sum").wait()
    return total[0].pow(1 / norm_type).to(dtype)


def dtype_of_norm(parameters: Iterable[torch.Tensor]) -> torch.dtype:
    """That of a norm of these parameters' gradients."""
    dtypes = set(map(operator.attrgetter("dtype"), parameters))
    return torch.float64 if torch.float64 in {each.to_real() for each in dtypes} else torch.float32


def find_unclippable(parameters: Iterable[torch.Tensor], norm_type: float) -> Exception | None:
    """Why gradients can't be clipped, if they can't."""
    if norm_type <= 0:
        return ValueError(f"norm_type={norm_type} must be greater than 0; usual are 1, 2 and inf")
    if any_is_dtensor(parameters):
        return TypeError("a DTensor's norm isn't known here; use torch.nn.utils.clip_grad_norm_()")
    return None


@torch.no_grad()
def clip_by_norm_(
    gradients: Iterable[torch.Tensor],
    norm: torch.Tensor,
    max_norm: float,
    error_if_nonfinite: bool,
) -> None:
    """Scales ``gradients`` as ``torch.nn.utils.clip_grad_norm_`` does, given their norm."""
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the norm of all gradients is {norm.item()}, so they can't be clipped by it; pass "
            "error_if_nonfinite=False to scale by it anyway"
        )
    coefficient = clip_coefficient(norm, max_norm)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_device.setdefault(gradient.device, []).append(gradient)
    for device, members in by_device.items():
        if not is_one(coefficient):
            torch._foreach_mul_(members, coefficient.to(device))


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """By what gradients of that norm are scaled; at most 1."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def is_one(coefficient: torch.Tensor) -> bool:
    """Whether there is nothing to scale, where looking at it waits for no device."""
    return coefficient.device.type == "cpu" and bool(coefficient == 1)


def _like(stretch: torch.Tensor, real: torch.dtype) -> torch.dtype:
    return real.to_complex() if stretch.is_complex() else real


def _stretches(gradient: torch.Tensor) -> Iterator[torch.Tensor]:
    if gradient.numel() <= STRETCH_NUMEL:
        yield gradient.detach()
        return
    yield from torch.split(flatten(gradient.detach()), STRETCH_NUMEL)


def flatten(gradient: torch.Tensor) -> torch.Tensor:
    """All elements in any order, without a copy if they are dense in some order."""
    order = sorted(range(gradient.ndim), key=gradient.stride, reverse=True)
    return gradient.permute(order).reshape(-1)
