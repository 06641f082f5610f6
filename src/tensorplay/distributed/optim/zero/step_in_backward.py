"""The three verbs of a sharded step, bucket by bucket during backward, over our own reduction.

Each bucket is reduced to its owners; an owner steps what it owns of it and frees the gradients; and
the bucket's parameters are gathered at once. So a bucket of parameters is one of gradients too, or
holds several of these, and is gathered when all have been stepped.
"""

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from tensorplay.distributed.optim._core.bucket_step import BucketStepper
from tensorplay.distributed.optim._core.collectives import Communicator, Waitable
from tensorplay.distributed.optim._core.flat_buffer import KeptStorages
from tensorplay.distributed.optim._core.gradient_buckets import assign
from tensorplay.distributed.optim._core.parameter_checks import describe_options
from tensorplay.distributed.optim._core.ranks import GroupRank
from tensorplay.distributed.optim._core.tagged_json import Json
from tensorplay.distributed.optim._core.transfers import Transfer
from tensorplay.distributed.optim._core.wrapped_optimizer import (
    WrappedOptimizer,
    all_parameters,
    copy_options_,
    is_plain_torch,
)
from tensorplay.distributed.optim.zero.gather_parameters import ParameterBuckets
from tensorplay.distributed.optim.zero.gradients import Gradients


