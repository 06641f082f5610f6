"""Where the gradients come from that a sharded optimizer steps on.

Either something else averages them on every rank, usually ``DistributedDataParallel``, or the
optimizer reduces them to their owners itself.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol
from weakref import WeakMethod

import torch
from torch import nn

from tensorplay.distributed.optim._core.agreement import Agreement
from tensorplay.distributed.optim._core.bucket_layout import BucketLayout
from tensorplay.distributed.optim._core.collectives import Communicator
from tensorplay.distributed.optim._core.gradient_reducer import NUM_KEPT, GradientReducer
from tensorplay.distributed.optim._core.local_shard import is_dtensor
from tensorplay.distributed.optim._core.partial_gradient import PartialGradient
from tensorplay.distributed.optim._core.partition import IN_PARTS
from tensorplay.distributed.optim._core.ranks import GroupRank
from tensorplay.distributed.optim._core.replication import replicate_
from tensorplay.distributed.optim._core.step_schedule import Stage, StepInBackward
from tensorplay.distributed.optim._core.tagged_json import Json
from tensorplay.distributed.optim.zero.checkpointed_uses import CheckpointedUses
from tensorplay.distributed.optim.zero.flat_slices import in_memory_order
from tensorplay.distributed.optim.zero.sharding_plan import (
    CAPACITY_BYTES,
    STEPPED_CAPACITY_BYTES,
    ShardingPlan,
)


class Gradients(Protocol):
    """What :class:`ZeroRedundancyOptimizer` needs of either source."""

    def watch(
        self,
        parameters: Sequence[torch.Tensor],
        plan: ShardingPlan,
        layouts: Sequence[BucketLayout],
    ) -> None:
        """Takes care of further parameters. Every rank must call it."""

    can_follow: bool
    """Whether a rank without inputs takes part in reductions of the others."""
    reduces_to_owners: bool
    """Whether each owner gets its gradients in the reduction, also one without inputs, and others not."""
    divides_by_world_size: bool
    """Whether such a rank counts as having contributed zeros."""

    @property
    def num_begun(self) -> int:
        """How many backward passes this rank has begun."""

    def divide_among(self, active: Sequence[GroupRank]) -> None:
        """Notes which ranks have inputs."""

    def reduce_nothing(self, num_begun: int) -> None:
        """Takes part in a reduction after a backward pass of other ranks."""

    def settle_aborted(self) -> None:
        """Ends, with the other ranks, a backward pass that an exception has ended here."""

    def find_unfinished(self) -> Exception | None:
        """An error if backward didn't get as far as it should have."""

    def find_unclippable(self) -> Exception | None:
        """Why gradients from here can't be clipped by the optimizer, if they can't."""

    def has_unreduced(self) -> bool:
        """Whether there are gradients on this rank that :meth:`reduce` should average first."""

    def reduce(self, call: str) -> None:
        """Averages these. Every rank must call it."""

    def owned_stretches(self) -> list[torch.Tensor]:
        """Tensors that together hold the averaged gradients of what this rank owns."""

    def others(self) -> list[torch.Tensor]:
        """The averaged gradients, as whole as they are here, of what other ranks own."""

    def missing_parts(self) -> list[int]:
        """Parameters of which every rank steps a part, and that have no gradient here."""

    def forget(self) -> None:
        """Drops what isn't in any ``.grad``."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside reduce nothing."""

    def describe(self) -> Json:
        """What must be the same on every rank at construction."""

    def refuse(self, parameters: Sequence[torch.Tensor]) -> None:
        """Raises for parameters whose gradients can't come from here."""

    def closure_returned(self, error: Exception | None) -> None:
        """Tells other ranks that wait for this rank's backward if a closure has failed."""


