"""Gradients looked at as a whole, where each rank holds those of the parameters that it owns."""

from collections.abc import Iterable

import torch

from tensorplay.distributed.optim._core.collectives import Communicator
from tensorplay.distributed.optim._core.local_shard import is_dtensor
from tensorplay.distributed.optim._core.parameter_spec import ParameterSpec
from tensorplay.distributed.optim._core.ranks import GroupRank


def find_unclippable(parameters: Iterable[torch.Tensor], norm_type: float) -> Exception | None:
    """Why gradients can't be clipped, if they can't."""
    if norm_type <= 0:
        return ValueError(f"norm_type={norm_type} must be greater than 0; usual are 1, 2 and inf")
    if any(map(is_dtensor, parameters)):
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
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_device.setdefault(gradient.device, []).append(gradient)
    for device, members in by_device.items():
        torch._foreach_mul_(members, coefficient.to(device))


@torch.no_grad()
def gradient_from(
    communicator: Communicator, parameter: torch.Tensor, spec: ParameterSpec, owner: GroupRank
) -> torch.Tensor | None:
    """A copy of the gradient that ``owner`` holds, on every rank; ``None`` if it holds none."""
    is_owner = communicator.members.group_rank == owner
    gradient = parameter.grad if is_owner else None
    exists = torch.tensor(
        [gradient is not None], dtype=torch.uint8, device=communicator.transport_device()
    )
    communicator.all_reduce_(exists, "max").wait()
    if not exists.item():
        return None
    copy = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
    if gradient is not None:
        copy.copy_(gradient)
    cuts = [
        0 if rank <= owner else spec.numel for rank in range(communicator.members.world_size + 1)
    ]
    communicator.gather_from_owners(copy.as_strided((spec.numel,), (1,)), cuts).wait()
    return copy
