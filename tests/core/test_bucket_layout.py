"""Places in buckets: every parameter once, aligned, in its owner's slice."""

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tensorplay.distributed.optim._core.bucket_layout import (
    ALIGNMENT_BYTES,
    BucketLayout,
    Slot,
    cut_evenly,
    extents_in_rounds,
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


@given(spec_lists(), st.integers(1, 6), st.sampled_from([0, 100, 10_000]), st.integers(0, 400))
def test_parameters_of_a_size_or_more_stand_alone(
    specs: list[ParameterSpec], num_ranks: int, capacity_bytes: int, alone_bytes: int
) -> None:
    owners = partition_whole(specs, num_ranks).owners
    layouts = layout_buckets(specs, owners, num_ranks, capacity_bytes, alone_bytes=alone_bytes)
    placed = sorted(slot.parameter for layout in layouts for slot in layout.slots)
    assert placed == [spec.index for spec in specs if spec.numel]
    for layout in layouts:
        sizes = [specs[slot.parameter].nbytes for slot in layout.slots]
        assert len(sizes) == 1 or max(sizes) < alone_bytes
        assert len(sizes) == 1 or sum(sizes) <= capacity_bytes


def test_a_parameter_that_stands_alone_does_not_end_the_bucket_of_the_others() -> None:
    specs = [make_spec(index, numel) for index, numel in enumerate([2, 2, 100, 2, 100, 2])]
    layouts = layout_buckets(specs, [GroupRank(0)] * 6, 1, 10**6, alone_bytes=400)
    members = sorted([slot.parameter for slot in layout.slots] for layout in layouts)
    assert members == [[2], [4], [5, 3, 1, 0]]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(1, 60))
def test_rounds_cover_every_slice_once_and_in_order(lengths: list[int], longest: int) -> None:
    cuts = [0, *accumulate(lengths)]
    rounds = extents_in_rounds(cuts, longest)
    assert len(rounds) == -(-max(lengths) // longest)
    for owner, (start, end) in enumerate(pairwise(cuts)):
        covered = []
        for extents in rounds:
            assert len(extents) == len(lengths)
            begin, stop = extents[owner]
            assert 0 <= stop - begin <= longest
            covered += range(begin, stop)
        assert covered == list(range(start, end))


SLOTS = st.builds(Slot, st.just(3), st.integers(0, 30), st.integers(1, 30))


@given(SLOTS, st.integers(0, 70), st.integers(0, 70), st.integers(-10, 10))
@example(Slot(3, 0, 4), 2, 2, 0)
def test_an_overlap_holds_the_elements_in_both(slot: Slot, one: int, two: int, origin: int) -> None:
    start, end = sorted((one, two))
    both = sorted(set(range(slot.offset, slot.offset + slot.numel)) & set(range(start, end)))
    assert slot.meets(start, end) == bool(both)
    assert slot.is_within(start, end) == (len(both) == slot.numel)
    if both:
        begin, stop = slot.overlap(start, end, origin)
        assert list(range(begin + origin, stop + origin)) == both


@plans
def test_an_even_cut_leaves_places_alone_and_differs_by_one_alignment(
    specs: list[ParameterSpec], num_ranks: int, capacity_bytes: int
) -> None:
    for layout in layouts_of(specs, num_ranks, capacity_bytes):
        cut = cut_evenly(layout, num_ranks)
        assert (cut.slots, cut.numel, len(cut.cuts)) == (layout.slots, layout.numel, num_ranks + 1)
        lengths = [end - start for start, end in pairwise(cut.cuts)]
        alignment = max(1, ALIGNMENT_BYTES // layout.dtype.itemsize)
        assert all(length >= 0 for length in lengths)
        assert max(lengths) - min(lengths) <= 2 * alignment
        assert all(start % alignment == 0 or start == cut.numel for start in cut.cuts[:-1])


@plans
def test_places_cut_by_a_stretch_lie_in_it_with_a_part(
    specs: list[ParameterSpec], num_ranks: int, capacity_bytes: int
) -> None:
    for layout in layouts_of(specs, num_ranks, capacity_bytes):
        cut = cut_evenly(layout, num_ranks)
        held: dict[int, int] = {}
        for start, end in pairwise(cut.cuts):
            partly = cut.cut_slots(start, end)
            assert len(partly) <= 2
            for slot in cut.slots:
                begin, stop = slot.overlap(start, end, slot.offset)
                numel = max(0, stop - begin)
                held[slot.parameter] = held.get(slot.parameter, 0) + numel
                assert (slot in partly) == (0 < numel < slot.numel)
        assert held == {slot.parameter: slot.numel for slot in layout.slots}


@plans
def test_one_by_one_every_rank_owns_the_same_elements(
    specs: list[ParameterSpec], num_ranks: int, capacity_bytes: int
) -> None:
    for layout in layouts_of(specs, num_ranks, capacity_bytes):
        cut = cut_evenly(layout, num_ranks)
        alone = cut.one_by_one()
        assert [each.slots for each in alone] == [
            (Slot(slot.parameter, 0, slot.numel),) for slot in cut.slots
        ]
        for each, slot in zip(alone, cut.slots, strict=True):
            assert (each.cuts[0], each.numel) == (0, slot.numel)
            for (start, end), (own_start, own_end) in zip(
                pairwise(cut.cuts), pairwise(each.cuts), strict=True
            ):
                begin, stop = slot.overlap(start, end, slot.offset)
                assert (own_start, own_end) == (begin, stop) or (
                    own_start == own_end and begin >= stop
                )
