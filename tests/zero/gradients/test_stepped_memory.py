"""What is alive while backward steps sharded gradients, and in which order things happen."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tensorplay.distributed.optim._core import step_schedule
from tensorplay.distributed.optim.zero import sharding_plan
from tests.reference.data_parallel import make_parameters, squares
from tests.reference.traffic import counting
from tests.zero.gradients.test_memory import few_objects, peak_at_communication
from tests.zero.gradients.test_traffic import make_mixed
from tests.zero.test_memory import live_bytes

Run = Callable[..., list[Any]]

CAPACITY = 256 * 1024
LARGE = (400, 400)
KINDS: dict[str, Any] = {
    "small": [(100, 40)] * 120,
    "large": [LARGE] * 8,
    "both": [LARGE, *[(100, 40)] * 10] * 5,
}


@contextmanager
def small_buckets() -> Iterator[None]:
    stepped = CAPACITY // 2
    with (
        mock.patch.object(sharding_plan, "STEPPED_CAPACITY_BYTES", stepped),
        mock.patch("tensorplay.distributed.optim.zero.gradients.STEPPED_CAPACITY_BYTES", stepped),
    ):
        yield


def _backward(model: nn.Module, step: int) -> None:
    """Each gradient comes when the one after it has been used, as in a deep network."""
    x = torch.full((), 1.0 + dist.get_rank() + step, requires_grad=True)
    for parameter in model.parameters():
        x = torch.sin(x + parameter.sum())
    x.backward()


def least_peak(backward: Callable[[], None]) -> tuple[int, int]:
    """The most bytes alive in a backward beside those before, and those kept after it.

    A thread of gloo's may let go of a message a moment after it has been awaited: of several tries
    the best one counts.
    """
    before, peaks, after = [], [], []
    for _ in range(3):
        before.append(live_bytes())
        with peak_at_communication() as seen:
            backward()
        peaks.append(max(seen))
        after.append(live_bytes())
    return min(peaks) - min(before), min(after) - min(before)


def _measure(kind: str, resident: bool) -> dict[str, float]:
    with few_objects(), small_buckets():
        model = make_parameters(*KINDS[kind])
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(),
            torch.optim.SGD,
            None,
            resident,
            overlap_with_ddp=True,
            shard_gradients=True,
            overlap_with_backward=True,
            lr=0.1,
            momentum=0.9,
        )
        for step in range(2):
            _backward(model, step)
        peak, kept = least_peak(lambda: _backward(model, 2))
        del optimizer
        return {
            "gradients": sum(parameter.nbytes for parameter in model.parameters()),
            "largest": max(parameter.nbytes for parameter in model.parameters()),
            "peak": peak,
            "kept": kept,
        }


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("resident", [False, True], ids=["own storage", "bucket view"])
def test_gradients_alive_are_the_largest_and_two_buckets(
    run: Run, kind: str, resident: bool
) -> None:
    for world_size in (2, 3) if kind == "both" else (2,):
        for facts in run(world_size, _measure, kind, resident):
            few = 20_000  # of the graph
            assert facts["peak"] <= facts["largest"] + 2 * CAPACITY + few, facts
            assert facts["kept"] <= few
            assert facts["gradients"] > 1.5 * (facts["largest"] + 2 * CAPACITY)


def _order_of_events(early: bool) -> list[str]:
    with small_buckets():
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(400, 400, bias=False) for _ in range(6)))
        optimizer = ZeroRedundancyOptimizer(
            layers.parameters(),
            torch.optim.SGD,
            overlap_with_ddp=True,
            shard_gradients=True,
            overlap_with_backward=early,
            lr=0.1,
        )
    events: list[str] = []
    reducer: Any = optimizer._gradients
    reducer._schedule._capacity_bytes = 1 << 30  # so that only their number counts
    stage: Any = optimizer._stage

    def noting(owner: Any, name: str, number_of: Callable[..., int]) -> None:
        original = getattr(owner, name)

        def call(*args: Any) -> Any:
            events.append(f"{name} {number_of(*args)}")
            return original(*args)

        setattr(owner, name, call)

    def number_of(bucket: Any) -> int:
        return 5 - bucket.layout.slots[0].parameter  # type: ignore[no-any-return] # of whatever bucket

    noting(reducer, "launch", number_of)
    noting(stage, "step", lambda averaged: number_of(averaged[0][0].bucket))
    noting(stage, "gather", lambda transfer, _: number_of(transfer.bucket))
    for number, layer in enumerate(layers):
        layer.weight.register_hook(lambda _, number=number: events.append(f"gradient {5 - number}"))
    with mock.patch.object(step_schedule, "STEPPED_BYTES", 0):
        layers(torch.ones(2, 400)).sum().backward()
    return events


@pytest.mark.parametrize("early", [True, False])
def test_a_bucket_is_stepped_and_gathered_while_the_next_are_under_way(
    run: Run, early: bool
) -> None:
    for events in run(2, _order_of_events, early):
        place = {event: position for position, event in enumerate(events)}
        assert len(place) == len(events) == 4 * 6
        for k in range(6):
            assert place[f"gradient {k}"] < place[f"launch {k}"] < place[f"step {k}"]
            assert place[f"step {k}"] < place[f"gather {k}"]
            if k < 5:  # the reduction of the next is issued before the step of this one begins
                assert place[f"launch {k + 1}"] < place[f"step {k}"]
                assert (place[f"launch {k}"] < place[f"gradient {k + 1}"]) == early
            if k < 4:  # and the gather of this one before the reduction of the one after ends
                assert place[f"gather {k}"] < place[f"step {k + 2}"]
        assert (place["gather 1"] < place["gradient 5"]) == early


def _traffic() -> list[Any]:
    model = make_mixed()
    ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, overlap_with_ddp=True, shard_gradients=True, lr=0.1
    )
    squares(0)(model, dist.get_rank())
    with counting() as (calls, nbytes):
        squares(1)(model, dist.get_rank())
    with counting() as (calls_of_step, _):
        optimizer.step()
        optimizer.zero_grad()
    return [calls, nbytes, calls_of_step]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_step_sends_the_bytes_of_plain_ddp(run: Run, world_size: int) -> None:
    results = run(world_size, _traffic)
    model = sum(parameter.nbytes for parameter in make_mixed().parameters())
    sent = sum(nbytes["isend"] for _, nbytes, _ in results)
    assert sent <= 1.02 * 2 * (world_size - 1) * model
    for calls, _, calls_of_step in results:
        assert calls["all_reduce"] == 2
        # Gradients, parameters, and which parameters were used, which travels beside the gradients.
        assert calls["isend"] <= 3 * (6 + 1) * (world_size - 1)
        assert calls["irecv"] <= 3 * (6 + 1) * (world_size - 1)
        assert not set(calls) - {"all_reduce", "isend", "irecv"}
        assert not calls_of_step


def _sends_of(resident: bool, early: bool) -> int:
    model = make_parameters(*[LARGE] * 8, (10,), (20,))
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.SGD,
        None,
        resident,
        overlap_with_ddp=True,
        shard_gradients=True,
        overlap_with_backward=early,
        lr=0.1,
    )
    with counting() as (calls, _):
        squares(0)(model, dist.get_rank())
        optimizer.step()
    return calls["isend"]


def test_large_parameters_of_a_bucket_are_gathered_by_one_message_of_each_owner(run: Run) -> None:
    small = 2  # each rank owns one of the two, which share a bucket
    assert run(2, _sends_of, False, False) == [8 + small] * 2
    assert run(2, _sends_of, True, False) == [4 + 1 + small] * 2
    assert run(2, _sends_of, True, True) == [8 + small + 5] * 2  # and who uses what
