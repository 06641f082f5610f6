"""Order, offsets and owners' cuts in flat buckets: pure, derived from specs and owners.

A *bucket* is a flat stretch of elements of one dtype and device with *cuts*: rank r owns the
elements ``[cuts[r], cuts[r + 1])``. Buckets are formed in reverse order of registration, which is
about the order in which backward produces gradients; within a bucket parameters stand by owner.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch

from tensorplay.distributed.optim._core.parameter_spec import ParameterSpec
from tensorplay.distributed.optim._core.partition import partition_elements
from tensorplay.distributed.optim._core.ranks import GroupRank

ALIGNMENT_BYTES = 16
"""Every slot starts at a multiple of this, as vectorised kernels want it."""


class Slot(NamedTuple):
    """The place of one parameter in a bucket, in elements."""

    parameter: int
    offset: int
    numel: int

    def is_within(self, start: int, end: int) -> bool:
        """Whether a stretch of the bucket holds all of it."""
        return start <= self.offset and self.offset + self.numel <= end

    def meets(self, start: int, end: int) -> bool:
        """Whether a stretch of the bucket holds some of it."""
        return max(start, self.offset) < min(end, self.offset + self.numel)

    def overlap(self, start: int, end: int, origin: int) -> tuple[int, int]:
        """The part of it that lies in a stretch of the bucket, counted from ``origin``."""
        return (
            max(start, self.offset) - origin,
            min(end, self.offset + self.numel) - origin,
        )


@dataclass(frozen=True)
class BucketLayout:
    """The plan of one bucket.

    Attributes:
        dtype: element type of all its parameters.
        device: where all its parameters live.
        trainable: whether its parameters required gradients when the plan was made.
        resident: whether its parameters are to live in the bucket itself; each of them is
            trainable and has a storage of its own.
        slots: the parameters' places, in ascending order.
        cuts: ``(num_ranks + 1,)`` ascending offsets; the last is the bucket's length in elements.
    """

    dtype: torch.dtype
    device: torch.device
    trainable: bool
    resident: bool
    slots: tuple[Slot, ...]
    cuts: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Length in elements, padding included."""
        return self.cuts[-1]

    @property
    def nbytes(self) -> int:
        """Length in bytes, padding included."""
        return self.numel * self.dtype.itemsize

    @property
    def loads(self) -> tuple[int, ...]:
        """How many bytes of it each rank owns."""
        return tuple((end - start) * self.dtype.itemsize for start, end in pairwise(self.cuts))

    def cut_slots(self, start: int, end: int) -> tuple[Slot, ...]:
        """The places that lie in a stretch with a part only."""
        return tuple(
            slot for slot in self.slots if slot.meets(start, end) and not slot.is_within(start, end)
        )

    def one_by_one(self) -> "list[BucketLayout]":
        """A layout for each parameter by itself, divided between the owners as it is here."""
        return [
            replace(
                self,
                slots=(Slot(slot.parameter, 0, slot.numel),),
                cuts=tuple(min(max(cut - slot.offset, 0), slot.numel) for cut in self.cuts),
            )
            for slot in self.slots
        ]

    def slots_of(self, group_rank: GroupRank) -> tuple[Slot, ...]:
        """The places of the parameters that a rank owns."""
        start, end = self.cuts[group_rank], self.cuts[group_rank + 1]
        return tuple(slot for slot in self.slots if start <= slot.offset < end)

    def slots_except(self, group_rank: GroupRank) -> tuple[Slot, ...]:
        """The places of the parameters that other ranks own."""
        start, end = self.cuts[group_rank], self.cuts[group_rank + 1]
        return tuple(slot for slot in self.slots if not start <= slot.offset < end)


