"""DTensor parameters: local shards are optimized across the ranks that hold the same ones."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tensorplay.distributed.algorithms.join import Join
from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tests.launch import run_ranks
from tests.reference.training import require_equal


def make_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def make_parameters(mesh: DeviceMesh) -> list[torch.nn.Parameter]:
    """Two sharded by rows and by columns, one replicated over tp, one plain."""
    torch.manual_seed(0)
    tp = mesh["tp"]
    return [
        torch.nn.Parameter(distribute_tensor(torch.randn(4, 6), tp, [Shard(0)])),
        torch.nn.Parameter(distribute_tensor(torch.randn(5, 8), tp, [Shard(1)])),
        torch.nn.Parameter(distribute_tensor(torch.randn(7), tp, [Replicate()])),
        torch.nn.Parameter(torch.randn(9)),
    ]


def set_gradients(parameters: list[torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        gradient = torch.randn(parameter.shape, generator=generator)
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        parameter.grad = gradient


def local(value: Any) -> Any:
    if isinstance(value, DTensor):
        return [str(value.placements), value.to_local().detach().clone()]
    if isinstance(value, dict):
        return {key: local(item) for key, item in value.items()}
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _train(resident: bool) -> None:
    mesh = make_mesh()
    parameters, plain_parameters = make_parameters(mesh), make_parameters(mesh)
    plain = torch.optim.AdamW(plain_parameters, lr=0.1, foreach=False)
    options: dict[str, Any] = {"lr": 0.1, "foreach": False}
    sharded = ZeroRedundancyOptimizer(
        parameters,
        torch.optim.AdamW,
        mesh["dp"].get_group(),
        parameters_as_bucket_view=resident,
        **options,
    )
    for step in range(4):
        if step == 2:
            plain, sharded = _reload(plain, sharded, parameters, plain_parameters, mesh)
        set_gradients(parameters, step)
        set_gradients(plain_parameters, step)
        sharded.step()
        plain.step()
        for expected, actual in zip(plain_parameters, parameters, strict=True):
            require_equal(local(expected), local(actual), f"step {step}: ")


def _reload(
    plain: torch.optim.Optimizer,
    sharded: ZeroRedundancyOptimizer,
    parameters: list[torch.nn.Parameter],
    plain_parameters: list[torch.nn.Parameter],
    mesh: DeviceMesh,
) -> tuple[torch.optim.Optimizer, ZeroRedundancyOptimizer]:
    """Both go on from a dict of the sharded optimizer, which must be the plain one's."""
    for target in range(2):
        sharded.consolidate_state_dict(to=target)
        if dist.get_rank(mesh["dp"].get_group()) == target:
            state = sharded.state_dict()
    require_equal(local(plain.state_dict()["state"]), local(state["state"]))
    new_plain = torch.optim.AdamW(plain_parameters, lr=0.7, foreach=False)
    new_plain.load_state_dict(state)
    new_sharded = ZeroRedundancyOptimizer(
        parameters, torch.optim.AdamW, mesh["dp"].get_group(), lr=0.7, foreach=False
    )
    new_sharded.load_state_dict(state)
    return new_plain, new_sharded


@pytest.mark.parametrize("resident", [False, True])
def test_bitwise_equal_to_the_plain_optimizer_through_saving_and_loading(resident: bool) -> None:
    run_ranks(4, _train, resident)


def _join() -> list[Any]:
    mesh = make_mesh()
    group = mesh["dp"].get_group()
    parameters, plain_parameters = make_parameters(mesh), make_parameters(mesh)
    sharded = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, group, lr=0.1)
    with Join([sharded]):
        for step in range(1 + 2 * dist.get_rank(group)):
            set_gradients(parameters, step)
            sharded.step()
    plain = torch.optim.SGD(plain_parameters, lr=0.1)
    for step in range(3):
        set_gradients(plain_parameters, step)
        plain.step()
    for expected, actual in zip(plain_parameters, parameters, strict=True):
        require_equal(local(expected), local(actual))
    return []


def test_a_joined_rank_gets_the_gradients_of_its_shards() -> None:
    run_ranks(4, _join)


def _sharded_across_the_group() -> None:
    mesh = make_mesh()
    for group in (mesh["tp"].get_group(), dist.group.WORLD):
        with pytest.raises(
            TypeError, match=r"parameter 0 of group 0 is a DTensor of which the ran"
        ):
            ZeroRedundancyOptimizer(make_parameters(mesh), torch.optim.AdamW, group)


def test_a_group_whose_ranks_hold_different_parts_is_refused() -> None:
    run_ranks(4, _sharded_across_the_group)
