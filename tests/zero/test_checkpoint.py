"""Consolidating, loading and resuming: the plain optimizer's format, any world size, atomically."""

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tests.launch import run_ranks
from tests.reference.optimizers import OPTIMIZERS, KeepsCounters
from tests.reference.training import (
    make_matrices,
    make_model,
    require_equal,
    set_gradients,
    values_of,
)


def full_state(optimizer: ZeroRedundancyOptimizer, to: int = 0) -> dict[str, Any] | None:
    optimizer.consolidate_state_dict(to=to)
    return optimizer.state_dict() if dist.get_rank() == to else None


def _same_dict_as_plain() -> None:
    for name, (optimizer_class, options) in OPTIMIZERS.items():
        model, plain_model = make_model(), make_model()
        sharded = ZeroRedundancyOptimizer(model.named_parameters(), optimizer_class, **options)
        plain = optimizer_class(plain_model.named_parameters(), **options)
        for step in range(3):
            set_gradients(model.parameters(), step, without=[3])
            set_gradients(plain_model.parameters(), step, without=[3])
            sharded.step()
            plain.step()
        to = 1 % dist.get_world_size()
        state = full_state(sharded, to)
        if state is not None:
            expected = plain.state_dict()
            indexed = {k: v for k, v in expected["state"].items() if isinstance(k, int)}
            shared = {k: v for k, v in expected["state"].items() if not isinstance(k, int)}
            expected["state"] = {**{k: indexed[k] for k in sorted(indexed)}, **shared}
            require_equal(expected, state, name)
            for key, kept in expected["state"].items():
                for field, tensor in kept.items() if isinstance(kept, dict) else ():
                    if isinstance(tensor, torch.Tensor):
                        assert state["state"][key][field].stride() == tensor.stride(), (name, field)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_consolidated_dict_is_the_plain_optimizers(world_size: int) -> None:
    run_ranks(world_size, _same_dict_as_plain)


def _train_and_save(name: str, steps: int, saved: dict[str, Any] | None, first: int) -> Any:
    optimizer_class, options = OPTIMIZERS[name]
    model = make_model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class, **options)
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    for step in range(first, first + steps):
        set_gradients(model.parameters(), step)
        optimizer.step()
    state = full_state(optimizer)
    if state is None:
        return None
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": state}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", ["AdamW fused", "KeepsCounters", "Adam tensor lr"])
def test_training_goes_on_bitwise_at_any_world_size(name: str) -> None:
    saved = run_ranks(2, _train_and_save, name, 2, None, 0)[0]
    for number, world_size in enumerate((1, 3, 4, 2)):
        saved = run_ranks(world_size, _train_and_save, name, 2, saved, 2 + 2 * number)[0]
    expected = run_ranks(1, _train_and_save, name, 10, None, 0)[0]
    require_equal(expected["model"], saved["model"])
    require_equal(expected["optimizer"], saved["optimizer"])


def _exchange_with_plain(resident: bool) -> None:
    optimizer_class, options = OPTIMIZERS["AdamW"]
    plain_model = make_model()
    plain = optimizer_class(plain_model.parameters(), **options)
    model = make_model()
    sharded = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class, parameters_as_bucket_view=resident, lr=3.0
    )
    for step in range(2):
        set_gradients(plain_model.parameters(), step)
        plain.step()
    model.load_state_dict(plain_model.state_dict())
    sharded.load_state_dict(plain.state_dict())
    set_gradients(plain_model.parameters(), 2)
    set_gradients(model.parameters(), 2)
    plain.step()
    sharded.step()
    require_equal(values_of(plain_model.parameters()), values_of(model.parameters()))
    state = full_state(sharded)
    if state is not None:  # and back: into a plain optimizer
        again = optimizer_class(model.parameters(), lr=7.0)
        again.load_state_dict(state)
        set_gradients(plain_model.parameters(), 3)
        set_gradients(model.parameters(), 3)
        plain.step()
        again.step()
        require_equal(values_of(plain_model.parameters()), values_of(model.parameters()))


@pytest.mark.parametrize("resident", [False, True])
def test_dicts_move_between_the_plain_optimizer_and_the_sharded_one(resident: bool) -> None:
    run_ranks(3, _exchange_with_plain, resident)


def _snapshot() -> None:
    model = make_model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    set_gradients(model.parameters(), 0)
    optimizer.step()
    state = full_state(optimizer)
    before = copy.deepcopy(state)
    optimizer.param_groups[0]["lr"] = 5.0
    set_gradients(model.parameters(), 1)
    optimizer.step()
    if state is not None:
        require_equal(before, state)
        require_equal(before, optimizer.state_dict())


