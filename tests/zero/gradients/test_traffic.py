"""Collectives and bytes of a training step with sharded gradients: those of plain DDP."""

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from torch import nn

from tensorplay.distributed.optim.zero import sharding_plan
from tests.reference.data_parallel import Twins, make_parameters, squares
from tests.reference.traffic import SCALAR_BYTES, counting

Run = Callable[..., list[Any]]


def make_mixed() -> nn.ParameterList:
    return make_parameters(*[(400, 400)] * 6, *[(100, 3), (7,), (71,)] * 20)


def one_step(twins: Twins, step: int) -> None:
    twins.sharded.zero_grad()
    squares(step)(twins.model, twins.rank)
    twins.sharded.step()


def _step() -> tuple[Counter[str], Counter[str]]:
    twins = Twins(make_mixed)
    one_step(twins, 0)
    with counting() as (calls, nbytes):
        one_step(twins, 1)
    return calls, nbytes


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_step_sends_the_bytes_of_plain_ddp(run: Run, world_size: int) -> None:
    results = run(world_size, _step)
    parameters = list(make_mixed().parameters())
    model = sum(parameter.nbytes for parameter in parameters)
    sent = sum(nbytes["isend"] for _, nbytes in results)
    plain_ddp = 2 * (world_size - 1) * model
    assert plain_ddp <= sent <= 1.02 * plain_ddp
    for calls, nbytes in results:
        assert calls["all_reduce"] <= 4
        assert nbytes["all_reduce"] <= 4 * SCALAR_BYTES
        # Six large parameters, and one bucket of small ones with an owner each.
        assert calls["isend"] <= (6 + 1) * 2 * (world_size - 1)
        assert calls["irecv"] <= (6 + 1) * 2 * (world_size - 1)
        assert not set(calls) - {"all_reduce", "isend", "irecv"}


def _accumulation() -> list[dict[str, int]]:
    twins = Twins(make_mixed)
    one_step(twins, 0)
    results = []
    with counting() as (calls, _), twins.sharded.no_sync():
        for step in range(3):
            squares(step)(twins.model, twins.rank)
    results.append(dict(calls))
    with counting() as (calls, _):
        squares(3)(twins.model, twins.rank)
    results.append(dict(calls))
    with counting() as (calls, _):
        twins.sharded.step()
    results.append(dict(calls))
    one_step(twins, 0)
    twins.sharded.zero_grad()
    with twins.sharded.no_sync():
        squares(3)(twins.model, twins.rank)
    with counting() as (calls, _):
        twins.sharded.step()
    results.append(dict(calls))
    return results


def test_accumulation_costs_one_reduction_per_step(run: Run) -> None:
    for passes, last, step, late in run(2, _accumulation):
        assert passes == {}
        assert last["isend"] <= 7
        assert step["isend"] <= 7  # parameters only
        assert late["isend"] == last["isend"] + step["isend"]


def _unused_everywhere() -> tuple[int, int]:
    twins = Twins(make_mixed)
    twins.sharded.zero_grad()
    squares(0, without=lambda _: range(3))(twins.model, twins.rank)
    sent = []
    for numbers in ((), range(3)):
        twins.sharded.zero_grad()
        with counting() as (_, nbytes):
            squares(0, without=lambda _, n=numbers: n)(twins.model, twins.rank)
        sent.append(nbytes["isend"] + nbytes["irecv"])
    return sent[0], sent[1]


def test_a_large_parameter_that_nobody_uses_is_not_sent(run: Run) -> None:
    for all_used, some_unused in run(2, _unused_everywhere):
        assert some_unused == all_used - 3 * 400 * 400 * 4


def _look() -> list[dict[str, int]]:
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


def test_clipping_costs_one_scalar_and_a_gradient_one_message(run: Run) -> None:
    messages = []
    for clip, full, zero in run(2, _look):
        assert clip == {"all_reduce": 2}  # the agreement, and the norm
        assert full.pop("all_reduce") == 2
        messages.append(full)
        assert zero == {}
    assert sorted(messages, key=str) == [{"irecv": 1}, {"isend": 1}]


def _rounds() -> tuple[int, int]:
    """A parameter larger than what may be received at a time travels in rounds."""
    with (
        mock.patch.object(sharding_plan, "CAPACITY_BYTES", 64 * 1024),
        mock.patch("tensorplay.distributed.optim.zero.gradients.CAPACITY_BYTES", 64 * 1024),
    ):
        twins = Twins(lambda: make_parameters((400, 400), (300, 300)))
        with counting() as (calls, nbytes):
            squares(0)(twins.model, twins.rank)
    return calls["irecv"], nbytes["irecv"]


def test_large_gradients_travel_in_rounds(run: Run) -> None:
    (first_calls, first_bytes), (second_calls, second_bytes) = run(2, _rounds)
    assert (first_bytes, second_bytes) == (400 * 400 * 4, 300 * 300 * 4)
    assert first_calls == -(-first_bytes // (64 * 1024))
    assert second_calls == -(-second_bytes // (64 * 1024))
