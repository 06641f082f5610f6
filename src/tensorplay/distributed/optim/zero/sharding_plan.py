"""The plan of a sharded optimizer: who owns which parameter, and in which buckets they travel.

Note [Flat parameters]
    Parameters that are stepped as flat slices travel in buckets of their own, where they live, and
    the gradients of small ones in buckets of the same layout: what a rank owns of one lies in one
    stretch. A large one's gradient is a bucket of its own, and so is the slice that is stepped. The
    buckets are cut where parameters begin, or evenly, at any element.
"""

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from tensorplay.distributed.optim._core.bucket_layout import (
    BucketLayout,
    cut_evenly,
    layout_buckets,
)
from tensorplay.distributed.optim._core.parameter_spec import ParameterSpec, describe_parameters
from tensorplay.distributed.optim._core.partition import (
    IN_PARTS,
    WholePartition,
    partition_whole,
)
from tensorplay.distributed.optim._core.ranks import GroupRank

CAPACITY_BYTES = 25 * 1024 * 1024
"""Of a bucket at most: the same as DDP's, large enough to fill any link."""

RUN_BYTES = 3 * 512 * 1024
"""Of a bucket that is sent in backward, about what each rank owns: with long runs of one owner's
gradients a link would carry one direction at a time."""

STEPPED_CAPACITY_BYTES = CAPACITY_BYTES // 2
"""Of a bucket that is stepped during backward: while one fills, others are reduced and received."""

ALONE_BYTES = 512 * 1024
"""From which on a parameter :func:`is_large`."""

LEAST_STAGED_CAPACITY_BYTES = 8 * 1024 * 1024
"""Of a bucket that passes through a staging buffer, at least: see :func:`staged_capacity`."""


