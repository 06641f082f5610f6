"""Uneven inputs: training equals one process that sees the active ranks' batches."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.nn.parallel import DistributedDataParallel

from tensorplay.distributed.algorithms.join import Join
from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tests.launch import run_ranks
from tests.reference.training import require_equal, set_gradients, values_of

BATCHES = {2: [2, 5], 3: [5, 1, 3], 4: [0, 4, 4, 2]}
ADAMW: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.LayerNorm(17), nn.Linear(17, 3))


def batch(rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)


def loss_of(model: nn.Module, rank: int, number: int) -> torch.Tensor:
    inputs, targets = batch(rank, number)
    return nn.functional.mse_loss(model(inputs), targets)


def decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)


def train_as_one(world_size: int, *, by_initial_world_size: bool) -> list[torch.Tensor]:
    """One process that sees all batches, divided as DDP divides."""
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    scheduler = decay(optimizer)
    for number in range(max(BATCHES[world_size])):
        active = [rank for rank, count in enumerate(BATCHES[world_size]) if number < count]
        divisor = world_size if by_initial_world_size else len(active)
        optimizer.zero_grad()
        for rank in active:
            (loss_of(model, rank, number) / divisor).backward()
        optimizer.step()
        scheduler.step()
    return values_of(model.parameters())


def _train_joined(resident: bool, order: str, by_initial_world_size: bool) -> list[torch.Tensor]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(make_net())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=resident, **ADAMW
    )
    scheduler = decay(optimizer)
    join, joinables = {
        "model first": (Join, [model, optimizer]),
        "optimizer first": (Join, [optimizer, model]),
        "torch's, model first": (TorchJoin, [model, optimizer]),
    }[order]
    with join(joinables, divide_by_initial_world_size=by_initial_world_size):
        for number in range(BATCHES[world_size][rank]):
            optimizer.zero_grad()
            loss_of(model, rank, number).backward()
            optimizer.step()
            scheduler.step()
    expected = train_as_one(world_size, by_initial_world_size=by_initial_world_size)
    for plain, actual in zip(expected, model.parameters(), strict=True):
        torch.testing.assert_close(actual, plain, rtol=1e-4, atol=2e-6)
    return values_of(model.parameters())


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("order", ["model first", "optimizer first", "torch's, model first"])
@pytest.mark.parametrize("world_size", BATCHES)
def test_equals_one_process_that_sees_the_active_ranks_batches(
    world_size: int, order: str, resident: bool
) -> None:
    first, *others = run_ranks(world_size, _train_joined, resident, order, True)
    for other in others:
        require_equal(first, other)


@pytest.mark.parametrize("world_size", BATCHES)
def test_dividing_by_the_number_of_active_ranks(world_size: int) -> None:
    run_ranks(world_size, _train_joined, False, "model first", False)


def _train_joined_with_sharded_gradients(
    ours: bool, by_initial_world_size: bool
) -> list[torch.Tensor]:
    """Every other iteration accumulates two passes; clipping and looking take part in the join."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = make_net()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, shard_gradients=True, module=model, **ADAMW
    )
    scheduler = decay(optimizer)
    join = Join if ours else TorchJoin
    with join([optimizer], divide_by_initial_world_size=by_initial_world_size):
        for number in range(BATCHES[world_size][rank]):
            optimizer.zero_grad()
            if number % 2:
                with optimizer.no_sync():
                    (0 * loss_of(model, rank, number)).backward()
            loss_of(model, rank, number).backward()
            norm = optimizer.clip_grad_norm_(1e9)
            gradients = [optimizer.full_grad(parameter) for parameter in model.parameters()]
            flat = torch.cat([each.flatten() for each in gradients if each is not None])
            torch.testing.assert_close(norm, flat.norm())
            optimizer.step()
            scheduler.step()
    expected = train_as_one(world_size, by_initial_world_size=by_initial_world_size)
    for plain, actual in zip(expected, model.parameters(), strict=True):
        torch.testing.assert_close(actual, plain, rtol=1e-4, atol=2e-6)
    return values_of(model.parameters())


@pytest.mark.parametrize("by_initial_world_size", [True, False])
@pytest.mark.parametrize("world_size", BATCHES)
def test_a_joined_rank_takes_part_in_sharded_reductions(
    world_size: int, by_initial_world_size: bool
) -> None:
    ours = world_size != 3
    first, *others = run_ranks(
        world_size, _train_joined_with_sharded_gradients, ours, by_initial_world_size
    )
    for other in others:
        require_equal(first, other)