def test_the_consolidated_state_is_a_snapshot_of_one_moment() -> None:
    run_ranks(2, _snapshot)


def _only_on_target() -> None:
    optimizer = ZeroRedundancyOptimizer(make_model().parameters(), torch.optim.Adam, lr=0.1)
    with pytest.raises(RuntimeError, match=r"`consolidate_state_dict\(to=\d\)` on all ranks"):
        optimizer.state_dict()
    optimizer.consolidate_state_dict(to=1)
    if dist.get_rank() == 1:
        assert optimizer.state_dict()["state"] == {}
        optimizer.release_consolidated_state_dict()
    with pytest.raises(RuntimeError, match="has not been consolidated on this rank"):
        optimizer.state_dict()
    with pytest.raises(ValueError, match="to=2 is not a rank of a group of 2"):
        optimizer.consolidate_state_dict(to=2)


def test_state_dict_needs_a_consolidation_to_this_rank() -> None:
    run_ranks(2, _only_on_target)


def _target_is_a_group_rank() -> bool:
    members = [3, 1]
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return False
    model = make_model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, group, lr=0.1)
    set_gradients(model.parameters(), 0)
    optimizer.step()
    optimizer.consolidate_state_dict(to=1)
    return dist.get_group_rank(group, dist.get_rank()) == 1 and bool(optimizer.state_dict())


def test_the_target_is_a_rank_of_the_group() -> None:
    assert run_ranks(4, _target_is_a_group_rank).count(True) == 1


def _failed_load(broken: str) -> None:
    model = make_model()
    optimizer = ZeroRedundancyOptimizer(
        [{"params": list(model.parameters()), "lr": 0.1}], torch.optim.Adam
    )
    set_gradients(model.parameters(), 0)
    optimizer.step()
    good = full_state(optimizer, 0), full_state(optimizer, 1)
    (state,) = (each for each in good if each is not None)
    bad: dict[str, Any] = copy.deepcopy(state)
    match broken:
        case "groups":
            bad["param_groups"].append(bad["param_groups"][0])
        case "parameters":
            bad["param_groups"][0]["params"].pop()
        case "keys":
            del bad["state"]
        case "one rank only" if dist.get_rank() == 1:
            bad["param_groups"][0]["params"].pop()
        case "options differ":
            bad["param_groups"][0]["lr"] = 0.1 * dist.get_rank()
    before = copy.deepcopy((optimizer.optim.state_dict(), optimizer.param_groups[0]["lr"]))
    untouched = copy.deepcopy(bad)
    groups, group = optimizer.param_groups, optimizer.param_groups[0]
    with pytest.raises((ValueError, RuntimeError)) as caught:
        optimizer.load_state_dict(bad)
    message = str(caught.value)
    if broken == "one rank only":
        failed_here = "has 8 parameters instead of 9"
        assert failed_here in message
        assert ("failed on another rank" in message) == (dist.get_rank() == 0)
    if broken == "options differ":
        assert "param_groups[0].lr is 0.0 on rank 0 but 0.1 on rank 1" in message
    require_equal(untouched, bad)
    require_equal(before, (optimizer.optim.state_dict(), optimizer.param_groups[0]["lr"]))
    assert optimizer.param_groups is groups
    assert optimizer.param_groups[0] is group
    optimizer.load_state_dict(state)
    set_gradients(model.parameters(), 1)
    optimizer.step()


@pytest.mark.parametrize(
    "broken", ["groups", "parameters", "keys", "one rank only", "options differ"]
)
def test_a_failed_load_raises_everywhere_and_changes_nothing(broken: str) -> None:
    run_ranks(2, _failed_load, broken)


def _names_arrive() -> None:
    plain = torch.optim.SGD(make_model().named_parameters(), lr=0.1)
    optimizer = ZeroRedundancyOptimizer(make_model().parameters(), torch.optim.SGD, lr=0.1)
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.param_groups[0]["param_names"] == plain.param_groups[0]["param_names"]
    optimizer.add_param_group({"params": [("late", torch.nn.Parameter(torch.ones(2)))]})


def test_an_optimizer_that_got_its_names_by_loading_takes_named_groups() -> None:
    run_ranks(2, _names_arrive)


def _input_untouched() -> None:
    model = make_model()
    plain = torch.optim.Adam(model.parameters(), lr=0.1)
    set_gradients(model.parameters(), 0)
    plain.step()
    state = plain.state_dict()
    before = copy.deepcopy(state)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
    optimizer.load_state_dict(state)
    set_gradients(model.parameters(), 1)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 3.0
    require_equal(before, state)


