"""State of slices: as the user sees it, consolidated, and loaded into any other division."""

import io
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tests.reference.data_parallel import make_parameters
from tests.reference.optimizers import OPTIMIZERS
from tests.reference.training import require_close, require_equal, set_gradients, values_of
from tests.zero.elements.test_averaged_elsewhere import Pair, make_many
from tests.zero.elements.ways import ELEMENTS, FLAT, WAYS

Run = Callable[..., list[Any]]

DEEP = {
    **{
        name: OPTIMIZERS[name]
        for name in (
            *("SGD", "Adam amsgrad foreach", "AdamW fused", "Adagrad", "NAdam", "ASGD", "Rprop"),
            *("RMSprop", "NeedsAParameter", "KeepsCounters"),
        )
    },
    "SGD momentum": OPTIMIZERS["SGD momentum"],
}
NEEDS_STATE = ("Adagrad", "NeedsAParameter")
"""Their constructors make state, without which a step fails."""


def _views() -> list[int]:
    pair = Pair(make_many)
    assert len(pair.sharded.state) == 0
    assert list(pair.sharded.state) == []
    pair.step(0, without=(2,))
    state = pair.sharded.state
    assert isinstance(state, Mapping)
    assert len(state) == len(list(state)) == len(state.items()) == len(state.values())
    numels = []
    for plain, ours in pair.pairs:
        if ours not in state:
            numels.append(0)
            with pytest.raises(KeyError):
                state[ours]
            continue
        own = state[ours]
        assert list(own) == list(pair.plain.state[plain])
        require_equal(pair.plain.state[plain]["step"], own["step"])
        if ours.ndim and ours.numel():
            numels.append(own["exp_avg"].numel())
            assert own["exp_avg"].shape == (numels[-1],)
            own["exp_avg"].fill_(7.0)  # reaches the optimizer
            assert bool((pair.sharded.state[ours]["exp_avg"] == 7.0).all())
            with pytest.raises(TypeError):
                own["step"] = 3  # would be lost
        else:
            numels.append(ours.numel())  # not cut
    assert nn.Parameter(torch.ones(3)) not in state
    assert len(pair.sharded.optim.state) <= len(state)
    return numels


def test_the_user_sees_views_of_the_local_part(run: Run) -> None:
    numels = torch.tensor(run(3, _views))
    expected = [p.numel() for p in make_many().parameters()]
    expected[2] = 0
    assert numels.sum(0).tolist() == expected


def _empty_ways() -> None:
    """Nothing can be cut, so that the state is the local optimizer's own."""
    optimizer = ZeroRedundancyOptimizer(
        [nn.Parameter(torch.tensor(1.0))], torch.optim.Adam, lr=0.1, **ELEMENTS
    )
    assert optimizer.state is optimizer.optim.state


def test_without_slices_the_state_is_the_local_optimizers(run: Run) -> None:
    run(2, _empty_ways)


def _same_dict(name: str, way: dict[str, Any]) -> None:
    pair = Pair(make_many, *DEEP[name], **way)
    pair.require_close(f"{name}, before a step")
    for step, without in enumerate([(0,), (1, 5), (3, 9)]):
        pair.step(step, without)
    pair.require_close(name)  # keys, their order, shapes and strides as well
    to = dist.get_world_size() - 1
    pair.sharded.consolidate_state_dict(to=to)
    if dist.get_rank() == to:
        plain, ours = pair.plain.state_dict(), pair.sharded.state_dict()
        assert list(ours) == list(plain)
        groups = [[dict(sorted(g.items())) for g in d["param_groups"]] for d in (plain, ours)]
        require_equal(*groups)
        for state in ours["state"].values():
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    assert value.untyped_storage().nbytes() == value.nbytes


@pytest.mark.parametrize("name", DEEP)
@WAYS
def test_the_consolidated_dict_is_the_plain_optimizers(
    run: Run, name: str, way: dict[str, Any]
) -> None:
    run(3 if name in ("Rprop", "AdamW fused") else 2, _same_dict, name, way)


def _save(name: str, ours: dict[str, Any]) -> bytes:
    """Parameters with other counts of steps, and some without state."""
    pair = Pair(make_many, *DEEP[name], **ours)
    for step, without in enumerate([(0,), (0, 1, 9), (0, 7), (0,)]):
        pair.step(step, without)
    pair.sharded.consolidate_state_dict(to=0)
    if dist.get_rank():
        return b""
    file = io.BytesIO()
    saved = {"optimizer": pair.sharded.state_dict(), "model": values_of(pair.model.parameters())}
    torch.save(saved, file)
    return file.getvalue()


