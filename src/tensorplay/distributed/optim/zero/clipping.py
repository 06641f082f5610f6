"""Gradients looked at as a whole, where each rank holds those of the parameters that it owns."""

from collections.abc import Sequence

import torch

from tensorplay.distributed.optim._core.collectives import Communicator
from tensorplay.distributed.optim._core.gradient_norm import norm_across_ranks
from tensorplay.distributed.optim._core.local_shard import is_dtensor
from tensorplay.distributed.optim._core.parameter_spec import ParameterSpec
from tensorplay.distributed.optim._core.partial_gradient import PartialGradient
from tensorplay.distributed.optim._core.ranks import GroupRank


@torch.no_grad()
def clip_grad_norm_(
    communicator: Communicator,
    parameters: Sequence[torch.Tensor],
    owners: Sequence[GroupRank],
    max_norm: float,
    norm_type: float,
    *,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    """See :meth:`ZeroRedundancyOptimizer.clip_grad_norm_`."""
    if norm_type <= 0:
        raise ValueError(f"norm_type={norm_type} must be greater than 0; usual are 1, 2 and inf")
    if any(map(is_dtensor, parameters)):
        raise TypeError("a DTensor's norm isn't known here; use torch.nn.utils.clip_grad_norm_()")
    whole = [
        (parameter.grad, owner)
        for parameter, owner in zip(parameters, owners, strict=True)
        if parameter.grad is not None and not isinstance(parameter.grad, PartialGradient)
    ]
    owned = [grad for grad, owner in whole if owner == communicator.members.group_rank]
    doubles = any(parameter.dtype.to_real() is torch.float64 for parameter in parameters)
    dtype = torch.float64 if doubles else torch.float32
    norm = norm_across_ranks(communicator, owned, norm_type, parameters[0].device, dtype)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"The total norm of order {norm_type} of the gradients is {norm.item()}, so it cannot be "
            "clipped; pass error_if_nonfinite=False to scale by it anyway"
        )
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for gradient, _ in whole:
        by_device.setdefault(gradient.device, []).append(gradient)
    for device, gradients in by_device.items():
        torch._foreach_mul_(gradients, coefficient.to(device))
    return norm


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