class AveragedElsewhere:
    """Every rank has all averaged gradients when it steps.

    Args:
        group_rank: this rank.
        module: must be ``None``: whoever averages the gradients takes care of the module.
    """

    can_follow = False
    reduces_to_owners = False
    divides_by_world_size = True
    num_begun = 0

    def __init__(self, group_rank: GroupRank, module: nn.Module | None) -> None:
        self._group_rank = group_rank
        self._module = module
        self._parameters: Sequence[torch.Tensor] = ()
        self._plan: ShardingPlan | None = None

    def watch(
        self,
        parameters: Sequence[torch.Tensor],
        plan: ShardingPlan,
        layouts: Sequence[BucketLayout],  # noqa: ARG002 - the protocol has it
    ) -> None:
        """Nothing to do but to know them."""
        self._parameters, self._plan = parameters, plan

    def divide_among(self, active: Sequence[GroupRank]) -> None:
        """Nothing to do: whoever averages the gradients divides."""

    def reduce_nothing(self, num_begun: int) -> None:
        """Nothing to do."""

    def settle_aborted(self) -> None:
        """Nothing to do."""

    def find_unfinished(self) -> Exception | None:
        """Nothing that this could know."""
        return None

    def find_unclippable(self) -> Exception | None:
        """They can."""
        return None

    def has_unreduced(self) -> bool:
        """No: that's somebody else's business."""
        return False

    def reduce(self, call: str) -> None:
        """Nothing to do."""

    def owned_stretches(self) -> list[torch.Tensor]:
        """See :class:`Gradients`."""
        return [*self._whole(own=True), *(own for own, _ in self._divided())]

    def others(self) -> list[torch.Tensor]:
        """See :class:`Gradients`."""
        return [*self._whole(own=False), *(part for _, rest in self._divided() for part in rest)]

    def _whole(self, *, own: bool) -> list[torch.Tensor]:
        return [
            parameter.grad
            for parameter, owner in zip(self._parameters, self._owners, strict=True)
            if owner != IN_PARTS
            and (owner == self._group_rank) == own
            and parameter.grad is not None
        ]

    def _divided(self) -> Iterator[tuple[torch.Tensor, Sequence[torch.Tensor]]]:
        """Of each gradient whose parameter is divided: what this rank owns, and the rest."""
        for index, (parameter, owner) in enumerate(
            zip(self._parameters, self._owners, strict=True)
        ):
            gradient = parameter.grad
            if owner != IN_PARTS or gradient is None or self._plan is None:
                continue
            if isinstance(gradient, PartialGradient):
                if gradient.own is not None:
                    yield gradient.own, ()
                continue
            start, end = self._plan.cuts_of(index)[self._group_rank : self._group_rank + 2]
            spec = self._plan.specs[index]
            flat = in_memory_order(gradient, spec)
            if gradient.stride() == spec.stride:
                yield flat[start:end], [part for part in (flat[:start], flat[end:]) if part.numel()]
            else:  # `flat` is a copy, right for a norm: what is scaled is the gradient itself
                yield flat[start:end], [gradient]

    def missing_parts(self) -> list[int]:
        """See :class:`Gradients`."""
        return [
            index
            for index, (parameter, owner) in enumerate(
                zip(self._parameters, self._owners, strict=True)
            )
            if owner == IN_PARTS and parameter.grad is None
        ]

    @property
    def _owners(self) -> Sequence[GroupRank]:
        return () if self._plan is None else self._plan.partition.owners

    def forget(self) -> None:
        """Nothing to do."""

    def no_sync(self) -> AbstractContextManager[None]:
        """See :class:`Gradients`."""
        raise RuntimeError(
            "no_sync() needs shard_gradients=True; where DistributedDataParallel averages the "
            "gradients, use its no_sync()"
        )

    def describe(self) -> Json:
        """Nothing of its own."""
        return {"shard_gradients": False}

    def closure_returned(self, error: Exception | None) -> None:
        """Nothing to tell: whoever averages the gradients has to."""
        if error is not None:
            raise error

    def refuse(self, parameters: Sequence[torch.Tensor]) -> None:  # noqa: ARG002 - it takes any
        """Raises ``ValueError`` if a module was given."""
        if self._module is not None:
            raise ValueError(
                "module= is used with shard_gradients=True only; without it, "
                "DistributedDataParallel takes care of the module"
            )


