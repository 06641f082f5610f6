"""The mean over ranks that share memory: each averages a slice, and reads the others' averages.

As in a ring, every element travels to its owner and back. The owner sums where the others' parts
lie, in rank order, so that two runs give the same bits.
"""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch

from tensorplay.distributed.optim._core.host_messages import PIECE_BYTES
from tensorplay.distributed.optim._core.rank_order_sum import average_
from tensorplay.distributed.optim._core.ranks import GroupMembers, GroupRank
from tensorplay.distributed.optim._core.works import Waitable

NUM_UNDER_WAY = 2
"""Chunks that travel while one is averaged."""


class Parts(Waitable, Protocol):
    """What of an exchange is needed here."""

    def parts(self) -> list[torch.Tensor]:
        """Waits; what has come, which may be written to."""

    def let_go(self) -> None:
        """Gives the parts back."""


class Verbs(Protocol):
    """What of a communicator is needed here."""

    members: GroupMembers

    def exchange(
        self,
        outgoing: Sequence[tuple[GroupRank, torch.Tensor]],
        incoming: Sequence[tuple[GroupRank, torch.Tensor]],
    ) -> Parts:
        """Sends to some ranks while it receives from some."""

    def gather_from_owners(self, flat: torch.Tensor, cuts: Sequence[int]) -> Waitable:
        """Brings each rank's slice to all."""


class AverageThroughMemory:
    """An average under way; every rank must await it, in the order in which they began.

    Args:
        verbs: carry it.
        flat: ``(numel,)`` real floating-point numbers on the CPU, averaged in place.
        contributors: whose values count.
    """

    def __init__(self, verbs: Verbs, flat: torch.Tensor, contributors: Sequence[GroupRank]) -> None:
        self._verbs = verbs
        self._contributors = contributors
        longest = PIECE_BYTES // flat.element_size()
        self._chunks = deque(torch.split(flat, longest))
        self._summing: deque[tuple[torch.Tensor, list[int], Parts]] = deque()
        self._gathering: deque[Waitable] = deque()
        self._scatter()

    def wait(self) -> None:
        """Waits until ``flat`` holds the mean."""
        while self._summing:
            self._average()
            self._scatter()
            if len(self._gathering) > 1:
                self._gathering.popleft().wait()
        while self._gathering:
            self._gathering.popleft().wait()

    def _scatter(self) -> None:
        """Sends the next chunk's slices to their owners."""
        while self._chunks and len(self._summing) < NUM_UNDER_WAY:
            chunk = self._chunks.popleft()
            members = self._verbs.members
            rank, num_ranks = members.group_rank, members.world_size
            cuts = [chunk.numel() * place // num_ranks for place in range(num_ranks + 1)]
            outgoing = [
                (owner, chunk[cuts[owner] : cuts[owner + 1]])
                for owner in members
                if owner != rank and rank in self._contributors and cuts[owner] < cuts[owner + 1]
            ]
            length = cuts[rank + 1] - cuts[rank]
            incoming = [
                (source, torch.empty(length, dtype=chunk.dtype, device="meta"))
                for source in self._contributors
                if source != rank and length
            ]
            self._summing.append((chunk, cuts, self._verbs.exchange(outgoing, incoming)))

    def _average(self) -> None:
        chunk, cuts, exchange = self._summing.popleft()
        rank = self._verbs.members.group_rank
        own = chunk[cuts[rank] : cuts[rank + 1]]
        parts = iter(exchange.parts())
        if own.numel():
            contributions = [own if each == rank else next(parts) for each in self._contributors]
            average_(own, contributions, len(contributions), tell_finiteness=False)
        exchange.let_go()
        self._gathering.append(self._verbs.gather_from_owners(chunk, cuts))
