"""What can't be right with slices is refused on every rank, with the reason."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tests.reference.data_parallel import Twins, make_parameters, squares
from tests.reference.training import make_model, require_equal, set_gradients, values_of
from tests.zero.elements.ways import ELEMENTS, FLAT, SOURCES, WAYS, by_default

Run = Callable[..., list[Any]]


def _disagreeing(what: str) -> None:
    rank = dist.get_rank()
    parameters: Any = list(make_model().parameters())
    ours: dict[str, Any] = {}
    if what == "added group":
        optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)
        group = {"params": [nn.Parameter(torch.ones(50))]}
        with pytest.raises(RuntimeError, match="partition is 'parameters' on rank 0 but 'element"):
            optimizer.add_param_group({**group, **(ELEMENTS if rank else {})})
        optimizer.add_param_group({**group, **ELEMENTS})
        return
    if what == "partition":
        ours = ELEMENTS if rank else {}
    elif what == "flat_step":
        ours = {"flat_step": rank == 0}
    elif what == "group":
        groups = [
            {"params": parameters[:3], "partition": "elements"},
            {"params": parameters[3:5]},
            {"params": parameters[5:], "partition": "parameters"},
        ]
        groups[1]["partition"] = "elements" if rank else "parameters"
        parameters = groups
    else:  # a parameter that can be moved into a bucket here only
        ours = ELEMENTS
        if rank:
            (weight,) = [each for each in parameters if each.shape == (31, 7)]
            weight.data = torch.empty(2, 31, 7)[0].copy_(weight.detach())
    expected = {
        "partition": "partition is 'parameters' on rank 0 but 'elements' on",
        "flat_step": "flat_step is True on rank 0 but False on",
        "group": r"partition of each group\[1\] is 'parameters' on rank 0 but 'elements' on",
        "storage": "owns its storage",
    }[what]
    with pytest.raises(RuntimeError, match=expected):
        ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1, **ours)


@pytest.mark.parametrize("what", ["partition", "flat_step", "group", "added group", "storage"])
def test_ranks_that_disagree_about_the_division(run: Run, what: str) -> None:
    run(3, _disagreeing, what)


def _unknown_partition() -> list[str]:
    messages = []
    for partition in ("rows", None, ["elements"]):
        with pytest.raises((ValueError, TypeError)) as caught:
            ZeroRedundancyOptimizer(
                make_model().parameters(),
                torch.optim.SGD,
                partition=partition,  # type: ignore[arg-type] # the test passes what the types don't allow, or a wrapper
                lr=0.1,
            )
        messages.append(str(caught.value))
    return messages


def test_an_unknown_partition_is_named_with_the_choices(run: Run) -> None:
    for messages in run(2, _unknown_partition):
        for message, value in zip(messages, ("'rows'", "None", "['elements']"), strict=True):
            assert f"partition={value} is none; use 'parameters'" in message


def _replaced(way: dict[str, Any]) -> None:
    model = make_model()
    optimizer = ZeroRedundancyOptimizer(
        model.named_parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, **way
    )
    if dist.get_rank() == 1:
        model[2].weight.data = model[2].weight.detach().clone()
    before = values_of(model.parameters())
    set_gradients(model.parameters(), 0)
    with pytest.raises(RuntimeError, match=r"'2.weight'\) was replaced .*build the optimizer"):
        optimizer.step()
    require_equal(before, values_of(model.parameters()))


@WAYS
def test_replaced_storage_is_found_before_it_does_harm(run: Run, way: dict[str, Any]) -> None:
    run(2, _replaced, way)


class _GivesAnotherDtype(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self) -> None:  # takes no closure
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.double() + 1


def _misfit() -> None:
    model = make_model()
    optimizer = ZeroRedundancyOptimizer(
        model.named_parameters(), _GivesAnotherDtype, **ELEMENTS, elementwise=True
    )
    before = values_of(model.parameters())
    set_gradients(model.parameters(), 0)
    with pytest.raises(RuntimeError, match=r"gave parameter .* another shape, dtype or device"):
        optimizer.step()
    require_equal(before, values_of(model.parameters()))


def test_an_update_of_another_dtype_names_a_parameter_on_every_rank(run: Run) -> None:
    run(2, _misfit)


class _RebindsData(Optimizer):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # takes no closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data = parameter - group["lr"] * parameter.grad


def _rebinding(reduces: bool) -> None:
    def make() -> nn.Module:
        return make_parameters((30,), (7, 9), (400, 400), ())

    model, plain_model = make(), make()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), _RebindsData, shard_gradients=reduces, **ELEMENTS, elementwise=True
    )
    plain = _RebindsData(plain_model.parameters())
    for step in range(2):
        for each in (model, plain_model):
            set_gradients(each.parameters(), step)
        optimizer.step()
        plain.step()
    for ours, expected in zip(model.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(ours, expected)


@SOURCES
def test_an_optimizer_that_rebinds_data(run: Run, reduces: bool) -> None:
    run(2, _rebinding, reduces)


def _torchs_clip() -> None:
    with by_default(**ELEMENTS):
        twins = Twins(lambda: make_parameters((400, 400), (30,), (9, 7)))
    twins.backward(squares(0))
    for function in (
        lambda: nn.utils.clip_grad_norm_(twins.model.parameters(), 1.0),
        lambda: nn.utils.get_total_norm([p.grad for p in twins.model.parameters()]),  # type: ignore[misc] # some are None for mypy
    ):
        with pytest.raises(TypeError, match=r"clip_grad_norm_\(\).*full_grad\(parameter\)"):
            function()
    twins.step()
    twins.require_same()


def test_torchs_clip_refuses_a_cut_gradient(run: Run) -> None:
    run(2, _torchs_clip)


def _foreign_part() -> None:
    """A placeholder moved to another parameter isn't taken for that one's gradient."""
    with by_default(**ELEMENTS):
        twins = Twins(lambda: make_parameters((400, 400), (401, 399)))
    twins.backward(squares(0))
    first, second = twins.model.parameters()
    before = values_of(twins.model.parameters())
    first.grad, second.grad = None, None
    twins.sharded.step()
    require_equal(before, values_of(twins.model.parameters()))


def test_gradients_set_to_none_after_the_reduction_are_skipped(run: Run) -> None:
    run(2, _foreign_part)


def _many_flags() -> None:
    with pytest.raises(ValueError, match="flat_step=True needs"):
        ZeroRedundancyOptimizer(make_model().parameters(), _RebindsData, **FLAT)
    with pytest.raises(ValueError, match='partition="elements" needs'):
        ZeroRedundancyOptimizer(make_model().parameters(), _RebindsData, **FLAT, **ELEMENTS)


def test_the_refusal_names_the_argument(run: Run) -> None:
    run(2, _many_flags)
