"""What is averaged: the same set on every rank, buffers and state where asked for."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging import utils as torchs_utils
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tensorplay.distributed.algorithms.model_averaging import averagers, utils
from tensorplay.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from tensorplay.distributed.optim import PostLocalSGDOptimizer
from tests.launch import run_ranks


def filled(*, frozen: bool = False, shape: tuple[int, ...] = (2,)) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, float(dist.get_rank())), requires_grad=not frozen)


def first(*tensors: torch.Tensor) -> list[float]:
    return [tensor.view(-1)[0].item() for tensor in tensors]


def _gradients_on_one_rank_only() -> None:
    """The faults' example: torch would average one rank's first with the other's second."""
    one, two = filled(), filled()
    two.data += 10
    (one, two)[dist.get_rank()].grad = torch.zeros(2)
    PeriodicModelAverager(2).average_parameters([one, two])
    assert first(one, two) == [0.5, 10.5]


def _frozen_and_thawed() -> None:
    never, later, once = filled(frozen=True), filled(frozen=True), filled()
    groups = [{"params": [never, later]}, {"params": [once]}]
    averager = PeriodicModelAverager(2, 1)
    averager.average_parameters(groups)
    once.requires_grad_(False)
    averager.average_parameters(groups)
    own = float(dist.get_rank())
    assert first(never, later, once) == [own, own, 0.5]
    averager.average_parameters(groups)
    later.requires_grad_(True)
    averager.average_parameters(groups)
    assert first(never, later, once) == [own, 0.5, 0.5]


def _tied_and_replaced() -> None:
    tied, large = filled(), filled(shape=(70_000,))
    averager = PeriodicModelAverager(2)
    averager.average_parameters(itertools.chain([tied, large], [tied]))
    averager.average_parameters([tied, large, tied])
    tied.data = torch.full((2,), 4.0 + dist.get_rank())
    large.data = torch.full((70_000,), 6.0 + dist.get_rank(), dtype=torch.float64)
    averager.average_parameters([tied, large, tied])
    assert first(tied, large) == [4.5, 6.5]


def test_the_same_set_on_every_rank() -> None:
    run_ranks(2, _run, _gradients_on_one_rank_only, _frozen_and_thawed, _tied_and_replaced)


def _run(*functions: Any) -> None:
    for function in functions:
        function()


def _buffers_and_state() -> None:
    rank = dist.get_rank()
    model = nn.BatchNorm1d(3)
    assert model.running_mean is not None
    assert model.num_batches_tracked is not None

    def build(**options: Any) -> PostLocalSGDOptimizer:
        local = torch.optim.Adam(model.parameters(), lr=0.1)
        return PostLocalSGDOptimizer(local, PeriodicModelAverager(2), **options)

    optimizer = build(buffers=model.buffers())
    model.running_mean.fill_(rank)
    model.num_batches_tracked.fill_(rank)
    optimizer.step()
    assert first(model.running_mean, model.num_batches_tracked) == [0.5, rank]

    optimizer = build(
        buffers=model.buffers(),
        buffer_averager=PeriodicModelAverager(3, 1),
        state_averager=PeriodicModelAverager(2, 2),
    )
    model.running_mean.fill_(rank)
    weight = model.weight
    for step in range(3):
        weight.grad = torch.full_like(weight, float(rank))
        if rank == 1:  # rank 0 has no state for it
            model.bias.grad = torch.ones_like(model.bias)
        optimizer.step()
        assert first(model.running_mean) == [rank if step < 1 else 0.5]
    assert optimizer.state[weight]["exp_avg"][0] == pytest.approx(0.271 / 2)
    assert optimizer.state[weight]["step"] == 3
    assert (model.bias in optimizer.state) == (rank == 1)
    state = optimizer.state_dict()
    assert state["param_groups"][0]["buffer_averager_step"] == 3
    other = build(
        buffer_averager=PeriodicModelAverager(3, 1),
        state_averager=PeriodicModelAverager(2, 2),
    )
    other.load_state_dict(state)
    assert other.buffer_averager is not None
    assert other.state_averager is not None
    assert [a.step for a in (other.averager, other.buffer_averager, other.state_averager)] == [
        3
    ] * 3


def test_buffers_and_state_have_their_own_schedules() -> None:
    run_ranks(2, _buffers_and_state)


def _at_once() -> None:
    frozen, trained = filled(frozen=True), filled()
    own = float(dist.get_rank())
    assert utils.get_params_to_average([frozen, trained]) == [trained]
    assert utils.get_params_to_average([{"params": [trained, frozen]}]) == [trained]
    utils.average_parameters_or_parameter_groups([{"params": [frozen, trained]}], None)
    assert first(frozen, trained) == [own, 1.0]
    utils.average_parameters(iter([frozen]), dist.group.WORLD)
    assert first(frozen) == [1.0]
    outsiders = dist.new_group([0, 2])
    again = filled()
    utils.average_parameters(iter([again]), outsiders)
    assert first(again) == [own if dist.get_rank() == 1 else 1.0]
    assert set(utils.__all__) == set(torchs_utils.__all__)
    assert set(averagers.__all__) == {"ModelAverager", "PeriodicModelAverager"}


def test_averaging_at_once() -> None:
    run_ranks(3, _at_once)


def _hybrid_sharded() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    fully_shard(model, mesh=mesh["shard"])
    replicas = mesh["replicate"].get_group()
    local = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = PostLocalSGDOptimizer(local, PeriodicModelAverager(2, 1, replicas))
    for step in range(2):
        inputs = torch.full((4, 5), 1.0 + dist.get_rank(replicas) + step)
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        optimizer.step()
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, parameter.to_local().tolist(), group=replicas)
        assert gathered[0] == gathered[1]
    with pytest.raises(
        TypeError, match="DTensor of which the ranks of the process group hold diff"
    ):
        PeriodicModelAverager(2).average_parameters(model.parameters())


def test_local_shards_are_averaged_over_the_ranks_that_replicate_them() -> None:
    run_ranks(4, _hybrid_sharded)
