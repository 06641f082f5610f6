"""``overlap_with_ddp=True`` over our own reduction: the results of the step after backward."""

import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tensorplay.distributed.optim.zero import sharding_plan
from tests.reference.data_parallel import Passes, Twins, make_parameters, squares
from tests.reference.training import require_equal, values_of
from tests.zero import test_join
from tests.zero.gradients import test_oracle, test_passes
from tests.zero.gradients.test_passes import make

Run = Callable[..., list[Any]]
MODES = pytest.mark.parametrize(
    ("resident", "early"),
    [(False, True), (True, True), (False, False), (True, False)],
    ids=["own storage", "bucket view", "own storage, at the end", "bucket view, at the end"],
)


def _require_no_gradients(twins: Twins, what: str = "") -> None:
    left = [number for number, p in enumerate(twins.model.parameters()) if p.grad is not None]
    assert left == [], f"{what}gradients are left"


@contextmanager
def stepping(*, early: bool = True) -> Iterator[None]:
    """Inside, sharded gradients are stepped in backward, which leaves none to look at."""
    before = ZeroRedundancyOptimizer.__init__.__defaults__
    keywords = ZeroRedundancyOptimizer.__init__.__kwdefaults__
    ZeroRedundancyOptimizer.__init__.__defaults__ = (None, False, True)
    keywords["overlap_with_backward"] = early
    try:
        with mock.patch.object(Twins, "require_same_gradients", _require_no_gradients):
            yield
    finally:
        ZeroRedundancyOptimizer.__init__.__defaults__ = before
        keywords["overlap_with_backward"] = None


def stepping_in(early: bool, function: Callable[..., Any], *args: Any) -> Any:
    with stepping(early=early):
        return function(*args)


