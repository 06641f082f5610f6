"""Mixed precision with torch's own ``GradScaler`` under DDP: equal to the plain optimizer."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler

from tests.launch import run_ranks
from tests.reference.ddp import (
    MODES,
    Trainer,
    batch,
    make_net,
    make_twins,
    require_twins_equal,
)
from tests.reference.optimizers import OPTIMIZERS
from tests.reference.training import require_equal, values_of

KERNELS = ("AdamW", "AdamW fused", "SGD fused")


def make_scaler() -> GradScaler:
    return GradScaler("cpu", init_scale=2.0**10, growth_interval=2)


def train_scaled(
    trainer: Trainer,
    scaler: GradScaler,
    steps: range,
    *,
    clip: float | None = None,
    spoil_rank: int | None = None,
) -> None:
    """The loop of torch's page on mixed precision, in half precision."""
    for step in steps:
        inputs, targets = batch(step)
        trainer.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            outputs = trainer.model(inputs)
        loss = nn.functional.mse_loss(outputs.float(), targets)
        if dist.get_rank() == spoil_rank:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(trainer.optimizer)
            nn.utils.clip_grad_norm_(trainer.model.parameters(), clip)
        scaler.step(trainer.optimizer)
        scaler.update()


def _compare(resident: bool, clip: float | None) -> None:
    for name in KERNELS:
        plain, sharded = make_twins(make_net, resident, *OPTIMIZERS[name])
        plain_scaler, scaler = make_scaler(), make_scaler()
        train_scaled(plain, plain_scaler, range(5), clip=clip)
        train_scaled(sharded, scaler, range(5), clip=clip)
        require_twins_equal(plain, sharded, f"{name}: ")
        assert plain_scaler.state_dict() == scaler.state_dict()
        assert scaler.get_scale() == 2.0**12, "no step was skipped, and the scale grew twice"


@MODES
def test_scaled_training_is_bitwise_equal(resident: bool) -> None:
    run_ranks(2, _compare, resident, None)


@MODES
def test_unscaling_and_clipping_before_the_step(resident: bool) -> None:
    run_ranks(3, _compare, resident, 0.05)


def _one_linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, 3, bias=False)


def _more_ranks_than_parameters(resident: bool) -> None:
    plain, sharded = make_twins(_one_linear, resident, *OPTIMIZERS["AdamW fused"])
    for trainer in (plain, sharded):
        scaler = make_scaler()
        train_scaled(trainer, scaler, range(2), clip=0.05)
        train_scaled(trainer, scaler, range(2, 3), spoil_rank=2)
        train_scaled(trainer, scaler, range(3, 5))
    require_twins_equal(plain, sharded)


@MODES
def test_ranks_that_own_nothing(resident: bool) -> None:
    run_ranks(3, _more_ranks_than_parameters, resident)


def _overflow(resident: bool, clip: float | None) -> list[Any]:
    results = []
    for name in KERNELS:
        plain, sharded = make_twins(make_net, resident, *OPTIMIZERS[name])
        plain_scaler, scaler = make_scaler(), make_scaler()
        local: Any = sharded.optimizer.optim  # type: ignore[attr-defined] # mypy can't see that it has this
        train_scaled(plain, plain_scaler, range(1))
        train_scaled(sharded, scaler, range(1))
        before = values_of(sharded.model.parameters()), copy.deepcopy(local.state_dict())
        train_scaled(plain, plain_scaler, range(1, 2), spoil_rank=1, clip=clip)
        train_scaled(sharded, scaler, range(1, 2), spoil_rank=1, clip=clip)
        after = values_of(sharded.model.parameters()), local.state_dict()
        require_equal(before, after, f"{name}: ")
        train_scaled(plain, plain_scaler, range(2, 4))
        train_scaled(sharded, scaler, range(2, 4))
        require_twins_equal(plain, sharded, f"{name}: ")
        assert scaler.get_scale() == 2.0**10, "halved once, doubled once"
        results.append((scaler.state_dict(), values_of(sharded.model.parameters())))
    return results


@MODES
@pytest.mark.parametrize("clip", [None, 0.5], ids=["", "clipped"])
def test_an_inf_on_one_rank_skips_the_step_on_all(resident: bool, clip: float | None) -> None:
    results = run_ranks(2, _overflow, resident, clip)
    require_equal(results[0], results[1])
