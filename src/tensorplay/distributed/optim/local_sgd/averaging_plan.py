"""The plan of an average: which tensors travel from where they are, and which packed together.

Large tensors are averaged in their own memory. Small ones are packed into a bucket, tightly, because
what pads them would be averaged too. It has several slots, so that one can be packed or unpacked
while others travel. Types below 32 bits are packed as float32, in which their sum keeps its bits.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tensorplay.distributed.optim._core.parameter_spec import ParameterSpec

BUCKET_BYTES = 12 * 1024 * 1024
"""Of all memory that is packed into, on each device."""

NUM_SLOTS = 3
"""Equal parts of the bucket, used in turn."""

IN_PLACE_FROM_BYTES = 1024 * 1024
"""Tensors of at least this size are averaged in their own memory."""


@dataclass(frozen=True)
class Piece:
    """A part of one tensor: its elements ``[start, end)`` in memory order."""

    tensor: int
    start: int
    end: int

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return self.end - self.start


@dataclass(frozen=True)
class Parcel:
    """What one collective averages.

    Attributes:
        pieces: of tensors of one type, in order.
        packed: whether they travel in the bucket; otherwise it is one whole tensor, in its memory.
        alone: nothing else may be under way, since its tensor shares memory with others, or is too
            large for a slot and can't be divided.
        dtype: real; in which it travels. A complex element counts as two.
        device: where.
        numel: how many elements travel.
        nbytes: how many bytes.
    """

    pieces: tuple[Piece, ...]
    packed: bool
    alone: bool
    dtype: torch.dtype
    device: torch.device
    numel: int = field(init=False, repr=False, compare=False)
    nbytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        numel = sum(piece.numel for piece in self.pieces)
        object.__setattr__(self, "numel", numel)  # frozen, and averaging reads it often
        object.__setattr__(self, "nbytes", numel * self.dtype.itemsize)


def plan_parcels(specs: Sequence[ParameterSpec], dense: Sequence[bool]) -> tuple[Parcel, ...]:
    """Every element of every tensor in exactly one parcel: a pure function of metadata.

    Args:
        specs: the tensors, by index.
        dense: for each whether its elements fill their stretch of memory. One that isn't stays
            whole, and may be larger than a slot.
    """
    lodgers = Counter(spec.memory_unit for spec in specs)
    in_place: list[Parcel] = []
    packed: list[Parcel] = []
    to_pack: defaultdict[tuple[torch.device, torch.dtype], list[Piece]] = defaultdict(list)
    for spec, is_dense in zip(specs, dense, strict=True):
        dtype = _travelling_dtype(spec.dtype)
        numel = spec.numel * (2 if spec.dtype.is_complex else 1)
        whole = Piece(spec.index, 0, numel)
        # Overlapping tensors are averaged one after the other: the second time changes nothing
        # where the first has been.
        alone = lodgers[spec.memory_unit] > 1
        large = spec.nbytes >= IN_PLACE_FROM_BYTES
        if is_dense and large and spec.dtype.itemsize >= torch.float32.itemsize:
            in_place.append(Parcel((whole,), False, alone, dtype, spec.device))
        elif numel:
            capacity = _slot_bytes() // dtype.itemsize
            pieces = _divided(whole, capacity) if is_dense else [whole]
            if alone or pieces[0].numel > capacity:
                packed.extend(Parcel((piece,), True, True, dtype, spec.device) for piece in pieces)
            else:
                to_pack[spec.device, spec.dtype].extend(pieces)
    for (device, dtype), pieces in to_pack.items():
        travelling = _travelling_dtype(dtype)
        packed.extend(
            Parcel(tuple(members), True, False, travelling, device)
            for members in _fill(pieces, _slot_bytes() // travelling.itemsize)
        )
    return (*in_place, *packed)


def fits_slot(parcel: Parcel) -> bool:
    """Whether it is small enough for a slot; otherwise it travels alone, in memory of its own."""
    return parcel.nbytes <= _slot_bytes()


def fit_bucket(parcels: Sequence[Parcel]) -> bool:
    """Whether they may be under way together: others may have to keep as much for them."""
    return sum(parcel.nbytes for parcel in parcels) <= BUCKET_BYTES


def _slot_bytes() -> int:
    return BUCKET_BYTES // NUM_SLOTS


def _divided(whole: Piece, longest: int) -> list[Piece]:
    return [
        Piece(whole.tensor, start, min(start + longest, whole.end))
        for start in range(0, whole.end, longest)
    ]


def _travelling_dtype(dtype: torch.dtype) -> torch.dtype:
    real = dtype.to_real()
    return real if real.itemsize >= torch.float32.itemsize else torch.float32


def _fill(pieces: Sequence[Piece], capacity: int) -> list[list[Piece]]:
    parts: list[list[Piece]] = []
    free = -1
    for piece in pieces:
        if piece.numel > free:
            parts.append([])
            free = capacity
        parts[-1].append(piece)
        free -= piece.numel
    return parts
