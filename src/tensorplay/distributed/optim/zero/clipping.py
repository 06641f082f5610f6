"""Gradients looked at as a whole, where each rank holds those of what it owns."""

from collections.abc import Sequence

import torch

from tensorplay.distributed.optim._core.collectives import Communicator
from tensorplay.distributed.optim._core.parameter_spec import ParameterSpec
from tensorplay.distributed.optim._core.partial_gradient import PartialGradient


@torch.no_grad()
def gradient_from(
    communicator: Communicator,
    parameter: torch.Tensor,
    spec: ParameterSpec,
    cuts: Sequence[int],
) -> torch.Tensor | None:
    """A copy of a gradient, of which rank r holds the stretch ``[cuts[r], cuts[r + 1])``, on every rank.

    ``None`` if nobody holds anything.
    """
    rank = communicator.members.group_rank
    start, end = cuts[rank], cuts[rank + 1]
    gradient = parameter.grad if start < end or not spec.numel else None
    exists = torch.tensor(
        [gradient is not None], dtype=torch.uint8, device=communicator.transport_device()
    )
    communicator.all_reduce_(exists, "max").wait()
    if not exists.item():
        return None
    copy = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
    flat = copy.as_strided((spec.numel,), (1,))
    if not spec.numel:
        return copy
    if isinstance(gradient, PartialGradient):
        assert gradient.own is not None  # noqa: S101 - narrows a type; this rank owns some of it
        flat[start:end] = gradient.own
    elif gradient is not None:
        copy.copy_(gradient)
    else:
        flat[start:end].zero_()
    communicator.gather_from_owners(flat, cuts).wait()
    return copy
