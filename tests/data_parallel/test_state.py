"""It is an optimizer: state dicts, schedulers, instances, copies, checkpoints, added groups."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR, ReduceLROnPlateau

from tensorplay.distributed.optim import DistributedOptimizer
from tests.data_parallel.twins import Twins, make_small_and_large
from tests.reference.data_parallel import ADAMW, make_parameters, squares
from tests.reference.training import require_equal, values_of

Run = Callable[..., list[Any]]
AdamW = torch.optim.AdamW


def _instance() -> None:
    """The state and the options of a given instance survive."""
    twins = Twins(make_small_and_large)
    twins.train(squares, steps=2)
    inner = twins.ours.optim
    state = {parameter: inner.state[parameter] for parameter in inner.state}
    twins.ours.remove()
    twins.ours = DistributedOptimizer(inner, named_parameters=twins.model.named_parameters())
    assert twins.ours.optim is inner
    assert twins.ours.state is inner.state
    assert twins.ours.param_groups is inner.param_groups
    assert twins.ours.defaults is inner.defaults
    if twins.rank == 0:  # the others' are replaced by copies of rank 0's
        assert all(inner.state[parameter] is kept for parameter, kept in state.items())
    twins.train(squares, steps=2)


def test_an_instance_is_wrapped_with_its_state(run: Run) -> None:
    run(2, _instance)


def _instance_with_rank_0s_state() -> None:
    model = make_small_and_large()
    inner = AdamW(model.parameters(), **ADAMW)
    if dist.get_rank() == 0:
        for _ in range(2):
            squares(0)(model, 0)
            inner.step()
            inner.zero_grad()
        inner.param_groups[0]["lr"] = 0.01
    optimizer = DistributedOptimizer(inner)
    assert optimizer.check_replicas() is None
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert len(optimizer.state) == 11
    squares(1)(model, dist.get_rank())
    optimizer.step()
    assert optimizer.check_replicas() is None


def test_parameters_state_and_options_start_as_rank_0s(run: Run) -> None:
    run(3, _instance_with_rank_0s_state)


def _factory() -> None:
    def make(params: Any, **options: Any) -> torch.optim.Optimizer:
        return AdamW(params, **options, **ADAMW)

    model = make_parameters((3, 4))
    optimizer = DistributedOptimizer(make, model.parameters(), amsgrad=True)
    assert isinstance(optimizer.optim, AdamW)
    assert optimizer.param_groups[0]["amsgrad"]


def test_a_function_that_makes_an_optimizer(run: Run) -> None:
    run(1, _factory)


def _resumed() -> None:
    twins = Twins(make_small_and_large)
    twins.train(squares, steps=2)
    require_equal(twins.plain.state_dict()["param_groups"], twins.ours.state_dict()["param_groups"])
    saved = copy.deepcopy(twins.ours.state_dict())
    plain = AdamW(twins.plain_model.parameters(), lr=1.0)
    plain.load_state_dict(copy.deepcopy(saved))  # each loads the other's
    twins.ours = DistributedOptimizer(AdamW, twins.model.parameters(), lr=1.0)
    given = copy.deepcopy(twins.plain.state_dict())
    twins.ours.load_state_dict(given)
    require_equal(saved["state"], given["state"])
    twins.plain = plain
    twins.train(squares, steps=2)
    require_equal(saved["state"], given["state"])  # nothing has been aliased


def test_state_dicts_are_the_plain_optimizers(run: Run) -> None:
    run(2, _resumed)


def _loaded_on_rank_0_only() -> None:
    twins = Twins(make_parameters_of_two)
    twins.train(squares, steps=1)
    saved = copy.deepcopy(twins.ours.state_dict())
    twins.train(squares, steps=1)
    if dist.get_rank() == 0:
        twins.ours.load_state_dict(saved)
    twins.ours.broadcast_optimizer_state()
    require_equal(saved["state"], twins.ours.state_dict()["state"])
    with torch.no_grad():
        next(twins.model.parameters()).add_(dist.get_rank())
    assert twins.ours.check_replicas() is not None
    twins.ours.broadcast_parameters(1)
    assert twins.ours.check_replicas() is None


def make_parameters_of_two() -> nn.ParameterList:
    return make_parameters((3, 4), (1200, 1000))


def test_broadcasting_after_a_load_on_one_rank(run: Run) -> None:
    run(2, _loaded_on_rank_0_only)


def test_a_failed_load_changes_nothing() -> None:
    model = make_parameters((3, 4))
    optimizer = DistributedOptimizer(AdamW, model.parameters())
    squares(0)(model, 0)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({**before, "param_groups": []})
    require_equal(before, optimizer.state_dict())


def _scheduled(name: str) -> None:
    twins = Twins(make_parameters_of_two)
    make: Callable[[Any], Any] = {
        "ExponentialLR": lambda optimizer: ExponentialLR(optimizer, 0.7),
        "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, 0.3, total_steps=5),
        "ReduceLROnPlateau": lambda optimizer: ReduceLROnPlateau(optimizer, patience=0),
    }[name]
    schedulers = [make(optimizer) for optimizer in (twins.plain, twins.ours)]
    for step in range(4):
        twins.train(lambda _, step=step: squares(step), steps=1)
        for scheduler in schedulers:
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))


@pytest.mark.parametrize("name", ["ExponentialLR", "OneCycleLR", "ReduceLROnPlateau"])
def test_schedulers(run: Run, name: str) -> None:
    run(2, _scheduled, name)


def _copied() -> None:
    twins = Twins(make_parameters_of_two, clip_grad_norm=1e9)
    ExponentialLR(twins.ours, 0.9)  # patches step
    twins.train(squares, steps=2)
    model, copied = copy.deepcopy((twins.model, twins.ours))
    assert copied.process_group is twins.ours.process_group
    assert copied.clip_grad_norm == 1e9
    parameters = list(model.parameters())
    assert all(map(lambda a, b: a is b, copied.param_groups[0]["params"], parameters))
    copied.zero_grad()
    squares(5)(model, twins.rank)
    copied.step()
    assert copied.check_replicas() is None
    twins.train(squares, steps=1)  # the original goes on
    pickled = pickle.loads(pickle.dumps(twins.ours))
    require_equal(twins.ours.state_dict(), pickled.state_dict())
    squares(6)(nn.ParameterList(pickled.param_groups[0]["params"]), twins.rank)
    pickled.step()
    assert pickled.check_replicas() is None


def test_copies_and_pickles(run: Run) -> None:
    run(2, _copied)


def _pickled_on_a_group() -> None:
    group = dist.new_group([0, 1])
    optimizer = DistributedOptimizer(
        AdamW, make_parameters((3,)).parameters(), process_group=group, lr=0.1
    )
    with pytest.raises(TypeError, match="can't be pickled"):
        pickle.dumps(optimizer)
    assert copy.deepcopy(optimizer).process_group is group


def test_pickling_needs_the_default_group(run: Run) -> None:
    run(2, _pickled_on_a_group)


def _added_group() -> None:
    twins = Twins(make_small_and_large, params_of=lambda model: list(model.parameters())[:4])
    twins.train(squares_of_first, steps=1)
    for optimizer, model in ((twins.plain, twins.plain_model), (twins.ours, twins.model)):
        optimizer.add_param_group({"params": list(model.parameters())[4:], "lr": 0.2})
    twins.train(squares, steps=2)
    with pytest.raises(ValueError, match="some parameters appear in more than one"):
        twins.ours.add_param_group({"params": [next(twins.model.parameters())]})
    extra = nn.Parameter(torch.ones(2 + twins.rank))
    with pytest.raises(RuntimeError, match="ranks disagree"):
        twins.ours.add_param_group({"params": [extra]})
    twins.train(squares, steps=1)


def squares_of_first(step: int) -> Any:
    def passes(model: nn.Module, rank: int) -> None:
        squares(step)(nn.ParameterList(list(model.parameters())[:4]), rank)

    return passes


def test_groups_added_later(run: Run) -> None:
    run(2, _added_group)


def _checkpointed() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    optimizer = DistributedOptimizer(AdamW, model.parameters(), lr=0.1)
    if dist.get_rank() == 0:  # creating the state concerns nobody else
        state = get_optimizer_state_dict(model, optimizer)
        assert set(state["state"]) == {"weight", "bias"}
        optimizer.state.clear()
    before = values_of(model.parameters())
    state = get_optimizer_state_dict(model, optimizer)
    require_equal(before, values_of(model.parameters()))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def test_dcp_creates_and_reads_the_state(run: Run) -> None:
    run(2, _checkpointed)


def _make_net() -> nn.Module:
    torch.manual_seed(dist.get_rank())
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def _trained(model: nn.Module, optimizer: DistributedOptimizer, first: int) -> None:
    for step in range(first, first + 3):
        optimizer.zero_grad()
        model(torch.full((2, 3), 1.0 + step)).square().sum().backward()
        optimizer.step()


def _state_of(model: nn.Module, optimizer: DistributedOptimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def _saved_to_files(folder: str) -> list[torch.Tensor]:
    model = _make_net()
    optimizer = DistributedOptimizer(AdamW, model.parameters(), lr=0.1)
    _trained(model, optimizer, 0)
    dcp.save(_state_of(model, optimizer), checkpoint_id=folder)
    _trained(model, optimizer, 3)
    return values_of(model.parameters())


def _loaded_from_files(folder: str) -> list[torch.Tensor]:
    model = _make_net()
    optimizer = DistributedOptimizer(AdamW, model.parameters(), lr=0.3)
    state = _state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    assert optimizer.param_groups[0]["lr"] == 0.1
    _trained(model, optimizer, 3)
    return values_of(model.parameters())


@pytest.mark.parametrize("world_size", [2, 3])
def test_dcp_saves_and_loads_files(run: Run, tmp_path: Path, world_size: int) -> None:
    first, *others = run(2, _saved_to_files, str(tmp_path / "checkpoint"))
    others += run(world_size, _loaded_from_files, str(tmp_path / "checkpoint"))
    for other in others:
        if world_size == 2:
            require_equal(first, other)
        torch.testing.assert_close(other, first, rtol=1e-6, atol=1e-6)  # thirds are rounded


def _hooked() -> None:
    model = make_parameters((3, 4))
    optimizer = DistributedOptimizer(AdamW, model.parameters(), lr=0.1)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.register_state_dict_post_hook(lambda _, state: seen.append("saved") or state)
    optimizer.register_load_state_dict_pre_hook(lambda *_: seen.append("loads"))
    squares(0)(model, 0)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["before", "after", "saved", "loads"]


def test_hooks_run_once(run: Run) -> None:
    run(1, _hooked)
