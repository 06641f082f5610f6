"""When reductions, steps and gathers of DDP's buckets are issued, and what backward may still read."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from tensorplay.distributed.optim._core.bucket_step import BucketStepper
from tensorplay.distributed.optim._core.collectives import GroupCommunicator
from tensorplay.distributed.optim.zero import ddp_hooks
from tests.launch import run_ranks
from tests.reference.training import require_equal, values_of
from tests.zero.overlap.twins import Twins, backward
from tests.zero.test_compile_and_checkpointing import Branching

Run = Callable[..., list[Any]]


class Event(NamedTuple):
    """What happened, to which bucket."""

    what: str
    bucket: int


def _trace(interleaved: bool) -> list[Event]:
    """Events of the third iteration, when DDP has formed its buckets for good."""
    events: list[Event] = []
    bucket_of: dict[int, int] = {}
    traced = [False]

    def traced_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        for parameter in bucket.parameters():
            bucket_of[id(parameter)] = bucket.index()
        if traced[0]:
            events.append(Event("reduce", bucket.index()))
        return allreduce_hook(state, bucket)

    def traced_wait(bucket: Any) -> Any:
        gradients = wait(bucket)
        events.append(Event("reduced", bucket_of[id(bucket.parameters[0])]))
        return gradients

    wait = ddp_hooks._DDPBucket.wait
    step, gather = BucketStepper.step, GroupCommunicator.gather_from_owners

    def traced_step(stepper: BucketStepper, parameters: Sequence[torch.Tensor]) -> None:
        step(stepper, parameters)
        events.extend(
            Event("stepped", bucket)
            for bucket in sorted({bucket_of[id(parameter)] for parameter in parameters})
        )

    num_gathers = [0]

    def traced_gather(communicator: GroupCommunicator, *args: Any) -> Any:
        events.append(Event("gather", num_gathers[0]))
        num_gathers[0] += 1
        return gather(communicator, *args)

    twins = Twins(lambda: Layers(6, 30, 30, 30, 30, 3), hook=traced_hook, interleaved=interleaved)
    twins.train(2)
    twins.zero.zero_grad()
    traced[0] = True
    with (
        mock.patch.object(ddp_hooks._DDPBucket, "wait", traced_wait),
        mock.patch.object(BucketStepper, "step", traced_step),
        mock.patch.object(GroupCommunicator, "gather_from_owners", traced_gather),
    ):
        backward(twins.model, 2)
    return events


def test_interleaved_with_the_reductions_of_the_next_buckets(run: Run) -> None:
    for events in run(2, _trace, True):
        at = {event: place for place, event in enumerate(events)}
        buckets = range(sum(event.what == "reduce" for event in events))
        assert len(buckets) == 9
        stepped = [bucket for bucket in buckets if Event("stepped", bucket) in at]
        assert 0 < len(stepped) < len(buckets)  # the other rank has stepped the others
        for bucket in buckets[:-1]:
            if bucket in stepped:
                assert at[Event("reduce", bucket + 1)] < at[Event("stepped", bucket)]
                assert at[Event("stepped", bucket)] < at[Event("gather", bucket)]
        for bucket in buckets[:-2]:
            assert at[Event("gather", bucket)] < at[Event("reduce", bucket + 2)]
            assert at[Event("gather", bucket)] < at[Event("reduced", bucket + 2)]


def test_after_all_reductions_are_under_way(run: Run) -> None:
    for events in run(2, _trace, False):
        at = {event: place for place, event in enumerate(events)}
        buckets = range(sum(event.what == "reduce" for event in events))
        assert [event.what for event in events[: len(buckets)]] == ["reduce"] * len(buckets)
        for bucket in buckets[:-1]:
            assert at[Event("gather", bucket)] < at[Event("reduced", bucket + 1)]


def _traffic(find_unused: bool) -> dict[str, int]:
    calls: dict[str, int] = {}

    def counted(name: str) -> Any:
        original = getattr(GroupCommunicator, name)

        def call(communicator: GroupCommunicator, *args: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            if name == "gather_from_owners":
                calls["gathered"] = calls.get("gathered", 0) + args[0].nbytes
            return original(communicator, *args)

        return call

    options = {"find_unused_parameters": True} if find_unused else {}
    twins = Twins(Branching if find_unused else make_uneven, bucket_cap_mb=25, **options)
    twins.train(2)
    names = ("gather_from_owners", "max_", "all_gather_bytes", "exchange", "all_reduce_")
    with mock.patch.multiple(GroupCommunicator, **{name: counted(name) for name in names}):
        twins.zero.zero_grad()
        backward(twins.model, 2)
        during = dict(calls)
        twins.zero.step()
    assert calls == during  # step() sends nothing
    return calls


class Layers(nn.Sequential):
    """Dense layers of these widths."""

    def __init__(self, *widths: int) -> None:
        torch.manual_seed(0)
        super().__init__(*(nn.Linear(*pair) for pair in pairwise(widths)))


def make_uneven() -> nn.Module:
    """A bucket of small parameters, and a large one that is gathered in place."""
    return Layers(6, 600, 400, 3)


def test_a_bucket_costs_one_gather_and_an_iteration_two_scalars(run: Run) -> None:
    nbytes = sum(parameter.nbytes for parameter in make_uneven().parameters())
    for calls in run(2, _traffic, False):
        gathered = calls.pop("gathered")
        assert nbytes <= gathered <= 1.01 * nbytes
        assert calls == {"gather_from_owners": 2, "max_": 2}


def test_usage_bits_ride_beside_the_reductions(run: Run) -> None:
    for calls in run(2, _traffic, True):
        del calls["gathered"]
        assert calls == {"gather_from_owners": 1, "max_": 2}


class ReadsDetached(nn.Module):
    """A layer is read again, detached, by nodes that run after its gradients are complete."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(6, 40), nn.Linear(40, 40), nn.Linear(40, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs) * self.second.bias.detach() * self.second.weight[0].detach()
        return self.last(self.second(hidden))


def _read_after_the_update() -> None:
    twins = Twins(ReadsDetached, interleaved=False)
    twins.train(3)
    twins = Twins(ReadsDetached)
    twins.train(1)  # DDP forms its buckets in the second iteration
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        backward(twins.model, 1)
    with pytest.raises(RuntimeError, match="ended in an exception when a part"):
        twins.zero.step()


def test_backward_never_computes_with_a_weight_that_was_updated_meanwhile() -> None:
    run_ranks(2, _read_after_the_update)


def _second_backward() -> None:
    """Through a graph that was kept: its weights are no longer those of the forward."""
    twins = Twins()
    inputs = torch.ones(4, 6)
    loss = twins.model(inputs).square().mean()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        loss.backward()


def test_a_kept_graph_is_refused() -> None:
    run_ranks(2, _second_backward)


def _gradients_of_no_parameter() -> None:
    """``torch.autograd.grad`` accumulates nothing, so DDP and the update rest."""
    twins = Twins()
    twins.train(2)
    before = values_of(twins.model.parameters())
    inputs = torch.ones(4, 6, requires_grad=True)
    torch.autograd.grad(twins.model.module(inputs).sum(), inputs)
    require_equal(before, values_of(twins.model.parameters()))
    twins.train(2, first=2)
    assert dist.get_world_size() == 2


def test_torch_autograd_grad_updates_nothing(run: Run) -> None:
    run(2, _gradients_of_no_parameter)
