"""Group ranks and global ranks, and the one place that converts them."""

import pytest

from tensorplay.distributed.optim._core.ranks import GlobalRank, GroupMembers, GroupRank


def members(group_rank: int = 0) -> GroupMembers:
    return GroupMembers((GlobalRank(5), GlobalRank(2), GlobalRank(7)), GroupRank(group_rank))


def test_to_global_and_to_group_are_inverse() -> None:
    assert [members().to_global(rank) for rank in members()] == [5, 2, 7]
    assert [members().to_group(members().to_global(rank)) for rank in members()] == [0, 1, 2]


def test_a_global_rank_that_is_no_member_has_no_group_rank() -> None:
    with pytest.raises(ValueError, match="not in tuple"):
        members().to_group(GlobalRank(0))


def test_iterating_gives_the_group_ranks_in_order() -> None:
    assert list(members()) == [0, 1, 2]
    assert members().world_size == 3


def test_a_name_carries_the_global_rank_where_it_differs() -> None:
    assert members().name(GroupRank(0)) == "rank 0 (global rank 5)"


def test_a_name_is_short_where_both_ranks_are_the_same() -> None:
    same = GroupMembers((GlobalRank(0), GlobalRank(1)), GroupRank(0))
    assert same.name(GroupRank(1)) == "rank 1"
