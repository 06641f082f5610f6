"""``overlap_with_backward=True``: what other tests show, while buckets are under way in backward."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from tensorplay.distributed.optim import DistributedOptimizer
from tensorplay.distributed.optim._core import gradient_reducer
from tensorplay.distributed.optim._core.agreement import RankDisagreementError
from tensorplay.distributed.optim.data_parallel import reduction_plan
from tensorplay.distributed.optim.data_parallel.optimizer import DataParallelOptimizer
from tests.data_parallel import test_join, test_oracle, test_passes, test_two_optimizers
from tests.data_parallel.twins import make_small_and_large
from tests.reference.data_parallel import squares
from tests.reference.traffic import counting

Run = Callable[..., list[Any]]


def overlapping(function: Callable[..., Any], *args: Any) -> Any:
    """The same, where optimizers overlap unless they are told not to."""
    keywords = DataParallelOptimizer.__init__.__kwdefaults__
    with mock.patch.dict(keywords, {"overlap_with_backward": True}):
        return function(*args)


@pytest.mark.parametrize(
    ("world_size", "function", "args"),
    [
        (1, test_oracle._several_optimizers, ()),
        (2, test_oracle._several_optimizers, ()),
        (3, test_oracle._several_optimizers, ()),
        (2, test_oracle._matrix_wise, ()),
        (3, test_oracle._mixed_dtypes, ()),
        (2, test_oracle._groups, ()),
        (3, test_oracle._more_ranks_than_elements, ()),
        (2, test_oracle._unused_parameters, ()),
        (3, test_oracle._unused_parameters, ()),
        (2, test_oracle._frozen, ()),
        (2, test_oracle._tied, ()),
        (1, test_oracle._many_buckets, ()),
        (2, test_oracle._many_buckets, ()),
        (3, test_oracle._many_buckets, ()),
        (4, test_oracle._on_subgroup, ()),
        (2, test_oracle._sum, ()),
        (3, test_oracle._predivided, (3.0,)),
        (3, test_oracle._compressed, ("bf16",)),
        (3, test_oracle._low_precision_sum, (torch.float16,)),
        (2, test_passes._windows, ()),
        (3, test_passes._windows, ()),
        (2, test_passes._no_sync, ("backward",)),
        (2, test_passes._no_sync, ("synchronize",)),
        (2, test_passes._no_sync, ("step",)),
        (2, test_passes._clipped_between, ()),
        (3, test_passes._clipped_in_step, (0.5, True)),
        (2, test_passes._zeroed, ("to zero",)),
        (2, test_passes._zeroed, ("by the model",)),
        (2, test_passes._zeroed, ("never",)),
        (2, test_passes._discarded, ()),
        (2, test_passes._sparse, (True, None)),
        (2, test_passes._sparse, (True, 1)),
        (2, test_passes._closures, ()),
        (2, test_passes._failing_closure, ()),
        (2, test_passes._scaled, (None,)),
        (2, test_passes._scaled, (1,)),
        (2, test_join._joined, ("ours", True, 1)),
        (2, test_join._joined, ("ours", False, 2)),
        (3, test_join._joined, ("torch's", True, 2)),
        (3, test_join._joined, ("torch's", False, 1)),
        (1, test_two_optimizers._adversaries, ()),
        (2, test_two_optimizers._adversaries, ()),
        (2, test_two_optimizers._wrapped_again, ()),
        (2, test_two_optimizers._removed, ()),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_results_are_those_without(
    run: Run, world_size: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    run(world_size, overlapping, function, *args)


def _events(early: bool) -> list[str]:
    with mock.patch.object(reduction_plan, "ALONE_BYTES", 400 * 400 * 4):
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(400, 400, bias=False) for _ in range(6)))
        optimizer = DistributedOptimizer(
            optim=SGD,
            params=layers.parameters(),
            lr=0.1,
            overlap_with_backward=early,
        )
    reducer: Any = optimizer._gradients
    reducer._schedule._capacity_bytes = 1  # two are under way at a time
    events: list[str] = []

    def noting(name: str, what: str) -> None:
        original = getattr(reducer, name)

        def call(thing: Any, *args: Any) -> Any:
            bucket = getattr(thing, "bucket", thing)
            events.append(f"{what} {5 - bucket.layout.slots[0].parameter}")
            return original(thing, *args)

        setattr(reducer, name, call)

    noting("launch", "send")
    noting("finish", "average")
    noting("_launch_gather", "gather")
    for number, layer in enumerate(layers):
        layer.weight.register_hook(lambda _, number=number: events.append(f"gradient {5 - number}"))
    layers(torch.ones(2, 400)).sum().backward()
    return events


@pytest.mark.parametrize("early", [True, False])
def test_buckets_are_averaged_and_gathered_while_backward_goes_on(run: Run, early: bool) -> None:
    for events in run(2, _events, early):
        place = {event: position for position, event in enumerate(events)}
        assert len(place) == len(events) == 4 * 6
        for k in range(6):
            assert place[f"gradient {k}"] < place[f"send {k}"] < place[f"average {k}"]
            assert place[f"average {k}"] < place[f"gather {k}"]
            if k < 5:
                assert (place[f"send {k}"] < place[f"gradient {k + 1}"]) == early
                assert place[f"send {k + 1}"] < place[f"average {k}"]  # two are under way
            if k < 4 and early:  # the gather of one begins before the average of the one after next
                assert place[f"gather {k}"] < place[f"average {k + 2}"]
        assert (place["gather 1"] < place["gradient 5"]) == early


def _sent(early: bool) -> list[int]:
    model = make_small_and_large()
    optimizer = DistributedOptimizer(
        optim=SGD, params=model.parameters(), lr=0.1, overlap_with_backward=early
    )
    sent = []
    for step in range(3):
        with counting() as (_, nbytes):
            squares(step)(model, dist.get_rank())
            optimizer.step()
            optimizer.zero_grad()
        sent.append(nbytes["isend"])
    return sent


@pytest.mark.parametrize("world_size", [2, 3])
def test_as_many_bytes_travel(run: Run, world_size: int) -> None:
    assert run(world_size, _sent, True) == run(world_size, _sent, False)


def _aborted(failing: tuple[int, ...]) -> list[float]:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    with mock.patch.object(reduction_plan, "CAPACITY_BYTES", 8 * 8 * 4):  # so that some are sent
        optimizer = DistributedOptimizer(
            optim=SGD, params=layers.parameters(), lr=0.1, overlap_with_backward=True
        )
    fails = dist.get_rank() in failing

    def fail(_: torch.Tensor) -> None:
        if fails:
            raise ValueError("in backward")

    layers[1].weight.register_hook(fail)
    message = "in backward" if fails else "ended by an exception"
    for _ in range(3):
        with pytest.raises((ValueError, RankDisagreementError), match=message):
            layers(torch.ones(2, 8)).sum().backward()
        if fails and len(failing) == 1:  # it hears that others have been waiting
            with pytest.raises(RankDisagreementError, match="ended by an exception"):
                optimizer.zero_grad()
        optimizer.zero_grad()
    fails = False
    layers(torch.full((2, 8), 1.0 + dist.get_rank())).sum().backward()
    optimizer.step()
    assert optimizer.check_replicas() is None
    return [float(p.detach().sum()) for p in layers.parameters()]


@pytest.mark.parametrize("failing", [(0, 1), (1,)])
def test_aborted_passes_and_a_good_one(run: Run, failing: tuple[int, ...]) -> None:
    first, second = run(2, _aborted, failing)
    assert first == second
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    for rank in range(2):
        (layers(torch.full((2, 8), 1.0 + rank)).sum() / 2).backward()
    torch.optim.SGD(layers.parameters(), lr=0.1).step()
    expected = [float(p.detach().sum()) for p in layers.parameters()]
    assert first == pytest.approx(expected, rel=1e-5)


def _sparse(sizes: tuple[int, ...], on_rank: int | None) -> str:
    torch.manual_seed(0)
    embeddings = nn.ModuleList(nn.Embedding(size, 4, sparse=True) for size in sizes)
    dense = nn.Linear(4, 1)
    optimizer = DistributedOptimizer(
        optim=SGD,
        params=[*embeddings.parameters(), *dense.parameters()],
        lr=0.1,
        overlap_with_backward=True,
    )
    for embedding in embeddings:
        if on_rank in (None, dist.get_rank()):
            hidden = embedding(torch.tensor([0, 1]))
        else:
            hidden = embedding.weight[:2]
    with pytest.raises((TypeError, RuntimeError)) as caught:
        dense(hidden).sum().backward()
    optimizer.zero_grad()
    dense(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert optimizer.check_replicas() is None
    return str(caught.value)


@pytest.mark.parametrize("on_rank", [None, 1])
@pytest.mark.parametrize("size", [5, 400_000])
def test_sparse_gradients_are_refused_with_the_cure(
    run: Run, size: int, on_rank: int | None
) -> None:
    for message in run(2, _sparse, (size,), on_rank):
        assert "sparse_as_dense=True" in message


def _different() -> str:
    with pytest.raises(RankDisagreementError) as caught:
        DistributedOptimizer(
            optim=SGD,
            params=nn.Linear(2, 2).parameters(),
            lr=0.1,
            overlap_with_backward=dist.get_rank() == 0,
        )
    return str(caught.value)


def test_ranks_that_choose_differently_are_told(run: Run) -> None:
    for message in run(2, _different):
        assert "overlap_with_backward" in message


def _by_default(sparse_rank: int | None) -> list[bool]:
    torch.manual_seed(0)
    plain, ours = (nn.ModuleList([nn.Embedding(5, 4), nn.Linear(4, 1)]) for _ in range(2))
    plain.load_state_dict(ours.state_dict())
    ours[0].sparse = dist.get_rank() == sparse_rank
    with mock.patch.object(gradient_reducer, "overlaps_by_default", return_value=True):
        optimizer = DistributedOptimizer(SGD, ours[0].parameters(), lr=0.1)
        optimizer.add_param_group({"params": list(ours[1].parameters())})
    reference = SGD(plain.parameters(), lr=0.1)
    overlaps = []
    for step in range(3):
        overlaps.append(optimizer._gradients._schedule.hears_ready)  # type: ignore[attr-defined] # ours
        reference.zero_grad()
        optimizer.zero_grad()
        for rank in range(2):
            indices = torch.tensor([step, rank])
            (plain[1](plain[0](indices)).sum() / 2).backward()
        ours[1](ours[0](torch.tensor([step, dist.get_rank()]))).sum().backward()
        reference.step()
        optimizer.step()
        for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(one, other)
    return overlaps


@pytest.mark.parametrize("sparse_rank", [None, 0, 1])
def test_by_default_the_first_reduction_shows_whether_there_are_sparse_gradients(
    run: Run, sparse_rank: int | None
) -> None:
    overlaps = sparse_rank is None
    assert run(2, _by_default, sparse_rank) == [[False, overlaps, overlaps]] * 2
