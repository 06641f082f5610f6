"""Bytes, collectives and memory of an average, counted."""

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tensorplay.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from tensorplay.distributed.optim import PostLocalSGDOptimizer
from tensorplay.distributed.optim._core import host_average
from tensorplay.distributed.optim._core.collectives import connect
from tensorplay.distributed.optim._core.host_memory import HostMemory
from tensorplay.distributed.optim._core.host_peers import VARIABLE
from tensorplay.distributed.optim._core.works import Works
from tensorplay.distributed.optim.local_sgd import averaging_plan
from tests.launch import run_ranks
from tests.reference.traffic import counting
from tests.reference.training import set_gradients
from tests.zero.test_memory import live_bytes

BUCKET = 40_000


def _parameters() -> list[nn.Parameter]:
    averaging_plan.BUCKET_BYTES = BUCKET  # this process ends with the test
    averaging_plan.IN_PLACE_FROM_BYTES = 2 * BUCKET
    torch.manual_seed(dist.get_rank())
    large = [nn.Parameter(torch.randn(50_000)) for _ in range(3)]
    return [*large, *(nn.Parameter(torch.randn(37)) for _ in range(500))]


def _shared() -> int:
    """The most that a rank's messages occupy at a time while it averages."""
    parameters = _parameters()
    averager = PeriodicModelAverager(2)
    messages = connect(None, "Test")._on_host
    assert messages is not None
    memory, most = messages._memory, 0
    write = HostMemory.write

    def measured(self: HostMemory, *arguments: Any) -> Any:
        nonlocal most
        written = write(self, *arguments)
        most = max(most, sum(block.end - block.offset for block in memory._in_use))
        return written

    with (
        mock.patch.object(HostMemory, "write", measured),
        mock.patch.object(host_average, "PIECE_BYTES", BUCKET // 4),
    ):
        averager.average_parameters(parameters)
    memory._drop_read()
    return most


def test_messages_occupy_no_more_than_a_bucket() -> None:
    for most in run_ranks(2, _shared):
        assert 0 < most <= BUCKET


def _traffic(in_memory: bool) -> dict[str, int]:
    os.environ[VARIABLE] = str(int(in_memory))  # this process ends with the test
    parameters = _parameters()
    local = torch.optim.SGD(parameters, lr=0.1)
    optimizer = PostLocalSGDOptimizer(local, PeriodicModelAverager(4))
    counted = []
    for step in range(9):  # in the first, ranks of a host meet
        set_gradients(parameters, step)
        with counting() as (calls, nbytes):
            optimizer.step()
        counted.append((dict(calls), dict(nbytes)))
    useful = sum(p.nbytes for p in parameters)
    for calls, nbytes in (counted[4], counted[8]):
        parcels = -(-500 // (BUCKET // averaging_plan.NUM_SLOTS // (37 * 4)))
        if in_memory:  # half of each parcel to its owner, and its average back
            messages = 2 * (3 + parcels)
            assert calls == {"all_reduce": 1, "isend": messages, "irecv": messages}
            assert nbytes == {"all_reduce": 6 * 8, "isend": useful, "irecv": useful}
        else:
            assert calls == {"all_reduce": 3 + parcels + 1}
            assert nbytes["all_reduce"] == useful + 6 * 8  # and six integers
    assert counted[1:4] == [({}, {})] * 3
    return counted[4][1]


@pytest.mark.parametrize("in_memory", [True, False])
def test_each_byte_is_reduced_once_and_nothing_between_averages(in_memory: bool) -> None:
    assert len(run_ranks(2, _traffic, in_memory)) == 2


def _memory(in_memory: bool) -> tuple[int, int]:
    """Bytes that are alive beside the parameters during an average, and after it."""
    os.environ[VARIABLE] = str(int(in_memory))
    parameters = _parameters()
    averager = PeriodicModelAverager(2)
    connect(None, "Test")  # the memory that ranks of a host share is there in any case
    before, most = live_bytes(), 0
    wait = Works.wait

    def measured(self: Works) -> None:
        nonlocal most
        most = max(most, live_bytes())
        wait(self)

    with mock.patch.object(Works, "wait", measured):
        averager.average_parameters(parameters)
    return most - before, live_bytes() - before


@pytest.mark.parametrize("in_memory", [True, False])
def test_one_bucket_is_alive_beside_the_parameters(in_memory: bool) -> None:
    # What another rank has sent stays in the memory of that one.
    for during, after in run_ranks(2, _memory, in_memory):
        assert BUCKET // 2 <= during <= BUCKET + 1000
        assert after <= BUCKET + 1000


def test_it_is_half_of_what_ddps_are() -> None:
    assert averaging_plan.BUCKET_BYTES <= 25 * 1024 * 1024 // 2