def _go_on(name: str, content: bytes, ours: dict[str, Any]) -> None:
    saved = torch.load(io.BytesIO(content), weights_only=True)
    pair = Pair(make_many, *DEEP[name], **ours)
    with torch.no_grad():
        for model in (pair.plain_model, pair.model):
            for parameter, value in zip(model.parameters(), saved["model"], strict=True):
                parameter.copy_(value)
    before = torch.load(io.BytesIO(content), weights_only=True)["optimizer"]
    pair.plain.load_state_dict(torch.load(io.BytesIO(content), weights_only=True)["optimizer"])
    pair.sharded.load_state_dict(saved["optimizer"])
    require_equal(before, saved["optimizer"], "the dict that was loaded")
    pair.require_close(f"{name}, loaded")
    for step, without in enumerate([(), (0, 9), (4,)], 4):
        pair.step(step, (*without, *((0,) if name in NEEDS_STATE else ())))
    pair.require_close(f"{name}, going on")


WHOLE: dict[str, Any] = {"partition": "parameters", "flat_step": False}


@pytest.mark.parametrize("name", [n for n in DEEP if n != "SGD"])
def test_state_moves_between_divisions_and_world_sizes(run: Run, name: str) -> None:
    content = run(2, _save, name, ELEMENTS)[0]
    run(2, _go_on, name, content, ELEMENTS)
    run(3, _go_on, name, content, ELEMENTS)
    run(2, _go_on, name, content, WHOLE)
    run(1, _go_on, name, content, {**WHOLE, **FLAT})


@pytest.mark.parametrize("before", [WHOLE, {**WHOLE, **FLAT}], ids=["whole", "flat parameters"])
def test_state_of_whole_parameters_is_cut(run: Run, before: dict[str, Any]) -> None:
    content = run(3, _save, "AdamW fused", before)[0]
    run(2, _go_on, "AdamW fused", content, ELEMENTS)


def _load_into_cut_slices() -> None:
    """Slices that had been cut for good are formed anew, as the loaded state allows."""
    pair = Pair(make_many)
    pair.step(0)
    before = len(pair.sharded._sharded.slices.slices)
    content: list[Any] = [None]
    pair.sharded.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        content = [pair.sharded.state_dict()]
    dist.broadcast_object_list(content)
    for step in (1, 2):
        pair.step(step, (1, 5, 7))
    assert len(pair.sharded._sharded.slices.slices) >= before
    pair.sharded.load_state_dict(content[0])
    pair.plain.load_state_dict(content[0])
    assert len(pair.sharded._sharded.slices.slices) == before
    pair.require_close("loaded")
    pair.step(3)
    pair.require_close("going on")


def test_loading_joins_slices_again(run: Run) -> None:
    run(2, _load_into_cut_slices)


def _failing(how: str) -> None:
    pair = Pair(make_many)
    for step, without in enumerate([(1,), ()]):
        pair.step(step, without)
    broken = pair.plain.state_dict()
    if dist.get_rank() == dist.get_world_size() - 1:
        if how == "groups":
            broken["param_groups"] = []
        elif how == "options":
            broken["param_groups"][0]["lr"] = 7.0
        else:
            broken["state"][1] = _Uncopyable({"step": _Uncopyable()})
    slices = [(id(each.tensor), each.pieces) for each in pair.sharded._sharded.slices.slices]
    groups = [list(group["params"]) for group in pair.sharded.optim.param_groups]
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        pair.sharded.load_state_dict(broken)
    assert slices == [
        (id(each.tensor), each.pieces) for each in pair.sharded._sharded.slices.slices
    ]
    assert all(
        a is b
        for mine, theirs in zip(groups, pair.sharded.optim.param_groups, strict=True)
        for a, b in zip(mine, theirs["params"], strict=True)
    )
    pair.require_close("after the failure")
    pair.step(2, (5,))
    pair.require_close("going on")


class _Uncopyable(dict[str, Any]):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("can't be copied")


@pytest.mark.parametrize("how", ["groups", "options", "state"])
def test_a_failed_load_changes_nothing(run: Run, how: str) -> None:
    run(3, _failing, how)


