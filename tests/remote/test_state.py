"""Groups, schedulers, state dicts: what a plain optimizer has, over several workers."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed.autograd as dist_autograd
from torch.distributed import rpc
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau

from tensorplay.distributed.optim import DistributedOptimizer
from tests.reference.optimizers import KeepsCounters
from tests.reference.training import require_equal
from tests.remote.workers import Placed, Plain, Workers

PLACEMENT = {"owner1": [0, 3], "owner2": [1, 2]}
OTHER_PLACEMENT = {"owner2": [0], "trainer0": [1, 3], "owner1": [2]}


@contextmanager
def counted_calls() -> Iterator[list[str]]:
    """The RPCs that this process starts meanwhile: the workers that they go to."""
    calls: list[str] = []
    original = rpc.rpc_async

    def count(worker: Any, *args: Any) -> Any:
        calls.append(getattr(worker, "name", worker))
        return original(worker, *args)

    rpc.rpc_async = count
    try:
        yield calls
    finally:
        rpc.rpc_async = original


def _calls(options: dict[str, Any], expected: int, new_lr: bool) -> None:
    placed = Placed(PLACEMENT)
    optimizer = DistributedOptimizer(torch.optim.SGD, placed.params(), lr=0.1, **options)
    with dist_autograd.context() as context_id:
        placed.backward(context_id, 0)
        for _ in range(2):
            if new_lr:
                optimizer.param_groups[0]["lr"] *= 0.5
            with counted_calls() as calls:
                optimizer.step(context_id)
            assert sorted(calls) == sorted(expected * ["owner1", "owner2"])


@pytest.mark.parametrize("new_lr", [False, True])
@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, 1), ({"clip_grad_norm": 1.0}, 2), ({"atomic": True}, 3)],
    ids=["plain", "clipped", "atomic"],
)
def test_calls_per_step_to_each_worker(
    workers: Workers, options: dict[str, Any], expected: int, new_lr: bool
) -> None:
    workers.train(_calls, options, expected, new_lr)


SCHEDULERS: dict[str, Any] = {
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 5),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=[0.1, 0.2], total_steps=6),
    "plateau": lambda optimizer: ReduceLROnPlateau(optimizer, patience=0),
}


def _groups(params: list[Any]) -> list[dict[str, Any]]:
    return [{"params": params[:1] + params[3:], "lr": 0.3}, {"params": params[1:3]}]


def _scheduler(name: str) -> None:
    placed = Placed(PLACEMENT)
    optimizer = DistributedOptimizer(torch.optim.AdamW, _groups(placed.params()), lr=0.1)
    plain = Plain(torch.optim.AdamW, 4)
    plain.optimizer = torch.optim.AdamW(_groups(list(plain.params.values())), lr=0.1, fused=True)
    schedulers = [SCHEDULERS[name](each) for each in (optimizer, plain.optimizer)]
    for step in range(4):
        placed.train(optimizer, [step])
        plain.train([step])
        for scheduler in schedulers:
            scheduler.step(*([1.0] if name == "plateau" else []))
        for ours, theirs in zip(optimizer.param_groups, plain.optimizer.param_groups, strict=True):
            assert ours["lr"] == theirs["lr"]
    require_equal(plain.values(), placed.values())


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_drive_groups(workers: Workers, name: str) -> None:
    workers.train(_scheduler, name)


def _optimizers_options() -> None:
    placed = Placed(PLACEMENT)
    optimizer = DistributedOptimizer(KeepsCounters, placed.params())
    placed.train(optimizer, range(3))
    assert optimizer.param_groups[0]["group_steps"] == 3


def test_options_that_the_optimizer_writes_come_back(workers: Workers) -> None:
    workers.train(_optimizers_options)


class WritesInPlace(torch.optim.SGD):
    """SGD whose step changes options without assigning them; it fails after that, if it is to."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=torch.tensor(lr))
        for group in self.param_groups:
            group.update(seen=[], fails=False)

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            group["lr"].mul_(0.5)
            group["seen"].append(len(group["seen"]))
            if group["fails"]:
                raise ArithmeticError("Error running optimizer.")
        return loss


