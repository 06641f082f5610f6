"""Whatever backward passes come before a step, the step has the averages of all their gradients."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.reference.data_parallel import (
    ADAMW,
    Passes,
    Twins,
    make_parameters,
    num_parameters_in,
    square_loss,
    squares,
)
from tests.reference.training import require_equal

Run = Callable[..., list[Any]]
MODES = pytest.mark.parametrize("resident", [False, True], ids=["own storage", "bucket view"])

LARGE = (400, 400)


def make() -> nn.ParameterList:
    return make_parameters((3, 4), LARGE, (17,), (), (5, 3, 2), LARGE, (9,))


def _unused(resident: bool) -> None:
    def without(step: int) -> Callable[[int], list[int]]:
        nobody = [(0, 1), (2, 5), (6,), ()][step % 4]
        return lambda rank: [*nobody, (rank + step) % 7, 4 + rank % 2]

    for decay in (0.1, 0.0):
        options = {"lr": 0.1, "weight_decay": decay, "momentum": 0.5}
        twins = Twins(make, torch.optim.SGD, options, parameters_as_bucket_view=resident)
        twins.train(lambda step: squares(step, without=without(step)), steps=5)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@MODES
def test_parameters_unused_on_some_or_all_ranks(run: Run, world_size: int, resident: bool) -> None:
    run(world_size, _unused, resident)


def _never_used() -> int:
    twins = Twins(make)
    twins.train(lambda step: squares(step, without=lambda _: (1, 2)))
    parameters = list(twins.model.parameters())
    assert parameters[1].grad is None
    assert parameters[2].grad is None
    assert parameters[1] not in twins.sharded.state
    return num_parameters_in(twins.sharded.optim.state)


def test_parameters_that_nobody_uses_have_no_gradient_and_no_state(run: Run) -> None:
    assert sum(run(2, _never_used)) == 5


def _none_from_a_function(resident: bool) -> None:
    class Halves(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *values: torch.Tensor) -> torch.Tensor:
            ctx.set_materialize_grads(False)
            ctx.count = len(values)
            return torch.stack([value.sum() for value in values]).sum()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override] # the base class leaves it untyped or wider
            return (None, None, *[gradient.expand(3).clone()] * (ctx.count - 2))

    def passes(model: nn.Module, rank: int) -> None:
        ((rank + 1) * Halves.apply(*model.parameters())).backward()

    def make_vectors() -> nn.ParameterList:
        return make_parameters((3,), (3,), (3,), (3,))

    twins = Twins(make_vectors, parameters_as_bucket_view=resident)
    twins.train(lambda _: passes)


@MODES
def test_a_function_that_returns_no_gradient_for_a_parameter(run: Run, resident: bool) -> None:
    run(2, _none_from_a_function, resident)


class _Net(nn.Module):
    """Layers used twice, with and without checkpoints."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mode = mode
        self.first = nn.Linear(6, 6)
        self.shared = nn.Sequential(nn.Linear(6, 400), nn.Tanh(), nn.Linear(400, 6))
        self.last = nn.Linear(6, 2)

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self.shared, self.run(self.shared, x))

    def run(self, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Any:
        if self.mode == "plain":
            return function(x)
        return checkpoint(function, x, use_reentrant=self.mode != "not reentrant")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = self.run(self.twice, x) if self.mode == "nested" else self.twice(x)
        output: torch.Tensor = self.last(x)
        return output


def inputs_of(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def net_passes(step: int) -> Passes:
    return lambda model, rank: model(inputs_of(step, rank)).square().sum().backward()


def _used_twice(mode: str, resident: bool) -> None:
    twins = Twins(lambda: _Net(mode), parameters_as_bucket_view=resident)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
        twins.train(net_passes)


@pytest.mark.parametrize("mode", ["plain", "not reentrant", "reentrant", "nested"])
@MODES
def test_modules_used_twice_and_checkpoints(run: Run, mode: str, resident: bool) -> None:
    run(2, _used_twice, mode, resident)


def _compiled(resident: bool) -> None:
    twins = Twins(lambda: _Net("plain"), parameters_as_bucket_view=resident)
    compiled = {
        model: torch.compile(model, backend="aot_eager")
        for model in (twins.model, twins.plain_model)
    }

    def passes_of(step: int) -> Passes:
        return lambda model, rank: compiled[model](inputs_of(step, rank)).square().sum().backward()

    twins.train(passes_of)


def test_a_compiled_model(run: Run) -> None:
    run(2, _compiled, False)


def _two_backwards(resident: bool) -> None:
    def unused(rank: int) -> tuple[int, ...]:
        return (0, 1) if rank == 0 else (0, 5)

    twins = Twins(make, parameters_as_bucket_view=resident)
    for step in range(3):
        twins.zero_grad()
        twins.backward(squares(2 * step))
        twins.backward(squares(2 * step + 1, without=unused))
        twins.require_same_gradients()
        twins.step()
        twins.require_same(f"step {step}")


@MODES
def test_two_backwards_before_a_step(run: Run, resident: bool) -> None:
    run(3, _two_backwards, resident)


def _two_losses(resident: bool) -> None:
    def passes(model: nn.Module, rank: int) -> None:
        hidden = model.first(inputs_of(0, rank))  # type: ignore[operator] # mypy takes it for a plain tensor or module
        outputs = model.last(model.shared(hidden))  # type: ignore[operator] # mypy takes it for a plain tensor or module
        outputs.sum().backward(retain_graph=True)
        hidden.square().sum().backward()

    twins = Twins(lambda: _Net("plain"), parameters_as_bucket_view=resident)
    for step in range(3):
        twins.zero_grad()
        # On the one process each pass adds to local gradients; the sum of averages is the same
        # up to rounding.
        twins.backward(passes)
        pairs = zip(twins.plain_model.parameters(), twins.model.parameters(), strict=True)
        for plain, ours in pairs:
            torch.testing.assert_close(twins.sharded.full_grad(ours), plain.grad)
        twins.step()
        for plain, ours in zip(
            twins.plain_model.parameters(), twins.model.parameters(), strict=True
        ):
            torch.testing.assert_close(ours, plain, msg=f"step {step}")


@MODES
def test_two_losses_of_one_graph(run: Run, resident: bool) -> None:
    run(2, _two_losses, resident)


def _accumulated(resident: bool, last_syncs: bool) -> None:
    twins = Twins(make, parameters_as_bucket_view=resident)
    for step in range(3):
        twins.zero_grad()
        twins.backward(squares(9 * step, without=lambda rank: (rank,)), sync=False)
        twins.backward(squares(9 * step + 1, without=lambda _: (2,)), sync=False)
        twins.backward(squares(9 * step + 2, without=lambda _: (0, 2)), sync=last_syncs)
        twins.step()
        twins.require_same(f"step {step}")
        twins.require_same_gradients(f"step {step}")


@pytest.mark.parametrize("last_syncs", [True, False])
@MODES
def test_no_sync(run: Run, resident: bool, last_syncs: bool) -> None:
    run(2, _accumulated, resident, last_syncs)


def _no_sync_after_a_reduction(resident: bool) -> None:
    twins = Twins(make, parameters_as_bucket_view=resident)
    for step in range(2):
        twins.zero_grad()
        twins.backward(squares(9 * step))
        twins.backward(squares(9 * step + 1, without=lambda rank: (rank, 3)), sync=False)
        twins.backward(squares(9 * step + 2), sync=step == 0)
        twins.step()
        twins.require_same(f"step {step}")


@MODES
def test_no_sync_after_a_reduction(run: Run, resident: bool) -> None:
    run(2, _no_sync_after_a_reduction, resident)


def _no_sync_is_restored() -> None:
    twins = Twins(make)
    with pytest.raises(KeyError), twins.sharded.no_sync():
        raise KeyError
    with twins.sharded.no_sync():
        with twins.sharded.no_sync():
            squares(0)(twins.model, twins.rank)
        squares(1)(twins.model, twins.rank)
    twins.one.backward(squares(0), sync=False)
    twins.one.backward(squares(1), sync=False)
    twins.backward(squares(2))
    twins.step()
    twins.require_same()


def test_no_sync_nests_and_ends_with_an_exception(run: Run) -> None:
    run(2, _no_sync_is_restored)


def _discarded(how: str) -> None:
    """What was accumulated, and averages from before, are dropped; nothing comes back."""
    twins = Twins(make)
    twins.backward(squares(0))
    twins.backward(squares(1, without=lambda _: (3,)), sync=False)
    for local in twins.one.local:
        local.clear()
    for step in range(2):
        twins.plain.zero_grad()
        if how == "model":
            twins.model.zero_grad()
        else:
            twins.sharded.zero_grad()
        twins.backward(squares(step + 2))
        twins.step()
        twins.require_same(f"step {step}")


@pytest.mark.parametrize("how", ["optimizer", "model"])
def test_zero_grad_drops_averages_and_what_was_accumulated(run: Run, how: str) -> None:
    run(2, _discarded, how)


def _other_order() -> None:
    def passes_of(step: int) -> Passes:
        def passes(model: nn.Module, rank: int) -> None:
            parameters = list(model.parameters())
            order = torch.randperm(
                len(parameters), generator=torch.Generator().manual_seed(10 * step + rank)
            )
            x = torch.full((3,), 1.0 + rank)
            for number in order.tolist():
                x = torch.tanh(x * parameters[number].mean())
            x.sum().backward()

        return passes

    Twins(make).train(passes_of, steps=4)


def test_another_order_of_backward_on_every_rank_and_in_every_step(run: Run) -> None:
    run(3, _other_order)


def _retain_graph(resident: bool) -> None:
    twins = Twins(make, parameters_as_bucket_view=resident)
    for step in range(2):
        twins.zero_grad()
        losses = {
            (model, rank): square_loss(model.parameters(), 10 * step + rank)
            for model in (twins.model, twins.plain_model)
            for rank in range(twins.world_size)
        }
        for retain in (True, False):
            twins.backward(lambda m, r, r_=retain, l_=losses: l_[m, r].backward(retain_graph=r_))
        twins.step()
        twins.require_same()


@MODES
def test_retain_graph(run: Run, resident: bool) -> None:
    run(2, _retain_graph, resident)


def _create_graph(resident: bool) -> None:
    def penalised(step: int) -> Passes:
        def passes(model: nn.Module, rank: int) -> None:
            parameters = list(model.parameters())
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Using backward.. with create_graph=True")
                square_loss(parameters, 10 * step + rank).backward(create_graph=True)

        return passes

    Twins(make, parameters_as_bucket_view=resident).train(penalised)


@MODES
def test_create_graph(run: Run, resident: bool) -> None:
    run(2, _create_graph, resident)


def _autograd_grad(resident: bool) -> None:
    def penalised(step: int) -> Passes:
        def passes(model: nn.Module, rank: int) -> None:
            parameters = list(model.parameters())
            before = [parameter.grad for parameter in parameters]
            loss = square_loss(parameters, 10 * step + rank)
            gradients = torch.autograd.grad(loss, parameters, create_graph=True)
            assert all(p.grad is b for p, b in zip(parameters, before, strict=True)), (
                "torch.autograd.grad left a gradient"
            )
            penalty = torch.stack([g.square().sum() for g in gradients]).sum()
            torch.autograd.grad(penalty, parameters[0], retain_graph=True)
            (loss + 0.1 * penalty).backward()

        return passes

    Twins(make, parameters_as_bucket_view=resident).train(penalised)


@MODES
def test_a_gradient_penalty_with_autograd_grad(run: Run, resident: bool) -> None:
    run(2, _autograd_grad, resident)


def _only_autograd_grad() -> list[int]:
    twins = Twins(make)
    parameters = list(twins.model.parameters())
    if twins.rank == 0:  # alone: it must not communicate
        torch.autograd.grad(square_loss(parameters, 0), parameters)
    dist.barrier()
    assert all(parameter.grad is None for parameter in parameters)
    twins.train(squares)
    return []


def test_autograd_grad_on_one_rank_alone_communicates_nothing(run: Run) -> None:
    run(2, _only_autograd_grad)


def _inputs_given(resident: bool) -> None:
    def passes_of(step: int) -> Passes:
        def passes(model: nn.Module, rank: int) -> None:
            parameters = list(model.parameters())
            chosen = parameters[step % 2 :: 2]
            square_loss(parameters, 10 * step + rank).backward(inputs=chosen)

        return passes

    Twins(make, parameters_as_bucket_view=resident).train(passes_of)


@MODES
def test_backward_for_some_inputs_only(run: Run, resident: bool) -> None:
    run(2, _inputs_given, resident)


def _frozen_and_thawed(resident: bool) -> None:
    def make_half_frozen() -> nn.ParameterList:
        model = make()
        for parameter in list(model.parameters())[::2]:
            parameter.requires_grad_(False)
        model.append(nn.Parameter(torch.randn(500, 500), requires_grad=False))
        return model

    twins = Twins(make_half_frozen, parameters_as_bucket_view=resident)
    twins.train(squares, steps=2, what="half frozen")
    for model in (twins.model, twins.plain_model):
        for parameter in model.parameters():
            parameter.requires_grad_(True)
    twins.train(lambda step: squares(step + 2), steps=2, what="thawed")
    for model in (twins.model, twins.plain_model):
        for parameter in list(model.parameters())[1::2]:
            parameter.requires_grad_(False)
    twins.train(lambda step: squares(step + 4), steps=2, what="others frozen")


@MODES
def test_frozen_and_thawed_parameters(run: Run, resident: bool) -> None:
    run(3, _frozen_and_thawed, resident)


def _integers() -> None:
    def make_with_integers() -> nn.ParameterList:
        model = make()
        model.append(nn.Parameter(torch.arange(5), requires_grad=False))
        return model

    def only_floats(step: int) -> Passes:
        return squares(step, without=lambda _: (7,))

    Twins(make_with_integers).train(only_floats)


def test_frozen_integers(run: Run) -> None:
    run(2, _integers)


def _added_group(resident: bool) -> None:
    twins = Twins(make, parameters_as_bucket_view=resident)
    twins.train(squares, steps=1)
    for model, optimizer in ((twins.model, twins.sharded), (twins.plain_model, twins.plain)):
        torch.manual_seed(1 + twins.rank * (model is twins.model))  # rank 0's are broadcast
        added = [torch.randn(4), torch.randn(500, 400), torch.randn(2, 2)]
        new = [nn.Parameter(values) for values in added]
        model.extend(new)  # type: ignore[operator] # mypy takes it for a plain tensor or module
        optimizer.add_param_group({"params": new, "lr": 0.01})
    twins.require_same("after adding")
    twins.train(lambda step: squares(step + 1))


@MODES
def test_a_group_added_later(run: Run, resident: bool) -> None:
    run(2, _added_group, resident)


def _assigned(resident: bool) -> None:
    twins = Twins(make, parameters_as_bucket_view=resident)

    def assign(model: nn.Module, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        for number, parameter in enumerate(model.parameters()):
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = None if number == 3 + rank else gradient

    for step in range(2):
        twins.zero_grad()
        twins.backward(assign)
        twins.step()
        twins.require_same(f"step {step}")
    twins.train(squares)


@MODES
def test_gradients_assigned_by_hand_are_averaged_by_the_step(run: Run, resident: bool) -> None:
    run(2, _assigned, resident)


def _set_to_zero(resident: bool) -> None:
    twins = Twins(make, parameters_as_bucket_view=resident)
    for step in range(4):
        twins.zero_grad(set_to_none=step % 2 == 1)
        twins.backward(squares(step, without=lambda rank: (1, 2, 4 + rank)))
        twins.require_same_gradients(f"step {step}")
        twins.step()
        twins.require_same(f"step {step}")


@MODES
def test_zero_grad_to_zero(run: Run, resident: bool) -> None:
    run(2, _set_to_zero, resident)


def _zeroed_by_the_model(set_to_none: bool) -> None:
    twins = Twins(make)
    for step in range(3):
        twins.model.zero_grad(set_to_none)
        twins.plain_model.zero_grad(set_to_none)
        twins.backward(squares(step))
        twins.step()
        twins.require_same(f"step {step}")


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_of_the_model(run: Run, set_to_none: bool) -> None:
    run(2, _zeroed_by_the_model, set_to_none)


def _kept_gradients() -> None:
    twins = Twins(make)
    for step in range(3):
        twins.backward(squares(step))
        twins.step()
        twins.require_same(f"step {step}")


def test_gradients_that_are_never_zeroed_add_up(run: Run) -> None:
    run(2, _kept_gradients)


def _closures(resident: bool) -> list[float]:
    twins = Twins(lambda: make_parameters((3,)), parameters_as_bucket_view=resident)
    losses = []
    for step in range(3):

        def closure(step: int = step) -> float:
            twins.sharded.zero_grad()
            squares(step)(twins.model, twins.rank)
            return 2.5 + step

        twins.plain.zero_grad()
        twins.one.backward(squares(step))
        twins.plain.step()
        losses.append(twins.sharded.step(closure))
        twins.require_same(f"step {step}")
    return losses


@MODES
def test_closures_also_where_nothing_is_owned(run: Run, resident: bool) -> None:
    assert run(3, _closures, resident) == [[2.5, 3.5, 4.5]] * 3


def _schedulers(name: str) -> None:
    twins = Twins(make, torch.optim.AdamW, {**ADAMW, "betas": (0.8, 0.9)})
    schedulers: Any = [
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=5)
        if name == "one cycle"
        else torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.3)
        for optimizer in (twins.plain, twins.sharded)
    ]
    for step in range(4):
        twins.train(lambda _, step=step: squares(step), steps=1)
        for scheduler in schedulers:
            scheduler.step(*([] if name == "one cycle" else [1.0 + step]))
    assert twins.plain.param_groups[0]["lr"] == twins.sharded.param_groups[0]["lr"] != 0.05


@pytest.mark.parametrize("name", ["one cycle", "plateau"])
def test_schedulers(run: Run, name: str) -> None:
    run(2, _schedulers, name)


def _user_hooks() -> None:
    def add_one(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.add_(1)

    twins = Twins(make)
    for model in (twins.model, twins.plain_model):
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * 2)
            parameter.register_post_accumulate_grad_hook(add_one)
    twins.train(squares)


def test_hooks_of_the_user_see_local_gradients(run: Run) -> None:
    run(2, _user_hooks)


def _two_optimizers() -> None:
    halves = [Twins(lambda: make_parameters((3, 4), (9,), LARGE)) for _ in range(2)]

    def passes(step: int, which: int) -> Passes:
        def run_both(model: nn.Module, rank: int) -> None:
            pair = [halves[0], halves[1]]
            ours = model in [each.model for each in pair]
            models = [each.model if ours else each.plain_model for each in pair]
            first, second = models if which == 0 else models[::-1]
            losses = [square_loss(m.parameters(), 10 * step + rank) for m in (first, second)]
            (losses[0] * losses[1].detach()).backward()

        return run_both

    for step in range(2):
        for which, half in enumerate(halves):
            half.zero_grad()
            half.backward(passes(step, which))
            half.step()
            half.require_same(f"step {step}")


def test_two_optimizers_side_by_side(run: Run) -> None:
    run(2, _two_optimizers)


def _one_loss_of_two_optimizers() -> None:
    first, second = (Twins(lambda: make_parameters((3, 4), (9,))) for _ in range(2))
    for step in range(2):
        for half in (first, second):
            half.zero_grad()
        models = first.model, second.model
        sum(square_loss(m.parameters(), step + first.rank) for m in models).backward()
        for half in (first, second):
            half.one.backward(
                lambda m, r, step=step: square_loss(m.parameters(), step + r).backward()
            )
            half.step()
            half.require_same(f"step {step}")


def test_one_backward_for_two_optimizers(run: Run) -> None:
    run(2, _one_loss_of_two_optimizers)


def _gradients_by_rank() -> None:
    """The average is there when backward returns, on its owner, and a part of nothing elsewhere."""
    twins = Twins(make)
    twins.backward(squares(0))
    owned = {p for group in twins.sharded.optim.param_groups for p in group["params"]}
    pairs = list(zip(twins.plain_model.parameters(), twins.model.parameters(), strict=True))
    for plain, ours in pairs:
        assert ours.grad is not None
        assert (ours.grad.shape, ours.grad.dtype) == (plain.shape, plain.dtype)
        if ours in owned:
            require_equal(plain.grad, ours.grad)
        else:
            with pytest.raises(TypeError, match="only a part of it"):
                ours.grad.norm()
    assert len(owned) < len(pairs)


def test_gradients_are_complete_when_backward_returns(run: Run) -> None:
    run(2, _gradients_by_rank)
