"""Exceptions inside backward: found out on every rank, and the next iteration starts clean."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tests.reference.data_parallel import Passes, Twins, make_parameters, square_loss, squares

Run = Callable[..., list[Any]]

LARGE = (400, 400)


class _Stop(Exception):  # noqa: N818 - it isn't an error of ours
    pass


def make() -> nn.ParameterList:
    return make_parameters((3, 4), LARGE, (17,), (5, 3, 2), LARGE, (9,))


class _Stops(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(*_: Any) -> Any:
        raise _Stop


def aborted(model: nn.Module, rank: int) -> None:
    """A backward pass that ends in the middle: some parameters have got gradients."""
    parameters = list(model.parameters())
    early = _Stops.apply(square_loss(parameters[:3], rank))
    loss = early + square_loss(parameters[3:], rank)
    try:
        loss.backward()
    except _Stop:
        return
    raise AssertionError("the backward pass wasn't aborted")


def _all_alike(zero_grad: str, averages_before: bool) -> None:
    twins = Twins(make)
    twins.train(squares, steps=1)
    if averages_before:
        twins.backward(squares(5))
    aborted(twins.model, twins.rank)
    for step in range(3):
        twins.plain.zero_grad()
        (twins.sharded if zero_grad == "optimizer" else twins.model).zero_grad()
        twins.backward(squares(step))
        twins.require_same_gradients(f"step {step}")
        twins.step()
        twins.require_same(f"step {step}")


@pytest.mark.parametrize("zero_grad", ["optimizer", "model"])
@pytest.mark.parametrize("averages_before", [False, True])
def test_the_next_iteration_starts_clean(run: Run, zero_grad: str, averages_before: bool) -> None:
    run(2, _all_alike, zero_grad, averages_before)


def _step_after() -> None:
    twins = Twins(make)
    twins.train(squares, steps=1)
    aborted(twins.model, twins.rank)
    with pytest.raises(RuntimeError, match="last backward pass ended in an exception"):
        twins.sharded.step()
    twins.require_same("nothing has changed, ")
    twins.train(squares)


def test_a_step_after_an_aborted_pass_raises(run: Run) -> None:
    run(2, _step_after)


def _clip_after(call: str) -> None:
    twins = Twins(make)
    aborted(twins.model, twins.rank)
    look: Callable[[], Any] = {
        "clip": lambda: twins.sharded.clip_grad_norm_(1.0),
        "full_grad": lambda: twins.sharded.full_grad(next(twins.model.parameters())),
    }[call]
    with pytest.raises(RuntimeError, match="last backward pass ended in an exception"):
        look()
    twins.train(squares)


@pytest.mark.parametrize("call", ["clip", "full_grad"])
def test_looking_at_gradients_after_an_aborted_pass_raises(run: Run, call: str) -> None:
    run(2, _clip_after, call)


def _swallowed(next_call: str) -> str:
    """Only rank 1's pass is aborted, and it goes on as if nothing had been."""
    twins = Twins(make)
    twins.train(squares, steps=1)
    twins.zero_grad()
    message = ""
    try:
        if twins.rank == 1:
            aborted(twins.model, twins.rank)
            if next_call == "step":
                twins.sharded.step()
            elif next_call == "clip":
                twins.sharded.clip_grad_norm_(1.0)
            else:
                twins.sharded.zero_grad()
                squares(2)(twins.model, twins.rank)
        else:
            squares(1)(twins.model, twins.rank)
    except RuntimeError as error:
        message = str(error)
    twins.require_same("nothing has changed, ")
    twins.train(lambda step: squares(step + 2))
    return message


@pytest.mark.parametrize("next_call", ["step", "clip", "backward"])
def test_a_rank_that_swallowed_one_is_found_out_and_all_can_go_on(run: Run, next_call: str) -> None:
    first, second = run(2, _swallowed, next_call)
    for message in (first, second):
        assert message, "this rank has noticed nothing"
    assert "backward" in first + second


def _no_parameter_used() -> str:
    """On rank 1 the loss depends on none of the parameters, so that nobody can notice its pass."""
    twins = Twins(make)
    other = torch.ones((), requires_grad=True)
    try:
        if twins.rank == 0:
            squares(0)(twins.model, 0)
        else:
            (other * 2).backward()
        twins.sharded.step()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_pass_that_reaches_no_parameter_at_all_is_an_error_on_every_rank(run: Run) -> None:
    for message in run(2, _no_parameter_used):
        assert "backward" in message
        assert "step" in message


class _Segment(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.stops = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = _Stops.apply(x) if self.stops else x
        return checkpoint(self.second, x, use_reentrant=True)  # type: ignore[no-any-return] # torch leaves it untyped


def _inside_reentrant() -> None:
    """The checkpoint's own backward ends well; then the outer one is aborted."""

    def passes_of(step: int) -> Passes:
        def passes(model: nn.Module, rank: int) -> None:
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))
            model(x).square().sum().backward()

        return passes

    twins = Twins(_Segment)
    twins.train(passes_of, steps=1)
    twins.model.stops = True
    loss = twins.model(torch.ones(2, 4)).sum()  # stays alive, and with it the graph
    with pytest.raises(_Stop):
        loss.backward()
    twins.model.stops = False
    with pytest.raises(RuntimeError, match="last backward pass ended in an exception"):
        twins.sharded.step()
    twins.train(passes_of)
    with pytest.raises(RuntimeError, match="backward through the graph"):
        loss.backward()


def test_a_pass_aborted_after_a_reentrant_checkpoint(run: Run) -> None:
    run(2, _inside_reentrant)


def _in_no_sync() -> None:
    twins = Twins(make)
    twins.train(squares, steps=1)
    twins.zero_grad()
    with twins.sharded.no_sync():
        aborted(twins.model, twins.rank)
    with pytest.raises(RuntimeError, match="last backward pass ended in an exception"):
        twins.sharded.step()
    twins.train(squares)


def test_a_pass_aborted_in_no_sync(run: Run) -> None:
    run(2, _in_no_sync)


def _in_the_closure() -> list[str]:
    """A closure that fails on one rank reaches the others as an error, not as a hang."""
    twins = Twins(make)
    twins.train(squares, steps=1)

    def closure() -> float:
        twins.sharded.zero_grad()
        if twins.rank == 1:
            raise _Stop
        squares(1)(twins.model, twins.rank)
        return 0.0

    names = []
    try:
        twins.sharded.step(closure)
    except (RuntimeError, _Stop) as error:
        names.append(type(error).__name__)
    return names


def test_a_closure_that_fails_on_one_rank(run: Run) -> None:
    for names in run(2, _in_the_closure):
        assert names


def _dropped() -> bool:
    """An optimizer that is dropped leaves a model that plain torch can train."""
    model = make()
    optimizer: Any = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, lr=0.1, shard_gradients=True
    )
    square_loss(model.parameters(), dist.get_rank()).backward()
    optimizer.step()
    optimizer.zero_grad()
    del optimizer
    gc.collect()
    if dist.get_rank() == 0:  # alone: nothing communicates any more
        square_loss(model.parameters(), 0).backward()
        return all(type(parameter.grad) is torch.Tensor for parameter in model.parameters())
    return True


def test_a_model_without_its_optimizer_is_plain_again(run: Run) -> None:
    assert run(2, _dropped) == [True, True]
