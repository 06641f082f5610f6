"""What is returned is one optimizer: accumulation, clipping, checkpoints, ``step``, scaling."""

import copy
import io
import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict as dcp
from torch import nn
from torch.nn import utils
from torch.optim import Optimizer

from tensorplay.distributed.optim import apply_optimizer_in_backward
from tests.in_backward.models import (
    ADAMW,
    Net,
    batch,
    loss_of,
    make_twins,
    require_twins_equal,
    train_inside,
    train_plain,
)
from tests.reference.training import require_equal


def test_accumulation_over_micro_batches() -> None:
    plain_net, optimizer, net, inside = twins = make_twins()
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(3):
            loss_of(plain_net, batch(3 * step + micro)).backward()
        if step == 1:  # a gradient of an accumulated backward only
            plain_net.unused(torch.ones(3)).sum().backward()
        optimizer.step()
        with inside.accumulate():
            for micro in range(2):
                before = copy.deepcopy(net.state_dict())
                loss_of(net, batch(3 * step + micro)).backward()
                require_equal(dict(before), dict(net.state_dict()))
            if step == 1:
                net.unused(torch.ones(3)).sum().backward()
        assert net.scale.grad is not None
        train_inside(net, 1, 3 * step + 2)
    require_twins_equal(*twins)


def test_gradients_dropped_by_zero_grad_are_not_used() -> None:
    *plain, net, inside = twins = make_twins()
    train_plain(*plain)  # type: ignore[misc] # mypy can't check what is unpacked or optional here
    with inside.accumulate():
        loss_of(net, batch(7)).backward()
    inside.zero_grad()
    train_inside(net)
    require_twins_equal(*twins)


def test_clipping_by_value() -> None:
    *plain, net, _ = twins = make_twins(clip_value=1e-3)
    train_plain(*plain, clip=lambda parameters: utils.clip_grad_value_(parameters, 1e-3))  # type: ignore[misc] # mypy can't check what is unpacked or optional here
    train_inside(net)
    require_twins_equal(*twins)


def test_clipping_by_the_norm_of_each_parameter() -> None:
    def clip(parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            utils.clip_grad_norm_([parameter], 1e-2)

    *plain, net, _ = twins = make_twins(clip_parameter_norm=1e-2)
    train_plain(*plain, clip=clip)  # type: ignore[misc] # mypy can't check what is unpacked or optional here
    train_inside(net)
    require_twins_equal(*twins)


def norm_of(net: nn.Module) -> torch.Tensor:
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    return torch.linalg.vector_norm(torch.cat([g.flatten().double() for g in grads]))


def require_close(expected: nn.Module, actual: nn.Module) -> None:
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(actual.state_dict()[name], value, rtol=1e-5, atol=1e-6)


def test_clipping_by_the_norm_of_the_previous_backward_and_resuming() -> None:
    options = {"lr": 0.5}
    plain_net, optimizer, net, inside = make_twins(torch.optim.SGD, options, clip_previous_norm=0.1)
    previous = None
    for step in range(5):
        optimizer.zero_grad()
        loss_of(plain_net, batch(step)).backward()
        norm = norm_of(plain_net)
        if previous is not None:
            for parameter in plain_net.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(min(1.0, 0.1 / (float(previous) + 1e-6)))
        assert norm > 0.1  # so clipping does something
        previous = norm
        optimizer.step()
        if step == 3:  # as if stopped and resumed
            fresh = Net()
            fresh.load_state_dict(net.state_dict())
            again = apply_optimizer_in_backward(
                torch.optim.SGD, fresh.parameters(), options, clip_previous_norm=0.1
            )
            again.load_state_dict(inside.state_dict())
            net, inside = fresh, again
        train_inside(net, 1, step)
    require_close(plain_net, net)


def test_clipping_by_the_norm_of_all_gradients_in_two_passes() -> None:
    *plain, net, inside = make_twins(torch.optim.SGD, {"lr": 0.5, "momentum": 0.5})
    train_plain(*plain, clip=lambda parameters: utils.clip_grad_norm_(parameters, 0.1))  # type: ignore[misc] # mypy can't check what is unpacked or optional here
    for step in range(4):
        draws = []

        def closure(step: int = step, draws: list[float] = draws) -> torch.Tensor:
            draws.append(torch.rand(()).item())
            loss = loss_of(net, batch(step))
            loss.backward()
            return loss.detach()

        loss = inside.clip_norm_in_two_passes(closure, max_norm=0.1)
        assert loss > 0
        assert len(draws) == 2
        assert draws[0] == draws[1]  # dropout would drop the same
        assert net.scale.grad is None
    require_close(plain[0], net)


def test_two_passes_refuse_what_they_would_lose() -> None:
    *_, net, inside = make_twins()
    with inside.accumulate():
        loss_of(net, batch(0)).backward()
    with pytest.raises(RuntimeError, match="would lose the gradients that have been accumulated"):
        inside.clip_norm_in_two_passes(lambda: None, 1.0)
    inside.zero_grad()
    apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {})
    with pytest.raises(RuntimeError, match="the only one to step"):
        inside.clip_norm_in_two_passes(lambda: None, 1.0)


