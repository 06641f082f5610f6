"""Twins under DistributedDataParallel: one with the plain optimizer, one with the sharded one."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tests.reference.training import require_equal, values_of

MODES = pytest.mark.parametrize("resident", [False, True], ids=["own storage", "bucket view"])

ADAMW: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "fused": True}


class Trainer(NamedTuple):
    """What a training loop holds."""

    model: nn.Module
    optimizer: Optimizer

    @property
    def module(self) -> nn.Module:
        return self.model.module  # type: ignore[return-value] # mypy takes it for any attribute of a module


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 17), nn.ReLU(), nn.LayerNorm(17), nn.Linear(17, 3))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's inputs and targets of a step."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)


def make_twins(
    make_module: Callable[[], nn.Module],
    resident: bool,
    optimizer_class: type[Optimizer] = torch.optim.AdamW,
    options: dict[str, Any] | None = None,
    **ddp_options: Any,
) -> tuple[Trainer, Trainer]:
    """The plain trainer and the sharded one, from the same start."""
    options = ADAMW if options is None else options
    plain_model, model = (DistributedDataParallel(make_module(), **ddp_options) for _ in range(2))
    plain = optimizer_class(plain_model.parameters(), **options)
    sharded = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class, parameters_as_bucket_view=resident, **options
    )
    return Trainer(plain_model, plain), Trainer(model, sharded)


def train(model: nn.Module, optimizer: Optimizer, steps: int = 4, first: int = 0) -> None:
    """The usual loop."""
    for step in range(first, first + steps):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def require_twins_equal(plain: Trainer, sharded: Trainer, what: str = "") -> None:
    """Asserts that the models are bitwise equal, buffers included."""
    require_equal(
        values_of(plain.model.state_dict().values()),
        values_of(sharded.model.state_dict().values()),
        what,
    )