class ReducedToOwners(GradientReducer):
    """Gradients are reduced to their owners when backward ends; others see a part of nothing.

    Args:
        communicator: carries them.
        agreement: settles each reduction.
        module: whose buffers follow those of one rank, if given. Where buckets are stepped while
            backward goes on, its forward shows what must wait for the end.
        announce: refers to what is called before backward reduces, by ranks that have gradients.
        during_backward: whether buckets are sent while backward goes on; ``None`` to choose.
        stage: steps each bucket during backward; ``None`` to keep the averages for a step after it.

    Attributes:
        divides_by_world_size: whether joined ranks count as having contributed zeros.
    """

    can_follow = True
    reduces_to_owners = True

    def __init__(
        self,
        communicator: Communicator,
        agreement: Agreement,
        module: nn.Module | None,
        announce: WeakMethod[Callable[[], None]],
        *,
        during_backward: bool | None,
        stage: Stage | None = None,
    ) -> None:
        super().__init__(
            communicator,
            agreement,
            CAPACITY_BYTES if stage is None else STEPPED_CAPACITY_BYTES,
            during_backward=during_backward,
            num_kept=NUM_KEPT if stage is None else NUM_KEPT * 2,  # of half the size
            stage=stage,
        )
        self._announce = announce
        self._module = module
        self._checkpointed_uses: CheckpointedUses | None = None
        self._source = GroupRank(0)
        self.divides_by_world_size = True

    def describe(self) -> Json:
        """How, and what is broadcast of the module: the ranks' must fit together."""
        how: dict[str, Json] = {
            "shard_gradients": True,
            "overlap_with_ddp": self._stage is not None,
            "overlap_with_backward": bool(self._during_backward),
        }
        if self._module is None:
            return {**how, "module": None}
        named = (
            *self._module.named_parameters(remove_duplicate=False),
            *self._module.named_buffers(remove_duplicate=False),
        )
        tensors = [
            {"name": name, "shape": list(tensor.shape), "dtype": str(tensor.dtype)}
            for name, tensor in named
        ]
        return {**how, "module": tensors}

    def refuse(self, parameters: Sequence[torch.Tensor]) -> None:
        """Raises ``TypeError`` for a ``DTensor``, whose gradient would have to be one too."""
        for index, parameter in enumerate(parameters):
            if is_dtensor(parameter):
                raise TypeError(
                    f"parameter {index} is a DTensor, whose gradient shard_gradients=True can't "
                    "reduce; leave it False and let DistributedDataParallel or the model's own "
                    "parallelism average the gradients"
                )

    def watch(
        self,
        parameters: Sequence[torch.Tensor],
        plan: ShardingPlan,
        layouts: Sequence[BucketLayout],
    ) -> None:
        """Brings them to rank 0's values, as DDP does at construction, and watches them."""
        tensors = dict.fromkeys(
            parameters[len(self.parameters) :]
            if self._module is None or self.parameters
            else [*parameters, *self._module.parameters(), *self._module.buffers()]
        )
        replicate_(self._communicator, tensors, GroupRank(0), CAPACITY_BYTES)
        self.add(parameters, plan.specs, layouts)
        if self._module is not None and self._steps_early() and self._checkpointed_uses is None:
            self._checkpointed_uses = CheckpointedUses(self._module, WeakMethod(self._postpone))

    def _steps_early(self) -> bool:
        return isinstance(self._schedule, StepInBackward) and self._schedule.hears_ready

    def _postpone(self, used: Sequence[torch.Tensor]) -> None:
        assert isinstance(self._schedule, StepInBackward)  # noqa: S101 - narrows a type
        among = set(used)
        for index, parameter in enumerate(self.parameters):
            if parameter in among:
                self._schedule.postpone(index)

    def divide_among(self, active: Sequence[GroupRank]) -> None:
        """Notes which ranks have inputs: one of them has the buffers, and these may be the divisor."""
        self._source = active[0]
        self.divisor = (
            self._communicator.members.world_size if self.divides_by_world_size else len(active)
        )

    def reduce_nothing(self, num_begun: int) -> None:
        """Takes part in a reduction after a backward pass of other ranks."""
        self.backward_pass.num_begun = num_begun
        self._schedule.begin(syncs=True)
        self._schedule.end()

    def find_unclippable(self) -> Exception | None:
        """They can."""
        return None

    def others(self) -> list[torch.Tensor]:
        """None: they are partial."""
        return []

    def missing_parts(self) -> list[int]:
        """None that matter: the ranks agree on them when they reduce."""
        return []

    def before_backward_reduces(self) -> None:
        """Tells the ranks without inputs."""
        if (announce := self._announce()) is not None:
            announce()

    def after_reduction(self) -> None:
        """Brings the module's buffers in step, as DDP does before the next forward."""
        if self._module is None:
            return
        # Autograd doesn't see these writes: what it saved of a normalisation's statistics it reads
        # in evaluation mode only, when they don't change, but it would refuse a second backward.
        buffers = [buffer.data for buffer in self._module.buffers()]
        replicate_(self._communicator, buffers, self._source, CAPACITY_BYTES)
