"""``DataParallelOptimizer``: any optimizer, with gradients averaged over ranks in backward."""

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from typing import Any, cast
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.optim import Optimizer

from tensorplay.distributed.optim._core import tagged_json
from tensorplay.distributed.optim._core.agreement import Agreement
from tensorplay.distributed.optim._core.alone import Alone
from tensorplay.distributed.optim._core.collectives import Communicator, connect
from tensorplay.distributed.optim._core.gradient_norm import (
    clip_by_norm_,
    clip_coefficient,
    dtype_of_norm,
    is_one,
    norm_across_ranks,
    norm_of_own,
)
from tensorplay.distributed.optim._core.joined_calls import FollowWhenJoined, JoinedCalls
from tensorplay.distributed.optim._core.local_shard import is_dtensor
from tensorplay.distributed.optim._core.parameter_checks import (
    MetadataWatch,
    describe_options,
    describe_parameters,
    name_of,
    refuse_unsendable,
    same_members,
)
from tensorplay.distributed.optim._core.ranks import GroupRank
from tensorplay.distributed.optim._core.replication import replicate_
from tensorplay.distributed.optim._core.state_dicts import clone, require_fit
from tensorplay.distributed.optim._core.wrapped_optimizer import (
    SameGroupsOptimizer,
    all_parameters,
    canonical_group,
    options_of,
)
from tensorplay.distributed.optim.data_parallel.gradients import AveragedEverywhere
from tensorplay.distributed.optim.data_parallel.inner_optimizer import (
    make_inner,
    names_of,
    scales_gradients,
)
from tensorplay.distributed.optim.data_parallel.reduction_plan import (
    CAPACITY_BYTES,
    ReductionPlan,
)
from tensorplay.distributed.optim.data_parallel.reduction_policy import ReductionPolicy
from tensorplay.distributed.optim.data_parallel.replicas import (
    ReplicaDifference,
    broadcast,
    first_difference,
)
from tensorplay.distributed.optim.data_parallel.step_times import (
    StepProfile,
    StepTimes,
    TimedCommunicator,
)

__all__ = ["DataParallelOptimizer"]

NAME = "DistributedOptimizer"
"""What users and messages call it."""

_last_number = 0
"""Of the optimizers made in this process; their ranks agree on it."""


OwnNorm = tuple[torch.Tensor, list[torch.Tensor]]
"""What this rank contributes to a norm, and tensors that together hold all gradients."""


