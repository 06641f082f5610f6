"""State from training with sharded gradients loads anywhere."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tests.reference.data_parallel import ADAMW, OneProcess, Twins, make_parameters, squares
from tests.reference.training import first_difference, require_equal, values_of

Run = Callable[..., list[Any]]


def make() -> nn.ParameterList:
    return make_parameters((3, 4), (400, 400), (), (0, 4), (17,), (5, torch.float64))


def _save(resident: bool) -> dict[str, Any]:
    twins = Twins(make, parameters_as_bucket_view=resident)
    twins.train(squares, steps=2)
    twins.sharded.consolidate_state_dict(to=1)
    if twins.rank != 1:
        return {}
    state = twins.sharded.state_dict()
    expected = twins.plain.state_dict()
    assert first_difference(expected["state"], state["state"]) is None
    return {"optimizer": state, "model": values_of(twins.model.parameters())}


def _load(saved: dict[str, Any], shard_gradients: bool) -> None:
    """The loaded optimizer and the plain one go on alike."""
    world_size = dist.get_world_size()
    model, plain_model = make(), make()
    with torch.no_grad():
        for each in (model, plain_model):
            for parameter, value in zip(each.parameters(), saved["model"], strict=True):
                parameter.copy_(value)
    plain = torch.optim.AdamW(plain_model.parameters(), **ADAMW)
    plain.load_state_dict(saved["optimizer"])
    one = OneProcess(plain_model, world_size)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, shard_gradients=shard_gradients, **ADAMW
    )
    optimizer.load_state_dict(saved["optimizer"])
    for step in range(2, 4):
        plain.zero_grad()
        one.backward(squares(step))
        optimizer.zero_grad()
        if shard_gradients:
            squares(step)(model, dist.get_rank())
        else:
            pairs = zip(model.parameters(), plain_model.parameters(), strict=True)
            for parameter, whole in pairs:
                assert whole.grad is not None
                parameter.grad = whole.grad.clone()
        plain.step()
        optimizer.step()
        require_equal(values_of(plain_model.parameters()), values_of(model.parameters()))


@pytest.mark.parametrize("resident", [False, True])
def test_saved_on_two_ranks_and_loaded_on_others(run: Run, resident: bool) -> None:
    _, saved = run(2, _save, resident)
    run(3, _load, saved, True)
    run(1, _load, saved, True)
    run(2, _load, saved, False)


def _between_backward_and_step() -> None:
    twins = Twins(make)
    twins.train(squares, steps=1)
    twins.zero_grad()
    twins.backward(squares(1))
    twins.sharded.consolidate_state_dict(to=0)
    kept: list[Any] = [twins.sharded.state_dict() if twins.rank == 0 else None]
    dist.broadcast_object_list(kept)
    twins.sharded.load_state_dict(kept[0])
    twins.require_same_gradients()
    twins.step()
    twins.require_same()


def test_loading_leaves_gradients_alone(run: Run) -> None:
    run(2, _between_backward_and_step)
