"""The plan of a sharded optimizer: who owns which parameter, and in which buckets they travel."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tensorplay.distributed.optim._core.bucket_layout import BucketLayout, layout_buckets
from tensorplay.distributed.optim._core.parameter_spec import ParameterSpec, describe_parameters
from tensorplay.distributed.optim._core.partition import WholePartition, partition_whole

RESIDENT_CAPACITY_BYTES = 25 * 1024 * 1024
"""Buckets in which parameters live: the same as DDP's, large enough to fill any link."""

STAGED_CAPACITY_BYTES = 4 * 1024 * 1024
"""Buckets that pass through a staging buffer: small ones stay in a CPU's cache between copy and
transport, and keep the staging memory small; larger parameters travel without one."""


@dataclass(frozen=True)
class ShardingPlan:
    """A pure function of the parameters' metadata and the number of ranks.

    Attributes:
        specs: the parameters, by index.
        partition: their owners.
        layouts: the buckets; every parameter that has elements is in exactly one.
    """

    specs: tuple[ParameterSpec, ...]
    partition: WholePartition
    layouts: tuple[BucketLayout, ...]

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
            STAGED_CAPACITY_BYTES,
            resident_capacity_bytes=RESIDENT_CAPACITY_BYTES if resident else None,
        )
        return cls(specs, partition, (before.layouts if before else ()) + layouts)


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