class StepAndGather:
    """Steps what this rank owns of a bucket; a ``Stage`` of the core's ``step_schedule.py``.

    Args:
        communicator: carries the gathers.
    """

    steps_everywhere = False

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def attach(
        self,
        optimizer: WrappedOptimizer,
        find_problem: "weakref.WeakMethod[Callable[[], RuntimeError | None]]",
        parameters: Sequence[torch.Tensor],
        buckets: ParameterBuckets,
    ) -> None:
        """Gets to know the optimizer, which isn't complete when this is made.

        Args:
            optimizer: steps with ``optim`` and has the options in ``param_groups``.
            find_problem: returns why it can't step.
            parameters: all parameters by index; the list may grow.
            buckets: those in which parameters are gathered; each bucket of gradients lies within one.
        """
        self._optimizer = weakref.ref(optimizer)
        self._find_problem = find_problem
        self._parameters = parameters
        self._buckets = buckets
        self._number_of: dict[int, int] = {}
        self._stepper = BucketStepper(optimizer.optim)
        # So that a GradScaler calls step() in any case, which refuses.
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # noqa: SLF001 - where GradScaler looks

    def refresh(self) -> None:
        """Groups or state of the local optimizer have been replaced, or parameters added."""
        self._stepper.refresh()

    def describe(self) -> dict[str, Json]:
        """See :class:`Stage`: the options of all groups."""
        optimizer = self._optimizer()
        return {} if optimizer is None else describe_options(optimizer.param_groups)

    def find_problem(self) -> Exception | None:
        """See :class:`Stage`."""
        find_problem = self._find_problem()
        return None if find_problem is None else find_problem()

    def begin(self) -> None:
        """See :class:`Stage`: what schedulers have changed counts."""
        optimizer = self._optimizer()
        layouts = [bucket.layout for bucket in self._buckets.buckets]
        self._num_missing = [len(layout.slots) for layout in layouts]
        if len(self._number_of) != len(self._parameters):  # first, or some were added
            self._number_of = {
                slot.parameter: number for number, each in enumerate(layouts) for slot in each.slots
            }
        if optimizer is not None:
            copy_options_(optimizer.param_groups, optimizer.optim.param_groups)
            optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001 - a scheduler looks for it

    def step(self, averaged: Sequence[tuple[Transfer, set[int]]]) -> None:
        """See :class:`Stage`."""
        owned: list[torch.Tensor] = []
        for transfer, used in averaged:
            if transfer.result is None:
                continue
            start = transfer.bucket.layout.cuts[self._communicator.members.group_rank]
            gradients = transfer.bucket.views(transfer.result, start)
            if not used.issuperset(gradients):
                gradients = {index: each for index, each in gradients.items() if index in used}
            stepped = list(map(self._parameters.__getitem__, gradients))
            assign(stepped, "grad", gradients.values())
            owned += stepped
        self._step(owned)

    def step_empty(self, parameters: list[torch.Tensor]) -> None:
        """See :class:`Stage`."""
        self._step([p for p in parameters if self._stepper.knows(p)])

    def _step(self, parameters: list[torch.Tensor]) -> None:
        if not parameters:
            return
        optimizer = self._optimizer()
        is_plain = optimizer is not None and is_plain_torch(optimizer.optim)
        storages = KeptStorages([] if is_plain else parameters)
        try:
            self._stepper.step(parameters)
        finally:
            misfit = storages.restore_()
            assign(parameters, "grad", itertools.repeat(None))
        if misfit is not None:
            raise RuntimeError(
                f"the step gave a parameter of shape {tuple(misfit.shape)} another shape, dtype or "
                "device; it must keep them, so that every rank can receive the new values"
            )

    def gather(self, transfer: Transfer, used: set[int]) -> Waitable | None:  # noqa: ARG002 - which are used is known to the owner only
        """See :class:`Stage`. Autograd gets to know that others' parameters change."""
        layout = transfer.bucket.layout
        number = self._number_of[layout.slots[0].parameter]
        self._num_missing[number] -= len(layout.slots)
        if self._num_missing[number]:
            return None
        bucket = self._buckets.buckets[number]
        foreign = bucket.layout.slots_except(GroupRank(self._communicator.members.group_rank))
        with torch.no_grad():
            increment_version([self._parameters[slot.parameter] for slot in foreign])
        return bucket.launch(self._communicator)

    def end(self, *, succeeded: bool) -> None:
        """See :class:`Stage`. Every rank's optimizer counts the iteration, whatever it owns."""
        if succeeded:
            self._stepper.step_groups()
        self._stepper.end_iteration()
        optimizer = self._optimizer()
        if optimizer is not None:
            copy_options_(optimizer.optim.param_groups, optimizer.param_groups)

    # After backward

    def stand_in_for_step(
        self,
        optimizer: WrappedOptimizer,
        gradients: Gradients,
        closure: Callable[[], Any] | None,
        kwargs: Mapping[str, Any],
    ) -> Any:
        """What ``step()`` does where backward has stepped: it calls ``closure``. No communication.

        A step without effect by which ``torch.distributed.checkpoint`` has state made is one.

        Raises:
            RuntimeError: if there are gradients that backward hasn't used, or a ``GradScaler`` calls.
            TypeError: if there are arguments for the local optimizer's ``step``.
        """
        if "grad_scale" in vars(optimizer) or "found_inf" in vars(optimizer):
            for name in ("grad_scale", "found_inf"):
                vars(optimizer).pop(name, None)
            raise RuntimeError(
                "GradScaler can't be used with overlap_with_ddp=True: backward has updated the "
                "parameters already, with scaled gradients, and before anybody knew whether all are "
                "finite. Train in bfloat16, which needs no scaling, or leave overlap_with_ddp False"
            )
        if kwargs:
            raise TypeError(
                f"step() got {', '.join(kwargs)}, but with overlap_with_ddp=True backward has stepped "
                "already; leave it False to pass arguments to the local optimizer's step"
            )
        gradients.settle_aborted()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        elif not _make_state(optimizer) and any(p.grad is not None for p in self._parameters):
            raise RuntimeError(
                "step() finds gradients that backward hasn't used: they were accumulated in "
                "no_sync(), or assigned. overlap_with_ddp=True has parameters updated by the next "
                "backward outside of no_sync(), with the sum; run the last backward of an "
                "accumulation outside, or call zero_grad() to drop them"
            )
        return loss


def _make_state(optimizer: WrappedOptimizer) -> bool:
    """Makes state by a step without effect, if that is what is asked for."""
    groups = optimizer.param_groups
    if optimizer.state or any(group.get("lr", 1.0) != 0 for group in groups):
        return False
    gradients = [p.grad for p in all_parameters(groups) if p.grad is not None]
    if not gradients or any(gradient.any() for gradient in gradients):
        return False
    copy_options_(groups, optimizer.optim.param_groups)
    optimizer.optim.step()
    return True
