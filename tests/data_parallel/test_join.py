"""Uneven inputs: training equals one process that sees the active ranks' batches."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join as TorchJoin

from tensorplay.distributed.algorithms.join import Join
from tensorplay.distributed.optim import DistributedOptimizer
from tests.reference.training import values_of

Run = Callable[..., list[Any]]
BATCHES = {2: [2, 5], 3: [5, 0, 3]}
ADAMW: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.LayerNorm(17), nn.Linear(17, 3))


def loss_of(model: nn.Module, rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    inputs, targets = (torch.randn(4, n, generator=generator) for n in (6, 3))
    return nn.functional.mse_loss(model(inputs), targets)


def decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)


def train_as_one(world_size: int, *, by_initial_world_size: bool) -> list[torch.Tensor]:
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    scheduler = decay(optimizer)
    for number in range(max(BATCHES[world_size])):
        active = [rank for rank, count in enumerate(BATCHES[world_size]) if number < count]
        divisor = world_size if by_initial_world_size else len(active)
        optimizer.zero_grad()
        for rank in active:
            (loss_of(model, rank, number) / divisor).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
    return values_of(model.parameters())


def _joined(join: str, by_initial_world_size: bool, passes_per_step: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = make_net()
    optimizer = DistributedOptimizer(
        torch.optim.AdamW,
        model.parameters(),
        clip_grad_norm=0.5,
        backward_passes_per_step=passes_per_step,
        **ADAMW,
    )
    scheduler = decay(optimizer)
    context = {"ours": Join, "torch's": TorchJoin}[join]
    with context([optimizer], divide_by_initial_world_size=by_initial_world_size):
        for number in range(BATCHES[world_size][rank]):
            optimizer.zero_grad()
            loss_of(model, rank, number).backward()
            if number % 2:
                optimizer.synchronize()
            optimizer.step()
            scheduler.step()
    expected = train_as_one(world_size, by_initial_world_size=by_initial_world_size)
    for plain, actual in zip(expected, model.parameters(), strict=True):
        torch.testing.assert_close(actual.detach(), plain, rtol=1e-4, atol=2e-6)
    assert optimizer.check_replicas() is None


@pytest.mark.parametrize("passes_per_step", [1, 2])
@pytest.mark.parametrize("by_initial_world_size", [True, False])
@pytest.mark.parametrize(("world_size", "join"), [(2, "ours"), (3, "torch's")])
def test_uneven_inputs(
    run: Run, world_size: int, join: str, by_initial_world_size: bool, passes_per_step: int
) -> None:
    run(world_size, _joined, join, by_initial_world_size, passes_per_step)


def _closure_in_join() -> None:
    model = make_net()
    optimizer = DistributedOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="closure can't be used inside Join"), Join([optimizer]):
        optimizer.step(lambda: 0.0)


def test_a_closure_inside_join_is_refused(run: Run) -> None:
    run(2, _closure_in_join)
