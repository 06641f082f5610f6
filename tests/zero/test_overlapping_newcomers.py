"""Parameters added later that lie in the memory of earlier ones stay with these, or are refused."""

import pytest
import torch

from tensorplay.distributed.optim.zero.sharding_plan import ShardingPlan


def test_a_newcomer_inside_an_earlier_parameter_gets_its_owner() -> None:
    base = torch.zeros(10)
    first = [torch.zeros(20), base]
    before = ShardingPlan.of(first, 2)
    after = ShardingPlan.of([*first, base[2:4]], 2, before=before)
    assert after.partition.owners == (0, 1, 1)


def test_a_newcomer_that_joins_parameters_of_different_owners_is_refused() -> None:
    base = torch.zeros(10)
    first = [base[:5], base[5:]]
    before = ShardingPlan.of(first, 2)
    with pytest.raises(ValueError, match=r"overlap.* parameters 0 and 1, .*owned by ranks 0 and 1"):
        ShardingPlan.of([*first, base], 2, before=before)


def test_a_newcomer_that_joins_parameters_of_one_owner_gets_it() -> None:
    base = torch.zeros(10)
    first = [base[:5], base[5:], torch.zeros(20)]
    before = ShardingPlan.of(first, 2)
    assert before.partition.owners == (1, 1, 0)
    assert ShardingPlan.of([*first, base], 2, before=before).partition.owners == (1, 1, 0, 1)
