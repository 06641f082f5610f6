"""``PostLocalSGDOptimizer`` is an optimizer in all respects."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import (
    PeriodicModelAverager as TorchAverager,
)
from torch.optim import lr_scheduler

from tensorplay.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from tensorplay.distributed.algorithms.model_averaging.averagers import (
    ModelAverager,
    PeriodicModelAverager,
)
from tensorplay.distributed.algorithms.model_averaging.hierarchical_model_averager import (
    HierarchicalModelAverager,
)
from tensorplay.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from tests.launch import run_ranks
from tests.reference.optimizers import OPTIMIZERS
from tests.reference.training import make_model, require_equal, set_gradients, values_of

ADAM: dict[str, Any] = {"lr": 0.1}


def make(model: nn.Module, averager: Any = None, **options: Any) -> PostLocalSGDOptimizer:
    local = torch.optim.Adam(model.parameters(), **(options or ADAM))
    return PostLocalSGDOptimizer(local, averager or PeriodicModelAverager(3, 2))


def _run(*functions: Callable[[], Any]) -> None:
    for function in functions:
        function()


def _steps_as_the_plain_one() -> None:
    for optimizer_class, options in OPTIMIZERS.values():
        plain_model, model = make_model(), make_model()
        plain = optimizer_class(plain_model.parameters(), **options)
        local = optimizer_class(model.parameters(), **options)
        optimizer = PostLocalSGDOptimizer(local, PeriodicModelAverager(2))
        for step in range(4):
            for each in (plain_model, model):
                set_gradients(each.parameters(), step)
            plain.step()
            optimizer.step()
        require_equal(values_of(plain_model.parameters()), values_of(model.parameters()))


def _live_after_loading() -> None:
    optimizer = make(make_model())
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.load_state_dict(make(make_model()).state_dict())
    assert optimizer.param_groups is optimizer.optim.param_groups
    assert optimizer.state is optimizer.optim.state
    assert optimizer.defaults is optimizer.optim.defaults
    optimizer.step()
    scheduler.step()
    assert optimizer.optim.param_groups[0]["lr"] == 0.05


def _shown() -> None:
    shown = repr(make(make_model()))
    assert "averaged by PeriodicModelAverager(period=3, warmup_steps=2) at step 0" in shown
    assert "Adam (" in shown


def _every_scheduler() -> None:
    optimizer = make(make_model(), lr=0.1, betas=(0.9, 0.99))
    lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=10)
    optimizer.step()


def _closure() -> None:
    model = nn.Linear(3, 2)
    local = torch.optim.LBFGS(model.parameters(), lr=0.1)
    optimizer = PostLocalSGDOptimizer(local, PeriodicModelAverager(2))
    calls = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum(p.square().sum() for p in model.parameters())
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        calls.append(loss.item())
        return loss

    assert optimizer.step(closure).item() == calls[0]
    assert len(calls) > 1
    assert optimizer.averager.step == 1


def _hooks() -> None:
    optimizer = make(make_model())
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    optimizer.optim.register_step_post_hook(lambda *_: seen.append("inner"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "more": 1})
    optimizer.register_load_state_dict_pre_hook(lambda *_: seen.append("load"))
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    optimizer.step()
    state = optimizer.state_dict()
    assert state.pop("more") == 1
    optimizer.load_state_dict(state)
    assert seen == ["pre", "inner", "post", "load", "loaded"]


def _added_groups() -> None:
    model, more = make_model(), nn.Parameter(torch.full((3,), float(dist.get_rank())))
    optimizer = make(model, PeriodicModelAverager(2, 1))
    group = {"params": (each for each in [more]), "lr": 0.0}
    optimizer.step()
    optimizer.add_param_group(group)
    assert list(group) == ["params", "lr"]
    assert optimizer.optim.param_groups[1]["params"] == [more]
    optimizer.step()
    assert more.tolist() == [(dist.get_world_size() - 1) / 2] * 3


def test_alone_it_steps_as_the_plain_optimizer_bitwise() -> None:
    run_ranks(1, _steps_as_the_plain_one)


def test_param_groups_state_and_defaults_are_live_also_after_loading() -> None:
    run_ranks(1, _run, _live_after_loading, _every_scheduler, _shown)


def test_closures_hooks_and_added_groups() -> None:
    run_ranks(2, _run, _hooks, _closure, _added_groups)


# Copies


def _deepcopy() -> None:
    model = make_model()
    group = dist.new_group([1, 0])
    optimizer = PostLocalSGDOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.1),
        HierarchicalModelAverager({2: 2}, 1, group),
        hook_state=PostLocalSGDState(None, group, 1),
    )
    lr_scheduler.StepLR(optimizer, 1)
    set_gradients(model.parameters(), 0)
    optimizer.step()
    twin_model, twin = copy.deepcopy((model, optimizer))
    assert "step" not in vars(twin)
    assert isinstance(twin.averager, HierarchicalModelAverager)
    assert twin.averager is not optimizer.averager
    assert twin.averager.process_group is group
    assert twin.hook_state is not None
    assert twin.hook_state.subgroup is group
    assert twin.averager.step == 1
    for each_model, each in ((model, optimizer), (twin_model, twin)):
        for step in (1, 2):
            set_gradients(each_model.parameters(), step)
            each.step()
    require_equal(values_of(model.parameters()), values_of(twin_model.parameters()))


def _pickle() -> None:
    model = make_model()
    optimizer = make(model)
    set_gradients(model.parameters(), 0)
    optimizer.step()
    twin_model, twin = pickle.loads(pickle.dumps((model, optimizer)))
    assert twin.averager.process_group is dist.group.WORLD
    for each_model, each in ((model, optimizer), (twin_model, twin)):
        for step in (1, 2):
            set_gradients(each_model.parameters(), step)
            each.step()
    require_equal(values_of(model.parameters()), values_of(twin_model.parameters()))
    with pytest.raises(
        TypeError, match=r"PeriodicModelAverager can't be pickled: .* not the defau"
    ):
        pickle.dumps(make(make_model(), PeriodicModelAverager(2, 0, dist.new_group([0, 1]))))
    with pytest.raises(TypeError, match=r"PostLocalSGDState can't be pickled"):
        pickle.dumps(PostLocalSGDState(None, dist.group.WORLD, 1))
    state = PostLocalSGDState(None, None, 7)
    state.iter = 3
    assert vars(pickle.loads(pickle.dumps(state))) == vars(state)


def test_a_deep_copy_shares_the_process_groups_and_a_pickle_finds_the_default_one() -> None:
    run_ranks(2, _run, _deepcopy, _pickle)


# Saving and loading


def _format() -> None:
    model = make_model()
    optimizer = make(model)
    set_gradients(model.parameters(), 0)
    optimizer.step()
    state = optimizer.state_dict()
    inner = optimizer.optim.state_dict()
    assert state["step"] == 1
    assert set(state) == {*inner, "step"}
    require_equal(inner["state"], state["state"])
    for group, inner_group in zip(state["param_groups"], inner["param_groups"], strict=True):
        assert {**inner_group, "averager_step": 1} == group
    assert "averager_step" not in optimizer.param_groups[0]
    # torch's class and the plain optimizer take it, and ours takes theirs.
    torch.optim.Adam(make_model().parameters()).load_state_dict(state)
    theirs = {**inner, "step": 41}
    other = make(make_model())
    other.load_state_dict(theirs)
    assert other.averager.step == 41
    assert "averager_step" not in other.param_groups[0]
    with pytest.warns(UserWarning, match="does not contain a step counter for an averager"):
        other.load_state_dict(inner)
    assert other.averager.step == 0
    require_equal(inner, other.optim.state_dict())


def _callers_dict() -> None:
    model = make_model()
    optimizer = make(model)
    set_gradients(model.parameters(), 0)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    before = copy.deepcopy(state)
    optimizer.load_state_dict(state)
    optimizer.step()
    require_equal(before, state)


def _unfit() -> None:
    optimizer = make(make_model())
    optimizer.step()
    state = optimizer.state_dict()
    before = copy.deepcopy(state)
    for step in (-1, 0.5, None, "3"):
        with pytest.raises(ValueError, match="isn't a number of steps"):
            optimizer.load_state_dict({**state, "step": step})
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({**state, "step": 7, "param_groups": state["param_groups"] * 2})
    require_equal(before, optimizer.state_dict())


class SlowMomentum(PeriodicModelAverager):
    """An averager that holds more than a count."""

    def __init__(self) -> None:
        super().__init__(2)
        self.momentum = torch.zeros(2)

    def average_parameters(self, params: Any) -> None:
        super().average_parameters(params)
        self.momentum += 1

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "momentum": self.momentum.clone()}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.momentum.copy_(state_dict["momentum"])


class OnlyCounts(ModelAverager):
    """The least that an averager may be."""

    def average_parameters(self, params: Any) -> None:
        self.step += len([params])


def _other_averagers() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torchs = TorchAverager(2)
    for averager in (torchs, OnlyCounts(), SlowMomentum()):
        model = make_model()
        optimizer = make(model, averager)
        for step in range(2):
            set_gradients(model.parameters(), step)
            optimizer.step()
        state = optimizer.state_dict()
        assert state["step"] == 2
        twin = type(averager)(2) if averager is torchs else type(averager)()  # type: ignore[call-arg] # constructors differ
        other = make(make_model(), twin)
        other.load_state_dict(state)
        assert twin.step == 2
    assert isinstance(twin, SlowMomentum)
    assert twin.momentum.tolist() == [2, 2]


def test_the_state_dict_is_torchs_and_the_plain_optimizers_loads() -> None:
    run_ranks(1, _run, _format, _callers_dict, _unfit)


def test_averagers_of_torch_and_of_users_are_saved_with_all_they_hold() -> None:
    run_ranks(1, _other_averagers)


def _train(optimizer: PostLocalSGDOptimizer, model: nn.Module, steps: range) -> None:
    for step in steps:
        set_gradients(model.parameters(), 10 * step + dist.get_rank())
        optimizer.step()


def _resume_in_mid_period(sharded: bool) -> None:
    """From a file per rank."""
    subgroup, _ = dist.new_subgroups(group_size=1)

    def build() -> tuple[nn.Module, PostLocalSGDOptimizer, Any]:
        model = make_model()
        local: torch.optim.Optimizer
        if sharded:
            local = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, subgroup, lr=0.1)
        else:
            local = torch.optim.Adam(model.parameters(), lr=0.1)
        state = PostLocalSGDState(None, subgroup, 2)
        optimizer = PostLocalSGDOptimizer(local, PeriodicModelAverager(4, 2), hook_state=state)
        return model, optimizer, lr_scheduler.StepLR(optimizer, 3)

    model, optimizer, scheduler = build()
    _train(optimizer, model, range(5))
    assert optimizer.hook_state is not None
    optimizer.hook_state.iter = 2
    if sharded:
        optimizer.optim.consolidate_state_dict()  # type: ignore[attr-defined] # mypy can't see that it has this
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), scheduler.state_dict()], file)
    other_model, other, other_scheduler = build()
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other_model.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    other_scheduler.load_state_dict(saved[2])
    assert other.hook_state is not None
    assert (other.averager.step, other.hook_state.iter) == (5, 2)
    for each_model, each, each_scheduler in (
        (model, optimizer, scheduler),
        (other_model, other, other_scheduler),
    ):
        for step in range(5, 12):
            _train(each, each_model, range(step, step + 1))
            each_scheduler.step()
    require_equal(values_of(model.parameters()), values_of(other_model.parameters()))
    assert optimizer.param_groups[0]["lr"] == other.param_groups[0]["lr"]


@pytest.mark.parametrize("sharded", [False, True])
def test_resuming_in_mid_period_continues_bitwise(sharded: bool) -> None:
    run_ranks(2, _resume_in_mid_period, sharded)
