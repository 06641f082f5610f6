"""The schedule: the steps of torch's averagers, and those relative to the warm-up."""

import itertools

import pytest
from torch.distributed.algorithms.model_averaging import utils
from torch.distributed.algorithms.model_averaging.averagers import (
    PeriodicModelAverager as TorchPeriodic,
)
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import (
    HierarchicalModelAverager as TorchHierarchical,
)

from tensorplay.distributed.optim.local_sgd.averagers import (
    HierarchicalModelAverager,
    PeriodicModelAverager,
)
from tensorplay.distributed.optim.local_sgd.schedule import due_level, is_due
from tests.launch import run_ranks

STEPS = 200
PERIODS, WARMUPS = (2, 3, 4, 7, 16, 300), (0, 1, 5, 16, 100, 250)
HIERARCHIES = ({2: 2, 8: 4}, {1: 1, 3: 2, 4: 4}, {4: 2, 6: 2, 9: 4}, {5: 4})


def _steps_of_torchs(averager: object, groups: list[object]) -> list[int | None]:
    """At which level torch's averager averaged in each step."""
    fired: list[int | None] = []
    original = utils.average_parameters_or_parameter_groups
    levels: list[int | None] = [None]
    utils.average_parameters_or_parameter_groups = lambda _, group: levels.append(
        groups.index(group)
    )
    try:
        for _ in range(STEPS):
            levels[:] = [None]
            averager.average_parameters([])  # type: ignore[attr-defined] # mypy can't see that it has this
            fired.append(levels[-1])
    finally:
        utils.average_parameters_or_parameter_groups = original
    return fired


def _flat() -> None:
    for period, warmup_steps in itertools.product(PERIODS, WARMUPS):
        torchs = TorchPeriodic(period, warmup_steps)
        expected = _steps_of_torchs(torchs, [torchs.process_group])
        ours = PeriodicModelAverager(period, warmup_steps)
        for step, level in enumerate(expected):
            due = ours.due_group() is ours.process_group
            assert due == (level == 0), (period, warmup_steps, step)
            ours.average_parameters([])
            assert ours.step == step + 1


def _hierarchical() -> None:
    for sizes, warmup_steps in itertools.product(HIERARCHIES, WARMUPS):
        torchs = TorchHierarchical(sizes, warmup_steps)
        groups = list(torchs.period_process_group_dict.values())
        expected = _steps_of_torchs(torchs, groups)
        ours = HierarchicalModelAverager(sizes, warmup_steps)
        own = list(ours.period_process_group_dict.values())
        assert [g.size() for g in own] == [g.size() for g in groups]  # type: ignore[attr-defined] # mypy can't see that it has this
        for step, level in enumerate(expected):
            due = ours.due_group()
            assert due is (None if level is None else own[level]), (sizes, warmup_steps, step)
            ours.step += 1


def test_the_steps_of_torchs_periodic_averager() -> None:
    run_ranks(1, _flat)


def test_the_steps_and_levels_of_torchs_hierarchical_averager() -> None:
    run_ranks(4, _hierarchical)


def test_a_period_counts_from_the_end_of_the_warm_up() -> None:
    assert [step for step in range(20) if is_due(step, 4, 7)] == [7, 11, 15, 19]


@pytest.mark.parametrize(
    ("relative", "expected"),
    [(False, {8: 1, 10: 0, 12: 0, 14: 0, 16: 1}), (True, {7: 1, 9: 0, 11: 0, 13: 0, 15: 1})],
)
def test_a_hierarchy_counts_from_the_beginning_or_from_the_warm_up(
    relative: bool, expected: dict[int, int]
) -> None:
    levels = {step: due_level(step, [2, 8], 7, relative_to_warmup=relative) for step in range(17)}
    assert {step: level for step, level in levels.items() if level is not None} == expected
