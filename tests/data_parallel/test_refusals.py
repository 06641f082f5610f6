"""What can't be right raises on every rank, with the cure."""

import os
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tensorplay.distributed.optim import DistributedOptimizer
from tests.launch import run_ranks
from tests.reference.data_parallel import make_parameters, squares
from tests.reference.training import require_equal, values_of

Run = Callable[..., list[Any]]
SGD = torch.optim.SGD


def make(**changes: Any) -> Any:
    model = nn.Linear(2, 3)
    return DistributedOptimizer(
        **{"optim": SGD, "params": model.parameters(), "lr": 0.1, **changes}
    )


A, B = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"a": A}, r"lacks parameter 1 of shape \(3,\)"),
        ([("a", A), ("a", B)], "'a' twice"),
        ([("a", A), ("b", B), ("c", A)], "two names, 'a' and 'c'"),
        ({"a": A, "b": B, "other": torch.zeros(1)}, "has other, which isn't among params"),
    ],
)
def test_names_that_do_not_fit(named: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(params=[A, B], named_parameters=named)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"op": "max"}, ValueError, "op='max' must be one of"),
        ({"compression": "int8"}, ValueError, "compression='int8' must be one of"),
        ({"gradient_predivide_factor": 0}, ValueError, "greater than 0"),
        ({"gradient_predivide_factor": 2.0, "op": "sum"}, ValueError, "leave it 1.0"),
        ({"backward_passes_per_step": 0}, ValueError, "positive integer"),
        ({"clip_grad_norm": 0}, ValueError, "greater than 0"),
        ({"optim": SGD([A], lr=0.1)}, TypeError, r"has its options already, but got \['lr'\]"),
        ({"optim": 3}, TypeError, "optim must be an optimizer"),
        ({"optim": SGD, "params": None}, TypeError, "params is missing"),
        ({"params": torch.nn.Linear(2, 2)}, TypeError, r"Linear itself; pass its .parameters\(\)"),
        ({"optim": lambda _, **__: 3}, TypeError, "must make a torch.optim.Optimizer"),
        ({"momentums": 0.1}, TypeError, "momentums"),
        ({"lr": -1}, ValueError, "learning rate"),
        ({"params": []}, ValueError, "empty parameter list"),
    ],
)
def test_arguments_without_meaning(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(**changes)


def test_an_optimizer_that_is_missing() -> None:
    with pytest.raises(
        TypeError, match="needs an optimizer for parameters of this process: pass optim="
    ):
        DistributedOptimizer(params=[A], lr=0.1)


def test_a_parameter_list_is_one() -> None:
    assert len(DistributedOptimizer(SGD, torch.nn.ParameterList([A]), lr=0.1).param_groups) == 1


def test_an_optimizer_with_other_parameters() -> None:
    with pytest.raises(ValueError, match="1 of params aren't the optimizer's, and 1 of"):
        DistributedOptimizer(optim=SGD([A], lr=0.1), params=[B])


def test_a_wrapper_is_not_wrapped() -> None:
    with pytest.raises(TypeError, match="already"):
        DistributedOptimizer(make())


def test_without_a_group_but_with_a_world_the_cure_is_named() -> None:
    with (
        mock.patch.dict(os.environ, {"WORLD_SIZE": "2"}),
        pytest.raises(RuntimeError, match=r"(?s)init_process_group.*RANK, WORLD_SIZE, MASTER_ADDR"),
    ):
        make()


def _meta_device() -> str:
    with pytest.raises((ValueError, RuntimeError), match="move the model to a device") as caught:
        make(params=[nn.Parameter(torch.zeros(2, device="meta"))])
    return str(caught.value)


def test_a_device_that_the_group_cannot_send(run: Run) -> None:
    assert len(set(run(2, _meta_device))) == 1


def _moved() -> None:
    model = nn.Linear(2, 3)
    optimizer = DistributedOptimizer(optim=SGD, params=model.parameters(), lr=0.1)
    model.double()
    before = values_of(model.parameters())
    message = "build the optimizer after the model has its final"
    with pytest.raises(RuntimeError, match=message):
        model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    require_equal(before, values_of(model.parameters()))


def test_a_model_that_changes_after_construction() -> None:
    _moved()


def _mismatched(what: str) -> str:
    rank = dist.get_rank()
    model = make_parameters((3, 4), (5 + rank if what == "shape" else 5,))
    names = {f"p{number}": p for number, p in enumerate(model.parameters())}
    options = {"lr": 0.1 * (1 + rank) if what == "lr" else 0.1}
    op = "sum" if what == "op" and rank else "average"
    optim = torch.optim.Adam if what == "class" and rank else SGD
    with pytest.raises(RuntimeError, match="ranks disagree") as caught:
        DistributedOptimizer(optim, model.parameters(), names, op=op, **options)
    squares(0)(model, rank)  # nobody averages
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "named"),
    [("shape", r"\('p1'\)"), ("lr", r"lr"), ("op", "op"), ("class", "optimizer_class")],
)
def test_ranks_that_differ_are_told_at_construction(run: Run, what: str, named: str) -> None:
    first, second = run(2, _mismatched, what)
    assert first == second
    assert re.search(named, first), first


