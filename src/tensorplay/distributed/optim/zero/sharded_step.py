"""The step after backward: this rank steps what it owns, then all get what the others have stepped."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.optim import Optimizer

from tensorplay.distributed.optim._core.agreement import Agreement
from tensorplay.distributed.optim._core.collectives import (
    CommunicationError,
    Communicator,
    Waitable,
)
from tensorplay.distributed.optim._core.flat_buffer import KeptStorages
from tensorplay.distributed.optim._core.wrapped_optimizer import (
    WrappedOptimizer,
    copy_options_,
    is_plain_torch,
    step_inner,
)
from tensorplay.distributed.optim.zero.forward_gather import ForwardGather
from tensorplay.distributed.optim.zero.gradients import Gradients
from tensorplay.distributed.optim.zero.local_optimizer import LocalGroups
from tensorplay.distributed.optim.zero.sharded_parameters import ShardedParameters
from tensorplay.distributed.optim.zero.step_stages import StagedGroups

Closure = Callable[[], Any]


class ShardedStep:
    """What :meth:`ZeroRedundancyOptimizer.step` does when the ranks have agreed to.

    Args:
        communicator: carries the parameters.
        agreement: settles whether every rank's update has succeeded.
        sharded: all parameters, with slices and buckets.
        local: what the local optimizer steps of them.
        forward_gather: whose forward waits for the parameters; ``None`` to wait at once.
        overlaps: whether what has been stepped is sent while the rest is stepped; ``None``: where
            parameters are on an accelerator.
    """

    def __init__(
        self,
        communicator: Communicator,
        agreement: Agreement,
        sharded: ShardedParameters,
        local: LocalGroups,
        forward_gather: ForwardGather | None,
        *,
        overlaps: bool | None,
    ) -> None:
        self._communicator = communicator
        self._agreement = agreement
        self._sharded = sharded
        self._local = local
        self._forward_gather = forward_gather
        self._overlaps = overlaps
        self._staged: tuple[Any, StagedGroups] | None = None

    def run(
        self,
        optimizer: WrappedOptimizer,
        gradients: Gradients,
        closure: Closure | None,
        kwargs: dict[str, Any],
    ) -> Any:
        """Steps and gathers; every rank must call it.

        Args:
            optimizer: the user's, of which the inner one steps.
            gradients: where they come from; they are averaged, unless the closure makes them.
            closure: re-evaluates the model.
            kwargs: for the local optimizer's ``step``.

        Returns:
            What the local optimizer's ``step`` returns.

        Raises:
            Exception: if a rank's update failed; on every rank, when the parameters are equal again.
        """
        if closure is None and not kwargs and self.has_stages(optimizer.optim):
            self._step_and_gather_in_stages(optimizer)
            return None
        loss, error = self._step(optimizer, gradients, closure, kwargs)
        with self._recording(optimizer):
            self._gather(error)
        return loss

    def has_stages(self, local: Optimizer) -> bool:
        """Whether what ``local`` has stepped is sent while it steps the rest."""
        if self._overlaps is None:  # as reductions overlap with backward
            self._overlaps = any(p.device.type != "cpu" for p in self._sharded.parameters)
        return (
            self._overlaps
            and self._forward_gather is None
            and self._communicator.members.world_size > 1
            and len(self._sharded.buckets.stages(trainable=True)) > 1
            and is_plain_torch(local)
        )

    def _step(
        self,
        optimizer: WrappedOptimizer,
        gradients: Gradients,
        closure: Closure | None,
        kwargs: dict[str, Any],
    ) -> tuple[Any, Exception | None]:
        def live_closure() -> Any:
            copy_options_(optimizer.optim.param_groups, optimizer.param_groups)
            error, loss = None, None
            try:
                loss = closure()  # type: ignore[misc] # mypy can't check what is unpacked or optional here
            except Exception as problem:  # noqa: BLE001 - other ranks may wait for our backward
                error = problem
            gradients.closure_returned(error)
            copy_options_(optimizer.param_groups, optimizer.optim.param_groups)
            self._sharded.slices.take_gradients_(optimizer.optim)
            return loss

        storages = KeptStorages([])
        error: Exception | None = None
        try:
            if closure is None:
                self._sharded.slices.take_gradients_(optimizer.optim)
            if closure is not None or not is_plain_torch(optimizer.optim):
                storages = KeptStorages(self._local.memories(optimizer.optim))
            loss = step_inner(optimizer.optim, live_closure if closure else None, kwargs)
            copy_options_(optimizer.optim.param_groups, optimizer.param_groups)
        except Exception as problem:  # noqa: BLE001 - the other ranks wait for our parameters
            loss, error = None, problem
        self._sharded.slices.drop_gradients_()
        misfit = storages.restore_()
        if misfit is not None and error is None:
            error = self._sharded.describe_misfit(misfit, optimizer.optim, optimizer.param_groups)
        return loss, error

    @torch.no_grad()
    def _step_and_gather_in_stages(self, optimizer: WrappedOptimizer) -> None:
        """What :meth:`_step` and :meth:`_gather` do, but for several parts in turn."""
        slices, buckets = self._sharded.slices, self._sharded.buckets
        error: Exception | None = None
        launched: list[tuple[int, Waitable]] = []
        try:
            slices.take_gradients_(optimizer.optim)
            groups = self._staged_groups(optimizer.optim)
        except Exception as problem:  # noqa: BLE001 - the other ranks wait for our parameters
            error = problem
        for stage, numbers in enumerate(buckets.stages(trainable=True)):
            if error is None:
                try:
                    groups.step(optimizer.optim, stage)
                except Exception as problem:  # noqa: BLE001 - as above
                    error = problem
            with self._recording(optimizer):
                launched += [(n, buckets.launch(n, self._communicator)) for n in numbers]
        slices.drop_gradients_()
        if error is None:
            copy_options_(optimizer.optim.param_groups, optimizer.param_groups)
        with self._recording(optimizer):
            self._gather(error, launched)

    def _staged_groups(self, local: Optimizer) -> StagedGroups:
        sharded, stages = self._sharded, self._sharded.buckets.stages(trainable=True)
        formed = len(local.param_groups), sharded.slices.num_formed
        if self._staged is None or self._staged[0] != formed:
            number_of = {
                slot.parameter: stage
                for stage, numbers in enumerate(stages)
                for number in numbers
                for slot in sharded.buckets.buckets[number].layout.slots
            }
            stage_of = {sharded.parameters[index]: stage for index, stage in number_of.items()}
            stage_of.update(
                (each.tensor, number_of[each.pieces[0].parameter]) for each in sharded.slices.slices
            )
            self._staged = formed, StagedGroups(local.param_groups, stage_of, len(stages))
        return self._staged[1]

    @torch.no_grad()
    def _gather(
        self, error: Exception | None, launched: Sequence[tuple[int, Waitable]] | None = None
    ) -> None:
        """Gathers the trainable buckets, and the frozen ones if one was thawed since the plan.

        Args:
            error: what went wrong on this rank.
            launched: those gathers that are under way; all trainable ones, or ``None``.
        """
        failure, thawed = None, int(self._owned_frozen_was_thawed())
        settlement = self._agreement.start("step (update)", error=error, flag=thawed)
        if launched is not None:
            self._sharded.buckets.finish_all(launched)
        elif self._forward_gather is None:
            self._sharded.buckets.gather(self._communicator, trainable=True)
        try:
            thawed = settlement.wait()
        except CommunicationError:
            raise
        except Exception as problem:  # noqa: BLE001 - raised below, when the replicas agree again
            failure, thawed = problem, 1
        if self._forward_gather is not None:  # what ranks agree on would queue up behind it
            self._forward_gather.launch(self._communicator, frozen=bool(thawed))
        elif thawed:
            self._sharded.buckets.gather(self._communicator, trainable=False)
        if failure:
            raise failure

    def _owned_frozen_was_thawed(self) -> bool:
        rank = self._communicator.members.group_rank
        frozen = (
            self._sharded.parameters[slot.parameter]
            for layout in self._sharded.plan.layouts
            if not layout.trainable
            for slot in layout.slots_of(rank)
        )
        # The step may have dropped the gradient, and a gradient needs no `requires_grad`.
        return any(p.requires_grad or p.grad is not None for p in frozen)

    @staticmethod
    def _recording(optimizer: WrappedOptimizer) -> AbstractContextManager[None]:
        return record_function(f"{type(optimizer).__name__}.gather")
