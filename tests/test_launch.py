"""The launcher itself: results come back in rank order, failures and hangs are named."""

import time

import pytest
import torch
import torch.distributed as dist

from tests.launch import RankError, run_ranks


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
