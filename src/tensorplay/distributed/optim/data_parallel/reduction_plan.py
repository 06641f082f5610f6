"""The plan of a reduction: in which buckets gradients travel, and who averages which elements."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tensorplay.distributed.optim._core.bucket_layout import (
    BucketLayout,
    cut_evenly,
    layout_buckets,
)
from tensorplay.distributed.optim._core.parameter_spec import ParameterSpec, describe_parameters
from tensorplay.distributed.optim._core.ranks import GroupRank

CAPACITY_BYTES = 25 * 1024 * 1024
"""Of a bucket at most: the same as DDP's, large enough to fill any link."""

ALONE_BYTES = 4 * 1024 * 1024
"""Of a parameter whose gradient is sent from its own memory; smaller ones would be many messages."""


@dataclass(frozen=True)
class ReductionPlan:
    """A pure function of the parameters' metadata and the number of ranks.

    Attributes:
        specs: the parameters, by index.
        layouts: the buckets, each cut evenly.
    """

    specs: tuple[ParameterSpec, ...]
    layouts: tuple[BucketLayout, ...]

    @classmethod
    def of(
        cls,
        parameters: Sequence[torch.Tensor],
        num_ranks: int,
        before: "ReductionPlan | None" = None,
    ) -> "ReductionPlan":
        """Plans for ``parameters``, which begin with those of ``before``; these stay as they are."""
        planned = before or cls((), ())
        start = len(planned.specs)
        specs = describe_parameters(parameters)[start:]
        anybody = [GroupRank(0)] * len(specs)
        layouts = layout_buckets(specs, anybody, num_ranks, CAPACITY_BYTES, alone_bytes=ALONE_BYTES)
        return cls(
            planned.specs + specs,
            planned.layouts + tuple(cut_evenly(layout, num_ranks) for layout in layouts),
        )
