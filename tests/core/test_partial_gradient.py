"""A partial gradient passes for nothing else; what is right part by part goes through."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from tensorplay.distributed.optim._core.partial_gradient import PartialGradient


def make(*parts: torch.Tensor, dtype: torch.dtype = torch.float32) -> PartialGradient:
    return PartialGradient(nn.Parameter(torch.ones(3, 4, dtype=dtype)), parts)


def test_it_has_the_shape_and_strides_of_the_parameter() -> None:
    parameter = nn.Parameter(torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last))
    gradient = PartialGradient(parameter)
    parameter.grad = gradient
    assert parameter.grad is gradient
    assert (gradient.shape, gradient.stride()) == (parameter.shape, parameter.stride())
    assert (gradient.dtype, gradient.device) == (parameter.dtype, parameter.device)
    assert not gradient.requires_grad
    assert "shape=(2, 3, 4, 5)" in repr(gradient)


@pytest.mark.parametrize(
    "look",
    [
        lambda g: g.norm(),
        lambda g: g + 1,
        lambda g: g.clone(),
        lambda g: g.clamp_(-1, 1),
        lambda g: g.add_(1),
        lambda g: g.copy_(torch.ones(3, 4)),
        lambda g: g.sum(),
        lambda g: g[0],
        lambda g: g.tolist(),
        lambda g: g.numpy(),
        lambda g: g.isfinite(),
        lambda g: torch.ones(3, 4).add_(g),
        lambda g: torch.equal(g, g),
        lambda g: g.mul_(g),
        lambda g: torch._foreach_norm([torch.ones(2), g]),
        lambda g: torch._foreach_add_([torch.ones(3, 4)], [g]),
    ],
)
def test_what_needs_a_whole_gradient_is_refused(look: Callable[[Any], Any]) -> None:
    part = torch.ones(5)
    with pytest.raises((TypeError, RuntimeError)):
        look(make(part))
    assert torch.equal(part, torch.ones(5))


def test_the_refusal_names_the_cure() -> None:
    with pytest.raises(TypeError, match=r"clip_grad_norm_\(\).*full_grad\(parameter\)"):
        make().norm()


def test_scaling_and_zeroing_reach_every_part_once() -> None:
    shared, own, whole = torch.ones(2), torch.ones(3), torch.ones(4)
    gradients = [make(shared), make(shared, own), whole]
    torch._foreach_mul_(gradients, 3.0)
    torch._foreach_mul_(gradients, torch.tensor(2.0))
    for part in (shared, own, whole):
        assert torch.equal(part, torch.full_like(part, 6.0))
    gradients[1].div_(2)
    assert own[0] == shared[0] == 3
    torch._foreach_zero_(gradients)
    assert not any(part.any() for part in (shared, own, whole))


@pytest.mark.parametrize("foreach", [True, False])
def test_zero_grad_zeroes_the_parts(foreach: bool) -> None:
    parameter, part = nn.Parameter(torch.ones(3, 4)), torch.ones(2)
    optimizer = torch.optim.SGD([parameter], lr=0.1, foreach=foreach)
    parameter.grad = PartialGradient(parameter, (part,))
    optimizer.zero_grad(set_to_none=False)
    assert not part.any()


@pytest.mark.parametrize("value", [1.0, math.inf, math.nan])
def test_grad_scaler_unscales_and_checks_the_parts(value: float) -> None:
    parameter, part = nn.Parameter(torch.ones(3, 4)), torch.tensor([8.0, value])
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    parameter.grad = PartialGradient(parameter, (part,))
    scaler.unscale_(optimizer)
    assert part[0] == 2
    parameter.grad = None
    scaler.update()
    assert scaler.get_scale() == (4.0 if math.isfinite(value) else 2.0)


def test_detaching_keeps_the_parts() -> None:
    part = torch.ones(2)
    assert make(part).detach().parts[0] is part
