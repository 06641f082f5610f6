"""Why one would: every rank has the same load, at the bytes of plain data parallelism."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tensorplay.distributed.optim import ShardingReport, ZeroRedundancyOptimizer
from tests.reference.data_parallel import Twins, make_parameters, square_loss, squares
from tests.reference.traffic import counting
from tests.reference.training import require_close
from tests.zero.elements.ways import DURING, ELEMENTS, by_default
from tests.zero.gradients.test_memory import CAPACITY, KINDS, few_objects, small_buckets
from tests.zero.gradients.test_traffic import make_mixed, one_step
from tests.zero.test_memory import live_bytes

Run = Callable[..., list[Any]]


def make_skewed() -> nn.ParameterList:
    """Most of it is one embedding."""
    return make_parameters((2000, 96), (96, 96), (96,), (11,), (3, 5))


def _reports(reduces: bool) -> tuple[ShardingReport, int]:
    model = make_skewed()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=0.1, shard_gradients=reduces, **ELEMENTS
    )
    square_loss(model.parameters(), 0).backward()
    optimizer.step()
    state_bytes = sum(t.nbytes for s in optimizer.state.values() for t in s.values())
    return optimizer.sharding_report(), state_bytes


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("reduces", [False, True])
def test_every_rank_has_the_same_load(run: Run, world_size: int, reduces: bool) -> None:
    model_numel = sum(parameter.numel() for parameter in make_skewed().parameters())
    for rank, (report, state_bytes) in enumerate(run(world_size, _reports, reduces)):
        assert report.load_ratio <= 1.01
        assert sum(share.elements for share in report.ranks) == model_numel
        assert state_bytes <= 1.02 * 8 * model_numel / world_size
        measured = report.ranks[rank].state_bytes
        assert measured is not None
        assert measured <= 1.02 * 8 * model_numel / world_size
        assert "load ratio 1.00" in str(report)
        if reduces:
            assert report.gradient_bytes is not None
            assert report.gradient_bytes <= 1.01 * 4 * model_numel / world_size + 100


def _whole_is_not_even() -> float:
    optimizer = ZeroRedundancyOptimizer(make_skewed().parameters(), torch.optim.AdamW)
    return optimizer.sharding_report().load_ratio


def test_whole_parameters_cannot_be_even(run: Run) -> None:
    assert run(2, _whole_is_not_even)[0] > 1.8


def _step() -> Any:
    with by_default(**ELEMENTS):
        twins = Twins(make_mixed)
    one_step(twins, 0)
    with counting() as (calls, nbytes):
        one_step(twins, 1)
    return calls, nbytes


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_step_sends_the_bytes_of_plain_ddp(run: Run, world_size: int) -> None:
    results = run(world_size, _step)
    model = sum(parameter.nbytes for parameter in make_mixed().parameters())
    sent = sum(nbytes["isend"] for _, nbytes in results)
    plain_ddp = 2 * (world_size - 1) * model
    assert plain_ddp <= sent <= 1.02 * plain_ddp
    for calls, nbytes in results:
        # Every rank sends the same: the load is even.
        assert nbytes["isend"] <= 1.02 * sent / world_size
        assert calls["all_reduce"] <= 4
        # A bucket of large parameters, one of small ones, and six large gradients, some of them cut.
        assert calls["isend"] <= (2 + 1 + 6) * (world_size - 1)
        assert not set(calls) - {"all_reduce", "isend", "irecv"}


def _look() -> list[dict[str, int]]:
    with by_default(**ELEMENTS):
        twins = Twins(make_mixed)
    squares(0)(twins.model, twins.rank)
    results = []
    for look in (
        lambda: twins.sharded.clip_grad_norm_(1.0),
        lambda: twins.sharded.full_grad(next(twins.model.parameters())),
        twins.sharded.zero_grad,
    ):
        with counting() as (calls, _):
            look()
        results.append(dict(calls))
    return results


def test_clipping_costs_one_scalar(run: Run) -> None:
    for clip, full, zero in run(2, _look):
        assert clip == {"all_reduce": 2}  # the agreement, and the norm
        assert full["all_reduce"] == 2
        assert full.get("isend", 0) <= 1
        assert zero == {}


def _memory(kind: str, way: dict[str, Any]) -> dict[str, float]:
    with few_objects():
        return _measure(kind, way)


def _measure(kind: str, way: dict[str, Any]) -> dict[str, float]:
    with small_buckets():
        model = make_parameters(*KINDS[kind])
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(),
            torch.optim.SGD,
            shard_gradients=True,
            lr=0.1,
            momentum=0.9,
            **way,
        )

    def backward() -> None:
        square_loss(model.parameters(), dist.get_rank()).backward()

    for _ in range(2):
        backward()
        optimizer.step()
        optimizer.zero_grad()
    before = live_bytes()
    backward()
    after_backward = live_bytes()
    optimizer.step()
    after_step = live_bytes()
    optimizer.zero_grad()
    size = sum(parameter.nbytes for parameter in model.parameters())
    return {
        "share": size / dist.get_world_size(),
        "kept by backward": after_backward - before,
        "kept by step": after_step - before,
        "kept by zero_grad": live_bytes() - before,
        "parameters and state": before,
        "model": size,
    }


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("way", [ELEMENTS, DURING], ids=["after backward", "during backward"])
def test_averaged_gradients_are_a_share_and_two_buckets(
    run: Run, kind: str, way: dict[str, Any]
) -> None:
    for facts in run(3 if kind == "both" else 2, _memory, kind, way):
        few = 8000
        assert facts["kept by backward"] <= facts["share"] + 2 * CAPACITY + few
        assert facts["kept by step"] <= facts["share"] + 2 * CAPACITY + few
        assert facts["kept by zero_grad"] <= few
        assert facts["parameters and state"] <= (
            facts["model"] + facts["share"] + 3 * CAPACITY + few
        )


def _set_aside() -> None:
    """A gradient from an earlier pass, to which nobody adds, is clipped where it lies."""
    with by_default(**ELEMENTS):
        twins = Twins(lambda: make_parameters((33, 40), (7,), (50, 9)))
    for without in (0, 1, 2):
        twins.zero_grad()
        twins.backward(squares(0))
        twins.backward(squares(1, without=lambda _, n=without: (n,)))
        expected = nn.utils.clip_grad_norm_(twins.plain_model.parameters(), 0.5)
        norm = twins.sharded.clip_grad_norm_(0.5)
        torch.testing.assert_close(norm, expected)
        for plain, ours in zip(
            twins.plain_model.parameters(), twins.model.parameters(), strict=True
        ):
            full = twins.sharded.full_grad(ours)
            assert full is not None
            require_close(plain.grad, full, factor=3)


def test_clipping_of_gradients_to_which_a_later_pass_adds_nothing(run: Run) -> None:
    run(2, _set_aside)
    run(3, _set_aside)


def _cuts(num_parameters: int) -> list[tuple[int, ...]]:
    optimizer = ZeroRedundancyOptimizer(
        make_parameters(*[(10 + number,) for number in range(num_parameters)]).parameters(),
        torch.optim.SGD,
        **ELEMENTS,
    )
    return [optimizer._sharded.plan.cuts_of(index) for index in range(num_parameters)]


def test_every_element_has_one_owner_and_all_ranks_know_it(run: Run) -> None:
    first, *others = run(3, _cuts, 7)
    assert others == [first] * 2
    for index, cuts in enumerate(first):
        assert (cuts[0], cuts[-1]) == (0, 10 + index)
        assert all(start <= end for start, end in pairwise(cuts))
