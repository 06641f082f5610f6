"""Real training under DistributedDataParallel: equal to DDP with the plain optimizer."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tests.launch import run_ranks
from tests.reference.training import require_equal, values_of


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 17), nn.ReLU(), nn.LayerNorm(17), nn.Linear(17, 3))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)


def train(model: nn.Module, optimizer: Any, steps: int = 5, clip: float | None = None) -> None:
    for step in range(steps):
        inputs, targets = batch(step, dist.get_rank())
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


ADAMW = {"lr": 0.05, "weight_decay": 0.1, "fused": True}


def _compare(resident: bool, build_first: bool, ddp_options: dict[str, Any]) -> list[torch.Tensor]:
    group = dist.new_group([2, 0]) if dist.get_world_size() == 3 else dist.group.WORLD
    if dist.get_rank() == 1 and dist.get_world_size() == 3:
        return []
    plain_model = DistributedDataParallel(make_net(), process_group=group, **ddp_options)
    train(plain_model, torch.optim.AdamW(plain_model.parameters(), **ADAMW), clip=0.5)
    net = make_net()
    options = {"parameters_as_bucket_view": resident, "process_group": group, **ADAMW}
    if build_first:
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, **options)
    model = DistributedDataParallel(net, process_group=group, **ddp_options)
    if not build_first:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options)
    train(model, optimizer, clip=0.5)
    require_equal(values_of(plain_model.parameters()), values_of(model.parameters()))
    return values_of(model.parameters())


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("build_first", [False, True], ids=["DDP first", "optimizer first"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_bitwise_equal_to_ddp_with_the_plain_optimizer(
    world_size: int, build_first: bool, resident: bool
) -> None:
    ddp_options = {"gradient_as_bucket_view": build_first}
    replicas = run_ranks(world_size, _compare, resident, build_first, ddp_options)
    for replica in replicas[1:]:
        if replica:
            require_equal(replicas[0], replica)


def _union_of_batches() -> None:
    model = DistributedDataParallel(make_net())
    train(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **ADAMW))
    plain_model = make_net()
    plain = torch.optim.AdamW(plain_model.parameters(), **ADAMW)
    for step in range(5):
        batches = [batch(step, rank) for rank in range(dist.get_world_size())]
        inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        plain.zero_grad()
        nn.functional.mse_loss(plain_model(inputs), targets).backward()
        plain.step()
    for expected, actual in zip(plain_model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


def test_equals_one_process_on_the_union_of_the_batches() -> None:
    run_ranks(3, _union_of_batches)


def _accumulating() -> None:
    models = [DistributedDataParallel(make_net()) for _ in range(2)]
    optimizers = [
        torch.optim.AdamW(models[0].parameters(), **ADAMW),
        ZeroRedundancyOptimizer(models[1].parameters(), torch.optim.AdamW, **ADAMW),
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        for step in range(6):
            inputs, targets = batch(step, dist.get_rank())
            if step % 2 == 0:
                with model.no_sync():
                    nn.functional.mse_loss(model(inputs), targets).backward()
            else:
                nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
    require_equal(values_of(models[0].parameters()), values_of(models[1].parameters()))


def test_gradient_accumulation_with_no_sync() -> None:
    run_ranks(2, _accumulating)


def _tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first = nn.Linear(6, 6)
            self.second = nn.Linear(6, 6, bias=False)
            self.second.weight = self.first.weight
            self.last = nn.Linear(6, 3)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.last(torch.relu(self.second(torch.relu(self.first(inputs)))))

    plain_model = DistributedDataParallel(Tied())
    train(plain_model, torch.optim.AdamW(plain_model.parameters(), **ADAMW))
    for resident in (False, True):
        net = Tied()
        model = DistributedDataParallel(net)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=resident, **ADAMW
        )
        train(model, optimizer)
        require_equal(values_of(plain_model.parameters()), values_of(model.parameters()))
        assert net.first.weight is net.second.weight


def test_tied_weights_stay_tied() -> None:
    run_ranks(2, _tied)


def _module_stays_usable() -> None:
    net = make_net()
    optimizer = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **ADAMW
    )
    model = DistributedDataParallel(net)
    train(model, optimizer, 2)
    other = copy.deepcopy(net)
    state = net.state_dict()
    other.load_state_dict(state)
    net.load_state_dict(other.state_dict())  # in place, into the bucket
    train(model, optimizer, 2)


def test_the_model_can_be_copied_saved_and_loaded_in_bucket_view() -> None:
    run_ranks(2, _module_stays_usable)