@pytest.mark.parametrize(
    ("world_size", "function", "args"),
    [
        (1, test_oracle._several_optimizers, ()),
        (2, test_oracle._several_optimizers, ()),
        (3, test_oracle._several_optimizers, ()),
        (2, test_oracle._every_optimizer, ()),
        (3, test_oracle._matrix_wise, ()),
        (2, test_oracle._mixed_dtypes, ()),
        (3, test_oracle._mixed_dtypes, ()),
        (2, test_oracle._groups, ()),
        (3, test_oracle._more_ranks_than_parameters, ()),
        (2, test_oracle._tied, ()),
        (2, test_oracle._strange_memory, ()),
        (4, test_oracle._on_subgroup, ()),
        (1, test_passes._unused, ()),
        (3, test_passes._unused, ()),
        (2, test_passes._none_from_a_function, ()),
        (2, test_passes._create_graph, ()),
        (2, test_passes._autograd_grad, ()),
        (2, test_passes._inputs_given, ()),
        (3, test_passes._frozen_and_thawed, ()),
        (2, test_passes._added_group, ()),
        (2, test_passes._set_to_zero, ()),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
@MODES
def test_the_results_are_the_plain_optimizers(
    run: Run,
    world_size: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    resident: bool,
    early: bool,
) -> None:
    run(world_size, stepping_in, early, function, resident, *args)


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (test_passes._never_used, ()),
        *(
            (test_passes._used_twice, (m, False))
            for m in ("plain", "not reentrant", "reentrant", "nested")
        ),
        (test_passes._compiled, (False,)),
        (test_passes._accumulated, (False, True)),
        (test_passes._accumulated, (True, True)),
        (test_passes._no_sync_is_restored, ()),
        (test_passes._other_order, ()),
        (test_passes._only_autograd_grad, ()),
        (test_passes._integers, ()),
        (test_passes._zeroed_by_the_model, (True,)),
        (test_passes._schedulers, ("one cycle",)),
        (test_passes._schedulers, ("plateau",)),
        (test_passes._two_optimizers, ()),
        (test_passes._one_loss_of_two_optimizers, ()),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
@pytest.mark.parametrize("early", [True, False])
def test_passes_and_what_comes_between_them(
    run: Run, function: Callable[..., Any], args: tuple[Any, ...], early: bool
) -> None:
    run(2, stepping_in, early, function, *args)


def _many_buckets(resident: bool, alone_bytes: int) -> None:
    sizes = [(300,), (10,), (250,), (9000,), (7,), (100,), (400,), (600,), (600,), (20,)]
    with (
        mock.patch.object(sharding_plan, "STEPPED_CAPACITY_BYTES", 4000),
        mock.patch.object(sharding_plan, "ALONE_BYTES", alone_bytes),
        mock.patch("tensorplay.distributed.optim.zero.gradients.STEPPED_CAPACITY_BYTES", 4000),
    ):
        twins = Twins(lambda: make_parameters(*sizes), parameters_as_bucket_view=resident)
        twins.train(squares)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("alone_bytes", [3000, 1000])  # at the end, smaller ones share a gather
@MODES
def test_many_buckets_and_exchanges_in_rounds(
    run: Run, world_size: int, resident: bool, early: bool, alone_bytes: int
) -> None:
    run(world_size, stepping_in, early, _many_buckets, resident, alone_bytes)


def _without_step_and_zero_grad() -> None:
    with stepping():
        twins = Twins(make)
        for step in range(3):
            twins.plain.zero_grad()
            twins.backward(squares(step))
            twins.one.reduce()
            twins.plain.step()
            twins.require_same(f"step {step}")


def test_the_loop_needs_neither_step_nor_zero_grad(run: Run) -> None:
    run(2, _without_step_and_zero_grad)


def _closure() -> list[float]:
    with stepping():
        twins = Twins(make)
        losses = []
        for step in range(2):

            def closure(step: int = step) -> float:
                squares(step)(twins.model, twins.rank)
                return 1.5 + step

            twins.plain.zero_grad()
            twins.one.backward(squares(step))
            twins.plain.step()
            losses.append(twins.sharded.step(closure))
            twins.require_same(f"step {step}")
        return losses


def test_step_calls_a_closure(run: Run) -> None:
    assert run(2, _closure) == [[1.5, 2.5]] * 2


def _saved_weight() -> str:
    """Weights are used once more, by a graph that needs their old values."""
    with stepping():
        twins = Twins(lambda: make_parameters((400, 400), (400, 400), (3,)))
        weights = list(twins.model.parameters())[:2]
        x = torch.ones(400, requires_grad=True)
        kept = torch.stack([(weight.detach() * x).sum() for weight in weights]).sum()
        squares(0)(twins.model, twins.rank)
        try:
            kept.backward()
        except RuntimeError as error:
            return str(error)
        return ""


def test_autograd_notices_that_weights_have_changed(run: Run) -> None:
    for message in run(3, _saved_weight):
        assert "modified by an inplace operation" in message


class _Checkpointed(nn.Module):
    """On rank 1 its layer is used inside and outside of what is checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        y = checkpoint(self.layer, x, use_reentrant=True)
        output: torch.Tensor = self.layer(y) if rank == 1 else y
        return output


def _passes_of_checkpointed(step: int) -> Passes:
    def passes(model: nn.Module, rank: int) -> None:
        x = torch.full((2, 4), 1.0 + step + rank, requires_grad=True)
        model(x, rank).square().sum().backward()

    return passes


class _CheckpointedInParts(nn.Module):
    """On rank 1 a layer is used inside and outside of what is checkpointed, and lent to another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.last.weight = self.inner[0].weight  # type: ignore[assignment] # mypy sees a Module's

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        y = checkpoint(self.inner, self.first(x), use_reentrant=True)
        if rank == 1:
            y = self.inner(self.first(y))
        output: torch.Tensor = self.last(y)
        return output


def _shown_by_the_module() -> None:
    with stepping():
        twins = Twins(_CheckpointedInParts, with_module=True)
        copy = deepcopy(twins.model)
        twins.train(_passes_of_checkpointed, steps=4)
        saved = io.BytesIO()
        torch.save(twins.model, saved)
        saved.seek(0)
        for other in (copy, torch.load(saved, weights_only=False)):
            other(torch.ones(2, 4), 1).sum().backward()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_use_inside_and_outside_of_a_checkpoint_that_module_shows(
    run: Run, world_size: int
) -> None:
    run(world_size, _shown_by_the_module)


def _inside_and_outside() -> str:
    with stepping():
        twins = Twins(_Checkpointed)
        x = torch.ones(2, 4, requires_grad=True)
        messages = []
        for _ in range(2):
            with pytest.raises(RuntimeError) as caught:
                twins.model(x, twins.rank).sum().backward()
            messages.append(f"{caught.typename}: {caught.value}")
        _require_no_gradients(twins)
        return messages[1]


def _inside_and_outside_at_the_end() -> None:
    """What is stepped when all gradients are there may be used anywhere."""
    with stepping(early=False):
        twins = Twins(_Checkpointed)
        twins.train(_passes_of_checkpointed)


def test_a_second_gradient_is_one_when_the_end_is_awaited(run: Run) -> None:
    run(2, _inside_and_outside_at_the_end)


def test_a_second_gradient_raises_on_every_rank(run: Run) -> None:
    first, second = run(2, _inside_and_outside)
    for message in (first, second):
        assert "another gradient, from reentrant checkpointing" in message
        assert "use_reentrant=False" in message
        assert "as module=" in message
        assert "parameter 0" in message or "parameter 1" in message
    assert first.startswith("PeerError")


def _checkpointed_at_any_time() -> None:
    with stepping():
        twins = Twins(make)
        twins.train(squares, steps=2)
        twins.sharded.consolidate_state_dict(to=1)
        state = [twins.sharded.state_dict() if twins.rank == 1 else None]
        dist.broadcast_object_list(state, src=1)
        other = Twins(make)
        other.model.load_state_dict(twins.model.state_dict())
        other.sharded.load_state_dict(state[0])
        other.plain_model.load_state_dict(twins.plain_model.state_dict())
        other.plain.load_state_dict(twins.plain.state_dict())
        other.train(lambda step: squares(step + 2))


def test_state_moves_to_another_optimizer(run: Run) -> None:
    run(3, _checkpointed_at_any_time)


def _low_precision() -> None:
    with stepping():
        options: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}
        twins = Twins(
            lambda: make_parameters((300, 30), (17,), (400, 700), dtype=torch.bfloat16),
            torch.optim.AdamW,
            options,
        )
        twins.train(squares)


def test_bfloat16(run: Run) -> None:
    run(3, _low_precision)


def _registered_in_forward_order() -> list[int]:
    """The first parameter's gradient comes first, against what is expected."""

    def passes_of(step: int) -> Passes:
        def passes(model: nn.Module, rank: int) -> None:
            x = torch.full((400,), 1.0 + 0.1 * rank + step, requires_grad=True)
            for weight in reversed(list(model.parameters())):
                x = torch.tanh(x * weight.mean(0))
            x.sum().backward()

        return passes

    with stepping():
        twins = Twins(lambda: make_parameters(*[(400, 400)] * 6))
        most = []

        def look(_: torch.Tensor) -> None:
            most[-1] = max(most[-1], sum(p.grad is not None for p in twins.model.parameters()))

        for parameter in twins.model.parameters():
            parameter.register_post_accumulate_grad_hook(look)
        for step in range(3):
            most.append(0)
            twins.train(lambda _, step=step: passes_of(step), steps=1)
        return most


def test_buckets_follow_the_order_of_backward_from_the_second_on(run: Run) -> None:
    for most in run(2, _registered_in_forward_order):
        assert most[0] == 5  # all but that of the hook, which is called after ours
        assert most[2] == 0


def _joined(ours: bool, by_initial_world_size: bool) -> list[torch.Tensor]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = test_join.make_net()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        overlap_with_ddp=True,
        shard_gradients=True,
        **test_join.ADAMW,
    )
    scheduler = test_join.decay(optimizer)
    join = test_join.Join if ours else test_join.TorchJoin
    with join([optimizer], divide_by_initial_world_size=by_initial_world_size):
        for number in range(test_join.BATCHES[world_size][rank]):
            optimizer.zero_grad()
            if number % 2:
                with optimizer.no_sync():
                    (0 * test_join.loss_of(model, rank, number)).backward()
            test_join.loss_of(model, rank, number).backward()
            optimizer.step()
            scheduler.step()
    expected = test_join.train_as_one(world_size, by_initial_world_size=by_initial_world_size)
    for plain, actual in zip(expected, model.parameters(), strict=True):
        torch.testing.assert_close(actual, plain, rtol=1e-4, atol=2e-6)
    return values_of(model.parameters())


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("by_initial_world_size", [True, False])
def test_a_joined_rank_steps_what_it_owns(
    run: Run, ours: bool, by_initial_world_size: bool
) -> None:
    first, *others = run(3, _joined, ours, by_initial_world_size)
    for other in others:
        require_equal(first, other)


