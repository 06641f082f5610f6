"""Gradients looked at as a whole, where each rank holds those of what it owns."""

from collections.abc import Sequence

import torch

from tensorplay.distributed.optim._core.agreement import Agreement
from tensorplay.distributed.optim._core.collectives import Communicator
from tensorplay.distributed.optim._core.gradient_norm import (
    clip_by_norm_,
    dtype_of_norm,
    find_unclippable,
    norm_across_ranks,
    norm_of_own,
)
from tensorplay.distributed.optim._core.parameter_spec import ParameterSpec
from tensorplay.distributed.optim._core.partial_gradient import PartialGradient
from tensorplay.distributed.optim.zero.gradients import Gradients
from tensorplay.distributed.optim.zero.sharded_parameters import ShardedParameters


class WholeGradients:
    """The averaged gradients of all ranks, between backward and step.

    Each method gets their source, as it is then; every rank must call it.

    Args:
        communicator: carries norms and gradients.
        agreement: settles that there are averages, and that all ranks ask for the same.
        sharded: all parameters, and who owns what of them.
    """

    def __init__(
        self, communicator: Communicator, agreement: Agreement, sharded: ShardedParameters
    ) -> None:
        self._communicator = communicator
        self._agreement = agreement
        self._sharded = sharded

    def clip_(
        self, gradients: Gradients, max_norm: float, norm_type: float, error_if_nonfinite: bool
    ) -> torch.Tensor:
        """Scales them so that their norm is at most ``max_norm``; returns the norm before.

        See :meth:`ZeroRedundancyOptimizer.clip_grad_norm_`, also for what it raises.
        """
        parameters = self._sharded.parameters
        problem = (
            gradients.find_unfinished()
            or gradients.find_unclippable()
            or find_unclippable(parameters, norm_type)
        )
        flag = int(gradients.has_unreduced())
        settlement = self._agreement.start(
            "clip_grad_norm_",
            {"max_norm": repr(max_norm), "norm_type": repr(norm_type)},
            problem,
            flag,
        )
        device = parameters[0].device
        owned: list[torch.Tensor] = []
        if not (problem or flag):  # while the others come
            owned = gradients.owned_stretches()
            partial = norm_of_own(owned, norm_type, device)
        if settlement.wait():
            gradients.reduce("clip_grad_norm_ (reduce)")
            owned = gradients.owned_stretches()
            partial = norm_of_own(owned, norm_type, device)
        dtype = dtype_of_norm(parameters)
        norm = norm_across_ranks(self._communicator, partial, norm_type, dtype)
        clip_by_norm_([*owned, *gradients.others()], norm, max_norm, error_if_nonfinite)
        return norm

    def full(self, gradients: Gradients, index: int | None) -> torch.Tensor | None:
        """A copy of one parameter's, on every rank; ``None`` if no rank has one.

        Raises:
            ValueError: if ``index`` is ``None``; the other ranks raise too.
        """
        problem = (
            ValueError("full_grad() needs a parameter that this optimizer was given")
            if index is None
            else gradients.find_unfinished()
        )
        flag = int(gradients.has_unreduced())
        if self._agreement.settle("full_grad", {"parameter": index}, problem, flag):
            gradients.reduce("full_grad (reduce)")
        assert index is not None  # noqa: S101 - narrows a type; the agreement has raised
        plan, parameter = self._sharded.plan, self._sharded.parameters[index]
        return _gradient_from(self._communicator, parameter, plan.specs[index], plan.cuts_of(index))


@torch.no_grad()
def _gradient_from(
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
