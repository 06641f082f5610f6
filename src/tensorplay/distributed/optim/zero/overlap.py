"""The update of an iteration in pieces: each bucket of gradients is stepped and gathered by itself.

Whoever reduces gradients hands over each bucket when its reduction has been launched, and says when
it is to be *completed*: this rank waits for the averages, steps its own parameters among them, and
launches the gather of all of them. When backward ends, the gathers are awaited.

Note [One order]
    Buckets are completed in the order in which they were handed over, and at moments that are the
    same on every rank; never because a reduction happens to be done here. So all ranks issue the
    same collectives in the same order.

Note [Settled twice]
    Before the first bucket is stepped the ranks settle what ``step()`` settles: options, and that
    nothing was replaced. If they can't, nothing is stepped in this backward. When it ends, they
    settle whether every rank's update has succeeded; one that has failed went on with the reductions
    and gathers, so that the others didn't wait and the replicas are equal.

Note [Weights that backward still needs]
    A weight may be read by backward after its own gradient is complete, if it was detached in the
    forward. Its version is raised before the gather may write to it, on every rank, so that autograd
    refuses to go on instead of computing something else.
"""

import itertools
import operator
from collections import deque
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.distributed.algorithms.join import JoinHook
from torch.optim import Optimizer

from tensorplay.distributed.optim._core.agreement import Agreement, Settlement
from tensorplay.distributed.optim._core.bucket_layout import BucketLayout, layout_buckets
from tensorplay.distributed.optim._core.bucket_step import BucketStepper
from tensorplay.distributed.optim._core.collectives import (
    CommunicationError,
    Communicator,
    Waitable,
)
from tensorplay.distributed.optim._core.flat_buffer import KeptStorages
from tensorplay.distributed.optim._core.local_shard import (
    any_is_dtensor,
    is_dtensor,
    local_memory,
)
from tensorplay.distributed.optim._core.ranks import GroupRank
from tensorplay.distributed.optim._core.tagged_json import Json
from tensorplay.distributed.optim.zero.gather_parameters import (
    ParameterBucket,
    ParameterBuckets,
    ResidentStretch,
    resident_stretches,
)
from tensorplay.distributed.optim.zero.gradients import AveragedElsewhere
from tensorplay.distributed.optim.zero.sharding_plan import (
    ALONE_BYTES,
    ShardingPlan,
    staged_capacity,
)

_INSTEAD = "build the optimizer with overlap_with_ddp=False, and call step() after backward"


class ReducedBucket(Protocol):
    """Gradients whose reduction has been launched."""

    parameters: Sequence[torch.Tensor]

    def wait(self) -> Sequence[torch.Tensor | None]:
        """The averaged gradient of each parameter; ``None`` where no rank has one."""


class OptimizerSide(NamedTuple):
    """What an overlapped step needs of the optimizer.

    Attributes:
        local: returns the local optimizer.
        settle: begins to settle with all ranks, given what is wrong on this one, that a step may
            begin, and copies the options inward; the flag says whether this rank has run out of
            inputs.
        adopt: copies the options outward after a step.
        describe_misfit: an error for a parameter that its step has given other metadata.
    """

    local: Callable[[], Optimizer]
    settle: Callable[[Exception | None, bool], Settlement]
    adopt: Callable[[], None]
    describe_misfit: Callable[[torch.Tensor], Exception]