def _error_on_one_rank() -> str:
    with pytest.raises((RuntimeError, ValueError)) as caught:
        make(lr=-1.0 if dist.get_rank() else 0.1)
    return str(caught.value)


def test_an_error_on_one_rank_reaches_the_others(run: Run) -> None:
    first, second = run(2, _error_on_one_rank)
    assert "rank 1: ValueError" in first
    assert "Invalid learning rate" in second


def _options_apart() -> str:
    model = make_parameters((3, 4))
    optimizer = DistributedOptimizer(SGD, model.parameters(), lr=0.1)
    squares(0)(model, dist.get_rank())
    before = values_of(model.parameters())
    optimizer.param_groups[0]["lr"] = 0.1 + dist.get_rank()
    with pytest.raises(RuntimeError, match=r"param_groups\[0\].*lr.* is 0.1 on rank 0") as caught:
        optimizer.step()
    require_equal(before, values_of(model.parameters()))
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    return str(caught.value)


def test_options_that_have_run_apart(run: Run) -> None:
    assert len(set(run(2, _options_apart))) == 1


def _swallowed_step() -> str:
    model = make_parameters((3, 4))

    class Fails(SGD):
        def step(self, closure: Any = None) -> Any:
            if self.param_groups[0]["lr"] and dist.get_rank() == 1 and not self.failed:
                self.failed = True
                raise OSError("out of memory")
            return super().step(closure)

        failed = False

    optimizer = DistributedOptimizer(Fails, model.parameters(), lr=0.1)
    squares(0)(model, dist.get_rank())
    if dist.get_rank() == 1:
        with pytest.raises(OSError, match="out of memory"):
            optimizer.step()
    else:
        optimizer.step()
    squares(0)(model, dist.get_rank())
    with pytest.raises(RuntimeError, match="steps taken") as caught:
        optimizer.step()
    return str(caught.value)


def test_a_step_that_failed_on_one_rank_is_found_out_at_the_next(run: Run) -> None:
    assert len(set(run(2, _swallowed_step))) == 1


def _aborted() -> None:
    model = make_parameters((3, 4), (5,))
    optimizer = DistributedOptimizer(SGD, model.parameters(), lr=0.1)

    def fail(_: torch.Tensor) -> None:
        raise ValueError("stop")

    (model[0].sum() + model[1].sum()).backward()
    optimizer.zero_grad()
    hidden = model[0] * 2
    hidden.register_hook(fail)
    with pytest.raises(ValueError, match="stop"):
        (hidden.sum() + model[1].sum()).backward()
    with pytest.raises(RuntimeError, match="repeat forward and backward"):
        optimizer.step()
    optimizer.zero_grad()
    squares(0)(model, dist.get_rank())
    optimizer.step()
    assert optimizer.check_replicas() is None


def test_a_step_after_an_aborted_backward(run: Run) -> None:
    run(2, _aborted)


def _missing_rank() -> None:
    model = make_parameters((3, 4))
    optimizer = DistributedOptimizer(SGD, model.parameters(), lr=0.1)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"DistributedOptimizer.step: not every rank"):
            optimizer.step()


def test_a_rank_that_does_not_come() -> None:
    run_ranks(2, _missing_rank, collective_timeout_s=1.0)
