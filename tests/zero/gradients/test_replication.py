"""Every rank begins with rank 0's values, and a module's buffers follow rank 0's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tests.reference.data_parallel import make_parameters, square_loss
from tests.reference.training import require_equal, values_of

Run = Callable[..., list[Any]]
MODES = pytest.mark.parametrize("resident", [False, True], ids=["own storage", "bucket view"])

SHAPES: Any = (
    (3, 4),
    (400, 400),
    (),
    (0, 4),
    (7, torch.bfloat16),
    (5, torch.complex64),
    (2, 2, torch.float64),
)


def make_values(rank: int) -> list[torch.Tensor]:
    model = make_parameters(*SHAPES)
    model.append(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    model.append(torch.randn(4, 3, 2)[..., 0])
    return [parameter.detach() * (rank + 1) for parameter in model.parameters()]


def _initial_values(resident: bool) -> None:
    rank = dist.get_rank()
    parameters = [nn.Parameter(value) for value in make_values(rank)]
    parameters[1].requires_grad_(False)
    strides = [parameter.stride() for parameter in parameters]
    ZeroRedundancyOptimizer(
        parameters,
        torch.optim.SGD,
        parameters_as_bucket_view=resident,
        shard_gradients=True,
        lr=0.1,
    )
    require_equal(make_values(0), values_of(parameters))
    assert strides == [parameter.stride() for parameter in parameters]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@MODES
def test_ranks_begin_with_the_values_of_rank_0(run: Run, world_size: int, resident: bool) -> None:
    run(world_size, _initial_values, resident)


def _on_subgroup() -> None:
    members = [3, 1]
    group = dist.new_group(members)
    rank = dist.get_rank()
    if rank in members:
        parameters = [nn.Parameter(value) for value in make_values(rank)]
        ZeroRedundancyOptimizer(parameters, torch.optim.SGD, group, shard_gradients=True, lr=0.1)
        first = dist.get_process_group_ranks(group)[0]
        require_equal(make_values(first), values_of(parameters))


def test_the_first_of_a_subgroup_counts(run: Run) -> None:
    run(4, _on_subgroup)


def _only_with_shard_gradients() -> None:
    parameters = [nn.Parameter(value) for value in make_values(dist.get_rank())]
    ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)
    require_equal(make_values(dist.get_rank()), values_of(parameters))


def test_without_shard_gradients_nothing_is_broadcast(run: Run) -> None:
    run(2, _only_with_shard_gradients)


class _Rest(nn.Module):
    """What the optimizer isn't given."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.used = nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.full((4, 5), 1.0 + rank), requires_grad=False)
        self.left_out = nn.Parameter(torch.full((500, 400), 1.0 + rank))
        self.register_buffer("counter", torch.tensor(rank))
        self.register_buffer("empty", torch.ones(0, 3))
        self.register_buffer("complex", torch.full((3,), 1j + rank))
        self.register_buffer("flags", torch.tensor([rank == 0, True]))
        self.register_buffer("hidden", torch.full((3, 2), float(rank)).t(), persistent=False)


def _rest_of_the_module() -> None:
    rank = dist.get_rank()
    module, expected = _Rest(rank), _Rest(0)
    expected.used.load_state_dict(module.used.state_dict())
    ZeroRedundancyOptimizer(
        module.used.parameters(), torch.optim.SGD, shard_gradients=True, module=module, lr=0.1
    )
    require_equal(values_of(expected.buffers()), values_of(module.buffers()))
    for name in ("frozen", "left_out"):
        require_equal(getattr(expected, name).detach(), getattr(module, name).detach())


def test_the_rest_of_a_module_is_broadcast_too(run: Run) -> None:
    run(2, _rest_of_the_module)


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def inputs_of(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(5, 6, generator=generator)


def _batch_norm(resident: bool) -> None:
    ddp = DistributedDataParallel(make_net())
    plain = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    model = make_net()
    if dist.get_rank() == 1:
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.add_(1)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.SGD,
        parameters_as_bucket_view=resident,
        shard_gradients=True,
        module=model,
        lr=0.1,
        momentum=0.9,
    )
    for step in range(4):
        for current, its_optimizer in ((ddp, plain), (model, optimizer)):
            its_optimizer.zero_grad()
            current(inputs_of(step)).square().sum().backward()
            its_optimizer.step()
        require_equal(values_of(ddp.module.parameters()), values_of(model.parameters()))
        expected = values_of(ddp.module.buffers())
        for tensor in expected:  # DDP's other ranks get rank 0's before the next forward
            dist.broadcast(tensor, 0)
        require_equal(expected, values_of(model.buffers()))


@MODES
def test_batch_norm_statistics_are_those_of_ddp(run: Run, resident: bool) -> None:
    run(2, _batch_norm, resident)


def _two_backwards(mode: str) -> None:
    """Buffers that a graph still needs may be brought up to date between its passes."""
    model = make_net()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, shard_gradients=True, module=model, lr=0.1
    )
    model.train(mode != "evaluation")
    if mode == "two forwards":
        losses = [model(inputs_of(step)).square().sum() for step in range(2)]
    else:
        hidden = model(inputs_of(0))
        losses = [hidden.square().sum(), hidden.sum()]
    losses[0].backward(retain_graph=True)
    losses[1].backward()
    optimizer.step()
    for tensor in (*model.parameters(), *model.buffers()):
        copy = tensor.detach().clone()
        dist.broadcast(copy, 0)
        require_equal(copy, tensor.detach())


@pytest.mark.parametrize("mode", ["two losses", "two forwards", "evaluation"])
def test_batch_norm_in_two_backwards(run: Run, mode: str) -> None:
    run(2, _two_backwards, mode)


def _no_sync() -> None:
    model = make_net()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, shard_gradients=True, module=model, lr=0.1
    )
    with optimizer.no_sync():
        model(inputs_of(0)).square().sum().backward()
    gathered = [torch.empty(8) for _ in range(2)]
    dist.all_gather(gathered, model[1].running_mean)
    assert not torch.equal(*gathered), "no_sync communicates nothing"
    optimizer.step()
    dist.all_gather(gathered, model[1].running_mean)
    assert torch.equal(*gathered)


def test_buffers_follow_with_the_reduction(run: Run) -> None:
    run(2, _no_sync)


def _replaced_buffer() -> None:
    model = make_net()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, shard_gradients=True, module=model, lr=0.1
    )
    model[1].running_mean = torch.full((8,), 5.0 + dist.get_rank())
    square_loss(model.parameters(), dist.get_rank()).backward()
    optimizer.step()
    assert torch.equal(model[1].running_mean, torch.full((8,), 5.0))


def test_a_buffer_that_was_replaced(run: Run) -> None:
    run(2, _replaced_buffer)
