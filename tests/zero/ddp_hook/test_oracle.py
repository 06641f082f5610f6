"""DDP's buckets reduced to owners: gradients and updates are those of DDP and the plain optimizer."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.launch import run_ranks
from tests.reference.training import require_equal, values_of
from tests.zero.ddp_hook.twins import Twins
from tests.zero.overlap.test_oracle import (
    SOME_DDP_OPTIONS,
    Convolved,
    Embedded,
    HalfUsed,
    Matrices,
    Mixed,
    make_layers,
)
from tests.zero.overlap.twins import backward
from tests.zero.test_compile_and_checkpointing import Branching, Checkpointed

Run = Callable[..., list[Any]]


def _ddp_options(resident: bool, clip: float | None) -> None:
    for options in SOME_DDP_OPTIONS:
        twins = Twins(resident=resident, **options)
        twins.train(clip=clip)
        if clip is None:
            twins.require_state_equal()


@pytest.mark.parametrize("resident", [False, True], ids=["own storage", "bucket view"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equal_to_ddp_with_the_plain_optimizer(run: Run, world_size: int, resident: bool) -> None:
    run(world_size, _ddp_options, resident, None)


def _more_ranks_than_parameters() -> None:
    Twins(lambda: make_layers(6, 3)).train()


def test_more_ranks_than_parameters(run: Run) -> None:
    run(4, _more_ranks_than_parameters)


def _subgroup() -> None:
    members = [2, 1]
    group = dist.new_group(members)
    if dist.get_rank() in members:
        twins = Twins(group=group)
        twins.train()
        twins.require_state_equal()


def test_a_subgroup_whose_ranks_differ_from_the_global_ones(run: Run) -> None:
    run(3, _subgroup)


def _kinds() -> None:
    sgd: Any = (torch.optim.SGD, {"lr": 0.1})  # which doesn't blow rounding errors up
    for resident in (False, True):
        Twins(Mixed, *sgd, resident=resident).train()
        options = {"bucket_cap_mb": 25, "gradient_as_bucket_view": True}
        Twins(Mixed, *sgd, resident=resident, **options).train()
        Twins(Convolved, *sgd, resident=resident).train()
        Twins(Convolved, *sgd, resident=resident, **options).train()
    for size in (0.5, 25):
        Twins(lambda: make_layers(6, 1024, 256, 3), *sgd, bucket_cap_mb=size).train()
    Twins(Matrices, torch.optim.Muon, {"lr": 0.1}).train()


@pytest.mark.parametrize("world_size", [2, 3])
def test_kinds_and_sizes_of_parameters(run: Run, world_size: int) -> None:
    run(world_size, _kinds)


def _unused(options: dict[str, Any]) -> None:
    for set_to_none in (True, False):
        twins = Twins(Branching, **options)
        for step in range(6):
            for model, optimizer in twins.both:
                optimizer.zero_grad(set_to_none=set_to_none)
                backward(model, step)
            if set_to_none:
                twins.require_gradients_equal(f"iteration {step}: ")
            for _, optimizer in twins.both:
                optimizer.step()
            twins.require_equal(f"{options}, iteration {step}: ")
        twins.require_state_equal()


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_unused_parameters(run: Run, world_size: int, view: bool) -> None:
    run(world_size, _unused, {"find_unused_parameters": True, "gradient_as_bucket_view": view})


def _static_graph() -> None:
    for view in (False, True):
        twins = Twins(HalfUsed, static_graph=True, gradient_as_bucket_view=view)
        twins.train()
        twins.require_state_equal()
        for use_reentrant in (False, True):
            Twins(
                lambda: Checkpointed(use_reentrant),  # noqa: B023 - called at once
                static_graph=True,
                gradient_as_bucket_view=view,
            ).train()


def test_static_graphs_and_activation_checkpointing(run: Run) -> None:
    run(2, _static_graph)


def _accumulation(view: bool) -> None:
    for set_to_none in (True, False):
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


@pytest.mark.parametrize("view", [False, True])
def test_accumulation_with_ddps_no_sync(run: Run, view: bool) -> None:
    run(2, _accumulation, view)


def _several_backwards(view: bool) -> None:
    """Averages stay between passes, synchronised or not, in any order; SGD shows their sum."""
    twins = Twins(
        optimizer_class=torch.optim.SGD, options={"lr": 0.1}, gradient_as_bucket_view=view
    )
    for passes in ([True, True], [True, False, True], [False, True, True], [True]):
        for _, optimizer in twins.both:
            optimizer.zero_grad()
        for step, syncs in enumerate(passes):
            for model, _ in twins.both:
                if syncs:
                    backward(model, step)
                else:
                    with model.no_sync():  # type: ignore[operator] # mypy takes it for any attribute of a module
                        backward(model, step)
        for _, optimizer in twins.both:
            optimizer.step()
        for plain, actual in zip(
            twins.plain_model.parameters(), twins.model.parameters(), strict=True
        ):
            torch.testing.assert_close(actual, plain, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("view", [False, True])
def test_averages_that_are_still_there_are_added_to(run: Run, view: bool) -> None:
    run(2, _several_backwards, view)


def _sparse() -> None:
    warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")
    twins = Twins(Embedded, torch.optim.SGD, {"lr": 0.1})
    for step in range(4):
        for model, optimizer in twins.both:
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
        twins.require_equal()


def test_sparse_gradients_are_averaged_on_every_rank() -> None:
    run_ranks(2, _sparse)


def _first_layer(model: nn.Module) -> Iterable[nn.Parameter]:
    return [p for name, p in model.named_parameters() if ".0." in f".{name}"]


def _part_of_the_model() -> None:
    """The others are another optimizer's, which needs their averages on every rank."""
    twins = Twins(params=_first_layer)
    rest = [
        torch.optim.SGD([p for p in model.parameters() if id(p) not in owned], lr=0.1)
        for model, owned in (
            (model, {id(p) for p in _first_layer(model)}) for model, _ in twins.both
        )
    ]
    for step in range(4):
        for (model, optimizer), other in zip(twins.both, rest, strict=True):
            model.zero_grad()
            backward(model, step)
            optimizer.step()
            other.step()
        twins.require_equal(f"iteration {step}: ")


