"""The plan of a sharded optimizer: who owns which parameter, and in which buckets they travel."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tensorplay.distributed.optim._core.bucket_layout import BucketLayout, layout_buckets
from tensorplay.distributed.optim._core.parameter_spec import ParameterSpec, describe_parameters
from tensorplay.distributed.optim._core.partition import WholePartition, partition_whole
from tensorplay.distributed.optim._core.ranks import GroupRank

CAPACITY_BYTES = 25 * 1024 * 1024
"""Of a bucket at most: the same as DDP's, large enough to fill any link."""

ALONE_BYTES = 512 * 1024
"""Of a parameter whose gradient is sent from its own memory: copying it would take longer."""

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
    """

    specs: tuple[ParameterSpec, ...]
    partition: WholePartition
    layouts: tuple[BucketLayout, ...]
    gradient_layouts: tuple[BucketLayout, ...]

    def stretches_of(self, index: int) -> tuple[tuple[int, int, GroupRank], ...]:
        """Who owns which elements ``(start, end, owner)`` of a parameter, ascending, in memory order."""
        return ((0, self.specs[index].numel, self.partition.owners[index]),)

    @classmethod
    def of(
        cls,
        parameters: Sequence[torch.Tensor],
        num_ranks: int,
        *,
        resident: bool = False,
        before: "ShardingPlan | None" = None,
    ) -> "ShardingPlan":
        """Plans for ``parameters``, which begin with those of ``before``; these stay as they are.

        Args:
            parameters: all of them, by index.
            num_ranks: how many ranks share them.
            resident: whether parameters that can are to live in their buckets.
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
        partition = partition_whole(specs, num_ranks, before.partition if before else None)
        layouts = layout_buckets(
            specs[num_planned:],
            partition.owners[num_planned:],
            num_ranks,
            staged_capacity(specs),
            resident_capacity_bytes=CAPACITY_BYTES if resident else None,
        )
        gradient_layouts = layout_buckets(
            specs[num_planned:],
            partition.owners[num_planned:],
            num_ranks,
            CAPACITY_BYTES,
            alone_bytes=ALONE_BYTES,
        )
        return cls(
            specs,
            partition,
            (before.layouts if before else ()) + layouts,
            (before.gradient_layouts if before else ()) + gradient_layouts,
        )


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
