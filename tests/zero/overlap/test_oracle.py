"""Updates inside DDP's backward: from the first iteration on, those of the plain optimizer, to the bit."""

import warnings
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
)
from torch.nn.parallel import DistributedDataParallel

from tensorplay.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import (
    hook_with_zero_step_interleaved,
)
from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tensorplay.distributed.optim.zero import overlap
from tests.launch import run_ranks
from tests.reference.ddp import ADAMW, make_net
from tests.reference.optimizers import OPTIMIZERS
from tests.reference.training import make_matrices, require_equal, values_of
from tests.zero.overlap.twins import MANY_BUCKETS_MB, Twins, backward
from tests.zero.test_compile_and_checkpointing import Branching, Checkpointed

Run = Callable[..., list[Any]]

BOTH_HOOKS = pytest.mark.parametrize("interleaved", [False, True], ids=["step", "interleaved"])
SOME_DDP_OPTIONS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"bucket_cap_mb": 25},
    {"static_graph": True},
    {"static_graph": True, "gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
]


def make_layers(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(widths)))


def _ddp_options(interleaved: bool, resident: bool) -> None:
    for options in SOME_DDP_OPTIONS:
        twins = Twins(interleaved=interleaved, resident=resident, **options)
        before = values_of(twins.model.parameters())
        twins.train(1)
        assert not any(map(torch.equal, before, values_of(twins.model.parameters())))
        twins.train(3, first=1)
        twins.require_state_equal()


