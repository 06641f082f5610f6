"""Norms, clipping and single gradients, where each rank holds its own part."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tests.reference.data_parallel import Passes, Twins, make_parameters, squares
from tests.reference.training import require_equal

Run = Callable[..., list[Any]]
NORM_TYPES = (1.0, 2.0, 3.0, 0.5, math.inf)


def make() -> nn.ParameterList:
    parameters = make_parameters(
        (3, 4),
        (400, 400),
        (),
        (0, 4),
        (17, torch.bfloat16),
        (500, 300, torch.float64),
        (6, torch.complex64),
        (9,),
    )
    parameters.append(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    return parameters


def norm_of(gradients: list[torch.Tensor], norm_type: float) -> float:
    """In float64, over all elements at once."""
    flat = torch.cat([gradient.abs().double().reshape(-1) for gradient in gradients])
    return torch.linalg.vector_norm(flat, norm_type).item()


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _clipped(norm_type: float, fraction: float) -> float:
    twins = Twins(make)
    twins.backward(squares(0, without=lambda _: (7,)))
    before = gradients_of(twins.plain_model)
    expected = norm_of(before, norm_type)
    max_norm = fraction * expected
    norm = twins.sharded.clip_grad_norm_(max_norm, norm_type)
    assert (norm.shape, norm.device.type) == ((), "cpu")
    # For other p the powers of float32 cost some digits more.
    assert math.isclose(norm.item(), expected, rel_tol=1e-4 if norm_type == 3 else 1e-5)
    coefficient = min(1.0, max_norm / (expected + 1e-6))
    for ours, plain in zip(twins.model.parameters(), twins.plain_model.parameters(), strict=True):
        full = twins.sharded.full_grad(ours)
        if plain.grad is None:
            assert full is None
            continue
        assert full is not None
        if fraction > 1:
            require_equal(plain.grad + 0, full + 0)
        whole = (plain.grad * coefficient).to(full.dtype)
        rounding = 1e-2 if full.dtype is torch.bfloat16 else 1e-4 if norm_type == 3 else 1e-5
        torch.testing.assert_close(full, whole, rtol=rounding, atol=1e-9)
    nn.utils.clip_grad_norm_(
        [p for p in twins.plain_model.parameters() if not p.is_complex()], 1.0
    )  # it refuses nothing on whole gradients
    twins.sharded.step()
    return norm.item()


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("fraction", [0.1, 2.0])
def test_clipping_equals_that_of_the_whole_model(
    run: Run, norm_type: float, fraction: float
) -> None:
    first, *others = run(3, _clipped, norm_type, fraction)
    assert others == [first] * 2, "the norm is the same on every rank"


def _accurate(norm_type: float) -> float:
    twins = Twins(lambda: make_parameters((2500, 2400), (300,)), torch.optim.SGD)
    twins.backward(lambda model, _: sum(p.square().sum() for p in model.parameters()).backward())
    expected = norm_of(gradients_of(twins.plain_model), norm_type)
    return twins.sharded.clip_grad_norm_(1.0, norm_type).item() / expected - 1


@pytest.mark.parametrize("norm_type", [1.0, 2.0])
def test_the_norm_is_accurate_over_six_million_elements(run: Run, norm_type: float) -> None:
    for error in run(2, _accurate, norm_type):
        assert abs(error) < 1e-5


def spoiled(value: float) -> Passes:
    """On rank 1 the gradient of the last parameter has one element that isn't finite."""

    def passes(model: nn.Module, rank: int) -> None:
        *_, last = model.parameters()
        loss = sum(p.square().sum() for p in model.parameters())
        if rank == 1:
            loss = loss + value * last.view(-1)[0]
        loss.backward()

    return passes


def _not_finite(norm_type: float, value: float, owner_of_last: int) -> tuple[float, str]:
    # The largest parameter goes to rank 0, the second largest to rank 1.
    shapes = [(20,), (30,)] if owner_of_last == 0 else [(30,), (20,)]
    twins = Twins(lambda: make_parameters(*shapes))
    twins.backward(spoiled(value))
    message = ""
    try:
        twins.sharded.clip_grad_norm_(1.0, norm_type, error_if_nonfinite=True)
    except RuntimeError as error:
        message = str(error)
    twins.require_same_gradients("after the error")
    return twins.sharded.clip_grad_norm_(1.0, norm_type).item(), message


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_norm_that_is_not_finite(run: Run, norm_type: float, value: float) -> None:
    for owner_of_last in (0, 1):
        results = run(2, _not_finite, norm_type, value, owner_of_last)
        for norm, message in results:
            assert not math.isfinite(norm)
            assert math.isnan(norm) == math.isnan(value)
            assert "cannot be clipped" in message or "can't be clipped" in message


