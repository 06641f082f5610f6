"""What sharded gradients keep alive, by a ledger of live tensors: a share, and two buckets."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tensorplay.distributed.optim._core.collectives import GroupCommunicator
from tensorplay.distributed.optim.zero import sharding_plan
from tests.reference.data_parallel import make_parameters, square_loss
from tests.zero.test_memory import live_bytes

Run = Callable[..., list[Any]]

CAPACITY = 64 * 1024
KINDS: dict[str, Any] = {
    "small": [(25, 40)] * 80,
    "large": [(400, 400)] * 4,
    "both": [(25, 40)] * 40 + [(400, 400)] * 3,
}


@contextmanager
def small_buckets() -> Iterator[None]:
    with (
        mock.patch.object(sharding_plan, "CAPACITY_BYTES", CAPACITY),
        mock.patch.object(sharding_plan, "LEAST_STAGED_CAPACITY_BYTES", CAPACITY),
        mock.patch("tensorplay.distributed.optim.zero.gradients.CAPACITY_BYTES", CAPACITY),
    ):
        yield


@contextmanager
def peak_at_communication() -> Iterator[list[int]]:
    """Live bytes whenever something has been launched."""
    seen: list[int] = []

    def watched(name: str) -> Any:
        original = getattr(GroupCommunicator, name)

        def call(self: Any, *args: Any) -> Any:
            launched = original(self, *args)
            seen.append(live_bytes())
            return launched

        return call

    verbs = ("exchange", "gather_from_owners")
    with mock.patch.multiple(GroupCommunicator, **{name: watched(name) for name in verbs}):
        yield seen


@contextmanager
def few_objects() -> Iterator[None]:
    """Keeps everything that is there out of the ledger, so that reading it is quick."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _measure(kind: str, resident: bool) -> dict[str, float]:
    with few_objects():
        return _measure_new(kind, resident)


def _measure_new(kind: str, resident: bool) -> dict[str, float]:
    with small_buckets():
        model = make_parameters(*KINDS[kind])
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(),
            torch.optim.SGD,
            parameters_as_bucket_view=resident,
            shard_gradients=True,
            lr=0.1,
            momentum=0.9,
        )

    def backward() -> None:
        square_loss(model.parameters(), dist.get_rank()).backward()

    for _ in range(2):
        backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.zero_grad()
    before = live_bytes()
    with peak_at_communication() as in_backward:
        backward()
    after_backward = live_bytes()
    with peak_at_communication() as in_step:
        optimizer.step()
    after_step = live_bytes()
    optimizer.zero_grad()
    size = sum(parameter.nbytes for parameter in model.parameters())
    return {
        "model": size,
        "largest share": max(r.elements * 4 for r in optimizer.sharding_report().ranks),
        "peak in backward": max(in_backward) - before,
        "kept by backward": after_backward - before,
        "peak in step": max(in_step) - after_backward,
        "kept by step": after_step - before,
        "kept by zero_grad": live_bytes() - before,
        "before": before - size,
    }


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("resident", [False, True], ids=["own storage", "bucket view"])
def test_gradients_are_a_share_and_two_buckets(run: Run, kind: str, resident: bool) -> None:
    for world_size in (2, 3) if kind == "both" else (2,):
        for facts in run(world_size, _measure, kind, resident):
            few = 4000
            assert facts["kept by backward"] <= facts["largest share"] + 2 * CAPACITY + few
            assert facts["kept by step"] <= facts["largest share"] + 2 * CAPACITY + few
            assert facts["peak in step"] <= 2 * CAPACITY + few
            assert facts["kept by zero_grad"] <= few
            # Gradients come up in full before they are reduced; what is received is two buckets.
            assert facts["peak in backward"] <= facts["model"] + 4 * CAPACITY + few


def _dropped() -> list[bool]:
    model = make_parameters(*KINDS["both"])
    optimizer: Any = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, shard_gradients=True, module=model, lr=0.1
    )
    square_loss(model.parameters(), dist.get_rank()).backward()
    optimizer.step()
    watched = [weakref.ref(optimizer), *map(weakref.ref, model.parameters())]
    del optimizer
    gc.collect()
    gone = [watched[0]() is None]
    del model
    gc.collect()
    return [*gone, all(each() is None for each in watched)]


def test_nothing_is_kept_alive_once_the_optimizer_and_the_model_are_dropped(run: Run) -> None:
    assert run(2, _dropped) == [[True, True]] * 2


def _frozen_costs_nothing() -> int:
    model = nn.ParameterList(
        nn.Parameter(torch.randn(200, 100), requires_grad=number < 2) for number in range(20)
    )
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, shard_gradients=True, lr=0.1
    )
    square_loss(model.parameters(), 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = live_bytes()
    square_loss(model.parameters(), 0).backward()
    return live_bytes() - before


def test_frozen_parameters_have_no_gradient_memory(run: Run) -> None:
    for kept in run(2, _frozen_costs_nothing):
        assert kept <= 2 * 200 * 100 * 4 + 4000
