"""What goes wrong while backward steps is found out on every rank, and the next iteration is clean."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tests.reference.data_parallel import Twins, make_parameters, squares
from tests.reference.training import require_equal, values_of
from tests.zero.gradients.test_aborted import aborted, make
from tests.zero.gradients.test_stepped_in_backward import stepping

Run = Callable[..., list[Any]]
SGD: dict[str, Any] = {"lr": 0.1}


def go_on(twins: Twins, what: str = "") -> None:
    """The replicas are equal, and train as the plain optimizer does from here."""
    assert [p for p in twins.model.parameters() if p.grad is not None] == []
    for ours, plain in zip(twins.model.parameters(), twins.plain_model.parameters(), strict=True):
        values = [torch.empty_like(ours) for _ in range(twins.world_size)]
        dist.all_gather(values, ours.detach().contiguous())
        for each in values[1:]:
            require_equal(values[0], each, f"{what}replicas differ: ")
        plain.data.copy_(ours)
    twins.train(squares, what=what)


def _all_alike(between: str) -> None:
    with stepping():
        twins = Twins(make, torch.optim.SGD, SGD)
        twins.train(squares, steps=1)
        aborted(twins.model, twins.rank)
        if between == "zero_grad":
            twins.sharded.zero_grad()
        elif between == "step":
            twins.sharded.step()
        else:  # the next pass ends what was begun, too late
            with pytest.raises(RuntimeError, match=r"call zero_grad\(\) before the next forward"):
                squares(3)(twins.model, twins.rank)
        go_on(twins)


@pytest.mark.parametrize("between", ["zero_grad", "step", "backward"])
def test_a_pass_aborted_on_every_rank(run: Run, between: str) -> None:
    run(2, _all_alike, between)


def _on_one_rank(next_call: str) -> str:
    with stepping():
        twins = Twins(make, torch.optim.SGD, SGD)
        twins.train(squares, steps=1)
        message = ""
        try:
            if twins.rank == 1:
                aborted(twins.model, twins.rank)
                if next_call == "backward":
                    squares(2)(twins.model, twins.rank)
                else:
                    getattr(twins.sharded, next_call)()
            else:
                squares(1)(twins.model, twins.rank)
        except RuntimeError as error:
            message = str(error)
        go_on(twins, "after the error, ")
        return message


@pytest.mark.parametrize("next_call", ["step", "zero_grad", "backward"])
def test_a_rank_that_swallowed_an_exception_is_found_out(run: Run, next_call: str) -> None:
    for message in run(2, _on_one_rank, next_call):
        assert "backward" in message
        assert "exception" in message


class Fails(torch.optim.SGD):
    """Raises at one parameter's size."""

    numel = -1

    def step(self, closure: Any = None) -> Any:
        if any(
            p.numel() == self.numel and p.grad is not None
            for g in self.param_groups
            for p in g["params"]
        ):
            raise ArithmeticError("this size can't be stepped")
        return super().step(closure)


def _step_fails(numel: int) -> str:
    with stepping():
        twins = Twins(make, Fails, SGD)
        owners = twins.sharded._sharded.plan.partition.owners
        numels = [p.numel() for p in twins.model.parameters()]
        owner = owners[numels.index(numel)]
        Fails.numel = numel
        message = ""
        try:
            squares(0)(twins.model, twins.rank)
        except Exception as error:  # noqa: BLE001 - which one is what the test is about
            message = f"{owner == twins.rank} {type(error).__name__}: {error}"
        Fails.numel = -1
        go_on(twins, "after the error, ")
        return message


@pytest.mark.parametrize("numel", [160_000, 17])
def test_a_step_that_fails_on_the_owner(run: Run, numel: int) -> None:
    messages = run(3, _step_fails, numel)
    own = [message for message in messages if message.startswith("True")]
    if numel == 17:
        assert own == ["True ArithmeticError: this size can't be stepped"]
    others = [message for message in messages if message.startswith("False")]
    for message in others:
        assert "this size can't be stepped" in message
    assert len(own) + len(others) == 3


def _options_differ() -> str:
    with stepping():
        twins = Twins(make, torch.optim.SGD, SGD)
        before = values_of(twins.model.parameters())
        twins.sharded.param_groups[0]["lr"] = 0.1 + twins.rank
        message = ""
        try:
            squares(0)(twins.model, twins.rank)
        except RuntimeError as error:
            message = f"{type(error).__name__}: {error}"
        require_equal(before, values_of(twins.model.parameters()))
        twins.sharded.param_groups[0]["lr"] = 0.1
        twins.sharded.zero_grad()
        go_on(twins)
        return message


