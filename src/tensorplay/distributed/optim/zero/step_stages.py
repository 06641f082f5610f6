"""A step in stages: what has been stepped travels to the other ranks while the next is stepped."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from tensorplay.distributed.optim._core.bucket_layout import BucketLayout, take_turns
from tensorplay.distributed.optim._core.wrapped_optimizer import bare_step

STAGE_BYTES = 12 * 1024 * 1024
"""Of parameters, on all ranks together: smaller stages aren't worth a step of their own."""

NUM_STAGES = 4
"""At most."""


def plan_stages(layouts: Mapping[int, BucketLayout]) -> list[list[int]]:
    """The order in which buckets are gathered, in stages of about the same size.

    Args:
        layouts: the buckets' layouts, by number.

    Returns:
        The numbers; in any stage all owners have about as much as they have in all of them.
    """
    numbers, loads = list(layouts), [layout.loads for layout in layouts.values()]
    order = [numbers[place] for place in take_turns(loads)]
    stage_nbytes = max(STAGE_BYTES, sum(map(sum, loads)) // NUM_STAGES)
    stages: list[list[int]] = []
    free = 0
    for number in order:
        if free <= 0:
            stages.append([])
            free = stage_nbytes
        stages[-1].append(number)
        free -= layouts[number].nbytes
    return stages


class StagedGroups:
    """The local optimizer's groups with the parameters of one stage.

    Args:
        groups: all of them.
        stage_of: the stage of each parameter; others belong to the first.
        num_stages: how many there are.
    """

    def __init__(
        self, groups: Sequence[dict[str, Any]], stage_of: Mapping[Any, int], num_stages: int
    ) -> None:
        self._members: list[list[tuple[int, list[torch.Tensor]]]] = [[] for _ in range(num_stages)]
        for place, group in enumerate(groups):
            by_stage: dict[int, list[torch.Tensor]] = {}
            for parameter in group["params"]:
                by_stage.setdefault(stage_of.get(parameter, 0), []).append(parameter)
            for stage, members in by_stage.items():
                self._members[stage].append((place, members))

    def step(self, optimizer: Optimizer, stage: int) -> None:
        """Steps the parameters of one stage with the options that the groups have now."""
        groups = optimizer.param_groups
        members = self._members[stage]
        step = bare_step(optimizer)
        if not members or step is None:
            return
        optimizer.param_groups = [{**groups[place], "params": each} for place, each in members]
        try:
            step()
        finally:
            optimizer.param_groups = groups
