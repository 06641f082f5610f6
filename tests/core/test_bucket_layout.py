"""Places in buckets: every parameter once, aligned, in its owner's slice."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tensorplay.distributed.optim._core.bucket_layout import (
    ALIGNMENT_BYTES,
    BucketLayout,
    layout_buckets,
)
from tensorplay.distributed.optim._core.parameter_spec import ParameterSpec
from tensorplay.distributed.optim._core.partition import partition_whole
from tensorplay.distributed.optim._core.ranks import GroupRank
from tests.core.specs import make_spec, spec_lists


def layouts_of(
    specs: list[ParameterSpec], num_ranks: int, capacity_bytes: int
) -> tuple[BucketLayout, ...]:
    return layout_buckets(
        specs, partition_whole(specs, num_ranks).owners, num_ranks, capacity_bytes
    )


plans = given(spec_lists(), st.integers(1, 6), st.sampled_from([0, 1, 100, 10_000, 10**9]))


@plans
def test_every_parameter_with_elements_is_in_exactly_one_bucket(
    specs: list[ParameterSpec], num_ranks: int, capacity_bytes: int
) -> None:
    layouts = layouts_of(specs, num_ranks, capacity_bytes)
    placed = sorted((slot.parameter, slot.numel) for each in layouts for slot in each.slots)
    assert placed == [(spec.index, spec.numel) for spec in specs if spec.numel]


@plans
def test_slots_are_aligned_and_do_not_overlap(
    specs: list[ParameterSpec], num_ranks: int, capacity_bytes: int
) -> None:
    for layout in layouts_of(specs, num_ranks, capacity_bytes):
        end = 0
        for slot in layout.slots:
            assert slot.offset * layout.dtype.itemsize % ALIGNMENT_BYTES == 0
            assert slot.offset >= end
            end = slot.offset + slot.numel
        assert end <= layout.numel


@plans
def test_cuts_ascend_from_zero_to_the_end(
    specs: list[ParameterSpec], num_ranks: int, capacity_bytes: int
) -> None:
    for layout in layouts_of(specs, num_ranks, capacity_bytes):
        assert (len(layout.cuts), layout.cuts[0]) == (num_ranks + 1, 0)
        assert layout.cuts[-1] == layout.numel
        assert list(layout.cuts) == sorted(layout.cuts)


@plans
def test_every_slot_lies_inside_the_cuts_of_its_owner(
    specs: list[ParameterSpec], num_ranks: int, capacity_bytes: int
) -> None:
    owners = partition_whole(specs, num_ranks).owners
    for layout in layout_buckets(specs, owners, num_ranks, capacity_bytes):
        for slot in layout.slots:
            owner = owners[slot.parameter]
            assert layout.cuts[owner] <= slot.offset
            assert slot.offset + slot.numel <= layout.cuts[owner + 1]
            assert slot in layout.slots_of(owner)


@plans
def test_the_slots_of_all_ranks_are_the_slots(
    specs: list[ParameterSpec], num_ranks: int, capacity_bytes: int
) -> None:
    for layout in layouts_of(specs, num_ranks, capacity_bytes):
        by_rank = [slot for rank in range(num_ranks) for slot in layout.slots_of(GroupRank(rank))]
        assert tuple(by_rank) == layout.slots


@plans
def test_a_bucket_holds_its_capacity_or_one_larger_parameter(
    specs: list[ParameterSpec], num_ranks: int, capacity_bytes: int
) -> None:
    for layout in layouts_of(specs, num_ranks, capacity_bytes):
        nbytes = sum(slot.numel for slot in layout.slots) * layout.dtype.itemsize
        assert nbytes <= capacity_bytes or len(layout.slots) == 1


@plans
def test_padding_is_less_than_the_alignment_per_slot(
    specs: list[ParameterSpec], num_ranks: int, capacity_bytes: int
) -> None:
    for layout in layouts_of(specs, num_ranks, capacity_bytes):
        nbytes = sum(slot.numel for slot in layout.slots) * layout.dtype.itemsize
        assert nbytes <= layout.nbytes < nbytes + ALIGNMENT_BYTES * len(layout.slots)


@plans
def test_kinds_are_kept_apart(
    specs: list[ParameterSpec], num_ranks: int, capacity_bytes: int
) -> None:
    owners = partition_whole(specs, num_ranks).owners
    for layout in layout_buckets(
        specs, owners, num_ranks, capacity_bytes, resident_capacity_bytes=1000
    ):
        for slot in layout.slots:
            spec = specs[slot.parameter]
            assert (spec.dtype, spec.device) == (layout.dtype, layout.device)
            assert spec.trainable == layout.trainable
            assert (spec.trainable and spec.owns_storage) == layout.resident


def test_resident_buckets_have_a_capacity_of_their_own() -> None:
    specs = [make_spec(index, 4) for index in range(4)]
    owners = [GroupRank(0)] * 4
    layouts = layout_buckets(specs, owners, 1, 16, resident_capacity_bytes=32)
    assert [(layout.resident, len(layout.slots)) for layout in layouts] == [(True, 2)] * 2
    assert not any(layout.resident for layout in layout_buckets(specs, owners, 1, 16))


def test_devices_are_kept_apart() -> None:
    specs = [
        ParameterSpec(index, (4,), (1,), torch.float32, torch.device(device), True, index, True)
        for index, device in enumerate(["cpu", "meta", "cpu"])
    ]
    layouts = layouts_of(specs, 1, 10**6)
    assert [(layout.device.type, len(layout.slots)) for layout in layouts] == [
        ("cpu", 2),
        ("meta", 1),
    ]


@plans
def test_buckets_of_a_kind_follow_the_reverse_order_of_registration(
    specs: list[ParameterSpec], num_ranks: int, capacity_bytes: int
) -> None:
    kinds: dict[object, list[list[int]]] = {}
    for layout in layouts_of(specs, num_ranks, capacity_bytes):
        kind = (layout.dtype, layout.trainable, layout.resident)
        kinds.setdefault(kind, []).append([slot.parameter for slot in layout.slots])
    for buckets in kinds.values():
        assert all(min(earlier) > max(later) for earlier, later in pairwise(buckets))


def test_within_a_bucket_parameters_stand_by_owner() -> None:
    specs = [make_spec(index, 4) for index in range(5)]
    owners = [GroupRank(rank) for rank in (2, 0, 2, 0, 1)]
    (layout,) = layout_buckets(specs, owners, 4, 10**6)
    assert [slot.parameter for slot in layout.slots] == [3, 1, 4, 2, 0]
    assert layout.cuts == (0, 8, 12, 20, 20)


def test_the_first_ranks_may_own_nothing() -> None:
    (layout,) = layout_buckets([make_spec(0, 4)], [GroupRank(2)], 4, 10**6)
    assert layout.cuts == (0, 0, 0, 4, 4)
    assert [len(layout.slots_of(GroupRank(rank))) for rank in range(4)] == [0, 0, 1, 0]


def test_parameters_without_elements_need_no_bucket() -> None:
    assert layouts_of([make_spec(0, 0), make_spec(1, 0)], 2, 10**6) == ()


def test_specs_that_do_not_begin_at_zero_keep_their_indices() -> None:
    specs = [make_spec(7, 4), make_spec(8, 4)]
    (layout,) = layout_buckets(specs, [GroupRank(0), GroupRank(1)], 2, 10**6)
    assert [(slot.parameter, slot.offset) for slot in layout.slots] == [(7, 0), (8, 4)]


@pytest.mark.parametrize(
    ("dtype", "padded"),
    [(torch.bool, 16), (torch.bfloat16, 8), (torch.float32, 4), (torch.complex128, 1)],
    ids=str,
)
def test_slots_are_padded_to_sixteen_bytes(dtype: torch.dtype, padded: int) -> None:
    specs = [make_spec(index, 1, dtype=dtype) for index in range(2)]
    (layout,) = layout_buckets(specs, [GroupRank(0)] * 2, 1, 10**6)
    assert [slot.offset for slot in layout.slots] == [0, padded]
    assert layout.numel == 2 * padded


def test_a_bucket_of_one_parameter_has_no_padding() -> None:
    (layout,) = layout_buckets([make_spec(0, 5)], [GroupRank(1)], 3, 10**6)
    assert layout.cuts == (0, 0, 5, 5)
