"""With the hook, DDP and the sharded optimizer together send what plain DDP sends."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tensorplay.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import reduce_to_owners_hook
from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tests.reference.traffic import SCALAR_BYTES, counting
from tests.zero.overlap.twins import backward

Run = Callable[..., list[Any]]


class Uneven(nn.Module):
    """Large matrices, and small ones that are scattered in DDP's buckets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 71)
        self.large = nn.ModuleList(nn.Linear(400, 400) for _ in range(6))
        self.small = nn.ModuleList(nn.Linear(71, 71) for _ in range(20))
        self.last = nn.Linear(71, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        wide = hidden.new_ones(len(inputs), 400)
        for large in self.large:
            wide = large(wide).tanh()
        for small in self.small:
            hidden = (hidden + small(hidden)).tanh()
        return self.last(hidden) + wide.mean()


def make(options: dict[str, Any]) -> tuple[DistributedDataParallel, ZeroRedundancyOptimizer]:
    model = DistributedDataParallel(Uneven(), **options)
    zero = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=1e-3
    )
    model.register_comm_hook(None, reduce_to_owners_hook(model, zero))
    return model, zero


def _step(options: dict[str, Any]) -> tuple[Counter[str], Counter[str]]:
    model, zero = make(options)
    for step in range(3):
        zero.zero_grad()
        with counting() as counts:
            backward(model, step)
            zero.step()
    return counts


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 1}])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_step_sends_the_bytes_of_plain_ddp(
    run: Run, world_size: int, options: dict[str, Any]
) -> None:
    results = run(world_size, _step, options)
    model = sum(parameter.nbytes for parameter in Uneven().parameters())
    sent = sum(nbytes["isend"] for _, nbytes in results)
    plain_ddp = 2 * (world_size - 1) * model
    assert plain_ddp <= sent <= 1.02 * plain_ddp
    num_buckets = 1 if not options else 6
    for calls, nbytes in results:
        assert calls["all_reduce"] <= 3  # whether all is finite, and the two of step()
        assert nbytes["all_reduce"] <= 3 * SCALAR_BYTES
        assert calls["isend"] <= num_buckets * 20 * (world_size - 1)
        assert calls["irecv"] <= num_buckets * 20 * (world_size - 1)
        assert not set(calls) - {"all_reduce", "isend", "irecv"}


def _accumulation() -> dict[str, int]:
    model, _ = make({})
    backward(model, 0)
    with counting() as (calls, _), model.no_sync():
        backward(model, 1)
        backward(model, 2)
    return dict(calls)


def test_accumulation_sends_nothing(run: Run) -> None:
    assert run(2, _accumulation) == [{}, {}]


def _in_rounds() -> list[float]:
    from unittest import mock

    losses = []
    for capacity in (1 << 30, 64 * 1024):
        with mock.patch("tensorplay.distributed.optim.zero.ddp_reduction.CAPACITY_BYTES", capacity):
            model, zero = make({})
            for step in range(3):
                zero.zero_grad()
                with counting() as (calls, _):
                    backward(model, step)
                zero.step()
            losses.append(float(sum(p.detach().double().sum() for p in model.parameters())))
        if capacity < 1 << 30:
            assert calls["irecv"] > 10
    assert dist.get_world_size() > 1
    return losses


def test_large_buckets_travel_in_rounds(run: Run) -> None:
    for whole, in_rounds in run(3, _in_rounds):
        assert whole == in_rounds