def test_options_that_differ_between_ranks(run: Run) -> None:
    for message in run(2, _options_differ):
        assert message.startswith("RankDisagreementError")
        assert "lr" in message
        assert "1.1" in message


def _converted() -> str:
    with stepping():
        twins = Twins(lambda: make_parameters((3,), (4,)), torch.optim.SGD, SGD)
        if twins.rank == 1:
            twins.model.double()
        try:
            squares(0)(twins.model, twins.rank)
        except RuntimeError as error:
            return str(error)
        return ""


def test_parameters_that_were_converted(run: Run) -> None:
    for message in run(2, _converted):
        assert "was torch.float32" in message
        assert "torch.float64" in message


def _sparse(rows: int, on_rank: int | None) -> str:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding = nn.Embedding(rows, 8)
            self.linear = nn.Linear(8, 3)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.linear(self.embedding(tokens))
            return output

    def passes(model: nn.Module, rank: int) -> None:
        model(torch.tensor([1, 2 + rank])).square().sum().backward()

    with stepping():
        twins = Twins(Net, torch.optim.SGD, SGD)
        embedding: Any = twins.model.embedding
        embedding.sparse = on_rank in (None, twins.rank)
        message = ""
        try:
            passes(twins.model, twins.rank)
        except (TypeError, RuntimeError) as error:
            message = f"{type(error).__name__}: {error}"
        embedding.sparse = False
        for ours, plain in zip(
            twins.model.parameters(), twins.plain_model.parameters(), strict=True
        ):
            plain.data.copy_(ours)
        twins.train(lambda _: passes)
        return message


@pytest.mark.parametrize("rows", [10, 20_000], ids=["small", "large"])
@pytest.mark.parametrize("on_rank", [None, 1])
def test_a_sparse_gradient(run: Run, rows: int, on_rank: int | None) -> None:
    for rank, message in enumerate(run(2, _sparse, rows, on_rank)):
        assert message.startswith("TypeError" if on_rank in (None, rank) else "PeerError")
        assert "parameter 0" in message
        assert "sparse=False" in message


def _message(function: Callable[[], Any]) -> str:
    try:
        function()
    except (RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _refused() -> dict[str, str]:
    with stepping():
        twins = Twins(make, torch.optim.SGD, SGD)
    sharded = twins.sharded
    messages = {
        "clip": _message(lambda: sharded.clip_grad_norm_(1.0)),
        "full_grad": _message(lambda: sharded.full_grad(next(twins.model.parameters()))),
        "kwargs": _message(lambda: sharded.step(scale=2.0)),
    }
    with sharded.no_sync():
        squares(0)(twins.model, twins.rank)
    messages["accumulated"] = _message(sharded.step)
    sharded.zero_grad()
    for parameter in twins.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    messages["assigned"] = _message(sharded.step)
    sharded.zero_grad()
    scaler = torch.amp.GradScaler("cpu")

    def scale() -> None:
        scaler.scale(sum(p.sum() for p in twins.model.parameters())).backward()
        scaler.step(sharded)

    messages["scaler"] = _message(scale)
    messages["one rank"] = _message(
        lambda: ZeroRedundancyOptimizer(
            make().parameters(),
            torch.optim.SGD,
            overlap_with_ddp=twins.rank == 0,
            shard_gradients=True,
            lr=0.1,
        )
    )
    return messages


def test_what_is_refused_with_the_reason(run: Run) -> None:
    for messages in run(2, _refused):
        assert messages["clip"].startswith("RuntimeError: clip_grad_norm_() needs the averaged")
        assert "overlap_with_ddp" in messages["clip"]
        assert messages["full_grad"].startswith("RuntimeError: full_grad() needs the averaged")
        assert messages["kwargs"].startswith("TypeError: step() got scale")
        for what in ("accumulated", "assigned"):
            assert messages[what].startswith("RuntimeError: step() finds gradients"), what
        assert messages["scaler"].startswith("RuntimeError: GradScaler can't be used")
        assert messages["one rank"].startswith("RankDisagreementError")
        assert "overlap_with_ddp" in messages["one rank"]
