"""Parameters of which several ranks own a part: each holds the averages of its stretches."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tensorplay.distributed.optim._core.partial_gradient import PartialGradient
from tensorplay.distributed.optim._core.ranks import GroupRank
from tensorplay.distributed.optim.zero.sharding_plan import ShardingPlan
from tests.zero.ddp_hook.twins import Twins
from tests.zero.overlap.test_oracle import make_layers
from tests.zero.overlap.twins import backward

Run = Callable[..., list[Any]]


def cut(plan: ShardingPlan, index: int) -> tuple[tuple[int, int, GroupRank], ...]:
    """About equal parts, none of some ranks for small parameters."""
    numel, num_ranks = plan.specs[index].numel, plan.partition.num_ranks
    share = -(-numel // num_ranks)
    cuts = [min(rank * share, numel) for rank in range(num_ranks + 1)]
    return tuple(
        (cuts[rank], cuts[rank + 1], GroupRank(rank))
        for rank in range(num_ranks)
        if cuts[rank] < cuts[rank + 1]
    )


class Scaled(nn.Module):
    """Layers, and a parameter of one element, which can't be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_layers(6, 300, 200, 3)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.scale * self.layers(inputs)


def _parts(passes: int, view: bool) -> None:
    rank = dist.get_rank()
    with mock.patch.object(ShardingPlan, "stretches_of", cut):
        twins = Twins(
            Scaled,
            torch.optim.SGD,
            {"lr": 0.1},
            bucket_cap_mb=0.05,
            gradient_as_bucket_view=view,
        )
        for step in range(3):
            for model, optimizer in twins.both:
                optimizer.zero_grad()
                for number in range(passes):
                    backward(model, passes * step + number)
        whole = 0
        for index, (plain, actual) in enumerate(
            zip(twins.plain_model.parameters(), twins.model.parameters(), strict=True)
        ):
            own = [(s, e) for s, e, owner in cut(twins.zero._sharded.plan, index) if owner == rank]
            gradient = actual.grad
            if own == [(0, actual.numel())]:
                whole += 1
                parts = [gradient.flatten()]
            else:
                assert isinstance(gradient, PartialGradient)
                *parts, _ = gradient.parts
            expected = [plain.grad.flatten()[start:end] for start, end in own]
            torch.testing.assert_close(parts, expected, rtol=1e-5, atol=1e-7)
        assert whole == int(rank == 0)  # the one element
        norm = nn.utils.clip_grad_norm_(twins.plain_model.parameters(), 0.01)
        torch.testing.assert_close(twins.zero.clip_grad_norm_(0.01), norm)
        plain, first = (model.module.layers[0].weight for model, _ in twins.both)  # type: ignore[union-attr,index] # mypy takes them for any attribute of a module
        index = [p is first for p in twins.model.parameters()].index(True)
        ((start, end),) = [(s, e) for s, e, o in cut(twins.zero._sharded.plan, index) if o == rank]
        assert isinstance(first.grad, PartialGradient)
        clipped = plain.grad.flatten()[start:end]
        torch.testing.assert_close(first.grad.parts[0], clipped, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("world_size", [2, 3])
def test_each_rank_has_the_averages_of_its_stretches(
    run: Run, world_size: int, passes: int, view: bool
) -> None:
    run(world_size, _parts, passes, view)
