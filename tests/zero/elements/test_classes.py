"""Which optimizer classes may step a part of a parameter, and that those train right."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tensorplay.distributed.optim.zero.elementwise import ELEMENTWISE, NOT_ELEMENTWISE
from tests.reference.data_parallel import Twins, make_parameters, squares
from tests.reference.optimizers import OPTIMIZERS, KeepsCounters
from tests.reference.training import make_matrices, make_model, require_close, values_of
from tests.zero.elements.ways import ELEMENTS, FLAT, SOURCES, WAYS, by_default

Run = Callable[..., list[Any]]

SHIPPED = {
    name
    for name in torch.optim.__all__
    if isinstance(getattr(torch.optim, name), type) and name != "Optimizer"
}


def test_what_torch_ships_is_classified() -> None:
    assert ELEMENTWISE | {name for name in NOT_ELEMENTWISE if name in SHIPPED} == SHIPPED
    assert not ELEMENTWISE & set(NOT_ELEMENTWISE)


def test_every_element_wise_class_is_tried_here() -> None:
    tried = {optimizer_class.__name__ for optimizer_class, _ in OPTIMIZERS.values()}
    assert tried >= ELEMENTWISE


def make_doubles() -> nn.Module:
    return make_model().double()


VARIANTS: dict[str, Any] = {
    **{name: entry for name, entry in OPTIMIZERS.items() if entry[0] is not KeepsCounters},
    "AdamW amsgrad": (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True, "weight_decay": 0.1}),
    "SGD fused nesterov": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "fused": True},
    ),
    "RMSprop foreach": (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.5, "foreach": True}),
    "Adadelta foreach": (torch.optim.Adadelta, {"lr": 0.1, "foreach": True}),
    "NAdam decoupled": (
        torch.optim.NAdam,
        {"lr": 0.1, "decoupled_weight_decay": True, "weight_decay": 0.1},
    ),
    "KeepsCounters": OPTIMIZERS["KeepsCounters"],
}


def _trains_right(names: list[str], make: Callable[[], nn.Module], way: dict[str, Any]) -> None:
    with by_default(elementwise=True, **way):
        for name in names:
            twins = Twins(make, *VARIANTS[name])
            for step in range(3):
                twins.zero_grad()
                twins.backward(squares(step))
                twins.step()
            twins.require_same(f"{name}: ")


@pytest.mark.parametrize("quarter", range(4))
@pytest.mark.parametrize(("world_size", "make"), [(2, make_model), (3, make_doubles)])
@WAYS
def test_element_wise_classes_train_right(
    run: Run, world_size: int, make: Callable[[], nn.Module], quarter: int, way: dict[str, Any]
) -> None:
    run(world_size, _trains_right, list(VARIANTS)[quarter::4], make, way)


REASONS: list[tuple[type[Optimizer], str]] = [
    (torch.optim.Muon, "it orthogonalises the whole matrix"),
    (torch.optim.Adafactor, "its second moment is kept by rows and columns"),
    (torch.optim.SparseAdam, "its gradients are sparse rows"),
    (torch.optim.LBFGS, "LBFGS can't be sharded: its "),
]


def _refused(reduces: bool) -> list[str]:
    messages = []
    for optimizer_class, reason in REASONS:
        for way in (ELEMENTS, FLAT):
            for elementwise in (False, True):
                with pytest.raises(ValueError, match=reason) as caught:
                    ZeroRedundancyOptimizer(
                        make_matrices(),
                        optimizer_class,
                        shard_gradients=reduces,
                        elementwise=elementwise,
                        **way,
                    )
                messages.append(str(caught.value))
    return messages


@SOURCES
def test_other_classes_are_refused_with_the_reason(run: Run, reduces: bool) -> None:
    for messages in run(3, _refused, reduces):
        assert sum('Use partition="parameters"' in message for message in messages) == 12


class Lamb(torch.optim.SGD):
    """Stands for the real one, which isn't installed."""


class LambFromApex(torch.optim.SGD):
    """Stands for another one."""


class MyLamb(Lamb):
    """A subclass counts as well."""


class LambdaOptimizer(torch.optim.SGD):
    """Is called like one, but isn't."""


class MyAdamW(torch.optim.AdamW):
    """A subclass may do anything."""


