"""Where the gradients come from that a sharded optimizer steps on.

Either something else averages them on every rank, usually ``DistributedDataParallel``, or the
optimizer reduces them to their owners itself.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from tensorplay.distributed.optim._core.agreement import (
    Agreement,
    PeerError,
    RankDisagreementError,
)
from tensorplay.distributed.optim._core.bucket_layout import BucketLayout
from tensorplay.distributed.optim._core.collectives import CommunicationError, Communicator
from tensorplay.distributed.optim._core.gradient_reducer import GradientReducer
from tensorplay.distributed.optim._core.local_shard import is_dtensor
from tensorplay.distributed.optim._core.ranks import GroupRank
from tensorplay.distributed.optim._core.replication import replicate_
from tensorplay.distributed.optim._core.tagged_json import Json
from tensorplay.distributed.optim.zero.sharding_plan import CAPACITY_BYTES, ShardingPlan


class Gradients(Protocol):
    """What :class:`ZeroRedundancyOptimizer` needs of either source."""

    def add(
        self,
        parameters: Sequence[torch.Tensor],
        plan: ShardingPlan,
        layouts: Sequence[BucketLayout],
    ) -> None:
        """Takes care of further parameters. Every rank must call it."""

    def find_unfinished(self) -> Exception | None:
        """An error if backward didn't get as far as it should have."""

    def has_unreduced(self) -> bool:
        """Whether there are gradients on this rank that :meth:`reduce` should average first."""

    def reduce(self) -> None:
        """Averages these. Every rank must call it."""

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
        module: must be ``None``: whoever averages the gradients takes care of the module.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self._module = module

    def add(
        self,
        parameters: Sequence[torch.Tensor],
        plan: ShardingPlan,
        layouts: Sequence[BucketLayout],
    ) -> None:
        """Nothing to do."""

    def find_unfinished(self) -> Exception | None:
        """Nothing that this could know."""
        return None

    def has_unreduced(self) -> bool:
        """No: that's somebody else's business."""
        return False

    def reduce(self) -> None:
        """Nothing to do."""

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


class ReducedToOwners:
    """Gradients are reduced to their owners when backward ends; others see a part of nothing.

    Args:
        communicator: carries them.
        agreement: settles each reduction.
        module: whose buffers follow those of group rank 0, if given.
    """

    def __init__(
        self, communicator: Communicator, agreement: Agreement, module: nn.Module | None
    ) -> None:
        self._communicator = communicator
        self._agreement = agreement
        self._module = module
        self.reducer = GradientReducer(
            communicator, agreement, CAPACITY_BYTES, after=self._replicate_buffers
        )

    def describe(self) -> Json:
        """What is broadcast of the module: the ranks' must fit together."""
        if self._module is None:
            return {"shard_gradients": True, "module": None}
        named = (
            *self._module.named_parameters(remove_duplicate=False),
            *self._module.named_buffers(remove_duplicate=False),
        )
        tensors = [
            {"name": name, "shape": list(tensor.shape), "dtype": str(tensor.dtype)}
            for name, tensor in named
        ]
        return {"shard_gradients": True, "module": tensors}

    def closure_returned(self, error: Exception | None) -> None:
        """Settles that the closure has succeeded on every rank; every rank must call it."""
        if isinstance(error, (PeerError, RankDisagreementError, CommunicationError)):
            raise error  # every rank knows
        self._agreement.settle("step (closure)", error=error)

    def refuse(self, parameters: Sequence[torch.Tensor]) -> None:
        """Raises ``TypeError`` for a ``DTensor``, whose gradient would have to be one too."""
        for index, parameter in enumerate(parameters):
            if is_dtensor(parameter):
                raise TypeError(
                    f"parameter {index} is a DTensor, whose gradient shard_gradients=True can't "
                    "reduce; leave it False and let DistributedDataParallel or the model's own "
                    "parallelism average the gradients"
                )

    def add(
        self,
        parameters: Sequence[torch.Tensor],
        plan: ShardingPlan,
        layouts: Sequence[BucketLayout],
    ) -> None:
        """Brings them to rank 0's values, as DDP does at construction, and watches them."""
        tensors = dict.fromkeys(
            parameters[len(self.reducer.parameters) :]
            if self._module is None or self.reducer.parameters
            else [*parameters, *self._module.parameters(), *self._module.buffers()]
        )
        replicate_(self._communicator, tensors, GroupRank(0), CAPACITY_BYTES)
        self.reducer.add(parameters, plan.specs, layouts)

    def find_unfinished(self) -> Exception | None:
        """An error after a backward pass that ended in an exception."""
        if not self.reducer.backward_pass.settle_aborted():
            return None
        return RuntimeError(
            "the last backward pass ended in an exception, so that its gradients were not reduced; "
            "call zero_grad() and repeat forward and backward before step()"
        )

    def has_unreduced(self) -> bool:
        """Whether backward passes in ``no_sync()``, or the caller, left gradients here."""
        return self.reducer.has_own_gradients()

    def reduce(self) -> None:
        """See :class:`Gradients`."""
        self.reducer.reduce("step (reduce)")

    def forget(self) -> None:
        """See :class:`Gradients`."""
        self.reducer.forget()

    def no_sync(self) -> AbstractContextManager[None]:
        """See :class:`Gradients`."""
        return self.reducer.no_sync()

    def _replicate_buffers(self) -> None:
        if self._module is None:
            return
        # Autograd doesn't see these writes: what it saved of a normalisation's statistics it reads
        # in evaluation mode only, when they don't change, but it would refuse a second backward.
        buffers = [buffer.data for buffer in self._module.buffers()]
        replicate_(self._communicator, buffers, GroupRank(0), CAPACITY_BYTES)
