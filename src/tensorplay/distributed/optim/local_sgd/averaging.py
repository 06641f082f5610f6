"""Averaging at once, without a schedule."""

import functools
from collections.abc import Iterable

import torch
import torch.distributed as dist

from tensorplay.distributed.optim._core.collectives import connect
from tensorplay.distributed.optim.local_sgd.averagers import Averaged, may_change, tensors_of
from tensorplay.distributed.optim.local_sgd.group_average import GroupAverage


def average_parameters(
    params: Iterable[torch.Tensor], process_group: dist.ProcessGroup | None
) -> None:
    """Replaces tensors by their mean over the ranks, in place; ranks outside the group do nothing.

    Every rank of the group must call it, with the same tensors in the same order.

    Args:
        params: floating or complex tensors; frozen parameters are averaged too.
        process_group: the ranks to average over, ``None`` for the default group.

    Raises:
        TypeError, ValueError, RuntimeError: as ``PeriodicModelAverager.average_parameters``.
    """
    if dist.get_rank(process_group) < 0:
        return
    average = _average_over(process_group or dist.group.WORLD)
    average.settle("average_parameters", list(dict.fromkeys(params)), schedule=None)
    average.average_()


def get_params_to_average(params: Averaged) -> list[torch.Tensor]:
    """Those of ``params`` that training may change: the same on every rank.

    Torch's takes those that have a gradient, which depends on the rank.

    Args:
        params: parameters, or param groups of an optimizer.

    Raises:
        NotImplementedError: for anything else.
    """
    return [tensor for tensor in dict.fromkeys(tensors_of(params)) if may_change(tensor)]


def average_parameters_or_parameter_groups(
    params: Averaged, process_group: dist.ProcessGroup | None
) -> None:
    """:func:`average_parameters` of :func:`get_params_to_average`."""
    average_parameters(get_params_to_average(params), process_group)


@functools.lru_cache(maxsize=8)
def _average_over(process_group: dist.ProcessGroup) -> GroupAverage:
    return GroupAverage(connect(process_group, "average_parameters"), "average_parameters")
