"""``torch.distributed.checkpoint`` keeps the counters and disturbs none."""

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from tensorplay.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from tensorplay.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from tensorplay.distributed.optim import PostLocalSGDOptimizer
from tests.launch import run_ranks
from tests.reference.ddp import make_net, train
from tests.reference.training import require_equal, values_of


def _build() -> tuple[nn.Module, PostLocalSGDOptimizer, PostLocalSGDState]:
    model = DistributedDataParallel(make_net())
    state = PostLocalSGDState(None, None, 3, post_local_gradient_allreduce=False)
    model.register_comm_hook(state, post_localSGD_hook)
    local = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer = PostLocalSGDOptimizer(local, PeriodicModelAverager(4, 3), hook_state=state)
    return model, optimizer, state


def _resume() -> None:
    model, optimizer, state = _build()
    before = values_of(model.parameters())
    get_optimizer_state_dict(model, optimizer)  # lets it create its state
    require_equal(before, values_of(model.parameters()))
    assert (optimizer.averager.step, state.iter) == (0, 0)
    train(model, optimizer, steps=5)
    saved = get_optimizer_state_dict(model, optimizer)
    other_model, other, other_state = _build()
    set_optimizer_state_dict(other_model, other, optim_state_dict=saved)
    other_model.load_state_dict(model.state_dict())
    assert (other.averager.step, other_state.iter) == (5, 3)
    train(model, optimizer, steps=6, first=5)
    train(other_model, other, steps=6, first=5)
    require_equal(values_of(model.parameters()), values_of(other_model.parameters()))


def test_resuming_in_mid_period_continues_bitwise() -> None:
    run_ranks(2, _resume)


def _flattened() -> None:
    model, optimizer, _ = _build()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    train(model, optimizer, steps=4)
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    assert saved["param_groups.0.weight.averager_step"] == 4
    other_model, other, _ = _build()
    with pytest.warns(UserWarning, match="does not contain a step counter"):
        set_optimizer_state_dict(other_model, other, optim_state_dict=saved, options=options)


def test_flattened_dicts_lose_the_count_when_they_are_loaded_and_that_is_said() -> None:
    run_ranks(2, _flattened)