def _equal_gradients() -> list[float]:
    """The faults' example: two weights that get equal gradients must stay equal."""
    model = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(2)])
    for weight in model.parameters():
        nn.init.ones_(weight)
    ddp = DistributedDataParallel(_Sum(model))
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=1.0)
    inputs = [torch.ones(1) * (number + 1) for number in range(10 + 20 * dist.get_rank())]
    with Join([ddp, optimizer]):
        for each in inputs:
            optimizer.zero_grad()
            ddp(each).sum().backward()
            optimizer.step()
    return [float(weight) for weight in ddp.parameters()]


class _Sum(nn.Module):
    def __init__(self, parts: nn.ModuleList) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.stack([part(inputs) for part in self.parts]).sum(0)


def test_two_weights_with_equal_gradients_stay_equal() -> None:
    expected = 1.0 - sum(n + 1 for n in range(10)) - sum(n + 1 for n in range(10, 30)) / 2
    assert run_ranks(2, _equal_gradients) == [[expected, expected]] * 2


def _accumulating() -> list[torch.Tensor]:
    rank = dist.get_rank()
    model = DistributedDataParallel(make_net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **ADAMW)
    with Join([optimizer, model]):
        for number in range(2 + 4 * rank):
            if number % 2 == 0:
                with model.no_sync():
                    loss_of(model, rank, number).backward()
            else:
                loss_of(model, rank, number).backward()
                optimizer.step()
                optimizer.zero_grad()
    return values_of(model.parameters())


def test_gradient_accumulation_inside_join() -> None:
    first, second = run_ranks(2, _accumulating)
    require_equal(first, second)


def _alone() -> list[torch.Tensor]:
    model = make_net()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **ADAMW)
    scheduler = decay(optimizer)
    with TorchJoin([optimizer]):
        for step in range(2 + 3 * dist.get_rank()):
            set_gradients(model.parameters(), step)
            optimizer.step()
            scheduler.step()
    plain_model = make_net()
    plain = torch.optim.AdamW(plain_model.parameters(), **ADAMW)
    scheduler = decay(plain)
    for step in range(2 + 3 * (dist.get_world_size() - 1)):
        set_gradients(plain_model.parameters(), step)
        plain.step()
        scheduler.step()
    require_equal(values_of(plain_model.parameters()), values_of(model.parameters()))
    return [torch.tensor(optimizer.param_groups[0]["lr"])]


def test_alone_through_torchs_join_bitwise_with_the_active_ranks_learning_rate() -> None:
    run_ranks(3, _alone)


def _sparse() -> list[torch.Tensor]:
    def forward(model: nn.Module, step: int) -> torch.Tensor:
        return model(torch.tensor([step % 7, 3])).sum()

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Embedding(7, 3, sparse=True))
    other = nn.Parameter(torch.ones(2, 2))
    optimizer = ZeroRedundancyOptimizer(
        [other, *model.parameters()], torch.optim.SparseAdam, lr=0.1
    )
    with Join([model, optimizer]):
        for step in range(2 + 2 * dist.get_rank()):
            optimizer.zero_grad()
            forward(model, step).backward()
            optimizer.step()
    return values_of(model.parameters())


def test_sparse_gradients_reach_a_joined_rank() -> None:
    first, second = run_ranks(2, _sparse)
    require_equal(first, second)


def _closure() -> None:
    model = make_net()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with (
        pytest.raises(ValueError, match="a closure can't be used inside Join"),
        Join([optimizer]),
    ):
        optimizer.step(lambda: 0.0)


def test_a_closure_inside_join_is_refused() -> None:
    run_ranks(2, _closure)


def _early_termination() -> None:
    model = DistributedDataParallel(make_net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with (  # noqa: PT012 - the loop is what raises
        pytest.raises(RuntimeError, match="exhausted"),
        Join([optimizer, model], throw_on_early_termination=True),
    ):
        for number in range(1 + dist.get_rank()):
            loss_of(model, dist.get_rank(), number).backward()
            optimizer.step()


def test_throwing_on_early_termination() -> None:
    run_ranks(2, _early_termination)


def _joinable_properties() -> None:
    group = dist.new_group([1, 0])
    optimizer = ZeroRedundancyOptimizer(make_net().parameters(), torch.optim.SGD, group, lr=0.1)
    assert optimizer.join_process_group is group
    assert optimizer.join_device == torch.device("cpu")
    with pytest.raises(ValueError, match="at least one joinable"):
        Join([])


def test_device_and_group_of_a_joinable() -> None:
    run_ranks(2, _joinable_properties)
