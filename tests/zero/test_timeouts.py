"""A rank that is late or dead: the others get an error that names call, bucket and rank."""

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tests.launch import RankError, run_ranks
from tests.reference.training import make_model, set_gradients


class SlowOnRankOne(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        if dist.get_rank() == 1:
            time.sleep(4)
        return super().step(closure)


def _late_update(resident: bool) -> None:
    model = make_model()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), SlowOnRankOne, lr=0.1, parameters_as_bucket_view=resident
    )
    set_gradients(model.parameters(), 0)
    if dist.get_rank() == 1:
        with pytest.raises(RuntimeError):
            optimizer.step()
    else:
        with pytest.raises(RuntimeError, match=r"in bucket 1 of 1, .*from rank 1\b.*[Tt]ime"):
            optimizer.step()
    os._exit(0) if dist.get_rank() == 1 else None


@pytest.mark.parametrize("resident", [False, True])
def test_a_late_update_times_out_and_names_bucket_and_rank(resident: bool) -> None:
    with pytest.raises(RankError, match=r"^1 of 2 ranks failed .*\[0\] finished"):
        run_ranks(2, _late_update, resident, collective_timeout_s=1.5)


def _missing_call() -> None:
    model = make_model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    set_gradients(model.parameters(), 0)
    if dist.get_rank() == 0:
        expected = r"Optimizer.step: not every rank has come to the same call: .*[Tt]imed out"
        with pytest.raises(RuntimeError, match=expected):
            optimizer.step()
    else:
        time.sleep(3)


def test_a_rank_that_does_not_step_times_out_and_names_the_call() -> None:
    run_ranks(2, _missing_call, collective_timeout_s=1.5)


def _dead() -> None:
    model = make_model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    set_gradients(model.parameters(), 0)
    if dist.get_rank() == 1:
        os._exit(1)
    with pytest.raises(RuntimeError, match=r"Optimizer.step: not every rank has come"):
        optimizer.step()


def test_a_dead_rank_is_found_out_at_once() -> None:
    with pytest.raises(RankError, match=r"^1 of 2 ranks failed .*\[0\] finished"):
        run_ranks(2, _dead)