def test_an_optimizer_of_a_part_of_the_model(run: Run) -> None:
    run(2, _part_of_the_model)


class EitherOr(nn.Module):
    """Rank 0 uses one layer, rank 1 the other, which is all that the optimizer has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Linear(6, 3, dtype=torch.float64)  # in another bucket than the other's
        self.other = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            return self.other(inputs)
        return self.one(inputs.double()).float()


def _used_elsewhere() -> None:
    for set_to_none in (True, False):
        twins = Twins(
            EitherOr,
            params=lambda model: model.module.other.parameters(),  # type: ignore[union-attr] # mypy takes it for any attribute of a module
            find_unused_parameters=True,
        )
        for step in range(4):
            for model, optimizer in twins.both:
                optimizer.zero_grad(set_to_none=set_to_none)
                backward(model, step)
            if set_to_none:
                twins.require_gradients_equal(among="other")
            for _, optimizer in twins.both:
                optimizer.step()
            twins.require_equal(f"iteration {step}: ")


def test_parameters_that_a_rank_uses_none_of(run: Run) -> None:
    run(2, _used_elsewhere)


def _added_group() -> None:
    twins = Twins(params=lambda model: [{"params": list(_first_layer(model))}])
    for model, optimizer in twins.both:
        known = {id(p) for p in _first_layer(model)}
        rest = [p for p in model.parameters() if id(p) not in known]
        optimizer.add_param_group({"params": rest, "lr": 0.5})
    twins.train()


def test_a_group_added_later(run: Run) -> None:
    run(2, _added_group)


def _looking() -> None:
    twins = Twins()
    twins.train(2)
    for model, optimizer in twins.both:
        optimizer.zero_grad()
        backward(model, 2)
    for plain, actual in zip(twins.plain_model.parameters(), twins.model.parameters(), strict=True):
        require_equal(plain.grad, twins.zero.full_grad(actual))
    norm = nn.utils.clip_grad_norm_(twins.plain_model.parameters(), 0.01)
    with pytest.raises(TypeError, match=r"Use the optimizer's clip_grad_norm_\(\)"):
        nn.utils.clip_grad_norm_(twins.model.parameters(), 0.01)
    torch.testing.assert_close(twins.zero.clip_grad_norm_(0.01), norm)
    for _, optimizer in twins.both:
        optimizer.step()
    for plain, actual in zip(twins.plain_model.parameters(), twins.model.parameters(), strict=True):
        torch.testing.assert_close(actual, plain, rtol=1e-5, atol=1e-6)


def test_clipping_and_looking(run: Run) -> None:
    run(2, _looking)


def _grad_scaler() -> list[torch.Tensor]:
    """One rank sees an infinite gradient: all skip, and all scales fall."""
    twins = Twins()
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in range(2)]
    for step in range(5):
        for (model, optimizer), scaler in zip(twins.both, scalers, strict=True):
            optimizer.zero_grad()
            inputs = torch.full((4, 6), 0.1 * (step + dist.get_rank()))
            loss = model(inputs).square().mean()
            if step == 2 and dist.get_rank() == 1:
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale(), f"iteration {step}"
        twins.require_equal(f"iteration {step}: ")
    return values_of(twins.model.parameters())


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_grad_scaler_skips_alike(run: Run, world_size: int) -> None:
    first, *others = run(world_size, _grad_scaler)
    for other in others:
        require_equal(first, other)


def _hooked_twice() -> None:
    """Step hooks, schedulers and closures of the caller are as without the hook."""
    twins = Twins()
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for _, o in twins.both]
    for step in range(3):
        twins.train(1, first=step)
        for scheduler in schedulers:
            scheduler.step()
    for model, optimizer in twins.both:

        def closure(model: nn.Module = model, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(4, 6)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    twins.require_equal()


def test_schedulers_and_closures(run: Run) -> None:
    run(2, _hooked_twice)
