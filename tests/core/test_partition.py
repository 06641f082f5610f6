"""Who owns what: every parameter once, balanced, and for life."""

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorplay.distributed.optim._core.parameter_spec import ParameterSpec
from tensorplay.distributed.optim._core.partition import (
    IN_PARTS,
    WholePartition,
    partition_elements,
    partition_whole,
)
from tests.core.specs import make_spec, spec_lists

NUM_RANKS = st.integers(1, 8) | st.integers(30, 40)


def unit_bytes(specs: list[ParameterSpec], *, trainable_only: bool) -> dict[int, int]:
    """The weight of each memory unit: all of it, if any of it is trainable."""
    nbytes: defaultdict[int, int] = defaultdict(int)
    trainable: defaultdict[int, bool] = defaultdict(bool)
    for spec in specs:
        nbytes[spec.memory_unit] += spec.nbytes
        trainable[spec.memory_unit] |= spec.trainable
    return {unit: size for unit, size in nbytes.items() if trainable[unit] or not trainable_only}


@given(spec_lists(), NUM_RANKS)
def test_every_parameter_has_an_owner(specs: list[ParameterSpec], num_ranks: int) -> None:
    owners = partition_whole(specs, num_ranks).owners
    assert len(owners) == len(specs)
    assert set(owners) <= set(range(num_ranks))


@given(spec_lists(), NUM_RANKS)
def test_the_answer_is_always_the_same(specs: list[ParameterSpec], num_ranks: int) -> None:
    assert partition_whole(specs, num_ranks) == partition_whole(list(specs), num_ranks)


@given(spec_lists(), NUM_RANKS)
def test_every_memory_unit_has_one_owner(specs: list[ParameterSpec], num_ranks: int) -> None:
    owners: defaultdict[int, set[int]] = defaultdict(set)
    for spec, owner in zip(specs, partition_whole(specs, num_ranks).owners, strict=True):
        owners[spec.memory_unit].add(owner)
    assert all(len(each) == 1 for each in owners.values())


@given(spec_lists(), NUM_RANKS)
def test_the_largest_load_is_at_most_the_mean_plus_the_largest_unit(
    specs: list[ParameterSpec], num_ranks: int
) -> None:
    sizes = unit_bytes(specs, trainable_only=True).values()
    loads = partition_whole(specs, num_ranks).trainable_loads
    assert max(loads) <= sum(sizes) / num_ranks + max(sizes, default=0)


@given(spec_lists(), NUM_RANKS)
def test_the_reported_loads_are_those_of_the_owners(
    specs: list[ParameterSpec], num_ranks: int
) -> None:
    partition = partition_whole(specs, num_ranks)
    owner_of = {
        spec.memory_unit: owner for spec, owner in zip(specs, partition.owners, strict=True)
    }
    for trainable_only, loads in (
        (True, partition.trainable_loads),
        (False, partition.total_loads),
    ):
        expected = [0] * num_ranks
        for unit, size in unit_bytes(specs, trainable_only=trainable_only).items():
            expected[owner_of[unit]] += size
        assert list(loads) == expected


@given(spec_lists(), st.integers(0, 20), NUM_RANKS)
def test_adding_parameters_moves_none(
    specs: list[ParameterSpec], num_before: int, num_ranks: int
) -> None:
    before = partition_whole(specs[:num_before], num_ranks)
    after = partition_whole(specs, num_ranks, before)
    assert after.owners[:num_before] == before.owners[: len(specs)]


@given(spec_lists(), st.integers(0, 20), NUM_RANKS)
def test_every_memory_unit_has_one_owner_after_adding_to_it(
    specs: list[ParameterSpec], num_before: int, num_ranks: int
) -> None:
    before = partition_whole(specs[:num_before], num_ranks)
    after = partition_whole(specs, num_ranks, before)
    owners: defaultdict[int, set[int]] = defaultdict(set)
    for spec, owner in zip(specs, after.owners, strict=True):
        owners[spec.memory_unit].add(owner)
    assert all(len(each) == 1 for each in owners.values())


def test_added_parameters_go_to_the_least_loaded_ranks() -> None:
    before = partition_whole([make_spec(0, 10)], 3)
    after = partition_whole([make_spec(0, 10), make_spec(1, 4), make_spec(2, 5)], 3, before)
    assert after.owners == (0, 2, 1)


@pytest.mark.parametrize("frozen", [0, 1], ids=["even frozen", "odd frozen"])
def test_alternate_frozen_layers_leave_the_trainable_ones_balanced(frozen: int) -> None:
    specs = [make_spec(index, 1000, trainable=index % 2 != frozen) for index in range(16)]
    partition = partition_whole(specs, 4)
    assert partition.trainable_loads == (8000,) * 4
    assert partition.total_loads == (16000,) * 4


