"""What the optimizer keeps alive, by a ledger of live tensors: a share of the state, two buckets."""

import gc

import torch
import torch.distributed as dist

from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tensorplay.distributed.optim._core.collectives import connect
from tensorplay.distributed.optim._core.partial_gradient import PartialGradient
from tensorplay.distributed.optim.zero import sharding_plan
from tests.launch import run_ranks
from tests.reference.training import set_gradients

CAPACITY = 40_000
NUM_PARAMETERS, NUMEL = 100, 1000
MODEL = 4 * NUM_PARAMETERS * NUMEL


def live_bytes() -> int:
    """Bytes of all storages that tensors of this process keep alive."""
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        kind = type(each)
        if not issubclass(kind, torch.Tensor) or issubclass(kind, PartialGradient):
            continue  # a partial gradient has no memory but that of its parts
        if each.layout is torch.strided and not each.is_meta:
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _kept(resident: bool) -> tuple[int, int]:
    """Bytes kept after two steps beyond parameters and gradients: in all, and of them state."""
    sharding_plan.CAPACITY_BYTES = CAPACITY  # this process ends with the test
    parameters = [torch.nn.Parameter(torch.randn(NUMEL)) for _ in range(NUM_PARAMETERS)]
    set_gradients(parameters, 0)
    connect(None, "Test")  # the memory that ranks of a host share is there in any case
    before = live_bytes()
    optimizer = ZeroRedundancyOptimizer(
        parameters, torch.optim.Adam, lr=0.1, parameters_as_bucket_view=resident
    )
    for _ in range(2):
        optimizer.step()
    state = optimizer.sharding_report().ranks[dist.get_rank()].state_bytes
    assert state is not None
    return live_bytes() - before, state


def test_with_their_own_storage_a_step_keeps_two_staging_buffers_and_the_share_of_the_state() -> (
    None
):
    for kept, state in run_ranks(2, _kept, False):
        assert 2 * MODEL / 2 <= state <= 1.02 * 2 * MODEL / 2
        assert kept - state <= 2 * CAPACITY + 1000


def test_in_bucket_view_nothing_but_the_share_of_the_state_is_kept() -> None:
    for kept, state in run_ranks(2, _kept, True):
        assert kept - state <= 0.01 * MODEL


def _consolidated() -> tuple[int, int]:
    parameters = [torch.nn.Parameter(torch.randn(NUMEL)) for _ in range(NUM_PARAMETERS)]
    optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.1)
    set_gradients(parameters, 0)
    optimizer.step()
    before = live_bytes()
    optimizer.consolidate_state_dict(to=0)
    during = live_bytes()
    optimizer.release_consolidated_state_dict()
    return during - before, live_bytes() - before


def test_consolidating_keeps_one_copy_on_the_target_until_it_is_released() -> None:
    (target, target_after), (other, other_after) = run_ranks(2, _consolidated)
    assert 2 * MODEL <= target <= 1.02 * 2 * MODEL
    assert other <= 1000
    assert max(target_after, other_after) <= 1000
