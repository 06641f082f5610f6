"""Torch's own ``GradScaler``, unmodified: all ranks skip a step, or none."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from tests.reference.data_parallel import Passes, Twins, make_parameters, square_loss
from tests.reference.optimizers import OPTIMIZERS
from tests.reference.training import require_equal, values_of

Run = Callable[..., list[Any]]
KERNELS = ("AdamW", "AdamW fused", "SGD momentum")


class _Scaled:
    """Twins, and a scaler for each."""

    def __init__(self, twins: Twins, scale: float = 2.0**10) -> None:
        self.twins = twins
        models = twins.model, twins.plain_model
        self.scalers = {
            model: GradScaler("cpu", init_scale=scale, growth_interval=2) for model in models
        }

    def train(
        self,
        steps: range,
        *,
        autocast: bool,
        spoil_rank: int | None = None,
        spoil: float = math.inf,
        clip: float | None = None,
    ) -> None:
        twins = self.twins
        for step in steps:
            twins.zero_grad()
            twins.backward(self._passes(step, spoil_rank, spoil, autocast=autocast))
            ours, plains = (self.scalers[m] for m in (twins.model, twins.plain_model))
            if clip is not None:
                ours.unscale_(twins.sharded)
                plains.unscale_(twins.plain)
                norm = twins.sharded.clip_grad_norm_(clip)
                expected = nn.utils.clip_grad_norm_(twins.plain_model.parameters(), clip)
                torch.testing.assert_close(norm, expected, equal_nan=True)
            ours.step(twins.sharded)
            plains.step(twins.plain)
            ours.update()
            plains.update()
            assert ours.state_dict() == plains.state_dict()

    def _passes(self, step: int, spoil_rank: int | None, spoil: float, *, autocast: bool) -> Passes:
        def passes(model: nn.Module, rank: int) -> None:
            generator = torch.Generator().manual_seed(100 * step + rank)
            with torch.autocast("cpu", dtype=torch.float16, enabled=autocast):
                outputs = model(torch.randn(4, 6, generator=generator))
            loss = outputs.float().square().mean()
            loss = loss * spoil if rank == spoil_rank else loss
            self.scalers[model].scale(loss).backward()

        return passes


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 400), nn.ReLU(), nn.Linear(400, 400), nn.Linear(400, 3))


def make_tiny() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, 3, bias=False)


def _scaled(make: Callable[[], nn.Module], autocast: bool) -> list[Any]:
    results = []
    for name in KERNELS:
        twins = Twins(make, *OPTIMIZERS[name])
        scaled = _Scaled(twins)
        scaled.train(range(2), autocast=autocast)
        twins.require_same(f"{name}: ")
        before = values_of(twins.model.parameters())
        scaled.train(range(2, 3), autocast=autocast, spoil_rank=twins.world_size - 1)
        scaled.train(range(3, 4), autocast=autocast, spoil_rank=0, spoil=math.nan)
        require_equal(before, values_of(twins.model.parameters()), f"{name}: ")
        twins.require_same(f"{name}, after an inf: ")
        scaled.train(range(4, 6), autocast=autocast)
        twins.require_same(f"{name}, after going on: ")
        results.append(scaled.scalers[twins.model].state_dict())
    return results


@pytest.mark.parametrize("autocast", [True, False], ids=["float16", "float32"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_inf_on_one_rank_skips_the_step_on_all(
    run: Run, world_size: int, autocast: bool
) -> None:
    first, *others = run(world_size, _scaled, make_net, autocast)
    assert others == [first] * len(others)


def test_ranks_that_own_nothing_check_for_infs_too(run: Run) -> None:
    run(3, _scaled, make_tiny, True)


def _clipped(make: Callable[[], nn.Module]) -> None:
    twins = Twins(make, torch.optim.SGD, {"lr": 0.1})
    scaled = _Scaled(twins)
    scaled.train(range(2), autocast=True, clip=0.05)
    scaled.train(range(2, 3), autocast=True, clip=0.05, spoil_rank=1)
    scaled.train(range(3, 5), autocast=True, clip=0.05)
    pairs = zip(twins.plain_model.parameters(), twins.model.parameters(), strict=True)
    for plain, ours in pairs:
        torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("make", [make_net, make_tiny])
def test_unscaling_and_clipping_before_the_step(run: Run, make: Callable[[], nn.Module]) -> None:
    run(3, _clipped, make)


def _spoiled_while_accumulating(first_syncs: bool) -> float:
    twins = Twins(make_net)
    scaler = GradScaler("cpu", init_scale=4.0)
    for number, spoil in enumerate((math.inf, 1.0)):

        def passes(model: nn.Module, rank: int, spoil: float = spoil) -> None:
            loss = square_loss(model.parameters(), rank) * (spoil if rank == 1 else 1.0)
            scaler.scale(loss).backward()

        twins.backward(passes, sync=first_syncs or number == 1)
    scaler.step(twins.sharded)
    scaler.update()
    return scaler.get_scale()


@pytest.mark.parametrize("first_syncs", [True, False])
def test_an_inf_in_an_earlier_pass(run: Run, first_syncs: bool) -> None:
    assert run(2, _spoiled_while_accumulating, first_syncs) == [2.0, 2.0]


def _huge() -> float:
    """Finite gradients whose squares add up to more than float32 can hold."""
    twins = Twins(lambda: make_parameters(*[(400, 400)] * 4, (3,), (5,)), torch.optim.SGD)
    scaler = GradScaler("cpu", init_scale=1.0)
    loss = torch.stack([p.view(-1)[0] for p in twins.model.parameters()]).sum() * 1.5e19
    scaler.scale(loss).backward()
    scaler.step(twins.sharded)
    scaler.update()
    return scaler.get_scale()


def test_huge_gradients_are_finite(run: Run) -> None:
    assert run(2, _huge) == [1.0, 1.0]
