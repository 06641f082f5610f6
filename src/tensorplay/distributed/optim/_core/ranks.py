"""Group ranks and global ranks are different types; this is the one place that converts them.

A *global rank* numbers a process in the whole job, as ``torch.distributed.get_rank()`` does. A
*group rank* numbers it inside one process group. ``torch.distributed`` takes global ranks for the
peers of a collective, even on a subgroup; plans here speak of group ranks only.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NewType

import torch.distributed as dist

GroupRank = NewType("GroupRank", int)
GlobalRank = NewType("GlobalRank", int)


@dataclass(frozen=True)
class GroupMembers:
    """The members of a process group, and which of them this process is.

    ``global_ranks[group_rank]`` is the global rank of a member.
    """

    global_ranks: tuple[GlobalRank, ...]
    group_rank: GroupRank

    @classmethod
    def of(cls, process_group: dist.ProcessGroup) -> "GroupMembers":
        """Reads the members from ``process_group``, of which this process must be one."""
        return cls(
            tuple(GlobalRank(rank) for rank in dist.get_process_group_ranks(process_group)),
            GroupRank(dist.get_rank(process_group)),
        )

    @property
    def world_size(self) -> int:
        """How many ranks the group has."""
        return len(self.global_ranks)

    def __iter__(self) -> Iterator[GroupRank]:
        return (GroupRank(rank) for rank in range(self.world_size))

    def to_global(self, group_rank: GroupRank) -> GlobalRank:
        """The global rank of a member."""
        return self.global_ranks[group_rank]

    def to_group(self, global_rank: GlobalRank) -> GroupRank:
        """The group rank of a member; ``ValueError`` if ``global_rank`` is none of them."""
        return GroupRank(self.global_ranks.index(global_rank))

    def name(self, group_rank: GroupRank) -> str:
        """How a message calls a member: by group rank, and by global rank where that differs."""
        global_rank = self.to_global(group_rank)
        return f"rank {group_rank}" + (
            f" (global rank {global_rank})" if int(global_rank) != int(group_rank) else ""
        )
