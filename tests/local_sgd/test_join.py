"""Uneven inputs: joined ranks receive the mean of the active ones."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tensorplay.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from tensorplay.distributed.algorithms.join import Join
from tensorplay.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from tensorplay.distributed.algorithms.model_averaging.hierarchical_model_averager import (
    HierarchicalModelAverager,
)
from tensorplay.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from tests.launch import run_ranks
from tests.reference.ddp import batch, make_net
from tests.reference.training import require_equal, values_of

COUNTS = {2: [3, 7], 3: [7, 2, 5], 4: [1, 7, 4, 4]}


def _alone() -> tuple[list[float], int]:
    """Parameters count the steps of their rank; averages over the active ranks only."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    parameter = nn.Parameter(torch.full((300_000,), 100.0 * rank))
    small = nn.Parameter(torch.full((3,), 100.0 * rank))
    local = torch.optim.SGD([parameter, small], lr=1.0)
    optimizer = PostLocalSGDOptimizer(local, PeriodicModelAverager(2))
    with Join([optimizer]):
        for _ in range(COUNTS[world_size][rank]):
            for each in (parameter, small):
                each.grad = -torch.ones_like(each)
            optimizer.step()
    return [parameter[0].item(), parameter[-1].item(), small[0].item()], optimizer.averager.step


def as_one(world_size: int) -> float:
    values = [100.0 * rank for rank in range(world_size)]
    for step in range(max(COUNTS[world_size])):
        active = [r for r in range(world_size) if step < COUNTS[world_size][r]]
        for rank in active:
            values[rank] += 1.0
        if step % 2 == 0:
            mean = sum(values[rank] for rank in active) / len(active)
            values = [mean] * world_size
    return values[0]


@pytest.mark.parametrize("world_size", COUNTS)
def test_the_mean_is_that_of_the_active_ranks(world_size: int) -> None:
    expected = as_one(world_size)
    for values, step in run_ranks(world_size, _alone):
        assert values == pytest.approx([expected] * 3)
        assert step == max(COUNTS[world_size])


def _with_ddp(order: int, sharded: bool) -> None:
    subgroup, _ = dist.new_subgroups(group_size=2)
    model = DistributedDataParallel(make_net())
    state = PostLocalSGDState(None, subgroup, 2)
    model.register_comm_hook(state, post_localSGD_hook)
    local: torch.optim.Optimizer
    if sharded:
        local = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, subgroup, lr=0.1)
    else:
        local = torch.optim.Adam(model.parameters(), lr=0.1)
    averager = HierarchicalModelAverager({2: 2, 4: 4}, 2)
    optimizer = PostLocalSGDOptimizer(local, averager, hook_state=state)
    with Join([model, optimizer][::order]):
        for number in range(COUNTS[4][dist.get_rank()]):
            inputs, targets = batch(number)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    assert (averager.step, state.iter) == (7, 2)
    gathered: list[Any] = [None] * 4
    dist.all_gather_object(gathered, values_of(model.parameters()))
    for other in gathered[1:]:
        require_equal(gathered[0], other)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("order", [1, -1])
def test_with_a_model_and_its_hook_in_any_order(order: int, sharded: bool) -> None:
    run_ranks(4, _with_ddp, order, sharded)
