"""The launcher itself: results come back in rank order, failures and hangs are named."""

import contextlib
import time

import pytest
import torch
import torch.distributed as dist

from tests.launch import RankError, RankPool, run_ranks


def _sum_of_ranks(offset: int) -> tuple[int, torch.Tensor]:
    total = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(total)
    return dist.get_rank(), total


def _rank_one_fails() -> None:
    if dist.get_rank() == 1:
        raise ValueError("seventeen")
    dist.barrier()


def _rank_zero_hangs() -> None:
    if dist.get_rank() == 0:
        time.sleep(60)


def test_results_come_back_in_rank_order() -> None:
    assert run_ranks(3, _sum_of_ranks, 10) == [(rank, torch.tensor([33])) for rank in range(3)]


def test_a_failing_rank_is_named_with_its_traceback() -> None:
    with pytest.raises(RankError, match=r"(?s)--- rank 1: .*seventeen"):
        run_ranks(2, _rank_one_fails)


def test_a_hanging_rank_is_named_with_its_stack() -> None:
    with pytest.raises(
        RankError, match=r"(?s)--- rank 0: did not finish in time.*_rank_zero_hangs"
    ):
        run_ranks(2, _rank_zero_hangs, timeout_s=2)


def _remember(value: int) -> int:
    remembered = globals().get("_remembered", 0)
    globals()["_remembered"] = value
    return int(remembered)


def test_the_ranks_of_a_pool_stay_and_new_ones_come_after_a_failure() -> None:
    with contextlib.closing(RankPool(2)) as pool:
        assert pool.run(_sum_of_ranks, 10) == [(rank, torch.tensor([21])) for rank in range(2)]
        pool.run(_remember, 7)
        assert pool.run(_remember, 8) == [7, 7]
        with pytest.raises(RankError, match=r"(?s)--- rank 1: .*seventeen"):
            pool.run(_rank_one_fails)
        assert pool.run(_remember, 9) == [0, 0]
        with pytest.raises(RankError, match=r"(?s)rank 0: did not finish.*_rank_zero_hangs"):
            pool.run(_rank_zero_hangs, timeout_s=1)
