"""Bytes, collectives and memory of an average, counted."""

import torch
import torch.distributed as dist
from torch import nn

from tensorplay.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from tensorplay.distributed.optim import PostLocalSGDOptimizer
from tensorplay.distributed.optim.local_sgd import averaging_plan
from tests.launch import run_ranks
from tests.reference.training import set_gradients
from tests.zero.test_memory import live_bytes
from tests.zero.test_traffic import counting

BUCKET = 40_000


def _parameters() -> list[nn.Parameter]:
    averaging_plan.BUCKET_BYTES = BUCKET  # this process ends with the test
    averaging_plan.IN_PLACE_FROM_BYTES = 2 * BUCKET
    torch.manual_seed(dist.get_rank())
    large = [nn.Parameter(torch.randn(50_000)) for _ in range(3)]
    return [*large, *(nn.Parameter(torch.randn(37)) for _ in range(500))]


def _traffic() -> dict[str, int]:
    parameters = _parameters()
    local = torch.optim.SGD(parameters, lr=0.1)
    optimizer = PostLocalSGDOptimizer(local, PeriodicModelAverager(4))
    counted = []
    for step in range(5):
        set_gradients(parameters, step)
        with counting() as (calls, nbytes):
            optimizer.step()
        counted.append((dict(calls), dict(nbytes)))
    useful = sum(p.nbytes for p in parameters)
    for calls, nbytes in (counted[0], counted[4]):
        parcels = -(-500 // (BUCKET // averaging_plan.NUM_SLOTS // (37 * 4)))
        assert calls == {"all_reduce": 3 + parcels + 1}
        assert nbytes["all_reduce"] == useful + 6 * 8  # and six integers
    assert counted[1:4] == [({}, {})] * 3
    return counted[0][1]


def test_each_byte_is_reduced_once_and_nothing_between_averages() -> None:
    assert len(run_ranks(2, _traffic)) == 2


def _memory() -> tuple[int, int]:
    """Bytes that are alive beside the parameters during an average, and after it."""
    parameters = _parameters()
    averager = PeriodicModelAverager(2)
    before, most = live_bytes(), 0
    original = dist.all_reduce

    def measured(*args: object, **kwargs: object) -> object:
        nonlocal most
        most = max(most, live_bytes())
        return original(*args, **kwargs)  # type: ignore[arg-type] # the test passes what the types don't allow, or a wrapper

    dist.all_reduce = measured  # type: ignore[assignment] # replaced for the measurement
    averager.average_parameters(parameters)
    dist.all_reduce = original
    return most - before, live_bytes() - before


def test_one_bucket_is_alive_beside_the_parameters() -> None:
    for during, after in run_ranks(2, _memory):
        assert BUCKET // 2 <= during <= BUCKET + 1000
        assert after <= BUCKET + 1000


def test_it_is_half_of_what_ddps_are() -> None:
    assert averaging_plan.BUCKET_BYTES <= 25 * 1024 * 1024 // 2