def _unknown() -> None:
    for optimizer_class in (Lamb, LambFromApex, MyLamb):
        with pytest.raises(ValueError, match="scaled by the norm of the whole parameter"):
            ZeroRedundancyOptimizer(make_matrices(), optimizer_class, **ELEMENTS, elementwise=True)
    for optimizer_class in (LambdaOptimizer, MyAdamW, KeepsCounters):
        for way, use in ((ELEMENTS, 'partition="elements" needs'), (FLAT, "flat_step=True needs")):
            with pytest.raises(ValueError, match=f"{use}.*say so with elementwise=True"):
                ZeroRedundancyOptimizer(make_matrices(), optimizer_class, **way)
            ZeroRedundancyOptimizer(make_matrices(), optimizer_class, **way, elementwise=True)


def test_unknown_classes_ask_for_confirmation(run: Run) -> None:
    run(2, _unknown)


def _a_function_makes_it() -> None:
    def make(params: Any, **options: Any) -> Optimizer:
        return MyAdamW(params, **options)

    with pytest.raises(ValueError, match="MyAdamW does isn't known here"):
        ZeroRedundancyOptimizer(make_matrices(), make, **ELEMENTS)  # type: ignore[arg-type] # the test passes what the types don't allow, or a wrapper


def test_a_function_in_the_place_of_the_class(run: Run) -> None:
    run(2, _a_function_makes_it)


def _confirmed_on_one_rank() -> str:
    with pytest.raises((ValueError, RuntimeError), match="isn't known here") as caught:
        ZeroRedundancyOptimizer(
            make_matrices(), MyAdamW, **ELEMENTS, elementwise=dist.get_rank() == 1
        )
    return type(caught.value).__name__


def test_a_class_confirmed_on_one_rank_only_is_refused_on_all(run: Run) -> None:
    assert run(2, _confirmed_on_one_rank) == ["ValueError", "PeerError"]


def _mixed(reduces: bool) -> None:
    """Muon's matrices can't be cut; a group of its own works with whole parameters."""
    model = make_matrices()
    with pytest.raises(ValueError, match=r"Muon can't be used with partition=.elements"):
        ZeroRedundancyOptimizer(
            [
                {"params": [*model][:2]},
                {"params": [*model][2:], "partition": "elements"},
            ],
            torch.optim.Muon,
            shard_gradients=reduces,
        )
    optimizer = ZeroRedundancyOptimizer(
        [{"params": [*model], "partition": "parameters"}],
        torch.optim.Muon,
        partition="elements",
        shard_gradients=reduces,
    )
    before = values_of(model)
    with pytest.raises((ValueError, RuntimeError), match=r"Muon can't be used with"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 3))]})
    require_close(before, values_of(model))
    assert len(optimizer.param_groups) == 1


@SOURCES
def test_a_group_may_ask_for_whole_parameters(run: Run, reduces: bool) -> None:
    run(2, _mixed, reduces)


def _several_partitions(way: dict[str, Any]) -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        parameters = list(model.parameters())
        return [
            {"params": parameters[:2], "lr": 0.2, "partition": "elements"},
            {"params": parameters[2:5], "betas": (0.5, 0.6), "partition": "parameters"},
            {"params": parameters[5:7], "weight_decay": 0.5},
            {"params": parameters[7:], "partition": "elements"},
        ]

    def without_choice(model: nn.Module) -> list[dict[str, Any]]:
        entries = groups(model)
        if model is not twins_models[-1]:
            for entry in entries:
                entry.pop("partition", None)
        return entries

    def make() -> nn.Module:
        shapes = [(3, 4), (400, 400), (17,), (5, 3, 2), (2, 3), (400, 333), (9,), (11, 7)]
        twins_models.append(make_parameters(*shapes))
        return twins_models[-1]

    twins_models: list[nn.Module] = []
    with by_default(**way):
        twins = Twins(make, params_of=without_choice)
    for step in range(4):
        twins.train(lambda _, step=step: squares(step, without=lambda _: (6,)[: step % 2]), steps=1)
        for optimizer in (twins.plain, twins.sharded):
            assert "partition" not in optimizer.param_groups[0]
            optimizer.param_groups[0]["lr"] *= 0.5
            optimizer.param_groups[3]["betas"] = (0.1 * step, 0.9)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@WAYS
def test_groups_with_other_options_and_other_partitions(
    run: Run, world_size: int, way: dict[str, Any]
) -> None:
    run(world_size, _several_partitions, way)
