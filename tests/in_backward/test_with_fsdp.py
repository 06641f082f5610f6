"""FSDP2 modules: each rank's shard is stepped inside backward."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import utils

from tensorplay.distributed.optim import apply_optimizer_in_backward
from tensorplay.distributed.optim.in_backward import local_gradients
from tests.launch import run_ranks
from tests.reference.ddp import ADAMW, batch, make_net
from tests.reference.training import require_equal

ADAM = torch.optim.AdamW


@pytest.fixture(autouse=True)
def bucket_nbytes() -> None:
    """The ranks set it themselves."""


def make_sharded(**options: Any) -> nn.Sequential:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = make_net()
    for layer in net:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    return net


def backward(model: nn.Module, step: int) -> None:
    inputs, targets = batch(step)
    nn.functional.mse_loss(model(inputs), targets).backward()


def local_values(model: nn.Module) -> list[torch.Tensor]:
    return [p.to_local().detach().clone() for p in model.parameters()]  # type: ignore[attr-defined] # mypy can't see that it has this


def _train() -> None:
    for num_bytes in (100, 1 << 20):
        local_gradients.BUCKET_NBYTES = num_bytes
        for options in ({}, {"reshard_after_forward": False}):
            for given in (True, False):
                plain, model = make_sharded(**options), make_sharded(**options)
                optimizer = ADAM(plain.parameters(), **ADAMW)
                inside = apply_optimizer_in_backward(
                    ADAM, model.parameters(), ADAMW, module=model if given else None
                )
                for step in range(4):
                    optimizer.zero_grad()
                    backward(plain, step)
                    optimizer.step()
                    backward(model, step)
                    assert all(p.grad is None for p in model.parameters())
                require_equal(local_values(plain), local_values(model))
                assert len(inside.state) == len(list(model.parameters()))


def _accumulate_and_clip() -> None:
    plain, model = make_sharded(), make_sharded()
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    inside = apply_optimizer_in_backward(
        torch.optim.SGD, model.parameters(), {"lr": 0.1}, module=model
    )
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(2):
            backward(plain, 2 * step + micro)
        optimizer.step()
        with inside.accumulate():
            backward(model, 2 * step)
        backward(model, 2 * step + 1)
    require_equal(local_values(plain), local_values(model))
    for step in range(6, 9):
        optimizer.zero_grad()
        backward(plain, step)
        utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
        inside.clip_norm_in_two_passes(lambda step=step: backward(model, step), 0.1)
    for expected, actual in zip(local_values(plain), local_values(model), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def _registered_before_sharding() -> None:
    net = make_net()
    apply_optimizer_in_backward(ADAM, net.parameters(), ADAMW, module=net)
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    with pytest.raises(RuntimeError, match="only after fully_shard"):
        backward(net, 0)


def _all() -> None:
    _train()
    _accumulate_and_clip()
    _registered_before_sharding()


def test_fully_sharded_modules() -> None:
    run_ranks(2, _all)
