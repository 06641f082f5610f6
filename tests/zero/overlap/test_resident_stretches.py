"""Which parts of resident buckets can be sent by themselves."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tensorplay.distributed.optim._core.bucket_layout import BucketLayout, layout_buckets
from tensorplay.distributed.optim._core.parameter_spec import describe_parameters
from tensorplay.distributed.optim._core.partition import partition_whole
from tensorplay.distributed.optim.zero.gather_parameters import resident_stretches

NUM_RANKS = 3


def make_layouts(sizes: list[int]) -> tuple[BucketLayout, ...]:
    specs = describe_parameters([torch.nn.Parameter(torch.empty(size)) for size in sizes])
    owners = partition_whole(specs, NUM_RANKS).owners
    return layout_buckets(specs, owners, NUM_RANKS, 0, resident_capacity_bytes=400)


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=12),
    st.sets(st.integers(0, 11)),
    st.sampled_from([0, 100]),
)
def test_each_holds_only_what_was_asked_for_and_keeps_owners(
    sizes: list[int], indices: set[int], least_nbytes: int
) -> None:
    layouts = make_layouts(sizes)
    stretches = resident_stretches(layouts, indices, least_nbytes)
    found = [slot.parameter for stretch in stretches for slot in stretch.slots]
    assert len(found) == len(set(found))
    assert set(found) <= indices
    if not least_nbytes:
        assert set(found) == indices & set(range(len(sizes)))
    owner_of = {
        slot.parameter: rank
        for layout in layouts
        for rank in range(NUM_RANKS)
        for slot in layout.slots_of(rank)  # type: ignore[arg-type] # a plain number will do
    }
    for stretch in stretches:
        assert stretch.nbytes >= least_nbytes
        assert stretch.slots[0].offset == stretch.cuts[0] == 0
        assert stretch.slots[-1].offset + stretch.slots[-1].numel <= stretch.numel
        for rank in range(NUM_RANKS):
            for slot in stretch.slots_of(rank):  # type: ignore[arg-type] # a plain number will do
                assert owner_of[slot.parameter] == rank