def test_loading_neither_changes_nor_aliases_the_callers_dict() -> None:
    run_ranks(2, _input_untouched)


def _one_copy() -> None:
    model = torch.nn.Linear(100, 100)
    plain = torch.optim.Adam(model.parameters(), lr=0.1)
    set_gradients(model.parameters(), 0)
    plain.step()
    whole = torch.zeros(3, 50_000)  # a dict whose tensors are views of something much larger
    state = plain.state_dict()
    for name in ("exp_avg", "exp_avg_sq"):
        whole[0, :10_000] = state["state"][0][name].flatten()
        state["state"][0][name] = whole[0, :10_000].view(100, 100)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
    optimizer.load_state_dict(state)
    for kept in optimizer.state.values():
        for tensor in kept.values():
            nbytes = tensor.numel() * tensor.element_size()
            assert tensor.untyped_storage().nbytes() == nbytes


def test_loading_keeps_one_copy_of_what_is_owned_and_nothing_else() -> None:
    run_ranks(2, _one_copy)


def _placed_as_inner_would(name: str) -> None:
    optimizer_class, options = OPTIMIZERS[name]
    model = make_model()
    plain = optimizer_class(model.parameters(), **options)
    set_gradients(model.parameters(), 0)
    plain.step()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class, **options)
    optimizer.load_state_dict(plain.state_dict())
    again = optimizer_class(model.parameters(), **options)
    again.load_state_dict(plain.state_dict())
    for parameter, state in optimizer.state.items():
        require_equal(again.state[parameter], state)


@pytest.mark.parametrize("name", ["Adam fused", "Adam", "Adam tensor lr"])
def test_state_is_placed_where_the_plain_optimizer_would_place_it(name: str) -> None:
    run_ranks(2, _placed_as_inner_would, name)


def _hooks() -> None:
    model = make_model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.5)
    events: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda _: events.append("saving"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(
        lambda _, state: {k: v for k, v in state.items() if k != "extra"}
    )
    optimizer.register_load_state_dict_post_hook(lambda _: events.append("loaded"))
    set_gradients(model.parameters(), 0)
    optimizer.step()
    for rank in range(2):
        state = full_state(optimizer, rank) or {}
        if rank == dist.get_rank():
            assert state["extra"] == 1
            mine = state
    optimizer.load_state_dict(mine)
    assert events == ["saving", "loaded"]


def test_state_dict_hooks_run() -> None:
    run_ranks(2, _hooks)


class _KeepsObjects(KeepsCounters):
    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        result = super().step(closure, **kwargs)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["secret"] = object()
        return result


def _unsendable() -> None:
    parameters = list(make_matrices(count=1))
    optimizer = ZeroRedundancyOptimizer(parameters, _KeepsObjects)
    set_gradients(parameters, 0)
    optimizer.step()
    owner = bool(optimizer.sharding_report().ranks[dist.get_rank()].parameters)
    with pytest.raises(
        TypeError if owner else RuntimeError,
        match=r"the state of parameter 0\['secret'\]",
    ):
        optimizer.consolidate_state_dict()
    set_gradients(parameters, 1)
    optimizer.step()  # nobody hangs


def test_state_that_is_no_plain_data_is_named_on_every_rank() -> None:
    run_ranks(2, _unsendable)


def _target_of_another_type() -> None:
    optimizer = ZeroRedundancyOptimizer(make_matrices(), torch.optim.Adam, lr=0.1)
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
        optimizer.consolidate_state_dict(to=1.0)  # type: ignore[arg-type] # the test passes what the types don't allow, or a wrapper
    optimizer.consolidate_state_dict(to=torch.tensor(1))  # type: ignore[arg-type] # the test passes what the types don't allow, or a wrapper
    assert dist.get_rank() == 0 or optimizer.state_dict()


def test_the_target_must_be_an_integer_of_any_type() -> None:
    run_ranks(2, _target_of_another_type)


class _NoCopy:
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("can't be copied")


def _uncopyable_option() -> None:
    group = {"params": list(make_matrices()), "note": _NoCopy()}
    optimizer = ZeroRedundancyOptimizer([group], torch.optim.SGD, lr=0.1)
    with pytest.raises((TypeError, RuntimeError), match="can't be copied"):
        optimizer.consolidate_state_dict()


def test_an_option_that_cannot_be_copied_raises_on_every_rank() -> None:
    run_ranks(2, _uncopyable_option)