def _written_in_place(atomic: bool) -> None:
    placed = Placed(PLACEMENT)
    optimizer = DistributedOptimizer(WritesInPlace, placed.params(), lr=0.1, atomic=atomic)
    plain = Plain(WritesInPlace, 4, lr=0.1)
    for step in range(3):
        placed.train(optimizer, [step])
        plain.train([step])
        require_equal(in_order(plain.optimizer.state_dict()), optimizer.state_dict())
        if step == 1:
            for group in (optimizer.param_groups[0], plain.optimizer.param_groups[0]):
                group["lr"].fill_(0.3)
                group["seen"].clear()
    require_equal(plain.values(), placed.values())


@pytest.mark.parametrize("atomic", [False, True])
def test_options_that_the_optimizer_writes_in_place_come_back(
    workers: Workers, atomic: bool
) -> None:
    workers.train(_written_in_place, atomic)


def _undone_in_place() -> None:
    placed = Placed(PLACEMENT)
    optimizer = DistributedOptimizer(WritesInPlace, placed.params(), lr=0.1, atomic=True)
    plain = Plain(WritesInPlace, 4, lr=0.1)
    placed.train(optimizer, [0])
    plain.train([0])
    optimizer.param_groups[0]["fails"] = True
    with pytest.raises(RuntimeError, match="nothing has changed on any worker"):
        placed.train(optimizer, [1])
    optimizer.param_groups[0]["fails"] = False
    for handle in optimizer.remote_optimizers:
        held = handle.rpc_sync().describe()[1]
        assert (held[0]["lr"].item(), held[0]["seen"]) == (torch.tensor(0.05).item(), [0])
    placed.train(optimizer, [2])
    plain.train([2])
    require_equal(plain.values(), placed.values())


def test_an_undone_step_undoes_what_it_wrote_in_place(workers: Workers) -> None:
    workers.train(_undone_in_place)


def _tensor_lr() -> None:
    placed = Placed(PLACEMENT)
    lr = torch.tensor(0.1)
    optimizer = DistributedOptimizer(torch.optim.Adam, placed.params(), lr=lr)
    plain = Plain(torch.optim.Adam, 4, lr=torch.tensor(0.1))
    for step in range(3):
        placed.train(optimizer, [step])
        plain.train([step])
        for group in (optimizer.param_groups[0], plain.optimizer.param_groups[0]):
            group["lr"].mul_(0.5)
    require_equal(plain.values(), placed.values())


def test_a_learning_rate_that_is_a_tensor_changed_in_place(workers: Workers) -> None:
    workers.train(_tensor_lr)