def layout_buckets(
    specs: Sequence[ParameterSpec],
    owners: Sequence[GroupRank],
    num_ranks: int,
    capacity_bytes: int,
    *,
    resident_capacity_bytes: int | None = None,
    alone_bytes: int | None = None,
) -> tuple[BucketLayout, ...]:
    """Packs ``specs`` into buckets of at most ``capacity_bytes``, or of one larger parameter.

    Parameters of different dtype or device, trainable and frozen ones, resident ones and others go
    to different buckets. Parameters without elements go to none.

    Args:
        specs: the parameters, in order of registration.
        owners: ``owners[position]`` owns ``specs[position]``.
        num_ranks: into how many slices every bucket is cut.
        capacity_bytes: upper bound of a bucket's size, padding aside.
        resident_capacity_bytes: the same for resident buckets; without it there are none.
        alone_bytes: a parameter of this size or more gets a bucket of its own.
    """
    kinds: defaultdict[tuple[torch.device, torch.dtype, bool, bool], list[int]] = defaultdict(list)
    for position in reversed(range(len(specs))):
        spec = specs[position]
        if spec.numel:
            resident = spec.trainable and spec.owns_storage and resident_capacity_bytes is not None
            kinds[spec.device, spec.dtype, spec.trainable, resident].append(position)
    layouts = []
    for (device, dtype, trainable, resident), positions in kinds.items():
        capacity = resident_capacity_bytes if resident else capacity_bytes
        for members in _fill(positions, specs, capacity or 0, alone_bytes):
            slots, cuts = _place(members, specs, owners, num_ranks, dtype)
            layouts.append(BucketLayout(dtype, device, trainable, resident, slots, cuts))
    return tuple(layouts)


def cut_evenly(layout: BucketLayout, num_ranks: int) -> BucketLayout:
    """The same bucket, each rank owning about as many elements, wherever parameters begin."""
    alignment = max(1, ALIGNMENT_BYTES // layout.dtype.itemsize)
    return replace(layout, cuts=partition_elements(layout.numel, num_ranks, alignment))


def extents_in_rounds(cuts: Sequence[int], longest: int) -> list[tuple[tuple[int, int], ...]]:
    """Splits every owner's slice into stretches of at most ``longest`` elements.

    Returns:
        One tuple per round: the stretch ``(start, end)`` of each owner, empty where it has no more.
    """
    lengths = [end - start for start, end in pairwise(cuts)]
    return [
        tuple(
            (start + min(begin, length), start + min(begin + longest, length))
            for start, length in zip(cuts, lengths, strict=False)
        )
        for begin in range(0, max(lengths), longest)
    ]


def take_turns(loads: Sequence[Sequence[int]]) -> list[int]:
    """An order in which the owners' loads grow alike, so that links are filled both ways.

    What belongs to one rank alone travels one way only.

    Args:
        loads: of each thing, how much of it each rank owns.

    Returns:
        Positions in ``loads``; those of the same owners keep their order.
    """
    queues: dict[tuple[int, ...], deque[int]] = {}
    for position, load in enumerate(loads):
        owners = tuple(rank for rank, amount in enumerate(load) if amount)
        queues.setdefault(owners, deque()).append(position)
    grown = [0] * max(map(len, loads), default=0)
    order: list[int] = []
    while queues:
        owners = min(queues, key=lambda ranks: sum(grown[r] for r in ranks) / max(1, len(ranks)))
        position = queues[owners].popleft()
        if not queues[owners]:
            del queues[owners]
        order.append(position)
        for rank, amount in enumerate(loads[position]):
            grown[rank] += amount
    return order


def _fill(
    positions: Sequence[int],
    specs: Sequence[ParameterSpec],
    capacity_bytes: int,
    alone_bytes: int | None,
) -> list[list[int]]:
    buckets: list[list[int]] = []
    shared: list[int] = []
    free = -1
    for position in positions:
        nbytes = specs[position].nbytes
        if alone_bytes is not None and nbytes >= alone_bytes:
            buckets.append([position])
            continue
        if nbytes > free:
            shared = []
            buckets.append(shared)
            free = capacity_bytes
        shared.append(position)
        free -= nbytes
    return buckets


def _place(
    members: list[int],
    specs: Sequence[ParameterSpec],
    owners: Sequence[GroupRank],
    num_ranks: int,
    dtype: torch.dtype,
) -> tuple[tuple[Slot, ...], tuple[int, ...]]:
    # One parameter alone needs no padding: it can travel without being copied into a buffer.
    alignment = max(1, ALIGNMENT_BYTES // dtype.itemsize) if len(members) > 1 else 1
    slots: list[Slot] = []
    cuts = [0]
    end = 0
    for position in sorted(members, key=owners.__getitem__):  # stable
        cuts += [end] * (owners[position] + 1 - len(cuts))
        spec = specs[position]
        slots.append(Slot(spec.index, end, spec.numel))
        end += -(-spec.numel // alignment) * alignment
    cuts += [end] * (num_ranks + 1 - len(cuts))
    return tuple(slots), tuple(cuts)