def _nothing_to_clip() -> list[float]:
    norms = []
    twins = Twins(lambda: make_parameters((3,), (0, 4), (0,)))
    norms.append(twins.sharded.clip_grad_norm_(1.0).item())
    for sizes in ((), (1,), (0, 2)):
        twins.zero_grad()
        twins.backward(squares(0, without=lambda _, sizes=sizes: sizes))
        expected = norm_of(gradients_of(twins.plain_model), 2.0)
        norms += [twins.sharded.clip_grad_norm_(1e9, p).item() for p in (2.0, math.inf)]
        assert math.isclose(norms[-2], expected, rel_tol=1e-5)
    twins.step()
    return norms


def test_without_gradients_or_elements(run: Run) -> None:
    first, *others = run(3, _nothing_to_clip)
    assert first[0] == 0
    assert first[-2:] == [0, 0]
    assert others == [first] * 2


def _torchs_own() -> list[str]:
    twins = Twins(lambda: make_parameters((3, 4), (5,)))
    twins.backward(squares(0))
    messages = []
    for function in (
        lambda: nn.utils.clip_grad_norm_(twins.model.parameters(), 1.0),
        lambda: nn.utils.clip_grad_norm_(twins.model.parameters(), 1.0, foreach=False),
        lambda: nn.utils.clip_grad_value_(twins.model.parameters(), 1.0),
        lambda: nn.utils.get_total_norm([p.grad for p in twins.model.parameters()]),
        lambda: torch.cat([p.grad.flatten() for p in twins.model.parameters()]),
    ):
        with pytest.raises(TypeError) as caught:
            function()
        messages.append(str(caught.value))
    return messages


def test_torchs_own_functions_refuse_gradients_that_are_not_whole(run: Run) -> None:
    for messages in run(2, _torchs_own):
        for message in messages:
            assert "clip_grad_norm_()" in message
            assert "full_grad(parameter)" in message


def _averaged_elsewhere() -> None:
    model, plain = make(), make()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    for each in (model, plain):
        squares(0)(each, 0)
    expected = norm_of(gradients_of(plain), 2.0)
    norm = optimizer.clip_grad_norm_(0.1)
    assert math.isclose(norm.item(), expected, rel_tol=1e-5)
    for ours, whole in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert whole.grad is not None
        torch.testing.assert_close(ours.grad, (whole.grad * 0.1 / expected).to(whole.dtype))
    optimizer.step()


def test_gradients_that_somebody_else_has_averaged(run: Run) -> None:
    run(2, _averaged_elsewhere)


def _on_subgroup() -> None:
    group = dist.new_group([3, 1])
    if dist.get_rank() not in (1, 3):
        return
    twins = Twins(make, group=group)
    twins.backward(squares(0))
    expected = norm_of(gradients_of(twins.plain_model), 2.0)
    assert math.isclose(twins.sharded.clip_grad_norm_(1.0).item(), expected, rel_tol=1e-5)


def test_on_a_subgroup(run: Run) -> None:
    run(4, _on_subgroup)


def _full_grad_is_a_copy() -> None:
    twins = Twins(make)
    assert all(twins.sharded.full_grad(p) is None for p in twins.model.parameters())
    twins.backward(squares(0))
    for plain, ours in zip(twins.plain_model.parameters(), twins.model.parameters(), strict=True):
        full = twins.sharded.full_grad(ours)
        assert full is not None
        assert plain.grad is not None
        assert full.stride() == plain.grad.stride()
        assert not full.requires_grad
        full.fill_(7)
    twins.require_same_gradients()


def test_full_grad_is_a_copy_in_the_strides_of_the_parameter(run: Run) -> None:
    run(2, _full_grad_is_a_copy)


def _after_no_sync() -> None:
    twins = Twins(make)
    twins.backward(squares(0), sync=False)
    twins.backward(squares(1), sync=False)
    twins.one.reduce()
    expected = norm_of(gradients_of(twins.plain_model), 2.0)
    norm = twins.sharded.clip_grad_norm_(1e9)
    assert math.isclose(norm.item(), expected, rel_tol=1e-5)
    twins.require_same_gradients()


def test_what_no_sync_accumulated_is_reduced_first(run: Run) -> None:
    run(2, _after_no_sync)
