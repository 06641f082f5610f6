"""Gradients looked at as a whole, where each rank holds those of the parameters that it owns."""

import torch

from tensorplay.distributed.optim._core.collectives import Communicator
from tensorplay.distributed.optim._core.parameter_spec import ParameterSpec
from tensorplay.distributed.optim._core.ranks import GroupRank


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
