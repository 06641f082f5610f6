"""Compiled models, activation checkpointing and DDP's options: equal to the plain optimizer."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tests.launch import run_ranks
from tests.reference.ddp import (
    ADAMW,
    MODES,
    Trainer,
    batch,
    make_net,
    make_twins,
    require_twins_equal,
    train,
)


def _compiled_around_ddp(resident: bool, backend: str) -> None:
    plain, sharded = make_twins(make_net, resident)
    train(torch.compile(plain.model, backend=backend), plain.optimizer)
    train(torch.compile(sharded.model, backend=backend), sharded.optimizer)
    require_twins_equal(plain, sharded)


@MODES
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_ddp_model(resident: bool, backend: str) -> None:
    run_ranks(2, _compiled_around_ddp, resident, backend)


def _compiled_inside_ddp(resident: bool) -> None:
    def make_compiled() -> nn.Module:
        return torch.compile(make_net(), backend="aot_eager")  # type: ignore[return-value] # mypy takes it for any attribute of a module

    plain, sharded = make_twins(make_compiled, resident)
    train(*plain)
    train(*sharded)
    require_twins_equal(plain, sharded)


@MODES
def test_ddp_around_a_compiled_model(resident: bool) -> None:
    run_ranks(2, _compiled_inside_ddp, resident)


def _compiled_before_the_optimizer(resident: bool) -> None:
    plain = make_net()
    train(plain, torch.optim.AdamW(plain.parameters(), **ADAMW))
    net = make_net()
    compiled = torch.compile(net, backend="eager")
    compiled(batch(0)[0])  # compiled code holds the parameters from before they moved
    optimizer = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.AdamW, parameters_as_bucket_view=resident, **ADAMW
    )
    train(compiled, optimizer)
    require_twins_equal(Trainer(plain, optimizer), Trainer(net, optimizer))


@MODES
def test_a_model_that_ran_compiled_before_the_optimizer_was_built(resident: bool) -> None:
    run_ranks(1, _compiled_before_the_optimizer, resident)


class Checkpointed(nn.Module):
    """Runs its second layer twice and recomputes both halves in backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 16)
        self.repeated = nn.Linear(16, 16)
        self.last = nn.Linear(16, 3)
        self.use_reentrant = use_reentrant

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(inputs))
        for _ in range(2):
            hidden = checkpoint(self._half, hidden, use_reentrant=self.use_reentrant)
        return self.last(hidden)

    def _half(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.repeated(hidden))


def _checkpointed(resident: bool, use_reentrant: bool, ddp_options: dict[str, Any]) -> None:
    plain, sharded = make_twins(lambda: Checkpointed(use_reentrant), resident, **ddp_options)
    train(*plain)
    train(*sharded)
    require_twins_equal(plain, sharded)


@MODES
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_activation_checkpointing_of_a_layer_that_is_used_twice(
    resident: bool, use_reentrant: bool
) -> None:
    run_ranks(2, _checkpointed, resident, use_reentrant, {"static_graph": True})


def _with_ddp_options(resident: bool, ddp_options: dict[str, Any]) -> None:
    plain, sharded = make_twins(make_net, resident, **ddp_options)
    train(*plain)
    train(*sharded)
    require_twins_equal(plain, sharded)


@MODES
@pytest.mark.parametrize(
    "ddp_options",
    [
        {"static_graph": True},
        {"static_graph": True, "gradient_as_bucket_view": True},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001},
    ],
    ids=str,
)
def test_options_of_ddp(resident: bool, ddp_options: dict[str, Any]) -> None:
    run_ranks(3, _with_ddp_options, resident, ddp_options)


class Branching(nn.Module):
    """Which branch runs depends on the rank and the step; the last one never runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(6, 3) for _ in range(4))
        self.num_calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        branch = (self.num_calls + dist.get_rank()) % 3
        self.num_calls += 1
        return self.branches[branch](inputs)


def _unused(resident: bool, ddp_options: dict[str, Any]) -> None:
    plain, sharded = make_twins(Branching, resident, find_unused_parameters=True, **ddp_options)
    start = [p.detach().clone() for p in plain.module.branches[3].parameters()]  # type: ignore[index,union-attr] # mypy takes it for any attribute of a module
    train(*plain, steps=6)
    train(*sharded, steps=6)
    require_twins_equal(plain, sharded)
    never_used = sharded.module.branches[3]  # type: ignore[index] # mypy takes it for any attribute of a module
    for parameter, before in zip(never_used.parameters(), start, strict=True):
        assert torch.equal(parameter, before), "decayed, though no rank used it"
        assert parameter not in sharded.optimizer.state


@MODES
@pytest.mark.parametrize(
    "ddp_options", [{}, {"gradient_as_bucket_view": True}], ids=["", "gradient view"]
)
def test_parameters_unused_on_some_ranks_or_on_all(
    resident: bool, ddp_options: dict[str, Any]
) -> None:
    run_ranks(2, _unused, resident, ddp_options)
