"""Where communication overlaps: what has been stepped is sent while the rest is being stepped."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tensorplay.distributed.optim._core.bucket_layout import take_turns
from tensorplay.distributed.optim.zero import sharding_plan, step_stages

Run = Callable[..., list[Any]]

WAYS: dict[str, dict[str, Any]] = {
    "parameters": {},
    "views": {"parameters_as_bucket_view": True},
    "elements": {"partition": "elements"},
    "flat": {"flat_step": True},
}


@contextmanager
def small_stages() -> Iterator[None]:
    """Inside, buckets and stages are small enough for small models to have several."""
    with (
        mock.patch.object(step_stages, "STAGE_BYTES", 1024),
        mock.patch.object(sharding_plan, "CAPACITY_BYTES", 700_000),
        mock.patch.object(sharding_plan, "LEAST_STAGED_CAPACITY_BYTES", 300_000),
    ):
        yield


class Branches(nn.Module):
    """Layers that are large enough for buckets of their own, small ones, and one used now and then."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.ModuleList(nn.Linear(400, 400) for _ in range(3))
        self.norm = nn.BatchNorm1d(400)
        self.seldom = nn.Linear(400, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, inputs: torch.Tensor, *, seldom: bool) -> torch.Tensor:
        for layer in self.wide:
            inputs = torch.tanh(layer(inputs))
        outputs = self.norm(inputs)
        if seldom:
            return self.frozen(self.seldom(outputs)).square().sum() + self.empty.sum()
        return outputs.square().mean()


def _train(
    way: dict[str, Any], options: dict[str, Any], *, overlap: bool
) -> tuple[list[torch.Tensor], int]:
    model = Branches()
    wide = {id(p) for p in model.wide.parameters()}
    groups = [
        {"params": [p for p in model.parameters() if id(p) in wide], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if id(p) not in wide], "lr": 0.02},
    ]
    optimizer = ZeroRedundancyOptimizer(
        groups,
        torch.optim.AdamW,
        shard_gradients=True,
        overlap_with_backward=overlap,
        **way,
        **options,
        lr=0.01,
    )
    assert optimizer._update.has_stages(optimizer.optim) == overlap
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    torch.manual_seed(dist.get_rank())
    for number in range(6):
        model(torch.randn(5, 400), seldom=number in (2, 3)).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    stages = optimizer._sharded.buckets.stages(trainable=True)
    return [p.detach().clone() for p in model.parameters()], len(stages)


def _trains_alike(way: dict[str, Any], options: dict[str, Any]) -> None:
    with small_stages():
        expected, _ = _train(way, options, overlap=False)
        actual, num_stages = _train(way, options, overlap=True)
    assert num_stages > 1
    for one, other in zip(expected, actual, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"amsgrad": True}])
@pytest.mark.parametrize("way", WAYS)
def test_trains_bit_for_bit_as_without_overlap(run: Run, way: str, options: dict[str, Any]) -> None:
    run(3, _trains_alike, WAYS[way], options)


def _events() -> list[str]:
    layers = nn.Sequential(*(nn.Linear(400, 400, bias=False) for _ in range(4)))
    with small_stages():
        optimizer = ZeroRedundancyOptimizer(
            layers.parameters(),
            torch.optim.SGD,
            shard_gradients=True,
            partition="elements",
            overlap_with_backward=True,
            lr=1,
        )
        layers(torch.ones(2, 400)).sum().backward()
        events: list[str] = []
        buckets: Any = optimizer._sharded.buckets
        launch, finish = buckets.launch, buckets.finish

        def noting_launch(number: int, communicator: Any) -> Any:
            events.append(f"send {number}")
            return launch(number, communicator)

        def noting_finish(number: int, gathering: Any) -> None:
            events.append(f"await {number}")
            finish(number, gathering)

        def noting_step(staged: Any, local: Any, stage: int) -> None:
            events.append(f"step {stage}")
            original(staged, local, stage)

        original = step_stages.StagedGroups.step
        buckets.launch, buckets.finish = noting_launch, noting_finish
        with mock.patch.object(step_stages.StagedGroups, "step", noting_step):
            optimizer.step()
    return events


def test_a_stage_is_sent_before_the_next_is_stepped(run: Run) -> None:
    for events in run(2, _events):
        steps = [event for event in events if event.startswith("step")]
        sends = [event for event in events if event.startswith("send")]
        assert len(steps) == len(sends) > 1
        assert events[: 2 * len(steps)] == [
            event for pair in zip(steps, sends, strict=True) for event in pair
        ]
        assert all(event.startswith("await") for event in events[2 * len(steps) :])


def _fails() -> tuple[str, list[torch.Tensor]]:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(400, 400, bias=False) for _ in range(4)))
    before = [p.detach().clone() for p in layers.parameters()]
    with small_stages():
        optimizer = ZeroRedundancyOptimizer(
            layers.parameters(),
            torch.optim.AdamW,
            shard_gradients=True,
            overlap_with_backward=True,
            lr=1,
        )
        layers(torch.ones(2, 400)).sum().backward()
        last = optimizer._sharded.buckets.stages(trainable=True)[-1][0]
        slot = optimizer._sharded.buckets.buckets[last].layout.slots[0]
        broken = list(layers.parameters())[slot.parameter]
        if broken.grad is not None and type(broken.grad) is torch.Tensor:
            broken.grad = broken.grad.to_sparse()
        with pytest.raises(RuntimeError, match="sparse") as caught:
            optimizer.step()
    after = [p.detach().clone() for p in layers.parameters()]
    assert torch.equal(before[slot.parameter], after[slot.parameter])
    assert any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
    return type(caught.value).__name__, after


def test_a_failure_reaches_every_rank_and_replicas_stay_equal(run: Run) -> None:
    (name, first), *others = run(2, _fails)
    for other_name, after in others:
        assert {name, other_name} == {"RuntimeError", "PeerError"}
        assert all(map(torch.equal, first, after))


def _observed() -> int:
    with small_stages():
        model = Branches()
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(),
            torch.optim.AdamW,
            shard_gradients=True,
            overlap_with_backward=True,
        )
        calls: list[Any] = []
        if dist.get_rank() == 0:  # stages are the same on both ranks all the same
            optimizer.optim.register_step_post_hook(lambda *_: calls.append(1))
        for _ in range(2):
            model(torch.ones(3, 400), seldom=True).backward()
            optimizer.step()
            optimizer.zero_grad()
        for parameter in model.parameters():
            gathered = [torch.empty_like(parameter) for _ in range(2)]
            dist.all_gather(gathered, parameter.detach())
            assert torch.equal(*gathered)
        return len(calls)


def test_hooks_of_the_local_optimizer_see_one_step(run: Run) -> None:
    assert run(2, _observed) == [2, 0]


def test_owners_take_turns() -> None:
    assert take_turns([]) == []
    assert take_turns([(4, 0), (4, 0), (0, 2), (0, 2), (0, 4)]) == [0, 2, 3, 1, 4]
    assert take_turns([(1, 1), (1, 1)]) == [0, 1]
    assert sorted(take_turns([(0, 0), (3, 0), (0, 3)])) == [0, 1, 2]
