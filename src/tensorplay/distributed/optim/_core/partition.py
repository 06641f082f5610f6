"""Which rank owns which parameter, or which elements: pure, the same answer on every rank.

Two ways to divide the work of an optimizer among W ranks:

* :func:`partition_whole` gives each parameter to one rank, so that any optimizer class works. It is
  the greedy rule of longest-processing-time scheduling (Graham, 1969): largest first, to the least
  loaded rank.
* :func:`partition_elements` cuts a flat stretch of elements evenly.
"""

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from tensorplay.distributed.optim._core.parameter_spec import ParameterSpec
from tensorplay.distributed.optim._core.ranks import GroupRank

IN_PARTS = GroupRank(-1)
"""The owner of a parameter of which every rank owns a part."""


@dataclass(frozen=True)
class WholePartition:
    """Each parameter has one owner, but for those that are divided otherwise.

    Attributes:
        owners: ``owners[index]`` is the group rank that owns a parameter, or :data:`IN_PARTS`.
        trainable_loads: bytes of trainable parameters per rank.
        total_loads: bytes of all parameters per rank, frozen ones included.
    """

    owners: tuple[GroupRank, ...]
    trainable_loads: tuple[int, ...]
    total_loads: tuple[int, ...]
    unit_owners: dict[int, GroupRank] = field(repr=False, default_factory=dict)

    @classmethod
    def empty(cls, num_ranks: int) -> "WholePartition":
        """A partition of no parameters among ``num_ranks`` ranks."""
        return cls((), (0,) * num_ranks, (0,) * num_ranks)

    @property
    def num_ranks(self) -> int:
        """Among how many ranks the parameters are divided."""
        return len(self.trainable_loads)

    @property
    def load_ratio(self) -> float:
        """The largest load over the mean load of trainable bytes (λ); 1 is a perfect balance."""
        total = sum(self.trainable_loads)
        return max(self.trainable_loads) * self.num_ranks / total if total else 1.0


def partition_whole(
    specs: Sequence[ParameterSpec],
    num_ranks: int,
    before: WholePartition | None = None,
    *,
    in_parts: Collection[int] = (),
) -> WholePartition:
    """Gives every parameter an owner, and moves none that has one.

    Parameters that overlap in memory count as one. Frozen parameters weigh nothing for trainable
    ones; they are placed by a second pass, which balances the total, so that thawing them later
    keeps the balance and moves nobody. Ties go to the lower index and the lower rank.

    Args:
        specs: all parameters, those that ``before`` placed included, in index order.
        num_ranks: how many ranks share the work.
        before: an earlier partition of the first ``len(before.owners)`` parameters.
        in_parts: indices of new parameters that get no owner here; they share memory with no other.
    """
    before = before or WholePartition.empty(num_ranks)
    unit_owners = dict(before.unit_owners)
    nbytes: dict[int, int] = {}
    trainable: set[int] = set()
    added = specs[len(before.owners) :]
    for spec in added:
        unit = spec.memory_unit
        if spec.index in in_parts:
            unit_owners[unit] = IN_PARTS
            continue
        nbytes[unit] = nbytes.get(unit, 0) + spec.nbytes
        if spec.trainable:
            trainable.add(unit)
    trainable_loads, total_loads = list(before.trainable_loads), list(before.total_loads)
    for unit, owner in unit_owners.items():  # newcomers inside the memory of earlier parameters
        if unit in nbytes:
            total_loads[owner] += nbytes[unit]
            trainable_loads[owner] += nbytes[unit] if unit in trainable else 0
    newcomers = sorted(unit for unit in nbytes if unit not in unit_owners)
    newcomers.sort(key=nbytes.__getitem__, reverse=True)  # stable: ties stay in order of index
    for unit, owner in _greedy([u for u in newcomers if u in trainable], nbytes, trainable_loads):
        unit_owners[unit] = owner
        total_loads[owner] += nbytes[unit]
    unit_owners.update(_greedy([u for u in newcomers if u not in trainable], nbytes, total_loads))
    return WholePartition(
        before.owners + tuple([unit_owners[spec.memory_unit] for spec in added]),
        tuple(trainable_loads),
        tuple(total_loads),
        unit_owners,
    )


def _greedy(
    units: Sequence[int], nbytes: dict[int, int], loads_: list[int]
) -> list[tuple[int, GroupRank]]:
    heap = [(load, GroupRank(rank)) for rank, load in enumerate(loads_)]
    heapq.heapify(heap)
    placed = []
    for unit in units:
        load, rank = heap[0]
        heapq.heapreplace(heap, (load + nbytes[unit], rank))
        placed.append((unit, rank))
    for load, rank in heap:
        loads_[rank] = load
    return placed


def partition_elements(numel: int, num_ranks: int, multiple: int = 1) -> tuple[int, ...]:
    """Cuts ``numel`` elements into ``num_ranks`` contiguous ranges that differ as little as possible.

    Args:
        numel: how many elements there are.
        num_ranks: how many ranks share them.
        multiple: every cut but the last is a multiple of this many elements.

    Returns:
        ``num_ranks + 1`` ascending cuts from 0 to ``numel``; rank r owns ``[cuts[r], cuts[r+1])``.
    """
    blocks = -(-numel // multiple)
    starts = [min(numel, blocks * rank // num_ranks * multiple) for rank in range(num_ranks)]
    return (*starts, numel)