class DataParallelOptimizer(SameGroupsOptimizer, Joinable):
    """Averages the gradients of all ranks in backward, and lets any optimizer step on them.

    Every rank has all parameters, and its own batch. When the outermost ``backward()`` returns,
    ``.grad`` holds averages on every rank, each reduced once; so clipping, ``GradScaler`` and
    everything else between backward and :meth:`step` work as on one process. It takes the place of
    ``DistributedDataParallel``: don't wrap the model as well.

    Users get it as ``DistributedOptimizer(optim=..., params=...)``. It is used as Horovod's
    ``DistributedOptimizer``; the differences are that gradients are complete when backward returns
    (:meth:`synchronize` only averages what was left out), that ``optim`` is never rebuilt, and
    that ranks which disagree get an error instead of a hang.

    The constructor and the methods that say so must be called on every rank of the group.
    Parameters, and the state of an ``optim`` that has some, are brought to rank 0's at construction.
    Buffers of the model, such as running statistics, stay each rank's own.

    Args:
        optim: an optimizer class; a function that makes an optimizer from parameters; or an
            optimizer, which is wrapped with its state.
        params: parameters or groups, as ``torch.optim`` takes them. With an optimizer they can be
            left out.
        named_parameters: a dict or pairs of names and all of these parameters, for messages.

    Keyword Args:
        process_group: the group to average over (default: the default group). Without any, and
            where the environment's ``WORLD_SIZE`` is unset or 1, it is the plain optimizer.
        op: ``"average"`` or ``"sum"`` of the ranks' gradients.
        gradient_predivide_factor: with ``"average"``, gradients are divided by this before they
            are summed and by the rest of the number of ranks afterwards.
        backward_passes_per_step: how many backward passes accumulate before gradients are averaged.
            If fewer have run, :meth:`step` averages what there is. Passes add up, as torch's do.
        compression: ``"none"``, or ``"fp16"`` or ``"bf16"``: the type in which gradients of single
            or double precision travel. They are summed in their own precision; every rank gets the
            same rounded averages.
        sparse_as_dense: whether sparse gradients are made dense and averaged as such, instead of
            gathering all ranks' rows.
        overlap_with_backward: whether each bucket is averaged as soon as its gradients are there,
            while backward goes on; sparse gradients need ``sparse_as_dense`` then. By default
            where parameters are on an accelerator, after a first reduction without sparse
            gradients: on CPUs it takes the processor from backward, and pays over slow links only.
        clip_grad_norm: if given, :meth:`step` scales the averaged gradients so that their 2-norm is
            at most this, as ``torch.nn.utils.clip_grad_norm_`` does.
        **defaults: options for ``optim`` if it is a class or a function.

    Attributes:
        optim: the inner optimizer; ``param_groups``, ``state`` and ``defaults`` are its own, live.
        process_group: the group, ``None`` without any.
        clip_grad_norm: the largest norm, the same on every rank; it may be changed between steps.
        grad_norm: with ``clip_grad_norm``, the norm before clipping in the last step, a scalar.

    Raises:
        RuntimeError: if no process group is initialised though ``WORLD_SIZE`` is greater than 1, or
            the ranks' parameters or options differ; on every rank, naming the first difference.
        ValueError: if names and parameters don't fit together, an option has no meaning, or the
            group has no backend for a parameter's device; the other ranks raise too.
        TypeError: for arguments of the wrong kind, sparse parameters and ``DTensor``.

    Example:
        >>> optimizer = DistributedOptimizer(
        ...     optim=torch.optim.AdamW, params=model.parameters(), lr=1e-3, clip_grad_norm=1.0
        ... )
        >>> loss_fn(model(inputs), targets).backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        optim: Any,
        params: Iterable[Any] | None = None,
        named_parameters: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        op: str = "average",
        gradient_predivide_factor: float = 1.0,
        backward_passes_per_step: int = 1,
        compression: str | None = "none",
        sparse_as_dense: bool = False,
        overlap_with_backward: bool | None = None,
        clip_grad_norm: float | None = None,
        **defaults: Any,
    ) -> None:
        communicator = _communicator_for(process_group)
        error, description = None, None
        try:
            policy = ReductionPolicy(
                op,
                float(gradient_predivide_factor),
                backward_passes_per_step,
                compression or "none",
                bool(sparse_as_dense),
                overlap_with_backward,
            )
            inner = make_inner(optim, params, defaults)
            self._assemble(
                communicator,
                inner,
                policy,
                _positive(clip_grad_norm),
                names_of(named_parameters, inner),
            )
            description = {
                **asdict(policy),
                "clip_grad_norm": repr(self.clip_grad_norm),
                "optimizer_class": f"{type(inner).__module__}.{type(inner).__qualname__}",
                **self._describe_parameters(0),
            }
        except Exception as problem:  # noqa: BLE001 - the other ranks must hear of it first
            error = problem
        agreement = Agreement(communicator, NAME)
        self._number = 1 + agreement.settle("__init__", description, error, flag=_last_number)
        _count(self._number)
        self._watch_parameters(0)
        self.broadcast_parameters()
        if self._agreement.settle("__init__ (state)", flag=int(bool(self.optim.state))):
            self.broadcast_optimizer_state()
        self._agreement.settle("__init__ (options)", describe_options(self.param_groups))

    def _assemble(
        self,
        communicator: Communicator,
        inner: Optimizer,
        policy: ReductionPolicy,
        max_norm: float | None,
        names: list[str] | None,
    ) -> None:
        """Everything that needs no other rank and changes nothing outside."""
        if isinstance(inner, DataParallelOptimizer):
            raise TypeError(f"optim is a {NAME} already, which averages gradients by itself")
        # What it assigns gives way to the inner optimizer's as soon as there is one.
        Optimizer.__init__(self, [torch.empty(0)], {})
        Joinable.__init__(self)
        self.optim = inner
        self.process_group = cast(
            "dist.ProcessGroup | None", getattr(communicator, "process_group", None)
        )
        self.grad_norm: torch.Tensor | None = None
        self._policy = policy
        self.clip_grad_norm = max_norm
        self._names = names
        self._connection = communicator
        self._times = StepTimes()
        self._communicator: Communicator = TimedCommunicator(communicator, self._times)
        self._agreement = Agreement(self._communicator, NAME)
        self._joined_calls = JoinedCalls(self._communicator, f"a {NAME}")
        self._skips_synchronize = False
        self._is_removed = False
        self._num_steps = 0
        self._steps_counted_from = (0, 0)
        self._number = 0
        self._gradients = AveragedEverywhere(
            self._communicator,
            self._agreement,
            policy,
            self._times,
            WeakMethod(self._announce_backward),
            WeakMethod(self._require_unchanged),
        )
        self._parameters = list(dict.fromkeys(all_parameters(inner.param_groups)))
        self._refuse(self._parameters)
        self._plan = ReductionPlan.of(self._parameters, communicator.members.world_size)

    def _watch_parameters(self, num_layouts: int) -> None:
        """Begins to average the gradients of parameters that aren't yet."""
        self._members = [tuple(group["params"]) for group in self.param_groups]
        self._watch = MetadataWatch(self._parameters)
        self._gradients.number = self._number
        self._gradients.add(self._parameters, self._plan.specs, self._plan.layouts[num_layouts:])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters, which get rank 0's values. Every rank must call it.

        Args:
            param_group: as for ``torch.optim.Optimizer.add_param_group``; it isn't changed.

        Raises:
            RuntimeError: if the ranks' groups differ; on every rank, and nothing is added.
            TypeError, ValueError: for an invalid group; the other ranks raise too.
        """
        if "optim" not in self.__dict__:  # `Optimizer.__init__`
            super().add_param_group(param_group)
            return
        num_groups, num_parameters, plan = len(self.param_groups), len(self._parameters), self._plan
        error = None
        try:
            self.optim.add_param_group(canonical_group(param_group))
            known = set(self._parameters)
            group = self.param_groups[-1]
            added = [p for p in dict.fromkeys(group["params"]) if p not in known]
            self._refuse(added)
            self._parameters.extend(added)
            self._plan = ReductionPlan.of(
                self._parameters, self._communicator.members.world_size, plan
            )
        except Exception as problem:  # noqa: BLE001 - the other ranks must hear of it first
            error = problem
        try:
            description = (
                None
                if error
                else {
                    **self._describe_parameters(num_parameters),
                    **describe_options(self.param_groups),
                }
            )
            self._agreement.settle("add_param_group", description, error)
        except BaseException:
            del self.param_groups[num_groups:], self._parameters[num_parameters:]
            self._plan = plan
            raise
        if self._names is not None:
            self._names.extend(f"added {number}" for number, _ in enumerate(added))
        self._watch_parameters(len(plan.layouts))
        self.broadcast_parameters()

    # Training

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """One step of the inner optimizer on averaged gradients. Every rank must call it.

        Args:
            closure: re-evaluates the model on this rank's batch and returns the loss. The inner
                optimizer gets the average (or sum) of the ranks' losses.
            **kwargs: passed to the inner optimizer's ``step``.

        Returns:
            What the inner optimizer's ``step`` returns.

        Raises:
            RuntimeError: if the ranks' options differ, or some rank has taken another number of
                steps; if a backward pass was aborted, gradients haven't been averaged under
                :meth:`skip_synchronize`, or a parameter was replaced; on every rank, before
                anything changes. Whatever the inner optimizer raises.
        """
        if self._is_removed or self._is_only_creating_state():
            return self._step_inner(closure, kwargs)
        problem = self._find_problem()
        if self._join_config.enable:
            self._announce("step", options=_sendable(self.param_groups))
            if closure is not None:
                problem = ValueError(
                    "a closure can't be used inside Join: a rank that has joined could not follow "
                    "its forward and backward passes. Run them before step()"
                )
        flag = int(closure is None and self._gradients.has_unreduced())
        settlement = self._agreement.start(
            "step",
            {
                "optimizer number": self._number,
                "steps taken (one less where an exception ended one)": self._steps_taken(),
                "in skip_synchronize()": self._skips_synchronize,
                "clip_grad_norm": repr(self.clip_grad_norm),
                **describe_options(self.param_groups),
            },
            problem,
            flag,
        )
        own_norm = None
        if self.clip_grad_norm is not None and closure is None and not (problem or flag):
            own_norm = self._own_norm()  # while the others come
        if settlement.wait():
            own_norm = None
            if self._skips_synchronize:
                raise RuntimeError(
                    "step() inside skip_synchronize() would use gradients that haven't been averaged "
                    "since no_sync() or backward_passes_per_step held them back; call synchronize() "
                    "before it"
                )
            self._gradients.reduce("step (reduce)")
        with self._times.measure("step"):
            if closure is None:
                with self._clipped(own_norm):
                    loss = self._step_inner(None, kwargs)
            else:
                loss = self._step_inner(self._synchronised(closure), kwargs)
        self._num_steps += 1
        self._times.count_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the inner optimizer's. It also drops what hasn't been averaged. No communication."""
        self._gradients.forget()
        self.optim.zero_grad(set_to_none)
        if not set_to_none:
            self._gradients.forget_zeroed()

    def synchronize(self) -> None:
        """Averages what backward passes have left unaveraged. Every rank must call it.

        There is nothing to do after an ordinary backward pass; there may be after
        :meth:`no_sync`, and with ``backward_passes_per_step`` if the last window is short.
        """
        if self._is_removed:
            return
        self._announce("synchronize")
        flag = int(self._gradients.has_unreduced())
        description = {"optimizer number": self._number}
        if self._agreement.settle("synchronize", description, self._find_problem(), flag):
            self._gradients.reduce("synchronize (reduce)")

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A :meth:`step` inside averages nothing: :meth:`synchronize` must have run before."""
        before, self._skips_synchronize = self._skips_synchronize, True
        try:
            yield
        finally:
            self._skips_synchronize = before

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside accumulate gradients on each rank, without communication.

        They are averaged by the first backward pass that ends outside, or by :meth:`step`. Use it
        on every rank for the same passes. No communication.
        """
        return self._gradients.no_sync()

    def remove(self) -> None:
        """Takes all hooks off: from now on this is the inner optimizer, on this rank alone."""
        self._is_removed = True
        self._gradients.forget()
        self._gradients.backward_pass.remove()

    @contextmanager
    def _clipped(self, own_norm: OwnNorm | None) -> Iterator[None]:
        """Inside, the inner optimizer steps clipped gradients; its fused kernels clip by themselves."""
        max_norm = self.clip_grad_norm
        if max_norm is None:
            yield
            return
        everything = self._measure_norm(own_norm)
        assert self.grad_norm is not None  # noqa: S101 - narrows a type; the line above has set it
        coefficient = clip_coefficient(self.grad_norm, max_norm)
        if is_one(coefficient) or not scales_gradients(self.optim):
            clip_by_norm_(everything, self.grad_norm, max_norm, error_if_nonfinite=False)
            yield
            return
        inner: Any = self.optim
        inner.grad_scale = coefficient.float().reciprocal()
        try:
            yield
        finally:
            del inner.grad_scale

    def _clip_(self) -> None:
        if self.clip_grad_norm is not None:
            everything = self._measure_norm()
            assert self.grad_norm is not None  # noqa: S101 - narrows a type; the line above has set it
            clip_by_norm_(everything, self.grad_norm, self.clip_grad_norm, error_if_nonfinite=False)

    def _own_norm(self) -> OwnNorm:
        counted, everything = self._gradients.counted_and_all()
        return norm_of_own(counted, 2.0, self._parameters[0].device), everything

    def _measure_norm(self, own_norm: OwnNorm | None = None) -> list[torch.Tensor]:
        """Sets :attr:`grad_norm`; returns tensors that together hold all gradients."""
        partial, everything = own_norm or self._own_norm()
        self.grad_norm = norm_across_ranks(
            self._communicator, partial, 2.0, dtype_of_norm(self._parameters)
        )
        return everything

    def _synchronised(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure on all ranks' batches, as far as the inner optimizer can tell."""

        def synchronised() -> Any:
            error, loss = None, None
            try:
                with torch.enable_grad():
                    loss = closure()
            except Exception as problem:  # noqa: BLE001 - other ranks may wait for our backward
                error = problem
            self._gradients.closure_returned(error)
            self.synchronize()
            self._clip_()
            return self._average_loss(loss)

        return synchronised

    @torch.no_grad()
    def _average_loss(self, loss: Any) -> Any:
        if loss is None:
            return None
        device = self._communicator.transport_device()
        total = torch.as_tensor(loss, dtype=torch.float64).detach().to(device, copy=True).view(-1)
        self._communicator.all_reduce_(total, "sum").wait()
        if self._policy.op == "average":
            total /= self._communicator.members.world_size
        if isinstance(loss, torch.Tensor):
            return total.to(loss.device, loss.dtype).view(loss.shape)
        return total.item()

    def _is_only_creating_state(self) -> bool:
        """Whether this is how ``torch.distributed.checkpoint`` lets an optimizer create its state.

        It steps an empty optimizer with learning rates and gradients that are zero.
        """
        return (
            not self.optim.state
            and not self._gradients.has_unreduced()  # averages are zero on all ranks, or on none
            and all("lr" in group and not group["lr"] for group in self.param_groups)
            and all(
                parameter.grad is not None and not parameter.grad.any()
                for parameter in self._parameters
                if parameter.requires_grad
            )
        )

    def _steps_taken(self) -> int:
        if self._agreement.num_refused != self._steps_counted_from[0]:  # all ranks have been told
            self._steps_counted_from = self._agreement.num_refused, self._num_steps
        return self._num_steps - self._steps_counted_from[1]

    # Replicas

    def broadcast_parameters(self, root: int = 0) -> None:
        """Brings all parameters to those of one rank. Every rank must call it.

        Args:
            root: group rank whose values everybody gets.
        """
        self._require_rank("broadcast_parameters", root)
        replicate_(self._communicator, self._parameters, GroupRank(root), CAPACITY_BYTES)

    def broadcast_optimizer_state(self, root: int = 0) -> None:
        """Brings the state and the options of all groups to those of one rank.

        Every rank must call it, for instance after one rank has loaded a checkpoint.

        Args:
            root: group rank whose state everybody gets.

        Raises:
            TypeError: if there is something that is neither a tensor nor plain data; the other
                ranks raise too, and nothing changes.
        """
        self._require_rank("broadcast_optimizer_state", root)
        is_root = self._communicator.members.group_rank == root
        state = broadcast(
            self._communicator,
            self._agreement,
            "broadcast_optimizer_state",
            self.optim.state_dict() if is_root else None,
            GroupRank(root),
            {parameter.device.type: parameter.device for parameter in self._parameters},
            CAPACITY_BYTES,
        )
        if not is_root:
            self.optim.load_state_dict(state)

    def check_replicas(self) -> ReplicaDifference | None:
        """Compares parameters and optimizer state of all ranks, bit for bit.

        Every rank must call it, so not inside ``Join``. It reads all of them once, and sends a few
        bytes for each.

        Returns:
            ``None`` if all ranks agree, else where they differ first; the same on every rank.
        """
        self._agreement.settle("check_replicas", {"optimizer number": self._number})
        names = self._names or [
            name_of(parameter, self.param_groups) for parameter in self._parameters
        ]
        return first_difference(self._communicator, self._parameters, self.optim.state, names)

    @contextmanager
    def profile(self) -> Iterator[Callable[[], StepProfile]]:
        """Measures where the time of the steps inside goes, on this rank.

        Gives a function that returns what has been measured so far; it may be called inside and
        afterwards. On GPUs, kernels are launched without waiting, so use torch's profiler there. No
        communication.
        """
        self._times.reset()
        self._times.is_on = True
        try:
            yield self._times.profile
        finally:
            self._times.is_on = False

    # Saving and loading

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state dict; every rank has all of it. No communication."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        return self._run_state_dict_hooks(self.optim.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` or the plain optimizer's returned. No communication.

        Load the same on every rank, or call :meth:`broadcast_optimizer_state` afterwards. The
        caller's dict isn't changed, nor are its tensors kept.

        Raises:
            ValueError: if it doesn't fit; nothing has changed then.
        """
        state_dict = self._run_load_hooks(state_dict)
        require_fit(state_dict, self.param_groups)
        before = self.optim.state, self.optim.param_groups
        try:
            self.optim.load_state_dict(clone(state_dict))
        except BaseException:
            self.optim.state, self.optim.param_groups = before
            raise
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def __getstate__(self) -> dict[str, Any]:
        # Not a step that a scheduler has patched, nor hooks: as torch's optimizers.
        if self.process_group is not None and self.process_group is not dist.group.WORLD:
            raise TypeError(
                f"a {NAME} on a process_group of its own can't be pickled, since the group can't; "
                "use state_dict(), or copy.deepcopy() within the process"
            )
        return self._parts()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._restore(_communicator_for(None), state)

    def __deepcopy__(self, memo: dict[int, Any]) -> "DataParallelOptimizer":
        """A copy around a copy of the inner optimizer, on the same process group."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied._restore(self._connection, copy.deepcopy(self._parts(), memo))  # noqa: SLF001 - one class
        return copied

    def _parts(self) -> dict[str, Any]:
        return {
            "optim": self.optim,
            "policy": self._policy,
            "max_norm": self.clip_grad_norm,
            "names": self._names,
        }

    def _restore(self, communicator: Communicator, parts: Mapping[str, Any]) -> None:
        self._assemble(
            communicator, parts["optim"], parts["policy"], parts["max_norm"], parts["names"]
        )
        _count(_last_number + 1)
        self._number = _last_number
        self._watch_parameters(0)

    def __repr__(self) -> str:
        members = self._communicator.members
        return (
            f"{NAME} on {members.name(members.group_rank)} of {members.world_size}: {self.optim!r}"
        )

    # Uneven inputs

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The hook with which a rank that has run out of inputs follows the others' calls.

        It adds nothing to the sums, and takes every step with the active ranks' options. Counts as
        having contributed zeros unless ``divide_by_initial_world_size=False``.
        """
        self._gradients.divides_by_world_size = kwargs.get("divide_by_initial_world_size", True)
        return FollowWhenJoined(self.zero_grad, self._follow)

    @property
    def join_device(self) -> torch.device:
        """The device of the first parameter."""
        return self._parameters[0].device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group over which gradients are averaged."""
        assert self.process_group is not None  # noqa: S101 - Join needs one anyway
        return self.process_group

    def _announce_backward(self) -> None:
        self._announce("backward")

    def _announce(self, call: str, **arguments: Any) -> None:
        """Inside ``Join``, tells the ranks that have joined what the active ones do."""
        counts = {"num_begun": self._gradients.num_begun}
        active = self._joined_calls.announce(self, call, {**counts, **arguments})
        if active is not None:
            self._gradients.divide_among(active)

    def _follow(self) -> None:
        """On a rank that has joined: takes part in one call of the active ones."""
        call, arguments, active = self._joined_calls.follow()
        self._gradients.divide_among(active)
        self._gradients.backward_pass.num_begun = arguments["num_begun"]
        with self._joined_calls.taking_part():
            if call == "backward":
                self._gradients.reduce_nothing(arguments["num_begun"])
            elif call == "synchronize":
                self.synchronize()
            else:
                _adopt_(self.param_groups, arguments["options"])
                self.step()
                self.zero_grad()

    # What must hold

    def _refuse(self, parameters: Sequence[torch.Tensor]) -> None:
        for parameter in parameters:
            if is_dtensor(parameter):
                raise TypeError(
                    f"parameter {name_of(parameter, self._named_groups())} is a DTensor, whose "
                    "gradient its own parallelism averages; use the plain optimizer for it"
                )
        refuse_unsendable(parameters, self._named_groups(), self._communicator)

    def _describe_parameters(self, start: int) -> dict[str, Any]:
        return describe_parameters(
            self._named_groups(), self._parameters, self._plan.specs[start:], resident=False
        )

    def _named_groups(self) -> list[dict[str, Any]]:
        """The groups, with the names that messages use."""
        if self._names is None:
            return self.param_groups
        names = dict(zip(all_parameters(self.param_groups), self._names, strict=False))
        return [
            {**group, "param_names": [names.get(p, "added") for p in group["params"]]}
            for group in self.param_groups
        ]

    def _require_unchanged(self) -> None:
        replaced = self._watch.find_replaced(self.param_groups)
        if replaced is not None:
            raise replaced

    def _find_problem(self) -> Exception | None:
        if not same_members(self.param_groups, self._members):
            return RuntimeError(
                "the parameters in param_groups are no longer those that the optimizer was built "
                "with; add some with add_param_group(), and build a new optimizer to take some away"
            )
        return self._watch.find_replaced(self.param_groups) or self._gradients.find_unfinished()

    def _require_rank(self, call: str, rank: Any) -> None:
        world_size = self._communicator.members.world_size
        error = None
        if rank not in range(world_size):
            error = ValueError(f"root={rank!r} is not a rank of a group of {world_size}")
        self._agreement.settle(call, {"root": repr(rank)}, error)


def _communicator_for(process_group: dist.ProcessGroup | None) -> Communicator:
    is_initialized = dist.is_available() and dist.is_initialized()
    if process_group is None and not is_initialized and os.environ.get("WORLD_SIZE", "1") == "1":
        return Alone()
    return connect(process_group, NAME)


def _count(number: int) -> None:
    global _last_number  # noqa: PLW0603 - the ranks of several optimizers agree by it
    _last_number = max(_last_number, number)


def _positive(max_norm: float | None) -> float | None:
    if max_norm is None:
        return None
    if not float(max_norm) > 0:
        raise ValueError(f"clip_grad_norm={max_norm!r} must be greater than 0, or None")
    return float(max_norm)


def _sendable(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The options that joined ranks can be told; others stay there as they are."""
    return [
        {
            key: tagged_json.encode(_number(value), [])
            for key, value in options_of(group).items()
            if isinstance(_number(value), (bool, int, float, str, tuple, type(None)))
        }
        for group in groups
    ]


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _adopt_(groups: Sequence[dict[str, Any]], sent: Sequence[Mapping[str, Any]]) -> None:
    for group, options in zip(groups, sent, strict=True):
        for key, encoded in options.items():
            value = tagged_json.decode(encoded)
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = value
