"""The plan of an average: which tensors travel together, and which from their own memory.

Large tensors are averaged where they are, in stretches. Small ones are packed into buckets, tightly,
because what pads them would be averaged too.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from tensorplay.distributed.optim._core.parameter_spec import ParameterSpec

BUCKET_BYTES = 4 * 1024 * 1024
"""Of a bucket of small tensors, or of a stretch of a large one, at most."""

IN_PLACE_FROM_BYTES = 256 * 1024
"""Tensors of at least this size are averaged in their own memory."""


@dataclass(frozen=True)
class Stretch:
    """A part of one tensor, averaged in place: its elements ``[start, end)`` in memory order.

    Attributes:
        tensor: its index.
        alone: nothing else may be under way with it, since it shares memory with others.
    """

    tensor: int
    start: int
    end: int
    dtype: torch.dtype
    device: torch.device
    alone: bool

    @property
    def numel(self) -> int:
        """How many elements travel."""
        return self.end - self.start


@dataclass(frozen=True)
class Bucket:
    """Whole tensors, one after the other.

    Attributes:
        tensors: their indices.
        cuts: ``(len(tensors) + 1,)`` offsets in elements.
        alone: as of a :class:`Stretch`.
    """

    tensors: tuple[int, ...]
    cuts: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    alone: bool

    @property
    def numel(self) -> int:
        """How many elements travel."""
        return self.cuts[-1]

    @property
    def nbytes(self) -> int:
        """The size of the bucket."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class AveragingPlan:
    """A pure function of the tensors' metadata.

    Attributes:
        specs: the tensors, by index.
        parcels: what travels, in this order; every tensor with elements is in them exactly once.
    """

    specs: tuple[ParameterSpec, ...]
    parcels: tuple[Stretch | Bucket, ...]

    @classmethod
    def of(cls, specs: Sequence[ParameterSpec], dense: Sequence[bool]) -> "AveragingPlan":
        """Plans for tensors of which ``dense`` says whether they fill their stretch of memory."""
        lodgers = Counter(spec.memory_unit for spec in specs)
        stretches: list[Stretch | Bucket] = []
        buckets: list[Stretch | Bucket] = []
        small: defaultdict[tuple[torch.device, torch.dtype], list[ParameterSpec]] = defaultdict(
            list
        )
        for spec, is_dense in zip(specs, dense, strict=True):
            # Overlapping tensors are averaged one after the other; equal values then stay equal.
            alone = lodgers[spec.memory_unit] > 1
            if is_dense and spec.nbytes >= IN_PLACE_FROM_BYTES:
                stretches.extend(_stretches(spec, alone=alone))
            elif alone and spec.numel:
                buckets.append(_bucket([spec], alone=True))
            elif spec.numel:
                small[spec.device, spec.dtype].append(spec)
        for members in small.values():
            buckets.extend(_bucket(part) for part in _fill(members))
        return cls(tuple(specs), (*stretches, *buckets))


def _stretches(spec: ParameterSpec, *, alone: bool) -> list[Stretch]:
    step = BUCKET_BYTES // spec.dtype.itemsize
    return [
        Stretch(
            spec.index, start, min(start + step, spec.numel), spec.dtype, spec.device, alone=alone
        )
        for start in range(0, spec.numel, step)
    ]


def _bucket(members: Sequence[ParameterSpec], *, alone: bool = False) -> Bucket:
    return Bucket(
        tuple(spec.index for spec in members),
        tuple(accumulate((spec.numel for spec in members), initial=0)),
        members[0].dtype,
        members[0].device,
        alone=alone,
    )


def _fill(members: Sequence[ParameterSpec]) -> list[list[ParameterSpec]]:
    parts: list[list[ParameterSpec]] = []
    free = -1
    for spec in members:
        if spec.nbytes > free:
            parts.append([])
            free = BUCKET_BYTES
        parts[-1].append(spec)
        free -= spec.nbytes
    return parts