class OverlappedStep:
    """Steps and gathers buckets one by one, in the order of their reductions.

    Args:
        communicator: carries the parameters.
        agreement: settles that all ranks have stepped.
        optimizer: what steps.
    """

    def __init__(
        self, communicator: Communicator, agreement: Agreement, optimizer: OptimizerSide
    ) -> None:
        self._communicator = communicator
        self._agreement = agreement
        self._optimizer = optimizer
        self._stepper: BucketStepper | None = None
        self._stepped_groups: list[dict[str, Any]] = []
        self._stepped_state: Any = None
        self._parameters: Sequence[torch.Tensor] = ()
        self._index_of: dict[int, int] = {}
        self._owners: Sequence[GroupRank] = ()
        self._reduced: frozenset[int] | None = None
        self._left_changeable: list[tuple[torch.Tensor, int, int]] = []
        self._reset()
        self._broken: Exception | None = None
        self._has_stepped = False

    def _reset(self) -> None:
        self._pending: deque[ReducedBucket] = deque()
        self._settlement: Settlement | _Settled | None = None
        self._gathers: deque[tuple[int, Waitable]] = deque()
        """Under way: how many bytes, and what to await."""
        self._updated: list[torch.Tensor] = []
        self._refusal: Exception | None = None
        self._error: Exception | None = None
        self._is_open = self._is_settled = self._has_joined = self._has_stepped_part = False

    def watch(self, parameters: Sequence[torch.Tensor], plan: ShardingPlan) -> None:
        """Learns all parameters, and who owns them."""
        self._parameters, self._plan = parameters, plan
        self._index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._owners = plan.partition.owners
        self._has_dtensors = any_is_dtensor(parameters)
        memories = [local_memory(parameter) for parameter in parameters]
        self._buckets = ParameterBuckets(memories, self._communicator.members.group_rank)
        self._gathered_in: dict[tuple[int, ...], list[ParameterBucket]] = {}
        self._places: dict[tuple[int, ...], tuple[tuple[int, ...], list[int]]] = {}

    def attach(self, reduced: Sequence[torch.Tensor]) -> None:
        """From now on the gradients of these parameters, and no others, are handed over.

        Raises:
            ValueError: if a parameter that requires gradients is not among them.
        """
        before, self._reduced = self._reduced, frozenset(map(id, reduced))
        error = self._find_unreduced()
        if error is not None:
            self._reduced = before
            raise error
        self._reset()
        self._broken = None

    def begin(self, *, joined: bool) -> None:
        """Before the first bucket of a backward pass; ``joined`` if it's another rank's."""
        if self._is_open:
            self._abandon()
        self._is_open, self._has_joined = True, joined

    def add(self, bucket: ReducedBucket) -> None:
        """The reduction of a bucket has been launched."""
        self._pending.append(bucket)
        if self._settlement is None:  # Note [Settled twice]; it is awaited when a bucket is stepped
            problem = self._broken or self._find_unreduced()
            try:
                self._settlement = self._optimizer.settle(problem, self._has_joined)
            except CommunicationError:
                raise
            except Exception as refusal:  # noqa: BLE001 - raised on every rank when backward ends
                self._refusal, self._settlement = refusal, _Settled()

    @torch.no_grad()
    def complete(self, *, but: int = 0) -> None:
        """Completes buckets until only the last ``but`` are left (Note [One order])."""
        while len(self._pending) > but:
            self._complete(self._pending.popleft())

    @torch.no_grad()
    def end(self) -> None:
        """Completes what is left, and waits until all parameters are there.

        Raises:
            RuntimeError: what the settling at the beginning raised, or the step of a bucket on some
                rank; on every rank.
        """
        if not self._is_open:
            return
        self.complete()
        refusal, updated = self._refusal, self._updated
        if refusal is not None:
            self._reset()
            raise refusal
        error = self._error or self._find_trained_outside(set(map(id, updated)))
        try:
            stepper = self._stepper_of_now()
            if not self._has_stepped_part and error is None:
                stepper.step([])  # for what counts steps
            stepper.end_iteration()
            self._optimizer.adopt()
        except Exception as problem:  # noqa: BLE001 - the other ranks must hear of it
            error = error or problem
        settlement = self._agreement.start("backward (update)", error=error)
        self._left_changeable = _versions_of_gradients(updated)
        self._wait_for_gathers()
        self._reset()
        self._has_stepped = True
        settlement.wait()

    def step_called(
        self, closure: Callable[[], Any] | None, kwargs: dict[str, Any], *, scales: bool
    ) -> None:
        """What ``step()`` does: nothing, if it has been done.

        Args:
            closure: what the caller passed.
            kwargs: likewise.
            scales: whether the caller is a ``GradScaler``.

        Raises:
            RuntimeError: if the caller expects something that hasn't been done.
            ValueError, TypeError: for a closure and other arguments.
        """
        if self._is_open:
            self._abandon()
        error = self._broken or _find_misuse(closure, kwargs, scales=scales)
        if error is None and not self._has_stepped:
            error = RuntimeError(
                "nothing has been updated: with overlap_with_ddp=True parameters are updated inside "
                "backward, by a communication hook of DistributedDataParallel. Register it with "
                "model.register_comm_hook(None, hook_with_zero_step_interleaved(allreduce_hook, "
                "model, optimizer)), and call step() after backward, if at all"
            )
        if error is None:
            error = self._find_changed_gradient()
        if error is not None:
            raise error

    def find_broken(self) -> Exception | None:
        """An error after a backward pass that ended half-way."""
        if self._is_open:
            self._abandon()
        return self._broken

    def _complete(self, bucket: ReducedBucket) -> None:
        self._settle()
        gradients = bucket.wait()
        if self._refusal is not None:
            return
        indices, owned = self._places_of(bucket.parameters)
        ready = [
            (bucket.parameters[place], gradient)
            for place in owned
            if (gradient := gradients[place]) is not None
        ]
        if ready and self._error is None:
            self._step(ready)
        self._gather(indices)

    def _places_of(self, parameters: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], list[int]]:
        """The indices of a bucket's parameters, as far as they are ours, and where owned ones stand."""
        key = tuple(map(id, parameters))
        if key not in self._places:
            owner = self._communicator.members.group_rank
            indices = [self._index_of.get(identity) for identity in key]
            owned = [
                place
                for place, index in enumerate(indices)
                if index is not None and self._owners[index] == owner
            ]
            self._places[key] = tuple(index for index in indices if index is not None), owned
        return self._places[key]

    def _settle(self) -> None:
        """Note [Settled twice]."""
        if self._is_settled or self._settlement is None:
            return
        self._is_settled = True
        try:
            self._settlement.wait()
        except CommunicationError:
            raise
        except Exception as problem:  # noqa: BLE001 - raised on every rank when backward ends
            self._refusal = problem

    def _step(self, ready: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Steps parameters with these gradients; their own ``.grad`` stays."""
        members = [parameter for parameter, _ in ready]
        before = [parameter.grad for parameter in members]
        own_memory = [p for p in members if not is_dtensor(p)] if self._has_dtensors else members
        storages = KeptStorages(own_memory)
        try:
            for parameter, gradient in ready:
                parameter.grad = gradient
            self._stepper_of_now().step(members)
        except Exception as problem:  # noqa: BLE001 - the other ranks wait for our parameters
            self._error = problem
        self._has_stepped_part = True
        misfit = storages.restore_()
        if misfit is not None and self._error is None:
            self._error = self._optimizer.describe_misfit(misfit)
        for parameter, gradient_before in zip(members, before, strict=True):
            parameter.grad = gradient_before

    def _stepper_of_now(self) -> BucketStepper:
        """Knows the groups and the state as they are: loading replaces them."""
        optimizer = self._optimizer.local()
        groups = optimizer.param_groups
        if self._stepper is None:
            self._stepper = BucketStepper(optimizer, f"To use it here, {_INSTEAD}")
        elif (
            self._stepped_state is optimizer.state
            and len(groups) == len(self._stepped_groups)
            and all(one is other for one, other in zip(groups, self._stepped_groups, strict=True))
        ):
            return self._stepper
        else:
            self._stepper.refresh()
        self._stepped_groups, self._stepped_state = list(groups), optimizer.state
        return self._stepper

    def _gather(self, indices: tuple[int, ...]) -> None:
        """Launches the gather of these parameters."""
        parameters = [self._parameters[index] for index in indices]
        room = self._communicator.room_nbytes()
        # Note [Weights that backward still needs]
        torch.autograd.graph.increment_version(parameters)
        self._updated.extend(parameters)
        for bucket in self._buckets_of(indices):
            nbytes = bucket.layout.nbytes
            while self._gathers and nbytes + sum(n for n, _ in self._gathers) > room:
                self._wait_for_oldest_gather()
            self._gathers.append((nbytes, bucket.launch(self._communicator)))

    def _buckets_of(self, indices: tuple[int, ...]) -> list[ParameterBucket]:
        if indices not in self._gathered_in:
            plan, start = self._plan, len(self._buckets.buckets)
            stretches = resident_stretches(plan.layouts, set(indices), ALONE_BYTES)
            adjacent = {slot.parameter for layout in stretches for slot in layout.slots}
            others = [index for index in indices if index not in adjacent]
            for layout in layout_buckets(
                [plan.specs[index] for index in others],
                [self._owners[index] for index in others],
                self._communicator.members.world_size,
                staged_capacity(plan.specs),
                alone_bytes=ALONE_BYTES,
            ):
                self._buckets.add(layout, plan.specs)
            self._gathered_in[indices] = [
                *(ResidentStretch(layout, self._parameters) for layout in stretches),
                *self._buckets.buckets[start:],
            ]
        return self._gathered_in[indices]

    def _wait_for_gathers(self) -> None:
        while self._gathers:
            self._wait_for_oldest_gather()

    def _wait_for_oldest_gather(self) -> None:
        try:
            self._gathers.popleft()[1].wait()
        except CommunicationError as error:
            raise CommunicationError(f"gathering updated parameters failed {error}") from error

    def _abandon(self) -> None:
        """The last backward ended in an exception when some buckets may have been stepped."""
        self._broken = RuntimeError(
            "the last backward pass ended in an exception when a part of the parameters had been "
            "updated already: the model is neither that before the step nor that after it. Build "
            "DistributedDataParallel, optimizer and hook anew, and load a checkpoint"
        )
        gathers = self._gathers
        self._reset()
        for _, gathering in gathers:
            gathering.wait()

    def _find_unreduced(self) -> Exception | None:
        """Of parameters that nobody reduces, none may be trained."""
        return None if self._reduced is None else self._find_trained_outside(self._reduced)

    def _find_trained_outside(self, reduced: AbstractSet[int]) -> Exception | None:
        trained = itertools.compress(self._parameters, map(_requires_grad_of, self._parameters))
        if reduced >= set(map(id, trained)):
            return None
        for index, parameter in enumerate(self._parameters):
            if id(parameter) not in reduced and parameter.requires_grad:
                return ValueError(
                    f"parameter {index} of the optimizer is trained, but the model whose "
                    "communication hook updates parameters doesn't reduce its gradient (it isn't in "
                    "the model, was ignored there, or was frozen when DistributedDataParallel was "
                    "built), so that it is never updated. Give the optimizer the parameters that the "
                    "model trains, and wrap the model again after thawing some"
                )
        return None

    def _find_changed_gradient(self) -> Exception | None:
        left, self._left_changeable = self._left_changeable, []
        for parameter, pointer, version in left:
            gradient = parameter.grad
            if (
                gradient is not None
                and gradient.data_ptr() == pointer
                and gradient._version != version  # noqa: SLF001 - torch has no public name for it
                and bool(gradient.any())  # zeroing changes them too
            ):
                return RuntimeError(
                    "gradients were changed between backward and step(), but with "
                    "overlap_with_ddp=True the parameters were updated inside backward, with the "
                    "gradients as they were averaged. To clip or change gradients, "
                    f"{_INSTEAD}, or use shard_gradients=True and its clip_grad_norm_()"
                )
        return None


class _Settled:
    """Nothing is left to settle."""

    def wait(self) -> int:
        return 0


class EndWhenJoined(JoinHook):
    """After DDP has handed the buckets of the active ranks over on a joined rank: completes them."""

    def __init__(self, step: OverlappedStep) -> None:
        self._step = step

    def main_hook(self) -> None:
        """Shadows the end of a backward pass of the active ranks."""
        self._step.end()


class SteppedInBackward(AveragedElsewhere):
    """Gradients that have been used when backward returns.

    Args:
        group_rank: this rank.
        module: must be ``None``, as for :class:`AveragedElsewhere`.
        step: what uses them.
    """

    def __init__(
        self, group_rank: GroupRank, module: nn.Module | None, step: OverlappedStep
    ) -> None:
        super().__init__(group_rank, module)
        self._step = step

    def watch(
        self,
        parameters: Sequence[torch.Tensor],
        plan: ShardingPlan,
        layouts: Sequence[BucketLayout],
    ) -> None:
        """See :class:`Gradients`."""
        super().watch(parameters, plan, layouts)
        self._step.watch(parameters, plan)

    def find_unfinished(self) -> Exception | None:
        """See :class:`Gradients`."""
        return self._step.find_broken()

    def find_unclippable(self) -> Exception | None:
        """See :class:`Gradients`."""
        return RuntimeError(
            "with overlap_with_ddp=True the first parameters are updated before the norm of all "
            f"gradients is known; to clip by it, {_INSTEAD}, or use shard_gradients=True, which "
            "clips by itself"
        )

    def no_sync(self) -> AbstractContextManager[None]:
        """See :class:`Gradients`."""
        raise RuntimeError(
            "no_sync() needs shard_gradients=True; with overlap_with_ddp=True use the no_sync() of "
            "DistributedDataParallel: the update is made by the first backward pass outside of it"
        )

    def describe(self) -> Json:
        """See :class:`Gradients`."""
        return {"shard_gradients": False, "overlap_with_ddp": True}


def _versions_of_gradients(
    parameters: Sequence[torch.Tensor],
) -> list[tuple[torch.Tensor, int, int]]:
    """Parameters with address and version of their gradients, where these are dense."""
    gradients = list(map(_grad_of, parameters))
    is_strided = [g is not None and g.layout is torch.strided for g in gradients]
    strided = list(itertools.compress(gradients, is_strided))
    pointers, versions = map(torch.Tensor.data_ptr, strided), map(_version_of, strided)
    return list(zip(itertools.compress(parameters, is_strided), pointers, versions, strict=True))


_grad_of = operator.attrgetter("grad")
_version_of = operator.attrgetter("_version")
_requires_grad_of = operator.attrgetter("requires_grad")


def _find_misuse(
    closure: Callable[[], Any] | None, kwargs: dict[str, Any], *, scales: bool
) -> Exception | None:
    if closure is not None:
        return ValueError(
            "a closure can't be used with overlap_with_ddp=True: its backward would update the "
            f"parameters before the optimizer does. Run backward before step(), or {_INSTEAD}"
        )
    if kwargs:
        return TypeError(
            f"step() got {', '.join(kwargs)}, but with overlap_with_ddp=True the update has been "
            f"made inside backward without it; {_INSTEAD}"
        )
    if scales:
        return RuntimeError(
            "torch.amp.GradScaler can't be used with overlap_with_ddp=True: the parameters were "
            "updated inside backward, before the gradients could be unscaled and looked at. Train "
            f"in bfloat16, which needs no scaling, or {_INSTEAD}"
        )
    return None
