"""Optimizers as users write them: they rebind ``.data``, extend state dicts, look at parameters."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import Optimizer

from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tests.launch import run_ranks
from tests.reference.training import make_matrices, require_equal, set_gradients, values_of

MODES = pytest.mark.parametrize("resident", [False, True], ids=["own storage", "bucket view"])


class RebindsData(Optimizer):
    """Assigns new values to ``.data`` instead of writing in place."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def updated(self, parameter: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
        return parameter.data - change

    def step(self) -> None:  # type: ignore[override] # the base class leaves it untyped or wider
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data = self.updated(parameter, group["lr"] * parameter.grad)


class RebindsWithOtherStrides(RebindsData):
    def updated(self, parameter: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
        return (parameter.data - change).t().contiguous().t()


class RebindsWithOtherDtype(RebindsData):
    def updated(self, parameter: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
        return parameter.data.double() - change


class RebindsWithOtherShape(RebindsData):
    def updated(self, parameter: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
        return (parameter.data - change).flatten()


def _rebinding(optimizer_class: type[Optimizer], resident: bool) -> list[torch.Tensor]:
    parameters, plain_parameters = list(make_matrices()), list(make_matrices())
    parameters += make_matrices(seed=1, count=1).double()  # alone in its bucket
    plain_parameters += make_matrices(seed=1, count=1).double()
    sharded = ZeroRedundancyOptimizer(
        parameters, optimizer_class, parameters_as_bucket_view=resident
    )
    plain = optimizer_class(plain_parameters)
    for step in range(2):
        set_gradients(parameters, step)
        set_gradients(plain_parameters, step)
        sharded.step()
        plain.step()
        require_equal(values_of(plain_parameters), values_of(parameters))
    return values_of(parameters)


@MODES
@pytest.mark.parametrize("optimizer_class", [RebindsData, RebindsWithOtherStrides])
def test_a_step_that_rebinds_data_updates_every_rank(
    optimizer_class: type[Optimizer], resident: bool
) -> None:
    first, *others = run_ranks(3, _rebinding, optimizer_class, resident)
    for other in others:
        require_equal(first, other)


def _misfit(optimizer_class: type[Optimizer], resident: bool) -> list[torch.Tensor]:
    parameters = list(make_matrices(count=1))
    optimizer = ZeroRedundancyOptimizer(
        parameters, optimizer_class, parameters_as_bucket_view=resident
    )
    set_gradients(parameters, 0)
    with pytest.raises(RuntimeError, match="gave parameter 0 of group 0 another shape, dtype or "):
        optimizer.step()
    return values_of(parameters)


@MODES
@pytest.mark.parametrize("optimizer_class", [RebindsWithOtherDtype, RebindsWithOtherShape])
def test_a_step_that_changes_dtype_or_shape_raises_on_every_rank(
    optimizer_class: type[Optimizer], resident: bool
) -> None:
    first, other = run_ranks(2, _misfit, optimizer_class, resident)
    require_equal(first, other)
    require_equal(first, values_of(make_matrices(count=1)))


class ExtendsStateDict(torch.optim.SGD):
    """Keeps a counter of its own, saved beside state and groups; can't be loaded without it."""

    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "num_steps": self.num_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = dict(state_dict)
        self.num_steps = state_dict.pop("num_steps")
        super().load_state_dict(state_dict)


def _extended() -> None:
    parameters = list(make_matrices())
    options = {"lr": 0.1, "momentum": 0.5}
    optimizer = ZeroRedundancyOptimizer(parameters, ExtendsStateDict, **options)
    plain_parameters = list(make_matrices())
    plain = ExtendsStateDict(plain_parameters, **options)
    set_gradients(parameters, 0)
    set_gradients(plain_parameters, 0)
    optimizer.step()
    plain.step()
    optimizer.consolidate_state_dict(to=1)
    if dist.get_rank() == 1:
        require_equal(plain.state_dict(), optimizer.state_dict())
    again = ZeroRedundancyOptimizer(parameters, ExtendsStateDict, **options)
    again.load_state_dict(plain.state_dict())
    assert isinstance(again.optim, ExtendsStateDict)
    assert again.optim.num_steps == 1


def test_what_a_class_adds_to_its_state_dict_is_saved_and_loaded() -> None:
    run_ranks(2, _extended)


def _extended_differently() -> None:
    optimizer = ZeroRedundancyOptimizer(make_matrices(), ExtendsStateDict, lr=0.1)
    assert isinstance(optimizer.optim, ExtendsStateDict)
    optimizer.optim.num_steps = dist.get_rank()
    with pytest.raises(RuntimeError, match=r"state dict.num_steps is 0 on rank 0 but 1"):
        optimizer.consolidate_state_dict()


def test_what_a_class_adds_to_its_state_dict_must_be_the_same_on_every_rank() -> None:
    run_ranks(2, _extended_differently)


class LooksAtParameters(torch.optim.SGD):
    """Reads the parameters before torch makes groups of them."""

    def __init__(self, params: Iterable[torch.Tensor], lr: float = 0.1) -> None:
        params = list(params)
        assert all(parameter.ndim == 2 for parameter in params)
        super().__init__(params, lr=lr)


def _looking() -> None:
    parameters = list(make_matrices(count=1))
    ZeroRedundancyOptimizer(parameters, LooksAtParameters, lr=0.2)


def test_a_class_that_takes_only_tensors_gets_tensors() -> None:
    run_ranks(2, _looking)


class GroupsByShape(torch.optim.SGD):
    """Makes its own groups."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__([{"params": [parameter]} for parameter in params])


def _regrouping() -> None:
    with pytest.raises(ValueError, match="GroupsByShape rearranges the param groups"):
        ZeroRedundancyOptimizer(make_matrices(), GroupsByShape)


def test_a_class_that_makes_its_own_groups_is_refused() -> None:
    run_ranks(2, _regrouping)
