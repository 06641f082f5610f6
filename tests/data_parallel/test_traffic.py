"""Collectives and bytes of a step, and that every parameter is reduced once."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.data_parallel.twins import Twins
from tests.reference.data_parallel import make_parameters, squares
from tests.reference.traffic import counting

Run = Callable[..., list[Any]]


def make_mixed() -> nn.ParameterList:
    return make_parameters(*[(1100, 1000)] * 3, *[(100, 3), (7,), (71,)] * 20)


def _step(options: dict[str, Any], how: str) -> tuple[Counter[str], Counter[str]]:
    twins = Twins(make_mixed, **options)
    for step in range(2):
        twins.ours.zero_grad()
        with counting() as (calls, nbytes):
            squares(step)(twins.model, twins.rank)
            if how == "clips between":
                twins.ours.synchronize()
                nn.utils.clip_grad_norm_(twins.model.parameters(), 1.0)
                with twins.ours.skip_synchronize():
                    twins.ours.step()
            else:
                twins.ours.step()
    return calls, nbytes


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    ("options", "share"),
    [({}, 1.02), ({"compression": "bf16"}, 0.52), ({"compression": "fp16"}, 0.52)],
)
@pytest.mark.parametrize("how", ["clips in the step", "clips between"])
def test_a_step_sends_each_gradient_once_as_ddp_does(
    run: Run, world_size: int, options: dict[str, Any], share: float, how: str
) -> None:
    if how == "clips in the step":
        options = {**options, "clip_grad_norm": 1.0}
    results = run(world_size, _step, options, how)
    model = sum(parameter.nbytes for parameter in make_mixed().parameters())
    sent = sum(nbytes["isend"] for _, nbytes in results)
    by_ddp = 2 * (world_size - 1) * model
    assert sent <= share * by_ddp
    assert sent >= 0.48 * by_ddp
    for calls, nbytes in results:
        # Three large parameters and one bucket of small ones.
        assert calls["isend"] == calls["irecv"] == 2 * 4 * (world_size - 1)
        assert calls["all_reduce"] <= 3  # two agreements, and the norm or a third
        assert nbytes["all_reduce"] <= 3 * 64
        assert not set(calls) - {"all_reduce", "isend", "irecv"}


def _accumulated() -> list[dict[str, int]]:
    twins = Twins(make_mixed, backward_passes_per_step=3)
    counts = []
    for number in range(3):
        with counting() as (calls, _):
            squares(number)(twins.model, twins.rank)
        counts.append(dict(calls))
    with counting() as (calls, _):
        twins.ours.step()
    counts.append(dict(calls))
    return counts


def test_a_window_of_passes_costs_one_reduction(run: Run) -> None:
    for first, second, third, step in run(2, _accumulated):
        assert first == second == {}
        assert third["isend"] == 2 * 4
        assert step == {"all_reduce": 1}


def _memory() -> int:
    """Bytes of the buffers that hold averages, beyond one for each gradient."""
    twins = Twins(make_mixed)
    squares(0)(twins.model, twins.rank)
    storages = {
        parameter.grad.untyped_storage().data_ptr(): parameter.grad.untyped_storage().nbytes()
        for parameter in twins.model.parameters()
    }
    return sum(storages.values()) - sum(p.nbytes for p in twins.model.parameters())


def test_averages_lie_where_gradients_would(run: Run) -> None:
    assert all(extra <= 60 * 16 for extra in run(2, _memory))


def _flat_numels() -> list[int]:
    twins = Twins(make_mixed)
    return [layout.cuts[1] - layout.cuts[0] for layout in twins.ours._plan.layouts]


def test_every_rank_averages_an_even_share(run: Run) -> None:
    shares = run(2, _flat_numels)
    assert shares[0] == shares[1]
    sizes = [p.numel() for p in make_mixed().parameters()]
    assert abs(sum(shares[0]) - sum(sizes) / 2) <= 4 * len(sizes)
    assert torch.tensor(shares[0]).gt(0).all()
