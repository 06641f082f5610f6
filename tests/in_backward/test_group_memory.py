"""What is alive during backward over a process group: the largest gradient and two buckets."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tensorplay.distributed.optim import apply_optimizer_in_backward
from tensorplay.distributed.optim.in_backward import group_gradients
from tests.reference.data_parallel import make_parameters
from tests.reference.traffic import counting
from tests.zero.gradients.test_memory import few_objects
from tests.zero.gradients.test_stepped_memory import CAPACITY, KINDS, least_peak
from tests.zero.gradients.test_stepped_memory import _backward as backward
from tests.zero.gradients.test_traffic import make_mixed

Run = Callable[..., list[Any]]
SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}


@pytest.fixture(autouse=True)
def bucket_nbytes() -> None:
    """The reducer's own buckets are what counts here."""


@contextmanager
def small_buckets() -> Iterator[None]:
    with mock.patch.object(group_gradients, "CAPACITY_BYTES", CAPACITY // 3):
        yield


def _measure(kind: str) -> dict[str, float]:
    with few_objects(), small_buckets():
        model = make_parameters(*KINDS[kind])
        apply_optimizer_in_backward(
            torch.optim.SGD, model.parameters(), SGD, process_group=dist.group.WORLD
        )
        for step in range(2):
            backward(model, step)
        peak, kept = least_peak(lambda: backward(model, 2))
        return {
            "gradients": sum(parameter.nbytes for parameter in model.parameters()),
            "largest": max(parameter.nbytes for parameter in model.parameters()),
            "peak": peak,
            "kept": kept,
        }


@pytest.mark.parametrize("kind", list(KINDS))
def test_gradients_alive_are_the_largest_and_two_buckets(run: Run, kind: str) -> None:
    for world_size in (2, 3):
        for facts in run(world_size, _measure, kind):
            few = 20_000  # of the graph
            assert facts["peak"] <= facts["largest"] + 2 * CAPACITY + few, facts
            assert facts["kept"] <= few
            assert facts["gradients"] > 1.5 * (facts["largest"] + 2 * CAPACITY)


def _traffic() -> Any:
    model = make_mixed()
    apply_optimizer_in_backward(
        torch.optim.SGD, model.parameters(), SGD, process_group=dist.group.WORLD
    )
    backward(model, 0)
    with counting() as (calls, nbytes):
        backward(model, 1)
    return calls, nbytes


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_step_sends_the_bytes_of_plain_ddp(run: Run, world_size: int) -> None:
    results = run(world_size, _traffic)
    model = sum(parameter.nbytes for parameter in make_mixed().parameters())
    sent = sum(nbytes["isend"] for _, nbytes in results)
    assert sent <= 1.02 * 2 * (world_size - 1) * model
    for calls, _ in results:
        assert calls["all_reduce"] == 2
        # Seven buckets; beside each, which of its parameters are used.
        assert calls["isend"] <= 3 * 7 * (world_size - 1)
        assert not set(calls) - {"all_reduce", "isend", "irecv"}