@BOTH_HOOKS
@pytest.mark.parametrize("resident", [False, True], ids=["own storage", "bucket view"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_bitwise_equal_to_ddp_with_the_plain_optimizer(
    run: Run, world_size: int, resident: bool, interleaved: bool
) -> None:
    run(world_size, _ddp_options, interleaved, resident)


def _more_ranks_than_parameters(interleaved: bool) -> None:
    twins = Twins(lambda: make_layers(6, 3), interleaved=interleaved)
    twins.train()
    twins.require_state_equal()


@BOTH_HOOKS
def test_more_ranks_than_parameters(run: Run, interleaved: bool) -> None:
    run(4, _more_ranks_than_parameters, interleaved)


def _any_class(names: Iterable[str]) -> None:
    for name in names:
        optimizer_class, options = OPTIMIZERS[name]
        twins = Twins(optimizer_class=optimizer_class, options=options)
        twins.train(3)
        twins.require_state_equal()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_class(run: Run, name: str) -> None:
    run(2, _any_class, [name])


class Matrices(nn.Module):
    """Only 2-D parameters, each of which is used."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = make_matrices()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs[:, :3] * sum(matrix.sin().mean() for matrix in self.matrices)


def _matrix_classes() -> None:
    for optimizer_class in (torch.optim.Muon, torch.optim.Adafactor):
        twins = Twins(Matrices, optimizer_class, {"lr": 0.1})
        twins.train(3)
        twins.require_state_equal()


def test_matrix_optimizers(run: Run) -> None:
    run(2, _matrix_classes)


def _in_groups(model: nn.Module) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    biases = [p for name, p in named.items() if name.endswith("bias")]
    weights = [p for name, p in named.items() if not name.endswith("bias")]
    return [
        {"params": biases, "weight_decay": 0.0, "lr": 0.3},
        {"params": weights[:1], "betas": (0.5, 0.9)},
        {"params": weights[1:]},
    ]


def _groups_and_schedulers() -> None:
    twins = Twins(params=_in_groups)
    makers: list[Callable[[Any], Any]] = [
        lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=20),
    ]
    for position, make in enumerate(makers):
        schedulers = [make(optimizer) for _, optimizer in twins.both]
        for step in range(4):
            twins.train(1, first=4 * position + step)
            for scheduler in schedulers:
                scheduler.step()
    twins.zero.param_groups[0]["lr"] = twins.plain.param_groups[0]["lr"] = 0.0
    before = values_of(_in_groups(twins.model)[0]["params"])
    twins.train(1, first=8)
    require_equal(before, values_of(_in_groups(twins.model)[0]["params"]))
    twins.require_state_equal()


def test_several_groups_and_the_learning_rates_of_schedulers(run: Run) -> None:
    run(2, _groups_and_schedulers)


def _subgroup(interleaved: bool) -> None:
    members = [2, 1]
    group = dist.new_group(members)
    if dist.get_rank() in members:
        for resident in (False, True):
            twins = Twins(interleaved=interleaved, resident=resident, group=group)
            twins.train()
            twins.require_state_equal()


@BOTH_HOOKS
def test_a_subgroup_whose_ranks_differ_from_the_global_ones(run: Run, interleaved: bool) -> None:
    run(3, _subgroup, interleaved)


def _unused(options: dict[str, Any], set_to_none: bool) -> None:
    for interleaved in (False, True):
        twins = Twins(Branching, interleaved=interleaved, **options)
        for step in range(6):
            for model, optimizer in twins.both:
                optimizer.zero_grad(set_to_none=set_to_none)
                backward(model, step)
                optimizer.step()
            twins.require_equal(f"{options}, iteration {step}: ")
        twins.require_state_equal()
        never_used = set(twins.model.module.branches[3].parameters())  # type: ignore[index,union-attr] # mypy takes it for any attribute of a module
        assert never_used
        assert not never_used & set(twins.zero.state)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"find_unused_parameters": True},
        {"find_unused_parameters": True, "gradient_as_bucket_view": True},
        {"find_unused_parameters": True, "bucket_cap_mb": 25},
    ],
    ids=["", "bucket view", "one bucket"],
)
def test_parameters_unused_on_some_ranks_or_all(
    run: Run, options: dict[str, Any], set_to_none: bool
) -> None:
    run(2, _unused, options, set_to_none)


class HalfUsed(nn.Module):
    """The second layer is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.used(inputs)


def _static_unused() -> None:
    for view in (False, True):
        twins = Twins(HalfUsed, static_graph=True, gradient_as_bucket_view=view)
        before = values_of(twins.model.module.unused.parameters())
        twins.train()
        require_equal(before, values_of(twins.model.module.unused.parameters()))
        twins.require_state_equal()


def test_unused_parameters_of_a_static_graph_are_skipped_exactly(run: Run) -> None:
    run(2, _static_unused)


def _checkpointed() -> None:
    for use_reentrant in (False, True):
        for interleaved in (False, True):
            Twins(
                lambda: Checkpointed(use_reentrant),  # noqa: B023 - called at once
                static_graph=True,
                interleaved=interleaved,
            ).train()


def test_activation_checkpointing(run: Run) -> None:
    run(2, _checkpointed)


def _accumulation(set_to_none: bool) -> None:
    for view in (False, True):
        twins = Twins(gradient_as_bucket_view=view)
        for step in range(0, 9, 3):
            for model, optimizer in twins.both:
                optimizer.zero_grad(set_to_none=set_to_none)
                with model.no_sync():  # type: ignore[operator] # mypy takes it for any attribute of a module
                    backward(model, step)
                    backward(model, step + 1)
                backward(model, step + 2)
                optimizer.step()
            twins.require_equal(f"iteration {step}: ")


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_with_ddps_no_sync(run: Run, set_to_none: bool) -> None:
    run(2, _accumulation, set_to_none)


def _compressed() -> None:
    Twins(hook=fp16_compress_hook).train()


def test_a_hook_that_returns_other_memory_than_the_bucket(run: Run) -> None:
    run(2, _compressed)


class Embedded(nn.Module):
    """An embedding with sparse gradients before a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, 4, sparse=True)
        self.last = nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.embedding(inputs[:, 0].abs().long() % 5))


def _sparse() -> None:
    warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")
    for optimizer_class in (torch.optim.SGD, torch.optim.Adagrad):
        twins = Twins(Embedded, optimizer_class, {"lr": 0.1})
        for step in range(4):
            for model, optimizer in twins.both:
                optimizer.zero_grad()
                backward(model, step)
                optimizer.step()
            require_equal(
                values_of(twins.plain_model.parameters()), values_of(twins.model.parameters())
            )


def test_sparse_gradients() -> None:
    run_ranks(2, _sparse)


class Mixed(nn.Module):
    """Two dtypes, a tied weight, a frozen one, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.last = nn.Linear(6, 3, dtype=torch.float64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.second(self.norm(self.first(inputs)).relu()))
        return self.last(hidden.double()).float()


class Convolved(nn.Sequential):
    """A weight in channels_last, and a complex one."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(
            nn.Unflatten(1, (3, 2, 1)),
            nn.Conv2d(3, 5, 3, padding=1).to(memory_format=torch.channels_last),
            nn.Flatten(),
            nn.Linear(10, 3),
        )
        self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) * self.phase.abs()


def _mixed() -> None:
    for resident in (False, True):
        twins = Twins(Mixed, resident=resident)
        twins.train()
        twins.require_state_equal()
        for view in (False, True):
            options = {"resident": resident, "gradient_as_bucket_view": view}
            twins = Twins(Convolved, torch.optim.AdamW, {"lr": 0.05}, **options)
            twins.train()
            twins.require_state_equal()


def test_mixed_dtypes_tied_and_frozen_parameters(run: Run) -> None:
    run(2, _mixed)


def _large() -> None:
    """Parameters that are gathered from where they are, and some that share a staging buffer."""
    for resident in (False, True):
        twins = Twins(
            lambda: make_layers(6, 1024, 256, 3),
            resident=resident,
            bucket_cap_mb=0.5,
        )
        twins.train()


def test_large_parameters(run: Run) -> None:
    run(2, _large)


def _adjacent() -> None:
    """Parameters that stand side by side in a resident bucket travel from there, by DDP's buckets."""
    with mock.patch.object(overlap, "ALONE_BYTES", 64):
        for size in (MANY_BUCKETS_MB, 0.001, 25):
            twins = Twins(lambda: make_layers(6, 9, 9, 9, 9, 3), resident=True, bucket_cap_mb=size)
            twins.train()
            twins = Twins(Mixed, resident=True, bucket_cap_mb=size)
            twins.train()


@pytest.mark.parametrize("world_size", [2, 3])
def test_adjacent_parameters_are_gathered_in_place(run: Run, world_size: int) -> None:
    run(world_size, _adjacent)


def _without_step() -> None:
    """``step()`` may be left out, as with torch's hooks."""
    twins = Twins()
    for step in range(3):
        twins.plain.zero_grad()
        backward(twins.plain_model, step)
        twins.plain.step()
        twins.model.zero_grad()
        backward(twins.model, step)
        twins.require_equal()
    twins.zero.step()
    twins.zero.step()
    twins.require_equal()


def test_step_may_be_called_or_not(run: Run) -> None:
    run(2, _without_step)


def _first_layer(model: nn.Module) -> list[torch.Tensor]:
    return [p for name, p in model.named_parameters() if ".0." in f".{name}"]


def _rest(model: nn.Module) -> list[torch.Tensor]:
    first = {id(p) for p in _first_layer(model)}
    return [p for p in model.parameters() if id(p) not in first]


def _part_of_the_model() -> None:
    """The others' averaged gradients are there for another optimizer."""
    twins = Twins(params=_first_layer)
    others = [torch.optim.SGD(_rest(model), lr=0.1) for model, _ in twins.both]
    for step in range(4):
        for (model, optimizer), other in zip(twins.both, others, strict=True):
            model.zero_grad()
            backward(model, step)
            optimizer.step()
            other.step()
        twins.require_equal(f"iteration {step}: ")


def _nested_hooks() -> None:
    """Two sharded optimizers of one model: each one's hook is made from the other's."""
    plain = DistributedDataParallel(make_net(), bucket_cap_mb=MANY_BUCKETS_MB)
    model = DistributedDataParallel(make_net(), bucket_cap_mb=MANY_BUCKETS_MB)
    kinds: list[tuple[Any, Any, dict[str, Any]]] = [
        (_first_layer, torch.optim.AdamW, ADAMW),
        (_rest, torch.optim.SGD, {"lr": 0.1}),
    ]
    plains = [make(params(plain), **options) for params, make, options in kinds]
    hook: Any = allreduce_hook
    for params, make, options in kinds:
        zero = ZeroRedundancyOptimizer(params(model), make, overlap_with_ddp=True, **options)
        hook = hook_with_zero_step_interleaved(hook, model, zero)
    model.register_comm_hook(None, hook)
    for step in range(4):
        plain.zero_grad()
        model.zero_grad()
        backward(plain, step)
        backward(model, step)
        for optimizer in plains:
            optimizer.step()
        require_equal(values_of(plain.parameters()), values_of(model.parameters()))


def _several_optimizers() -> None:
    _part_of_the_model()
    _nested_hooks()


def test_several_optimizers_of_one_model(run: Run) -> None:
    run(2, _several_optimizers)


def _add_param_group() -> None:
    """The rest of the model comes later; the plan of what is gathered together is made anew."""
    twins = Twins(params=lambda model: [{"params": list(model.parameters())}])
    twins.train(2)
    extra = nn.Parameter(torch.zeros(3), requires_grad=False)
    for _, optimizer in twins.both:
        optimizer.add_param_group({"params": [extra], "lr": 0.5})
    twins.train(2, first=2)
    twins.require_state_equal()


def test_a_frozen_group_added_later(run: Run) -> None:
    run(2, _add_param_group)