@dataclass(frozen=True)
class ShardingPlan:
    """A pure function of the parameters' metadata and the number of ranks.

    Attributes:
        specs: the parameters, by index.
        partition: their owners.
        layouts: the buckets in which parameters are gathered; every parameter that has elements is
            in exactly one.
        gradient_layouts: the buckets in which gradients are reduced, likewise.
        flat_layouts: those of ``layouts`` of which each rank steps its stretch (Note [Flat parameters]).
    """

    specs: tuple[ParameterSpec, ...]
    partition: WholePartition
    layouts: tuple[BucketLayout, ...]
    gradient_layouts: tuple[BucketLayout, ...]
    flat_layouts: tuple[BucketLayout, ...] = ()

    @property
    def loads(self) -> tuple[int, ...]:
        """Bytes of trainable parameters that each rank steps."""
        loads = list(self.partition.trainable_loads)
        for layout in self.flat_layouts:
            if self.is_in_parts(layout):
                for rank, (start, end) in enumerate(pairwise(layout.cuts)):
                    loads[rank] += (end - start) * layout.dtype.itemsize
        return tuple(loads)

    @property
    def load_ratio(self) -> float:
        """The largest load over the mean load of trainable bytes (λ); 1 is a perfect balance."""
        total = sum(self.loads)
        return max(self.loads) * len(self.loads) / total if total else 1.0

    def is_in_parts(self, layout: BucketLayout) -> bool:
        """Whether the bucket is cut at any element."""
        return self.partition.owners[layout.slots[0].parameter] == IN_PARTS

    def cuts_of(self, index: int) -> tuple[int, ...]:
        """``(num_ranks + 1,)``: rank r owns the elements ``[cuts[r], cuts[r + 1])`` of a parameter.

        They count in the order in which the elements lie in memory.
        """
        owner, numel = self.partition.owners[index], self.specs[index].numel
        if owner != IN_PARTS:
            return tuple(0 if r <= owner else numel for r in range(self.partition.num_ranks + 1))
        layout, offset = self._places[index]
        return tuple(min(max(cut - offset, 0), numel) for cut in layout.cuts)

    @functools.cached_property
    def _places(self) -> dict[int, tuple[BucketLayout, int]]:
        return {
            slot.parameter: (layout, slot.offset)
            for layout in self.flat_layouts
            for slot in layout.slots
        }

    def stretches_of(self, index: int) -> tuple[tuple[int, int, GroupRank], ...]:
        """Who owns which elements ``(start, end, owner)`` of a parameter, ascending, in memory order."""
        owner = self.partition.owners[index]
        if owner != IN_PARTS:
            return ((0, self.specs[index].numel, owner),)
        extents = enumerate(pairwise(self.cuts_of(index)))
        return tuple((start, end, GroupRank(rank)) for rank, (start, end) in extents if start < end)

    @classmethod
    def of(
        cls,
        parameters: Sequence[torch.Tensor],
        num_ranks: int,
        *,
        resident: bool = False,
        flat: Collection[int] = (),
        in_parts: Collection[int] = (),
        steps_in_backward: bool = False,
        sends_in_backward: bool = False,
        before: "ShardingPlan | None" = None,
    ) -> "ShardingPlan":
        """Plans for ``parameters``, which begin with those of ``before``; these stay as they are.

        Args:
            parameters: all of them, by index.
            num_ranks: how many ranks share them.
            resident: whether parameters that can are to live in their buckets.
            flat: indices of new parameters to be stepped as flat slices, if they can be.
            in_parts: those of them that are to be cut at any element, if they can be.
            steps_in_backward: whether each bucket is reduced, stepped and gathered by itself, so
                that gradients and parameters have the same ones.
            sends_in_backward: whether gradients are reduced while backward goes on.
            before: an earlier plan of the first parameters.

        Raises:
            ValueError: if a new parameter overlaps in memory with several of ``before`` that have
                different owners: no rank could update it.
        """
        num_planned = len(before.specs) if before else 0
        described = describe_parameters(parameters)
        if before:
            _refuse_bridges(described[:num_planned], before.partition)
        specs = (before.specs if before else ()) + described[num_planned:]
        added = specs[num_planned:]
        flat = {spec.index for spec in added if spec.index in flat and can_be_flat(spec)}
        in_parts = flat.intersection(in_parts)
        partition = partition_whole(
            specs, num_ranks, before.partition if before else None, in_parts=in_parts
        )
        for spec in added:
            if spec.index not in in_parts and partition.owners[spec.index] == IN_PARTS:
                raise ValueError(
                    f"a new parameter overlaps in memory with parameter {spec.memory_unit}, which is "
                    "divided between the ranks, so that none could update it; pass both at "
                    "construction, and they get one owner"
                )
        is_on_cpu = all(spec.device.type == "cpu" for spec in added)
        if steps_in_backward:  # on accelerators that's done early, bucket by bucket
            gathers_together = resident and is_on_cpu and not sends_in_backward
            layouts, gradient_layouts = _lay_out_stepped(
                added, partition, num_ranks, resident=resident, gathers_together=gathers_together
            )
            return cls(
                specs,
                partition,
                (before.layouts if before else ()) + layouts,
                (before.gradient_layouts if before else ()) + gradient_layouts,
            )
        whole = [spec for spec in added if spec.index not in flat]
        owners = [partition.owners[spec.index] for spec in whole]
        layouts = layout_buckets(
            whole,
            owners,
            num_ranks,
            staged_capacity(specs),
            resident_capacity_bytes=CAPACITY_BYTES if resident else None,
        )
        gradient_layouts = layout_buckets(
            whole, owners, num_ranks, CAPACITY_BYTES, alone_bytes=ALONE_BYTES
        )
        alternates = sends_in_backward and is_on_cpu
        flat_layouts, flat_gradient_layouts = _lay_out_flat(
            [spec for spec in added if spec.index in flat],
            in_parts,
            partition,
            num_ranks,
            min(CAPACITY_BYTES, num_ranks * RUN_BYTES) if alternates else CAPACITY_BYTES,
        )
        return cls(
            specs,
            partition,
            (before.layouts if before else ()) + layouts + flat_layouts,
            (before.gradient_layouts if before else ()) + gradient_layouts + flat_gradient_layouts,
            (before.flat_layouts if before else ()) + flat_layouts,
        )


