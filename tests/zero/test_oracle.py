"""The oracle: sharded training equals the plain optimizer on one process, bit for bit."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import Optimizer

from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tensorplay.distributed.optim.zero import sharding_plan
from tests.launch import run_ranks
from tests.reference.optimizers import OPTIMIZERS, KeepsCounters
from tests.reference.training import (
    make_matrices,
    make_model,
    require_equal,
    set_gradients,
    set_sparse_gradients,
    values_of,
)

MODES = pytest.mark.parametrize("resident", [False, True], ids=["own storage", "bucket view"])
WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 3, 4])

Setter = Callable[[Iterable[torch.Tensor], int], None]


def train_both(
    parameters: Sequence[torch.Tensor],
    optimizer_class: type[Optimizer],
    options: dict[str, Any],
    *,
    resident: bool,
    group: dist.ProcessGroup | None = None,
    set_gradients_: Setter = set_gradients,
    steps: int = 4,
    what: str = "",
) -> None:
    """Trains ``parameters`` sharded and copies of them with the plain optimizer, and compares."""
    plain_parameters = [
        torch.nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for p in parameters
    ]
    plain = optimizer_class(plain_parameters, **options)
    sharded = ZeroRedundancyOptimizer(
        parameters, optimizer_class, group, parameters_as_bucket_view=resident, **options
    )
    for step in range(steps):
        set_gradients_(parameters, step)
        set_gradients_(plain_parameters, step)
        sharded.step()
        plain.step()
        require_equal(values_of(plain_parameters), values_of(parameters), f"{what}, step {step}: ")
    strides = [p.stride() for p in parameters]
    assert strides == [p.stride() for p in plain_parameters], f"{what}: strides changed"


def _every_optimizer(resident: bool) -> None:
    for name, (optimizer_class, options) in OPTIMIZERS.items():
        parameters = list(make_model().parameters())
        train_both(parameters, optimizer_class, options, resident=resident, what=name)


@WORLD_SIZES
@MODES
def test_every_optimizer_is_bitwise_equal(world_size: int, resident: bool) -> None:
    run_ranks(world_size, _every_optimizer, resident)


def _matrix_wise(resident: bool) -> None:
    for optimizer_class in (torch.optim.Muon, torch.optim.Adafactor):
        options = {"lr": 0.1, "weight_decay": 0.1}
        train_both(list(make_matrices()), optimizer_class, options, resident=resident)


@pytest.mark.parametrize("world_size", [2, 4])
@MODES
def test_matrix_wise_optimizers_get_whole_matrices(world_size: int, resident: bool) -> None:
    run_ranks(world_size, _matrix_wise, resident)


def _sparse_adam(resident: bool) -> None:
    parameters = list(make_matrices())
    train_both(
        parameters,
        torch.optim.SparseAdam,
        {"lr": 0.1},
        resident=resident,
        set_gradients_=set_sparse_gradients,
    )


@MODES
def test_sparse_adam_with_sparse_gradients(resident: bool) -> None:
    run_ranks(3, _sparse_adam, resident)


def _on_subgroup(resident: bool) -> None:
    members = [3, 1]
    group = dist.new_group(members)
    if dist.get_rank() in members:
        for name in ("AdamW fused", "SGD momentum"):
            optimizer_class, options = OPTIMIZERS[name]
            parameters = list(make_model().parameters())
            train_both(parameters, optimizer_class, options, resident=resident, group=group)


@MODES
def test_on_a_subgroup_whose_ranks_differ_from_the_global_ones(resident: bool) -> None:
    run_ranks(4, _on_subgroup, resident)


def _two_subgroups() -> None:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = groups[dist.get_rank() % 2]
    parameters = list(make_model(seed=dist.get_rank() % 2).parameters())
    optimizer_class, options = OPTIMIZERS["Adam"]
    train_both(parameters, optimizer_class, options, resident=False, group=mine)


def test_two_subgroups_train_side_by_side() -> None:
    run_ranks(4, _two_subgroups)


def _without_gradients(resident: bool) -> None:
    def some_missing(parameters: Iterable[torch.Tensor], step: int) -> None:
        set_gradients(parameters, step, without=[step % 3, 5])

    for name in ("AdamW", "AdamW fused", "SGD momentum"):
        optimizer_class, options = OPTIMIZERS[name]
        train_both(
            list(make_model().parameters()),
            optimizer_class,
            options,
            resident=resident,
            set_gradients_=some_missing,
            what=name,
        )


@MODES
def test_parameters_without_gradient_are_skipped(resident: bool) -> None:
    run_ranks(3, _without_gradients, resident)


def _mixed_dtypes(resident: bool) -> None:
    torch.manual_seed(0)
    parameters = [
        torch.nn.Parameter(torch.randn(5, 3).to(dtype))
        for dtype in (
            torch.float32,
            torch.bfloat16,
            torch.float64,
            torch.complex64,
            torch.float16,
            torch.bfloat16,
        )
    ]
    for name in ("Adam", "SGD momentum"):
        optimizer_class, options = OPTIMIZERS[name]
        train_both(parameters, optimizer_class, options, resident=resident, what=name)


@MODES
def test_mixed_dtypes_in_one_optimizer(resident: bool) -> None:
    run_ranks(2, _mixed_dtypes, resident)


def _frozen_then_thawed(resident: bool) -> None:
    model = make_model()
    parameters = list(model.parameters())
    for parameter in parameters[::2]:
        parameter.requires_grad_(False)

    def thaw_later(current: Iterable[torch.Tensor], step: int) -> None:
        current = list(current)
        set_gradients(current, step)
        for parameter in current[::2]:
            parameter.requires_grad_(step >= 2)
            if step < 2:
                parameter.grad = None

    train_both(
        parameters, torch.optim.AdamW, {"lr": 0.1}, resident=resident, set_gradients_=thaw_later
    )


@MODES
@pytest.mark.parametrize("world_size", [2, 4])
def test_frozen_parameters_that_are_thawed_at_run_time(world_size: int, resident: bool) -> None:
    run_ranks(world_size, _frozen_then_thawed, resident)


def _shared_storage(resident: bool) -> None:
    torch.manual_seed(0)
    flat = torch.randn(40)
    parameters = [
        torch.nn.Parameter(flat[:12].view(3, 4)),
        torch.nn.Parameter(flat[12:30]),
        torch.nn.Parameter(torch.randn(6)),
    ]
    train_both(parameters, torch.optim.AdamW, {"lr": 0.1}, resident=resident)
    expected = torch.cat([parameters[0].flatten(), parameters[1]])
    assert torch.equal(flat[:30], expected), "the parameters no longer live in their storage"


@MODES
def test_parameters_that_share_a_storage_go_on_sharing_it(resident: bool) -> None:
    run_ranks(2, _shared_storage, resident)


def _overlapping(resident: bool) -> None:
    torch.manual_seed(0)
    base = torch.randn(6, 4)
    plain_base = base.clone()
    whole, rows = torch.nn.Parameter(base), torch.nn.Parameter(base[2:4])
    plain_whole, plain_rows = torch.nn.Parameter(plain_base), torch.nn.Parameter(plain_base[2:4])
    optimizer = ZeroRedundancyOptimizer(
        [whole, rows], torch.optim.SGD, lr=0.1, parameters_as_bucket_view=resident, foreach=False
    )
    plain = torch.optim.SGD([plain_whole, plain_rows], lr=0.1, foreach=False)
    for step in range(3):
        set_gradients([whole, rows], step)
        set_gradients([plain_whole, plain_rows], step)
        optimizer.step()
        plain.step()
        require_equal(plain_base, base)


@MODES
def test_overlapping_parameters_are_updated_in_order(resident: bool) -> None:
    run_ranks(2, _overlapping, resident)


def _groups_with_options(resident: bool) -> None:
    def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
        parameters = list(model.parameters())
        return [
            {"params": parameters[:3], "lr": 0.3},
            {"params": parameters[3:4], "betas": (0.5, 0.6)},
            {"params": parameters[4:], "weight_decay": 0.5, "note": "user's own"},
        ]

    model, plain_model = make_model(), make_model()
    optimizer = ZeroRedundancyOptimizer(
        groups(model), torch.optim.AdamW, lr=0.1, parameters_as_bucket_view=resident
    )
    plain = torch.optim.AdamW(groups(plain_model), lr=0.1)
    for step in range(4):
        for current in (optimizer, plain):
            current.param_groups[1]["lr"] *= 0.5
            current.param_groups[2]["betas"] = (0.1 * step, 0.9)
        set_gradients(model.parameters(), step)
        set_gradients(plain_model.parameters(), step)
        optimizer.step()
        plain.step()
        require_equal(values_of(plain_model.parameters()), values_of(model.parameters()))


@MODES
@pytest.mark.parametrize("world_size", [2, 4])
def test_groups_with_their_own_options_changed_at_run_time(world_size: int, resident: bool) -> None:
    run_ranks(world_size, _groups_with_options, resident)


def _closure_and_keywords() -> float:
    model, plain_model = make_model(), make_model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), KeepsCounters)
    plain = KeepsCounters(plain_model.parameters())
    calls = []

    def closure_for(current: torch.nn.Module) -> Callable[[], float]:
        def closure() -> float:
            assert torch.is_grad_enabled()
            calls.append(current)
            set_gradients(current.parameters(), 0)
            return 2.5

        return closure

    loss = optimizer.step(closure_for(model), scale=0.25)
    plain.step(closure_for(plain_model), scale=0.25)
    assert calls == [model, plain_model]
    require_equal(values_of(plain_model.parameters()), values_of(model.parameters()))
    return loss


def test_closure_runs_on_every_rank_and_keywords_reach_the_local_optimizer() -> None:
    assert run_ranks(4, _closure_and_keywords) == [2.5] * 4


def _more_ranks_than_parameters(resident: bool) -> None:
    for count in (1, 2):
        for name in ("AdamW fused", "Adagrad", "NeedsAParameter", "KeepsCounters"):
            optimizer_class, options = OPTIMIZERS[name]
            parameters = list(make_matrices(count=count))
            train_both(parameters, optimizer_class, options, resident=resident, what=name)


@MODES
def test_more_ranks_than_parameters(resident: bool) -> None:
    run_ranks(4, _more_ranks_than_parameters, resident)


def _many_buckets(resident: bool) -> None:
    torch.manual_seed(0)
    sharding_plan.CAPACITY_BYTES = 4000  # this process ends with the test
    sizes = [300, 10, 250, 9000, 7, 100, 400, 600, 600, 20]
    parameters = [torch.nn.Parameter(torch.randn(size)) for size in sizes]
    train_both(parameters, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, resident=resident)


@MODES
@pytest.mark.parametrize("world_size", [2, 3])
def test_more_than_one_bucket_and_a_parameter_larger_than_a_bucket(
    world_size: int, resident: bool
) -> None:
    run_ranks(world_size, _many_buckets, resident)


class _DropsGradients(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        return loss


def _thawed_without_gradient_left(resident: bool) -> None:
    parameters = list(make_model().parameters())
    for parameter in parameters[::2]:
        parameter.requires_grad_(False)

    def thaw(current: Iterable[torch.Tensor], step: int) -> None:
        current = list(current)
        set_gradients(current, step)
        for parameter in current[::2]:
            parameter.requires_grad_(True)

    train_both(parameters, _DropsGradients, {"lr": 0.1}, resident=resident, set_gradients_=thaw)


@MODES
def test_thawed_parameters_whose_gradients_the_step_drops(resident: bool) -> None:
    run_ranks(2, _thawed_without_gradient_left, resident)


def _other_strides_on_one_rank() -> None:
    weight, plain_weight = (torch.nn.Parameter(make_matrices(count=1)[0].detach()) for _ in "ab")
    optimizer = ZeroRedundancyOptimizer([weight], torch.optim.SGD, lr=0.1)
    plain = torch.optim.SGD([plain_weight], lr=0.1)
    if dist.get_rank() == 1:
        weight.data = weight.data.t().contiguous().t()
    for step in range(2):
        set_gradients([weight], step)
        set_gradients([plain_weight], step)
        optimizer.step()
        plain.step()
        require_equal(plain_weight.detach(), weight.detach())


def test_strides_that_differ_between_ranks_when_parameters_keep_their_storage() -> None:
    run_ranks(2, _other_strides_on_one_rank)


def _default_device() -> None:
    parameters = list(make_model().parameters())
    torch.set_default_device("meta")
    optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1, momentum=0.5)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.consolidate_state_dict()


def test_the_default_device_of_new_tensors_does_not_matter() -> None:
    run_ranks(2, _default_device)


def _options_changed_in_a_closure() -> None:
    model, plain_model = make_model(), make_model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    plain = torch.optim.SGD(plain_model.parameters(), lr=0.1)

    def closure_for(current: torch.nn.Module, its_optimizer: Optimizer) -> Callable[[], float]:
        def closure() -> float:
            its_optimizer.param_groups[0]["lr"] = 0.5
            set_gradients(current.parameters(), 0)
            return 0.0

        return closure

    optimizer.step(closure_for(model, optimizer))
    plain.step(closure_for(plain_model, plain))
    require_equal(values_of(plain_model.parameters()), values_of(model.parameters()))
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_options_that_a_closure_changes_are_used() -> None:
    run_ranks(2, _options_changed_in_a_closure)
