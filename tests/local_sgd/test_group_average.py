"""Plans of averages, and averages by them between threads: every element once, whatever the sizes."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorplay.distributed.optim._core.collectives import CommunicationError
from tensorplay.distributed.optim.local_sgd import averaging_plan
from tensorplay.distributed.optim.local_sgd.averaged_tensors import AveragedTensors
from tensorplay.distributed.optim.local_sgd.averaging_plan import fits_slot, plan_parcels
from tensorplay.distributed.optim.local_sgd.group_average import GroupAverage
from tests.core.specs import make_spec
from tests.fakes import FakeCommunicator, run_fake_ranks

BUCKET, IN_PLACE = 400, 160
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(averaging_plan, "BUCKET_BYTES", BUCKET)
    monkeypatch.setattr(averaging_plan, "IN_PLACE_FROM_BYTES", IN_PLACE)


TENSORS = st.lists(
    st.tuples(st.integers(0, 300), st.sampled_from(DTYPES), st.booleans(), st.booleans()),
    max_size=12,
)


@given(TENSORS)
@settings(max_examples=200, deadline=None)
def test_every_element_is_in_exactly_one_parcel(tensors: list[Any]) -> None:
    specs = [
        make_spec(i, numel, dtype=dtype, memory_unit=0 if overlaps else None)
        for i, (numel, dtype, _, overlaps) in enumerate(tensors)
    ]
    dense = [is_dense for _, _, is_dense, _ in tensors]
    seen: Counter[tuple[int, int]] = Counter()
    for parcel in plan_parcels(specs, dense):
        members = [specs[piece.tensor] for piece in parcel.pieces]
        for piece in parcel.pieces:
            seen.update((piece.tensor, place) for place in range(piece.start, piece.end))
        assert {member.dtype for member in members} == {members[0].dtype}
        assert parcel.dtype in {torch.float32, torch.float64}
        assert len(members) == 1 or (parcel.packed and not parcel.alone)
        assert parcel.alone or not parcel.packed or fits_slot(parcel)
        if not parcel.packed:
            assert parcel.dtype == members[0].dtype.to_real()
            assert parcel.numel == parcel.pieces[0].end
        elif len(members) > 1 or (not parcel.alone and dense[members[0].index]):
            assert parcel.nbytes <= BUCKET // averaging_plan.NUM_SLOTS
    expected = {
        (spec.index, place)
        for spec in specs
        for place in range(spec.numel * (2 if spec.dtype.is_complex else 1))
    }
    assert seen == Counter(expected)


def make_tensors(rank: int, sizes: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randn(size, generator=generator, dtype=torch.float64).to(DTYPES[i % len(DTYPES)])
        for i, size in enumerate(sizes)
    ]


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_mean_whatever_the_sizes(world_size: int, deferred: bool) -> None:
    sizes = [0, 1, 500, 17, 3, 60, 99, 100, 101, 250, 7, 7, 7, 40, 41, 39]

    def average(communicator: FakeCommunicator) -> list[torch.Tensor]:
        tensors = make_tensors(communicator.members.group_rank, sizes)
        averaging = GroupAverage(communicator, "Test")
        averaging.settle("average", tensors, None)
        averaging.average_()
        return tensors

    everyones = [make_tensors(rank, sizes) for rank in range(world_size)]
    results = run_fake_ranks(world_size, average, deferred=deferred)
    for index, size in enumerate(sizes):
        wide = torch.complex128 if results[0][index].is_complex() else torch.float64
        mean = torch.stack([tensors[index].to(wide) for tensors in everyones]).mean(0)
        for tensors in results:
            assert len(tensors[index]) == size
            torch.testing.assert_close(tensors[index], mean.to(tensors[index].dtype))


def test_equal_replicas_are_found_out_without_sending_them() -> None:
    def average(communicator: FakeCommunicator) -> tuple[int, int]:
        tensors = [torch.arange(300.0), torch.arange(5.0)]
        averaging = GroupAverage(communicator, "Test")
        counts = []
        for _ in range(2):
            averaging.settle("average", tensors, None)
            averaging.average_()
            counts.append(communicator.calls["average_"])
            tensors[1][0] = communicator.members.group_rank  # not in the largest tensor
        return counts[0], counts[1]

    assert run_fake_ranks(3, average) == [(0, 2)] * 3


def test_a_failure_says_what_was_under_way() -> None:
    class Broken(FakeCommunicator):
        def average_(self, *_: Any) -> Any:
            raise CommunicationError("from all ranks: connection lost")

    def average(communicator: FakeCommunicator) -> str:
        averaging = GroupAverage(communicator, "Test")
        averaging.settle("average", [torch.ones(3)], None)
        communicator.__class__ = Broken
        with pytest.raises(CommunicationError) as raised:
            averaging.average_()
        return str(raised.value)

    message, _ = run_fake_ranks(2, average)
    assert message == ("averaging 1 tensors in 1 parcels failed, from all ranks: connection lost")


def test_what_is_too_large_for_a_slot_is_divided_or_travels_alone() -> None:
    def make(rank: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(rank)
        shared = torch.randn(100, generator=generator).bfloat16()
        gaps = torch.randn(40, 10, generator=generator)[:, ::2]
        return [shared, shared[20:80], gaps, torch.randn(5, generator=generator)]

    def average(communicator: FakeCommunicator) -> list[torch.Tensor]:
        tensors = make(communicator.members.group_rank)
        plans = [parcel.plan for parcel in AveragedTensors(tensors).parcels]
        assert [plan.pieces[0].tensor for plan in plans if not fits_slot(plan)] == [2]
        assert {piece.tensor for plan in plans if plan.alone for piece in plan.pieces} == {0, 1, 2}
        averaging = GroupAverage(communicator, "Test")
        for _ in range(2):  # what has left its memory finds some again
            averaging.settle("average", tensors, None)
            averaging.average_()
        return tensors

    everyones = [make(rank) for rank in range(2)]
    for tensors in run_fake_ranks(2, average):
        for index, tensor in enumerate(tensors):
            mean = torch.stack([each[index].float() for each in everyones]).mean(0)
            torch.testing.assert_close(tensor, mean.to(tensor.dtype), rtol=0, atol=0)