def can_be_flat(spec: ParameterSpec) -> bool:
    """Whether a parameter can be stepped as a stretch of a bucket.

    It must be able to live there. A frozen one isn't stepped; where there are no axes, a state dict
    doesn't show what belongs to an element and what to the parameter.
    """
    return spec.trainable and spec.owns_storage and spec.numel > 0 and len(spec.shape) > 0


def is_large(spec: ParameterSpec) -> bool:
    """Whether a parameter's gradient is sent from its own memory: copying it would take longer."""
    return spec.nbytes >= ALONE_BYTES


def _lay_out_stepped(
    specs: Sequence[ParameterSpec],
    partition: WholePartition,
    num_ranks: int,
    *,
    resident: bool,
    gathers_together: bool,
) -> tuple[tuple[BucketLayout, ...], tuple[BucketLayout, ...]]:
    """The buckets of parameters, and those of their gradients, each within one of these.

    Args:
        specs: all parameters to be laid out.
        partition: their owners.
        num_ranks: into how many slices every bucket is cut.
        resident: whether parameters that can are to live in their buckets.
        gathers_together: whether several large ones that live in a bucket are gathered at once.
    """
    shared = {
        spec.index
        for spec in specs
        if gathers_together and is_large(spec) and spec.trainable and spec.owns_storage
    }
    layouts: list[BucketLayout] = []
    gradient_layouts: list[BucketLayout] = []
    for together in (False, True):
        members = [spec for spec in specs if (spec.index in shared) == together]
        planned = layout_buckets(
            members,
            [partition.owners[spec.index] for spec in members],
            num_ranks,
            STEPPED_CAPACITY_BYTES,
            resident_capacity_bytes=STEPPED_CAPACITY_BYTES if resident else None,
            alone_bytes=None if together else ALONE_BYTES,
        )
        layouts += planned
        for layout in planned:
            gradient_layouts += layout.one_by_one() if together else [layout]
    return tuple(layouts), tuple(gradient_layouts)


def _lay_out_flat(
    specs: Sequence[ParameterSpec],
    in_parts: Collection[int],
    partition: WholePartition,
    num_ranks: int,
    cut_capacity: int,
) -> tuple[tuple[BucketLayout, ...], tuple[BucketLayout, ...]]:
    """The buckets of parameters, and those of their gradients, cut alike."""
    layouts: list[BucketLayout] = []
    gradient_layouts: list[BucketLayout] = []
    for is_cut in (False, True):
        owners = [GroupRank(0) if is_cut else owner for owner in partition.owners]
        capacity = cut_capacity if is_cut else CAPACITY_BYTES
        for large in (False, True):
            members = [
                spec
                for spec in specs
                if (spec.index in in_parts) == is_cut and is_large(spec) == large
            ]
            planned = layout_buckets(
                members,
                [owners[spec.index] for spec in members],
                num_ranks,
                capacity,
                resident_capacity_bytes=capacity,
            )
            if is_cut:
                planned = tuple(cut_evenly(layout, num_ranks) for layout in planned)
            layouts += planned
            for layout in planned:
                gradient_layouts += layout.one_by_one() if large else [layout]
    return tuple(layouts), tuple(gradient_layouts)


def staged_capacity(specs: Sequence[ParameterSpec]) -> int:
    """How large buckets that are staged may be, in bytes.

    Two staging buffers shall not eat what sharding saves, so a bucket is a sixth of the parameters
    at most; smaller than 8 MB they would only cost time.
    """
    total = sum(spec.nbytes for spec in specs)
    return min(CAPACITY_BYTES, max(LEAST_STAGED_CAPACITY_BYTES, total // 6))


def _refuse_bridges(planned: Sequence[ParameterSpec], partition: WholePartition) -> None:
    """``planned`` are as described together with the newcomers, which may have joined their units."""
    for spec in planned:
        one, other = partition.owners[spec.memory_unit], partition.owners[spec.index]
        if one != other:
            raise ValueError(
                f"a new parameter overlaps in memory with parameters {spec.memory_unit} and "
                f"{spec.index}, which are owned by ranks {one} and {other}; pass all three at "
                "construction, so that they get one owner"
            )