def _added() -> None:
    pair = Pair(make_many)
    pair.step(0)
    for bad in (
        {"params": [next(iter(pair.model.parameters()))]},
        {"params": [nn.Parameter(torch.ones(50))], "partition": "rows"},
        {"params": [nn.Parameter(torch.ones(50 + dist.get_rank()))]},
        {"params": [nn.Parameter(next(iter(pair.model.parameters())).detach()[:2])]},
    ):
        slices, count = (
            list(pair.sharded._sharded.slices.slices),
            pair.sharded._sharded.slices.num_buckets,
        )
        with pytest.raises((RuntimeError, ValueError)):
            pair.sharded.add_param_group(bad)
        assert pair.sharded._sharded.slices.slices == slices
        assert pair.sharded._sharded.slices.num_buckets == count
        assert len(pair.sharded.param_groups) == len(pair.sharded.optim.param_groups) == 1
        pair.step(1)
    for model, optimizer in ((pair.plain_model, pair.plain), (pair.model, pair.sharded)):
        torch.manual_seed(5)
        new = [nn.Parameter(torch.randn(*shape)) for shape in ((30,), (7, 9), (400, 400))]
        model.extend(new)  # type: ignore[operator] # mypy takes it for a plain tensor or module
        optimizer.add_param_group({"params": new, "lr": 0.01})
    whole = nn.Parameter(torch.ones(60))
    pair.sharded.add_param_group({"params": [whole], "partition": "parameters"})
    pair.model.append(whole)  # type: ignore[operator] # mypy takes it for a plain tensor or module
    other = nn.Parameter(torch.ones(60))
    pair.plain.add_param_group({"params": [other]})
    pair.plain_model.append(other)  # type: ignore[operator] # mypy takes it for a plain tensor or module
    for step in range(2, 5):
        pair.step(step, (12, step))
        pair.require_close(f"step {step}")


def test_groups_added_later_and_groups_that_cannot_be_added(run: Run) -> None:
    run(2, _added)


def _named() -> None:
    model = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 3))
    named = list(model.named_parameters())
    optimizer = ZeroRedundancyOptimizer(named, torch.optim.AdamW, lr=0.1, **ELEMENTS)
    set_gradients(model.parameters(), 0, without=(1,))
    optimizer.step()
    optimizer.consolidate_state_dict(to=0)
    content: list[Any] = [None]
    if dist.get_rank() == 0:
        content = [optimizer.state_dict()]
        assert content[0]["param_groups"][0]["param_names"] == [name for name, _ in named]
    dist.broadcast_object_list(content)
    optimizer.load_state_dict(content[0])
    optimizer.add_param_group({"params": [("more", nn.Parameter(torch.ones(9)))]})
    set_gradients(model.parameters(), 1)
    optimizer.step()


def test_named_parameters(run: Run) -> None:
    run(2, _named)


def _hooks() -> list[str]:
    pair = Pair(lambda: make_parameters((30,), (7, 9)))
    events: list[str] = []
    pair.sharded.register_step_pre_hook(lambda *_: events.append("before"))
    pair.sharded.register_step_post_hook(lambda *_: events.append("after"))
    pair.sharded.optim.register_step_pre_hook(
        lambda optimizer, *_: events.append(f"local {len(optimizer.param_groups[0]['params'])}")
    )
    pair.step(0)
    pair.step(1, (0,))
    pair.require_close()
    return events


def test_step_hooks(run: Run) -> None:
    for events in run(2, _hooks):
        assert [event for event in events if not event.startswith("local")] == [
            "before",
            "after",
        ] * 2
        assert len(events) == 6


def _through_dcp(ours: dict[str, Any]) -> tuple[str, dict[str, Any] | None]:
    """What torch.distributed.checkpoint's helpers make of it."""
    model = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 3))
    plain = torch.optim.AdamW(model.parameters(), lr=0.1)
    set_gradients(model.parameters(), 0)
    plain.step()
    full = get_optimizer_state_dict(model, plain)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1, **ours)
    message = ""
    try:
        get_optimizer_state_dict(model, optimizer)
    except RuntimeError as error:
        message = str(error)
    optimizer.zero_grad()
    set_optimizer_state_dict(model, optimizer, full)
    optimizer.consolidate_state_dict(to=0)
    return message, optimizer.state_dict() if dist.get_rank() == 0 else None


def test_the_helpers_of_torchs_checkpoints_do_the_same_in_every_mode(run: Run) -> None:
    whole = run(2, _through_dcp, WHOLE)
    for way in (ELEMENTS, FLAT):
        other = run(2, _through_dcp, way)
        assert [message for message, _ in other] == [message for message, _ in whole]
        expected, actual = whole[0][1], other[0][1]
        assert expected is not None
        assert actual is not None
        require_close(expected["state"], actual["state"])