def test_clipping_after_backward_says_why_it_cannot() -> None:
    *_, inside = make_twins()
    with pytest.raises(RuntimeError, match=r"clip_previous_norm=.*clip_norm_in_two_passes"):
        inside.clip_grad_norm_(1.0)


def test_step_explains_itself_once() -> None:
    *plain, net, inside = twins = make_twins()
    train_plain(*plain)  # type: ignore[misc] # mypy can't check what is unpacked or optional here
    with pytest.warns(UserWarning, match=r"step\(\) does nothing"):
        inside.step()
    for step in range(4):
        inside.zero_grad()
        train_inside(net, 1, step)
        inside.step()
    require_twins_equal(*twins)


def test_step_calls_a_closure_and_returns_its_loss() -> None:
    *_, net, inside = make_twins()
    before = net.scale.item()

    def closure() -> torch.Tensor:
        loss = loss_of(net, batch(0))
        loss.backward()
        return loss.detach()

    with pytest.warns(UserWarning, match="does nothing"):
        assert inside.step(closure) > 0
    assert net.scale.item() != before


def test_grad_scaler_is_refused_with_the_reason() -> None:
    *_, net, inside = make_twins()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(net, batch(0))).backward()
    with pytest.raises(RuntimeError, match=r"GradScaler can't be used .*bfloat16"):
        scaler.step(inside)
    with pytest.warns(UserWarning, match="does nothing"):
        inside.step()


@pytest.mark.parametrize("into", ["plain", "inside"])
def test_state_dicts_move_to_and_from_the_plain_optimizer(into: str) -> None:
    plain_net, optimizer, net, inside = make_twins()
    train_plain(plain_net, optimizer, 2)
    train_inside(net, 2)
    source: Optimizer = inside if into == "plain" else optimizer
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    kept = copy.deepcopy(saved)
    (optimizer if into == "plain" else inside).load_state_dict(saved)
    train_plain(plain_net, optimizer, 2, 2)
    train_inside(net, 2, 2)
    require_twins_equal(plain_net, optimizer, net, inside)
    if into == "inside":
        require_equal(kept, saved, "the caller's dict: ")


def test_a_state_dict_that_does_not_fit_changes_nothing() -> None:
    *plain, net, inside = twins = make_twins()
    train_plain(*plain)  # type: ignore[misc] # mypy can't check what is unpacked or optional here
    train_inside(net, 2)
    with pytest.raises(ValueError, match="doesn't match"):
        inside.load_state_dict(torch.optim.AdamW([nn.Parameter(torch.ones(2))]).state_dict())
    train_inside(net, 2, 2)
    require_twins_equal(*twins)


@pytest.mark.parametrize("trained", [False, True])
def test_distributed_checkpoint(trained: bool) -> None:
    plain_net, optimizer, net, inside = make_twins()
    if trained:
        train_plain(plain_net, optimizer, 2)
        train_inside(net, 2)
    before = copy.deepcopy(net.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own
        saved = dcp.get_optimizer_state_dict(net, inside)
        require_equal(dcp.get_optimizer_state_dict(plain_net, optimizer), saved)
        require_equal(dict(before), dict(net.state_dict()))
        fresh = Net()
        fresh.load_state_dict(net.state_dict())
        again = apply_optimizer_in_backward(torch.optim.AdamW, fresh.parameters(), ADAMW)
        # "unused" has no state, with the plain optimizer neither.
        lenient = dcp.StateDictOptions(strict=False)
        dcp.set_optimizer_state_dict(fresh, again, copy.deepcopy(saved), options=lenient)
        dcp.set_optimizer_state_dict(plain_net, optimizer, saved, options=lenient)
    train_plain(plain_net, optimizer, 2, 2)
    train_inside(fresh, 2, 2)
    require_twins_equal(plain_net, optimizer, fresh, again)


def test_it_is_an_optimizer() -> None:
    *_, net, inside = make_twins()
    assert isinstance(inside, Optimizer)
    assert inside.defaults["weight_decay"] == 0.1
    assert inside.param_groups is inside.optim.param_groups
    assert "AdamW inside backward" in repr(inside)
    calls: list[Any] = []
    inside.optim.register_step_post_hook(lambda *_: calls.append(1))
    train_inside(net, 1)
    assert calls
    assert inside.state[net.scale]["step"] == 1