def test_frozen_parameters_do_not_move_trainable_ones() -> None:
    trainable = [make_spec(index, 10 + index) for index in range(5)]
    frozen = [make_spec(5, 10**6, trainable=False), make_spec(6, 3, trainable=False)]
    assert partition_whole(trainable + frozen, 3).owners[:5] == partition_whole(trainable, 3).owners


def test_the_greedy_rule_is_largest_first_to_the_least_loaded() -> None:
    specs = [make_spec(index, numel) for index, numel in enumerate([1, 7, 3, 5, 4])]
    assert partition_whole(specs, 2).owners == (1, 0, 0, 1, 1)  # loads 7, then 5, 9, 10, 10


def test_ties_go_to_the_lower_index_and_the_lower_rank() -> None:
    assert partition_whole([make_spec(index, 4) for index in range(5)], 3).owners == (0, 1, 2, 0, 1)


def test_more_ranks_than_parameters_leave_ranks_without_any() -> None:
    partition = partition_whole([make_spec(0, 4), make_spec(1, 2)], 5)
    assert partition.owners == (0, 1)
    assert partition.trainable_loads == (16, 8, 0, 0, 0)


def test_no_parameters_are_a_perfect_balance() -> None:
    assert partition_whole([], 3) == WholePartition.empty(3)
    assert WholePartition.empty(3).load_ratio == 1.0


def test_the_load_ratio_is_the_largest_over_the_mean() -> None:
    assert partition_whole([make_spec(0, 3), make_spec(1, 1)], 2).load_ratio == 1.5


@given(st.integers(0, 10_000), st.integers(1, 40), st.integers(1, 64))
def test_element_cuts_ascend_from_zero_to_the_end(
    numel: int, num_ranks: int, multiple: int
) -> None:
    cuts = partition_elements(numel, num_ranks, multiple)
    assert (len(cuts), cuts[0], cuts[-1]) == (num_ranks + 1, 0, numel)
    assert list(cuts) == sorted(cuts)


@given(st.integers(0, 10_000), st.integers(1, 40), st.integers(1, 64))
def test_element_cuts_are_multiples_up_to_the_last(
    numel: int, num_ranks: int, multiple: int
) -> None:
    cuts = partition_elements(numel, num_ranks, multiple)
    assert all(cut % multiple == 0 or cut == numel for cut in cuts)


@given(st.integers(0, 10_000), st.integers(1, 40), st.integers(1, 64))
def test_element_ranges_differ_by_at_most_one_multiple(
    numel: int, num_ranks: int, multiple: int
) -> None:
    cuts = partition_elements(numel, num_ranks, multiple)
    blocks = [-(-(end - start) // multiple) for start, end in pairwise(cuts)]
    assert max(blocks) - min(blocks) <= 1


@given(spec_lists(), NUM_RANKS, st.sets(st.integers(0, 15)))
def test_parameters_in_parts_have_no_owner_and_weigh_nothing_for_the_others(
    specs: list[ParameterSpec], num_ranks: int, chosen: set[int]
) -> None:
    members: defaultdict[int, list[int]] = defaultdict(list)
    for spec in specs:
        members[spec.memory_unit].append(spec.index)
    in_parts = {index for index in chosen if members[index] == [index]}
    partition = partition_whole(specs, num_ranks, in_parts=in_parts)
    assert {i for i, owner in enumerate(partition.owners) if owner == IN_PARTS} == in_parts
    others = [spec for spec in specs if spec.index not in in_parts]
    alone = partition_whole(others, num_ranks)
    assert [partition.owners[spec.index] for spec in others] == list(alone.owners)
    assert (partition.trainable_loads, partition.total_loads) == (
        alone.trainable_loads,
        alone.total_loads,
    )


@given(spec_lists(), st.integers(0, 20), NUM_RANKS)
def test_adding_parameters_in_parts_moves_none(
    specs: list[ParameterSpec], num_before: int, num_ranks: int
) -> None:
    before = partition_whole(specs[:num_before], num_ranks)
    units = [spec.memory_unit for spec in specs]
    in_parts = {unit for unit in units[num_before:] if units.count(unit) == 1}
    after = partition_whole(specs, num_ranks, before, in_parts=in_parts)
    assert after.owners[:num_before] == before.owners[: len(specs)]
    assert all(after.owners[index] == IN_PARTS for index in in_parts)
