"""Uneven inputs: a joined rank steps and gathers what the active ranks' buckets ask of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.nn.parallel import DistributedDataParallel

from tensorplay.distributed.algorithms.join import Join
from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tests.reference.training import require_equal, values_of
from tests.zero.overlap.twins import HOOKS, MANY_BUCKETS_MB
from tests.zero.test_join import ADAMW, BATCHES, decay, loss_of, make_net, train_as_one

Run = Callable[..., list[Any]]


def _train_joined(
    interleaved: bool, resident: bool, ours: bool, options: dict[str, Any]
) -> list[torch.Tensor]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(make_net(), bucket_cap_mb=MANY_BUCKETS_MB, **options)
    zero = ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        parameters_as_bucket_view=resident,
        overlap_with_ddp=True,
        **ADAMW,
    )
    hook = HOOKS["interleaved" if interleaved else "step"](allreduce_hook, model, zero)
    model.register_comm_hook(None, hook)
    scheduler = decay(zero)
    join, joinables = (Join, [zero, model]) if ours else (TorchJoin, [model, zero])
    with join(joinables):
        for number in range(BATCHES[world_size][rank]):
            zero.zero_grad()
            loss_of(model, rank, number).backward()
            zero.step()
            scheduler.step()
    expected = train_as_one(world_size, by_initial_world_size=True)
    for plain, actual in zip(expected, model.parameters(), strict=True):
        torch.testing.assert_close(actual, plain, rtol=1e-4, atol=2e-6)
    return values_of(model.parameters())


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=["", "unused"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("world_size", BATCHES)
def test_equals_one_process_that_sees_the_active_ranks_batches(
    run: Run, world_size: int, interleaved: bool, options: dict[str, Any]
) -> None:
    ours = world_size != 3
    first, *others = run(world_size, _train_joined, interleaved, not ours, ours, options)
    for other in others:
        require_equal(first, other)


def _without_optimizer() -> None:
    model = DistributedDataParallel(make_net())
    zero = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, overlap_with_ddp=True, **ADAMW
    )
    model.register_comm_hook(None, HOOKS["step"](allreduce_hook, model, zero))
    with (
        pytest.raises(RuntimeError, match=r"its optimizer there too: Join\(\[model, optimizer"),
        Join([model]),
    ):
        loss_of(model, dist.get_rank(), 0).backward()


def test_the_model_alone_is_refused(run: Run) -> None:
    run(2, _without_optimizer)
