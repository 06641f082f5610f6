"""Uneven inputs: a joined rank gets its shard's averages in the hooks that DDP calls for it."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.nn.parallel import DistributedDataParallel

from tensorplay.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import reduce_to_owners_hook
from tensorplay.distributed.algorithms.join import Join
from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tensorplay.distributed.optim._core import host_memory
from tests.launch import run_ranks
from tests.reference.training import require_equal, values_of
from tests.zero.ddp_hook.twins import Twins
from tests.zero.overlap.twins import MANY_BUCKETS_MB
from tests.zero.test_join import ADAMW, BATCHES, decay, loss_of, make_net, train_as_one

Run = Callable[..., list[Any]]


def _train_joined(ours: bool, options: dict[str, Any]) -> list[torch.Tensor]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(make_net(), bucket_cap_mb=MANY_BUCKETS_MB, **options)
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **ADAMW)
    model.register_comm_hook(None, reduce_to_owners_hook(model, zero))
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


@pytest.mark.parametrize(
    "options",
    [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}],
    ids=["", "unused", "bucket view"],
)
@pytest.mark.parametrize("world_size", BATCHES)
def test_equals_one_process_that_sees_the_active_ranks_batches(
    run: Run, world_size: int, options: dict[str, Any]
) -> None:
    ours = world_size != 3
    first, *others = run(world_size, _train_joined, ours, options)
    for other in others:
        require_equal(first, other)


class HalfUsedTwins(Twins):
    """Of a model a part of which is never used."""

    def train_joined(self) -> None:
        """Rank 1 goes on alone after one iteration."""
        for (model, optimizer), joinables in zip(
            self.both, ([self.plain_model], [self.model, self.zero]), strict=True
        ):
            with Join(joinables):
                for number in range(1 + 2 * dist.get_rank()):
                    optimizer.zero_grad()
                    model(torch.full((4, 6), 1.0 + number)).square().mean().backward()
                    optimizer.step()


def _unused() -> list[torch.Tensor]:
    from tests.zero.overlap.test_oracle import HalfUsed

    twins = HalfUsedTwins(HalfUsed, find_unused_parameters=True)
    before = values_of(twins.model.module.unused.parameters())
    twins.train_joined()
    require_equal(before, values_of(twins.model.module.unused.parameters()))
    return values_of(twins.model.parameters())


def test_what_nobody_uses_is_skipped_by_a_joined_rank_too(run: Run) -> None:
    first, *others = run(2, _unused)
    for other in others:
        require_equal(first, other)


def _unused_without_room() -> list[torch.Tensor]:
    with mock.patch.multiple(host_memory, ARENA_BYTES=0, RESERVED_BYTES=0):
        return _unused()


def test_the_same_where_ranks_find_no_room_in_shared_memory() -> None:
    first, *others = run_ranks(2, _unused_without_room)
    for other in others:
        require_equal(first, other)


def _refusals() -> None:
    for together, options, message in (
        (False, {}, r"its optimizer there too: Join\(\[model, optimizer\]"),
        (True, {"divide_by_initial_world_size": False}, "divides by the number of all ranks"),
    ):
        model = DistributedDataParallel(make_net())
        zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **ADAMW)
        model.register_comm_hook(None, reduce_to_owners_hook(model, zero))
        with (
            pytest.raises((RuntimeError, ValueError), match=message),
            Join([model, zero] if together else [model], **options),
        ):
            loss_of(model, dist.get_rank(), 0).backward()


def test_what_would_hang_or_divide_wrongly_is_refused() -> None:
    run_ranks(2, _refusals)
