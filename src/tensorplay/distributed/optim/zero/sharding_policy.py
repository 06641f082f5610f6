"""How a user wants the parameters to be divided, and which of these wishes go together."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from tensorplay.distributed.optim._core.wrapped_optimizer import all_parameters
from tensorplay.distributed.optim.zero.elementwise import require_elementwise


@dataclass(frozen=True)
class ShardingPolicy:
    """The choices of :class:`ZeroRedundancyOptimizer` that decide how parameters are planned.

    Attributes:
        partition: ``"parameters"`` or ``"elements"``, where a group doesn't say.
        flat_step: whether all that can be are stepped as flat slices.
        is_confirmed_elementwise: whether the user says so of the optimizer class.
        resident: whether parameters that can are to live in buckets.
        overlaps_step: whether parameters are stepped during backward.
        shares_buckets: whether gradients and parameters then have the same buckets.
        sends_in_backward: whether gradients are to be reduced while backward goes on.
    """

    partition: str
    flat_step: bool
    is_confirmed_elementwise: bool
    resident: bool
    overlaps_step: bool
    shares_buckets: bool
    sends_in_backward: bool

    def take_from(self, group: dict[str, Any]) -> str:
        """Takes a group's own choice out of it, or the optimizer's.

        Raises:
            ValueError: if it is none.
        """
        choice = group.pop("partition", self.partition)
        if choice not in ("parameters", "elements"):
            raise ValueError(
                f"partition={choice!r} is none; use 'parameters' (each has one owner, any optimizer "
                "class) or 'elements' (all are cut evenly, element-wise classes)"
            )
        return str(choice)

    def is_flat(self, partitions: Sequence[str]) -> bool:
        """Whether some parameters are to be stepped as flat slices, if they can be."""
        return self.flat_step or "elements" in partitions

    def choose(
        self,
        parameters: Sequence[torch.Tensor],
        groups: Sequence[Mapping[str, Any]],
        partitions: Sequence[str],
        start: int,
    ) -> tuple[set[int], set[int]]:
        """The indices from ``start`` on that are to be stepped flat, and those to be cut.

        Args:
            parameters: all of them, by index.
            groups: all groups.
            partitions: the choice of each group.
            start: index of the first to choose for.

        Raises:
            ValueError: if parameters are stepped one by one during backward.
        """
        if self.overlaps_step and self.is_flat(partitions):
            raise ValueError(
                "overlap_with_ddp=True steps parameters one by one as they become ready, and can't be "
                'combined with partition="elements" or flat_step=True; leave one of them away'
            )
        partition_of = {
            parameter: partition
            for group, partition in zip(groups, partitions, strict=True)
            for parameter in group["params"]
        }
        counts = Counter(all_parameters(groups))  # repeated: stepped as often as given, as by torch
        flat = {i for i in range(start, len(parameters)) if counts[parameters[i]] == 1}
        in_parts = {index for index in flat if partition_of[parameters[index]] == "elements"}
        return flat if self.flat_step else in_parts, in_parts

    def require_elementwise(
        self, optimizer_class: type[Optimizer], partitions: Sequence[str]
    ) -> None:
        """Raises ``ValueError`` for a class that can't step flat slices, if there are to be some."""
        if self.is_flat(partitions):
            use = 'partition="elements"' if "elements" in partitions else "flat_step=True"
            require_elementwise(
                optimizer_class, is_confirmed=self.is_confirmed_elementwise, use=use
            )
