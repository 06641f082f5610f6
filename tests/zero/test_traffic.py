"""Collectives and bytes of each public call, counted where ``torch.distributed`` is called."""

import pytest
import torch
import torch.distributed as dist

from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tests.launch import run_ranks
from tests.reference.traffic import counting
from tests.reference.training import set_gradients


def _small_parameters(resident: bool, count: int) -> tuple[dict[str, int], dict[str, int], int]:
    parameters = [torch.nn.Parameter(torch.randn(10 + i % 7)) for i in range(count)]
    optimizer = ZeroRedundancyOptimizer(
        parameters, torch.optim.AdamW, lr=0.1, parameters_as_bucket_view=resident
    )
    set_gradients(parameters, 0)
    optimizer.step()
    with counting() as (calls, nbytes):
        optimizer.step()
    return dict(calls), dict(nbytes), optimizer.sharding_report().bytes_per_step


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_step_is_one_message_per_bucket_and_peer_and_two_scalars(
    world_size: int, resident: bool
) -> None:
    results = run_ranks(world_size, _small_parameters, resident, 300)
    peers = world_size - 1
    useful = sum(4 * (10 + i % 7) for i in range(300))
    for calls, nbytes, reported in results:
        messages = {"isend": peers, "irecv": peers} if peers else {}
        assert calls == {**messages, "all_reduce": 2}
        assert nbytes["all_reduce"] == 2 * 6 * 8
        assert sum(each.get("isend", 0) for _, each, _ in results) == reported
        # Slots are aligned to 16 bytes.
        assert useful * peers <= reported <= (useful + 300 * 12) * peers


def _large_parameters(resident: bool) -> int:
    parameters = [torch.nn.Parameter(torch.randn(71, 71)) for _ in range(20)]
    optimizer = ZeroRedundancyOptimizer(
        parameters, torch.optim.SGD, lr=0.1, parameters_as_bucket_view=resident
    )
    set_gradients(parameters, 0)
    with counting() as (_, nbytes):
        optimizer.step()
    return nbytes["isend"]


@pytest.mark.parametrize("resident", [False, True])
def test_padding_costs_less_than_two_percent(resident: bool) -> None:
    assert sum(run_ranks(2, _large_parameters, resident)) <= 1.02 * 20 * 71 * 71 * 4


def _frozen() -> tuple[int, int]:
    parameters = [torch.nn.Parameter(torch.randn(1000), requires_grad=i < 2) for i in range(6)]
    optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)
    set_gradients(parameters[:2], 0)
    with counting() as (_, frozen):
        optimizer.step()
    if (
        dist.get_rank() == 0 or optimizer.optim.param_groups[0]["params"]
    ):  # only its owner needs to have a gradient
        set_gradients(parameters, 0)
    with counting() as (_, thawed):
        optimizer.step()
    return frozen["isend"], thawed["isend"]


def test_frozen_parameters_are_not_sent_until_one_has_a_gradient() -> None:
    frozen, thawed = zip(*run_ranks(2, _frozen), strict=True)
    assert (sum(frozen), sum(thawed)) == (2 * 4000, 6 * 4000)


def _consolidation() -> dict[str, int]:
    parameters = [torch.nn.Parameter(torch.randn(100, 1 + i)) for i in range(40)]
    parameters.append(torch.nn.Parameter(torch.randn(300_000)))
    optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1, momentum=0.9)
    set_gradients(parameters, 0)
    optimizer.step()
    own = sum(s["momentum_buffer"].numel() * 4 for s in optimizer.state.values())
    with counting() as (calls, nbytes):
        optimizer.consolidate_state_dict(to=1)
    return {"own": own, **{f"{k}s": v for k, v in calls.items()}, **nbytes}


def test_consolidation_moves_each_byte_once_to_the_target() -> None:
    results = run_ranks(3, _consolidation)
    for rank in (0, 2):
        headers = 100 * 41  # about a hundred bytes describe a parameter's state
        assert results[rank]["isend"] == results[rank]["own"]
        assert results[rank]["isends"] <= 2
        assert results[rank]["sends"] == 2
        assert results[rank]["send"] <= headers
        assert not {"recv", "irecv"} & set(results[rank])
    assert not {"send", "isend"} & set(results[1])
    assert results[1]["irecv"] == results[0]["isend"] + results[2]["isend"]


def _no_communication() -> dict[str, int]:
    parameters = [torch.nn.Parameter(torch.randn(3))]
    optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1, momentum=0.9)
    with counting() as (calls, _):
        str(optimizer.sharding_report())
        repr(optimizer)
        optimizer.zero_grad()
        list(optimizer.state)
        optimizer.release_consolidated_state_dict()
    return dict(calls)


def test_looking_at_the_optimizer_costs_no_communication() -> None:
    assert run_ranks(2, _no_communication) == [{}, {}]
