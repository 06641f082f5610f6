"""``GradScaler``: what it skips on one rank leaves the averages where they are on all."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.amp import GradScaler

from tensorplay.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from tensorplay.distributed.optim import PostLocalSGDOptimizer
from tests.launch import run_ranks
from tests.reference.training import make_model, require_equal, set_gradients, values_of

KERNELS: tuple[dict[str, Any], ...] = ({}, {"fused": True}, {"foreach": False})
STEPS, SPOILT = 7, {1, 3}


def _train(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, scaler: GradScaler, clip: bool
) -> None:
    """Gradients of rank 1 overflow in some steps."""
    scaler.scale(torch.zeros(()))  # as it is when a loss has been scaled
    parameters = list(model.parameters())
    for step in range(STEPS):
        set_gradients(parameters, 10 * step + dist.get_rank())
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad *= scaler.get_scale()
        if dist.get_rank() == 1 and step in SPOILT:
            assert parameters[0].grad is not None
            parameters[0].grad.view(-1)[0] = torch.inf
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        scaler.step(optimizer)
        scaler.update()


def _as_the_plain_optimizer(clip: bool) -> None:
    """Without averages, each rank trains as the plain optimizer under its own scaler."""
    for kernel in KERNELS:
        results = []
        for local in (False, True):
            model, scaler = make_model(), GradScaler("cpu", init_scale=8.0, growth_interval=3)
            optimizer: torch.optim.Optimizer = torch.optim.Adam(
                model.parameters(), lr=0.1, **kernel
            )
            if local:
                optimizer = PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(2, 1000))
            _train(optimizer, model, scaler, clip)
            results.append([values_of(model.parameters()), scaler.get_scale()])
        require_equal(*results, f"{kernel}: ")
        assert isinstance(optimizer, PostLocalSGDOptimizer)
        assert optimizer.averager.step == STEPS


@pytest.mark.parametrize("clip", [False, True])
def test_steps_and_scales_are_the_plain_optimizers(clip: bool) -> None:
    run_ranks(2, _as_the_plain_optimizer, clip)


def _averaging() -> tuple[int, float]:
    model, scaler = make_model(), GradScaler("cpu", init_scale=8.0, growth_interval=100)
    local = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer = PostLocalSGDOptimizer(local, PeriodicModelAverager(3))
    _train(optimizer, model, scaler, clip=False)
    assert STEPS % 3 == 1  # the last step averages
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, values_of(model.parameters()))
    require_equal(gathered[0], gathered[1])
    return optimizer.averager.step, scaler.get_scale()


def test_the_count_is_equal_although_the_scales_are_not() -> None:
    assert run_ranks(2, _averaging) == [(STEPS, 8.0), (STEPS, 2.0)]


def _half() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    parameter.grad = torch.ones_like(parameter)
    local = torch.optim.SGD([parameter], lr=0.1)
    optimizer = PostLocalSGDOptimizer(local, PeriodicModelAverager(2, 1))
    scaler = GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    with pytest.raises(ValueError, match="float16 can't be unscaled"):
        scaler.step(optimizer)


def test_half_precision_gradients_are_refused_as_the_scaler_does() -> None:
    run_ranks(1, _half)
