"""Where backward passes begin and end, on one process."""

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tensorplay.distributed.optim._core.backward_pass import BackwardPass


class Log:
    """Observes, and notes which parameters had gradients at each end."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.events: list[Any] = []
        self.backward_pass = BackwardPass(self)
        self.backward_pass.watch(parameters)

    def begin(self) -> None:
        assert self.backward_pass.is_open
        self.events.append("begin")

    def end(self) -> None:
        assert not self.backward_pass.is_open
        self.events.append([n for n, p in enumerate(self.parameters) if p.grad is not None])

    def receive_sparse(self, index: int) -> None:
        self.events.append(f"sparse {index}")

    def abandon(self) -> None:
        self.events.append("abandon")


def make(count: int = 3) -> tuple[list[nn.Parameter], Log]:
    parameters = [nn.Parameter(torch.ones(2) * (1 + number)) for number in range(count)]
    return parameters, Log(parameters)


def test_a_pass_begins_before_the_first_gradient_and_ends_after_the_last() -> None:
    (a, b, c), log = make()
    (a * b).sum().backward()
    assert log.events == ["begin", [0, 1]]
    (a * c).sum().backward()
    assert log.events[2:] == ["begin", [0, 1, 2]]
    assert log.backward_pass.num_begun == 2


def test_passes_that_reach_none_of_them_are_not_noticed() -> None:
    (a, b, _), log = make()
    other = nn.Parameter(torch.ones(2))
    other.sum().backward()
    torch.autograd.grad((a * b).sum(), [a, b])
    torch.autograd.grad((a * b * other).sum(), other)
    assert log.events == []
    assert a.grad is None


def test_backward_for_some_inputs() -> None:
    (a, b, c), log = make()
    (a * b * c).sum().backward(inputs=[b])
    assert log.events == ["begin", [1]]


def test_a_backward_for_other_inputs_is_not_noticed() -> None:
    (a, _, _), log = make()
    other = nn.Parameter(torch.ones(2))
    (a * other).sum().backward(inputs=[other])
    assert log.events == []


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_reentrant_checkpoints_are_one_pass(depth: int) -> None:
    (a, b, c), log = make()

    def nested(x: torch.Tensor, level: int) -> torch.Tensor:
        if level == 0:
            return torch.tanh(x * a) * b
        return checkpoint(nested, x, level - 1, use_reentrant=True) * a  # type: ignore[no-any-return] # torch leaves it untyped

    x = torch.ones(2, requires_grad=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
        (nested(nested(x, depth), depth) * c).sum().backward()
    assert log.events == ["begin", [0, 1, 2]]
    c.sum().backward()
    assert log.events[2:] == ["begin", [0, 1, 2]]


def stop(_: torch.Tensor) -> None:
    raise KeyError


def test_an_aborted_pass_is_told_at_the_next() -> None:
    (a, b, _), log = make()
    hidden = a * 2
    hidden.register_hook(stop)
    with pytest.raises(KeyError):
        (hidden + b).sum().backward()
    assert log.events == ["begin"]
    assert not log.backward_pass.is_open
    b.sum().backward()
    assert log.events[:3] == ["begin", "abandon", "begin"]
    assert log.backward_pass.num_begun == 2


def test_an_aborted_pass_is_told_on_request_once() -> None:
    (a, b, _), log = make()
    hidden = a * 2
    hidden.register_hook(stop)
    assert not log.backward_pass.settle_aborted()
    with pytest.raises(KeyError):
        (hidden + b).sum().backward()
    assert log.backward_pass.settle_aborted()
    assert not log.backward_pass.settle_aborted()
    assert log.events == ["begin", "abandon"]


def test_an_exception_before_the_first_gradient_is_no_pass() -> None:
    (a, _, _), log = make()
    hidden = a * 2
    hidden.register_hook(stop)
    with pytest.raises(KeyError):
        hidden.sum().backward()
    assert not log.backward_pass.settle_aborted()
    assert log.events == []


def test_a_frozen_parameter_is_watched_once_it_is_thawed() -> None:
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    log = Log([frozen])
    assert not frozen.requires_grad
    frozen.requires_grad_(True)
    frozen.sum().backward()
    assert log.events == ["begin", [0]]


def test_parameters_that_cannot_require_gradients() -> None:
    numbers, weight = (
        nn.Parameter(torch.arange(3), requires_grad=False),
        nn.Parameter(torch.ones(2)),
    )
    log = Log([numbers, weight])
    weight.sum().backward()
    assert log.events == ["begin", [1]]


def test_parameters_watched_later_get_the_next_numbers() -> None:
    (a, _, _), log = make()
    later = nn.Parameter(torch.ones(2))
    log.backward_pass.watch([later])
    (later * a).sum().backward()


def test_a_missing_gradient_does_not_count() -> None:
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, *values: torch.Tensor) -> torch.Tensor:
            return values[0] + values[1]

        @staticmethod
        def backward(_: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override] # the base class leaves it untyped or wider
            return None, gradient

    (a, b, _), log = make()
    Nothing.apply(a, b).sum().backward()
    assert log.events == ["begin", [1]]


def test_sparse_gradients_are_noted() -> None:
    weight = nn.Parameter(torch.ones(5, 2))
    log = Log([weight])
    nn.functional.embedding(torch.tensor([1]), weight, sparse=True).sum().backward()
    assert log.backward_pass.layouts == {0: torch.sparse_coo}
    assert log.events == ["begin", "sparse 0", [0]]
    weight.grad = None
    weight.sum().backward()
    assert log.backward_pass.layouts == {}


def test_hooks_that_were_removed_notice_nothing() -> None:
    (a, _, _), log = make()
    log.backward_pass.remove()
    a.sum().backward()
    assert log.events == []


@pytest.mark.parametrize("drop", ["observer", "parameters"])
def test_parameters_and_observer_do_not_keep_each_other_alive(drop: str) -> None:
    parameters, log = make()
    (parameters[0] * 2).sum().backward()
    watched: list[Callable[[], Any]] = [weakref.ref(log)]
    if drop == "observer":
        del log
    else:
        watched = [weakref.ref(parameter) for parameter in parameters]
        del parameters, log
    gc.collect()
    assert all(each() is None for each in watched)