def _state_made_by_a_step_without_effect() -> int:
    """As ``torch.distributed.checkpoint`` asks for it; not every rank need do it."""
    with stepping():
        twins = Twins(lambda: make_parameters((3, 4), (17,), (5,)))
    before = values_of(twins.model.parameters())
    for parameter in twins.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    learning_rate = twins.sharded.param_groups[0]["lr"]
    twins.sharded.param_groups[0]["lr"] = 0.0
    if twins.rank != 1:
        twins.sharded.step()
    twins.sharded.param_groups[0]["lr"] = learning_rate
    twins.sharded.zero_grad()
    require_equal(before, values_of(twins.model.parameters()))
    return test_passes.num_parameters_in(twins.sharded.state)


def test_a_step_without_effect_makes_state(run: Run) -> None:
    first, second = run(2, _state_made_by_a_step_without_effect)
    assert first > 0
    assert second == 0


def _listed_twice(resident: bool, early: bool) -> None:
    def params_of(model: nn.Module) -> list[nn.Parameter]:
        first, *rest = model.parameters()
        return [first, *rest, first]

    def make_two() -> nn.ParameterList:
        return make_parameters((3,), (4, 2))

    with stepping(early=early), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "optimizer contains a parameter group with duplicate")
        twins = Twins(
            make_two,
            options={"lr": 0.05, "fused": True},
            params_of=params_of,
            parameters_as_bucket_view=resident,
        )
        twins.train(squares)


@MODES
def test_a_parameter_that_a_group_lists_twice_is_stepped_twice(
    run: Run, resident: bool, early: bool
) -> None:
    run(2, _listed_twice, resident, early)
