"""Gradients sent while backward goes on: the same results, and the order in which things happen."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tensorplay.distributed.optim._core.bucket_layout import BucketLayout
from tests.zero import test_join
from tests.zero.gradients import test_aborted, test_passes

Run = Callable[..., list[Any]]


@contextmanager
def overlapping() -> Iterator[None]:
    """Inside, optimizers that reduce gradients do so during backward."""
    defaults = ZeroRedundancyOptimizer.__init__.__kwdefaults__
    defaults["overlap_with_backward"] = True
    try:
        yield
    finally:
        defaults["overlap_with_backward"] = None


def _overlapping(function: Callable[..., Any], *args: Any) -> Any:
    with overlapping():
        return function(*args)


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (test_passes._unused, (False,)),
        (test_passes._never_used, ()),
        (test_passes._none_from_a_function, (True,)),
        (test_passes._used_twice, ("reentrant", False)),
        (test_passes._used_twice, ("not reentrant", True)),
        (test_passes._two_backwards, (True,)),
        (test_passes._two_losses, (False,)),
        (test_passes._accumulated, (True, True)),
        (test_passes._accumulated, (False, False)),
        (test_passes._no_sync_after_a_reduction, (True,)),
        (test_passes._discarded, ("model",)),
        (test_passes._other_order, ()),
        (test_passes._create_graph, (False,)),
        (test_passes._autograd_grad, (True,)),
        (test_passes._inputs_given, (False,)),
        (test_passes._frozen_and_thawed, (True,)),
        (test_passes._integers, ()),
        (test_passes._added_group, (False,)),
        (test_passes._kept_gradients, ()),
        (test_passes._closures, (True,)),
        (test_passes._two_optimizers, ()),
        (test_passes._one_loss_of_two_optimizers, ()),
        (test_aborted._all_alike, ("optimizer", True)),
        (test_aborted._swallowed, ("backward",)),
        (test_aborted._swallowed, ("step",)),
        (test_aborted._no_parameter_used, ()),
        (test_aborted._inside_reentrant, ()),
        (test_aborted._in_the_closure, ()),
        (test_aborted._dropped, ()),
        (test_join._train_joined_with_sharded_gradients, (True, False)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_passes_end_with_the_same_gradients(
    run: Run, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    run(3, _overlapping, function, *args)


def _order_of_events(num_under_way: int) -> list[str]:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(400, 400, bias=False) for _ in range(4)))
    events: list[str] = []
    for number, layer in enumerate(layers):

        def note(_: torch.Tensor, number: int = number) -> None:
            events.append(f"gradient {number}")

        layer.weight.register_hook(note)
    optimizer = ZeroRedundancyOptimizer(
        layers.parameters(), torch.optim.SGD, shard_gradients=True, overlap_with_backward=True, lr=1
    )
    reducer: Any = optimizer._gradients
    reducer._schedule._capacity_bytes = num_under_way * layers[0].weight.nbytes // 2
    launch, finish = reducer.launch, reducer.finish

    def noting_launch(bucket: Any) -> Any:
        events.append(f"send {_number_in(bucket.layout)}")
        return launch(bucket)

    def noting_finish(transfer: Any) -> Any:
        events.append(f"average {_number_in(transfer.bucket.layout)}")
        return finish(transfer)

    reducer.launch, reducer.finish = noting_launch, noting_finish
    layers(torch.ones(2, 400)).sum().backward()
    return events


def _number_in(layout: BucketLayout) -> int:
    return layout.slots[0].parameter


def test_a_bucket_is_sent_before_the_next_gradient_is_computed(run: Run) -> None:
    for events in run(2, _order_of_events, 1):
        assert events == [
            *("gradient 3", "send 3", "gradient 2", "send 2", "average 3"),
            *("gradient 1", "send 1", "average 2", "gradient 0", "send 0", "average 1"),
            "average 0",
        ]


def test_small_buckets_are_not_awaited_before_backward_ends(run: Run) -> None:
    sent = [f"{what} {number}" for number in (3, 2, 1, 0) for what in ("gradient", "send")]
    for events in run(2, _order_of_events, 4):
        assert events == [*sent, *(f"average {number}" for number in (3, 2, 1, 0))]


def _order_of_buckets() -> tuple[list[int], list[tuple[int, ...]]]:
    """The first parameter of each bucket as it is sent, and how much of it each rank owns."""
    layers = nn.Sequential(*(nn.Linear(800, 800) for _ in range(4)))
    optimizer = ZeroRedundancyOptimizer(
        layers.parameters(),
        torch.optim.SGD,
        shard_gradients=True,
        overlap_with_backward=True,
        partition="elements",
        lr=1,
    )
    reducer: Any = optimizer._gradients
    launch, sent = reducer.launch, []

    def noting_launch(bucket: Any) -> Any:
        sent.append(bucket.layout)
        return launch(bucket)

    reducer.launch = noting_launch
    layers(torch.ones(2, 800)).sum().backward()
    return [_number_in(layout) for layout in sent], [layout.loads for layout in sent]


def test_what_is_complete_last_is_sent_last_and_both_directions_of_a_link_are_used(
    run: Run,
) -> None:
    for numbers, loads in run(2, _order_of_buckets):
        assert numbers == [
            6,
            4,
            2,
            7,
            0,
        ]  # the biases are one bucket, which needs the first layer's
        for first, second in loads:
            assert 0.8 < first / second < 1.25


def _sparse(sizes: Sequence[int]) -> None:
    with overlapping():
        embedding = nn.Embedding(*sizes, sparse=True)
        optimizer = ZeroRedundancyOptimizer(
            embedding.parameters(), torch.optim.SGD, shard_gradients=True, lr=1
        )
        with pytest.raises(
            TypeError, match=r"parameter 0 has layout torch.sparse_coo.*sparse=False"
        ):
            embedding(torch.arange(2)).sum().backward()
        optimizer.zero_grad()


@pytest.mark.parametrize("sizes", [(4, 3), (400, 400)], ids=["small", "large"])
def test_a_sparse_gradient_is_refused(run: Run, sizes: tuple[int, int]) -> None:
    run(2, _sparse, sizes)