def in_order(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Parameters' state first, by index; the plain optimizer's is in the order of creation."""
    return {
        **state_dict,
        "state": dict(sorted(state_dict["state"].items(), key=lambda item: str(item[0]))),
    }


def _there_and_back(optimizer_class: Any, options: dict[str, Any]) -> None:
    placed = Placed(PLACEMENT)
    optimizer = DistributedOptimizer(optimizer_class, placed.params(), **options)
    plain = Plain(optimizer_class, 4, **options)
    placed.train(optimizer, range(2))
    plain.train(range(2))
    state = optimizer.state_dict()
    require_equal(in_order(plain.optimizer.state_dict()), state, "the plain format: ")

    moved = Placed(OTHER_PLACEMENT)
    other = DistributedOptimizer(optimizer_class, moved.params(), **{**options, "lr": 0.5})
    passed = copy.deepcopy(state)
    other.load_state_dict(passed)
    require_equal(state, passed, "the caller's dict: ")
    require_equal(state, other.state_dict(), "loaded: ")
    fresh = Plain(optimizer_class, 4, **options)
    fresh.optimizer.load_state_dict(copy.deepcopy(state))
    moved.train(other, range(2, 4))
    fresh.train(range(2, 4))
    require_equal(fresh.values(), moved.values(), "training goes on: ")
    require_equal(in_order(fresh.optimizer.state_dict()), other.state_dict(), "with state: ")


@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [
        (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True, "fused": False}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
        (KeepsCounters, {"lr": 0.1}),
    ],
)
def test_state_dicts_are_the_plain_ones_whoever_owns_what(
    workers: Workers, optimizer_class: Any, options: dict[str, Any]
) -> None:
    workers.train(_there_and_back, optimizer_class, options)


def _misfits() -> None:
    placed = Placed(PLACEMENT)
    optimizer = DistributedOptimizer(RejectsOddState, placed.params(), lr=0.1)
    placed.train(optimizer, range(1))
    before = optimizer.state_dict()
    groups = before["param_groups"]
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({**before, "param_groups": [*groups, *groups]})
    with pytest.raises(ValueError, match="lacks"):
        optimizer.load_state_dict({"state": {}})
    odd = copy.deepcopy(before)
    odd["param_groups"][0]["lr"] = 7.0
    odd["state"][2]["odd"] = True  # parameter 2 is on owner2
    with pytest.raises(
        ValueError, match=r"(?s)1 of 2 workers \(owner2\); nothing has changed.*odd!"
    ):
        optimizer.load_state_dict(odd)
    require_equal(before, optimizer.state_dict())


class RejectsOddState(torch.optim.Adam):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if any("odd" in state for state in state_dict["state"].values()):
            raise ValueError("odd!")


def test_a_failed_load_changes_nothing(workers: Workers) -> None:
    workers.train(_misfits)


def _hooks() -> None:
    placed = Placed(PLACEMENT)
    optimizer = DistributedOptimizer(torch.optim.SGD, placed.params(), lr=0.1)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "note": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(str(state["note"])))
    placed.train(optimizer, range(1))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["before", "after", "1"]


def test_hooks(workers: Workers) -> None:
    workers.train(_hooks)


def _added() -> None:
    placed = Placed({"owner1": [0], "owner2": [1, 2], "trainer0": [3]})
    optimizer = DistributedOptimizer(torch.optim.AdamW, placed.params(0, 1), lr=0.1)
    plain = Plain(torch.optim.AdamW, 4)
    plain.optimizer = torch.optim.AdamW(list(plain.params.values())[:2], lr=0.1, fused=True)
    placed.train(optimizer, [0], used=[0, 1])
    plain.train([0], used=[0, 1])
    group = {"params": iter(placed.params(2, 3)), "lr": 0.3}  # on an old worker and on a new one
    optimizer.add_param_group(group)
    plain.optimizer.add_param_group({"params": list(plain.params.values())[2:], "lr": 0.3})
    assert set(group) == {"params", "lr"}
    placed.train(optimizer, [1, 2])
    plain.train([1, 2])
    require_equal(plain.values(), placed.values())
    expected, actual = plain.optimizer.state_dict(), optimizer.state_dict()
    assert {g.pop("fused") for g in expected["param_groups"]} == {True}
    assert {g.pop("fused") for g in actual["param_groups"]} == {None}
    require_equal(expected, actual)

    before = optimizer.state_dict()
    newcomer = Placed({"trainer3": [5]}).params()
    with pytest.raises(ValueError, match=r"owner2.*\n(?s:.)*parameter 1 of group 2 are the same"):
        optimizer.add_param_group({"params": [*newcomer, *placed.params(1)]})
    with pytest.raises(TypeError, match="not an RRef"):
        optimizer.add_param_group({"params": [torch.ones(1)]})
    require_equal(before, optimizer.state_dict())
    assert len(optimizer.remote_optimizers) == 3
    placed.train(optimizer, [3])
    plain.train([3])
    require_equal(plain.values(), placed.values())


def test_add_param_group(workers: Workers) -> None:
    workers.train(_added)
