"""The plan of flat slices: a pure function of metadata."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tensorplay.distributed.optim._core.partition import IN_PARTS
from tensorplay.distributed.optim.zero.sharding_plan import ALONE_BYTES, ShardingPlan

SIZES = st.lists(st.integers(0, 3000) | st.just(ALONE_BYTES // 4 + 5), max_size=10)


def parameters_of(sizes: list[int]) -> list[torch.Tensor]:
    return [nn.Parameter(torch.empty(numel)) for numel in sizes]


@given(SIZES, st.integers(1, 6), st.booleans(), st.sets(st.integers(0, 9)))
def test_every_element_has_one_owner(
    sizes: list[int], num_ranks: int, flat_step: bool, chosen: set[int]
) -> None:
    flat = set(range(len(sizes))) if flat_step else chosen
    plan = ShardingPlan.of(parameters_of(sizes), num_ranks, flat=flat, in_parts=chosen)
    for index, numel in enumerate(sizes):
        cuts = plan.cuts_of(index)
        assert (len(cuts), cuts[0], cuts[-1]) == (num_ranks + 1, 0, numel)
        assert list(cuts) == sorted(cuts)
        owner = plan.partition.owners[index]
        if owner != IN_PARTS:
            assert cuts[owner + 1] - cuts[owner] == numel
    placed = sorted(slot.parameter for layout in plan.layouts for slot in layout.slots)
    assert placed == [index for index, numel in enumerate(sizes) if numel]


@given(SIZES, st.integers(1, 6))
def test_gradients_are_cut_as_parameters_are(sizes: list[int], num_ranks: int) -> None:
    everything = range(len(sizes))
    plan = ShardingPlan.of(parameters_of(sizes), num_ranks, flat=everything, in_parts=everything)
    for layout in plan.gradient_layouts:
        for slot in layout.slots:
            cuts = plan.cuts_of(slot.parameter)
            for (start, end), (own_start, own_end) in zip(
                pairwise(layout.cuts), pairwise(cuts), strict=True
            ):
                begin, stop = slot.overlap(start, end, slot.offset)
                assert max(0, stop - begin) == own_end - own_start
                assert stop <= begin or (begin, stop) == (own_start, own_end)


@given(st.lists(st.integers(1000, 200_000), min_size=1, max_size=8), st.integers(1, 6))
def test_loads_are_even(sizes: list[int], num_ranks: int) -> None:
    everything = range(len(sizes))
    plan = ShardingPlan.of(parameters_of(sizes), num_ranks, flat=everything, in_parts=everything)
    assert max(plan.loads) - min(plan.loads) <= 4 * 16 * len(plan.flat_layouts)
    assert sum(plan.loads) >= 4 * sum(sizes)


def test_what_cannot_be_cut_stays_whole() -> None:
    arena = torch.empty(20)
    parameters = [
        nn.Parameter(torch.empty(100)),
        nn.Parameter(torch.empty(100), requires_grad=False),
        nn.Parameter(torch.tensor(1.0)),
        nn.Parameter(torch.empty(0, 4)),
        nn.Parameter(arena[:10]),
        nn.Parameter(arena[10:]),
        nn.Parameter(torch.empty(10, 2)[:, 0]),
    ]
    everything = range(len(parameters))
    plan = ShardingPlan.of(parameters, 2, flat=everything, in_parts=everything)
    assert [owner == IN_PARTS for owner in plan.partition.owners] == [True] + [False] * 6


def test_a_parameter_in_the_memory_of_a_divided_one_is_refused() -> None:
    first = nn.Parameter(torch.empty(100))
    plan = ShardingPlan.of([first], 2, flat=[0], in_parts=[0])
    inside = nn.Parameter(first.detach()[:10])
    with pytest.raises(ValueError, match=r"overlaps in memory with parameter 0, which is divided"):
        ShardingPlan.of([first, inside], 2, before=plan)
