"""``ZeroRedundancyOptimizer``: any optimizer, its state sharded across the ranks of a group."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.profiler import record_function
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.optim import Optimizer

from tensorplay.distributed.optim._core.agreement import Agreement, Settlement
from tensorplay.distributed.optim._core.collectives import (
    connect,
)
from tensorplay.distributed.optim._core.coupled_optimizers import (
    refuse_coupled,
)
from tensorplay.distributed.optim._core.gradient_buckets import assign
from tensorplay.distributed.optim._core.joined_calls import FollowWhenJoined
from tensorplay.distributed.optim._core.local_shard import (
    is_dtensor,
)
from tensorplay.distributed.optim._core.parameter_checks import (
    describe_options,
)
from tensorplay.distributed.optim._core.tagged_json import Json
from tensorplay.distributed.optim._core.wrapped_optimizer import (
    WrappedOptimizer,
    canonical_group,
    canonical_groups,
    copy_options_,
)
from tensorplay.distributed.optim.zero.clipping import WholeGradients
from tensorplay.distributed.optim.zero.ddp_reduction import ReducedInHooks
from tensorplay.distributed.optim.zero.flat_slices import (
    StateByParameter,
)
from tensorplay.distributed.optim.zero.forward_gather import ForwardGather, require_module
from tensorplay.distributed.optim.zero.full_state import FullState
from tensorplay.distributed.optim.zero.gradients import (
    AveragedElsewhere,
    Gradients,
    ReducedToOwners,
)
from tensorplay.distributed.optim.zero.join import StepWhenJoined, UnevenInputs
from tensorplay.distributed.optim.zero.local_optimizer import COUPLED, LocalGroups
from tensorplay.distributed.optim.zero.overlap import (
    EndWhenJoined,
    OptimizerSide,
    OverlappedStep,
    SteppedInBackward,
)
from tensorplay.distributed.optim.zero.sharded_parameters import ShardedParameters
from tensorplay.distributed.optim.zero.sharded_step import ShardedStep
from tensorplay.distributed.optim.zero.sharding_policy import ShardingPolicy
from tensorplay.distributed.optim.zero.sharding_report import ShardingReport
from tensorplay.distributed.optim.zero.step_in_backward import StepAndGather

__all__ = ["ZeroRedundancyOptimizer"]

_ABSENT = object()


class ZeroRedundancyOptimizer(WrappedOptimizer, Joinable):
    r"""Wraps any ``torch.optim.Optimizer`` class and shards its state across the ranks of a group.

    Each rank keeps the optimizer state of about ``1 / world_size`` of the parameters, steps only
    these, and gets the others' new values from their owners: the first stage of `ZeRO
    <https://arxiv.org/abs/1910.02054>`_. A parameter belongs to one rank as a whole (sorted greedy,
    largest first to the least loaded rank), so any optimizer class works that updates each
    parameter from its own gradient and state. The result equals the plain optimizer's, bit for bit.

    The gradients must be averaged before :meth:`step`, usually by ``DistributedDataParallel``;
    whether the optimizer is made before or after the model is wrapped doesn't matter. With
    ``shard_gradients=True`` it averages them itself, and keeps each on its owner only: the second
    stage.

    Follows ``torch.distributed.optim.ZeroRedundancyOptimizer``, with the differences that
    parameters of several dtypes and devices may be mixed, parameters are gathered bucket by bucket
    instead of one by one, saved state never passes through pickle, and ranks that disagree get an
    error instead of a hang.

    The constructor and the methods that say so must be called on every rank of the group.

    Args:
        params: what ``torch.optim`` takes: tensors, named tensors, or dicts of them with options.
        optimizer_class: class of the local optimizer.

    Keyword Args:
        process_group: the group to shard across (default: the default group).
        parameters_as_bucket_view: if true, trainable parameters move into flat buffers, as views
            with their shapes and strides, and are gathered there without copies. Build the
            optimizer after the model is on its device and in its dtype. If false, parameters keep
            their storage: large ones are sent from there, small ones pass through two staging
            buffers of at most 25 MB.
        overlap_with_ddp: if true, parameters are updated inside ``backward()``, bucket by bucket: one
            is stepped while others are reduced or gathered. Without ``shard_gradients=True``
            a communication hook of ``DistributedDataParallel`` does it: see
            ``tensorplay.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook``; with it, no DDP and no
            hook is needed, and ``overlap_with_backward`` says when it begins: with ``True`` buckets
            are updated and their gradients freed while backward goes on, by default on CPUs all is
            done when the last gradient has been computed. :meth:`step` may be called as usual and
            does nothing; what needs all gradients before the update (clipping by their norm,
            :meth:`full_grad`, ``GradScaler``, closures) raises.
        shard_gradients: if true, use no ``DistributedDataParallel``: the optimizer averages the
            gradients itself. When the outermost ``backward()`` returns, each rank has those of the
            parameters that it owns, and the others are freed: there ``.grad`` is a placeholder,
            which raises if it's taken for a gradient. A step sends what plain DDP sends, a third
            less than DDP with sharded state. At construction every rank gets the parameters of
            group rank 0. See also :meth:`no_sync`, :meth:`clip_grad_norm_`, :meth:`full_grad`.
        module: the module that is trained, for ``shard_gradients=True`` or
            ``overlap_with_forward=True``. With the former its parameters and buffers
            are those of group rank 0 from the start, and its buffers (BatchNorm's statistics) again
            after each backward, as under DDP. With ``overlap_with_ddp=True``, where buckets are
            updated while backward goes on, its forward shows which parameters are used inside
            reentrant checkpoints: these wait for the end of backward. Without it, one that is used
            both inside and outside raises.
        overlap_with_backward: with ``shard_gradients=True``: whether gradients are sent while
            backward goes on, bucket by bucket, instead of when it has ended, and updated parameters
            while others are stepped. By default they are where parameters are on an accelerator; on
            CPUs that communicate and compute with the same cores nothing is gained, but between
            hosts with slow links it is, with ``partition="elements"``. Hooks of yours that are called
            after a gradient has been accumulated may then find ``None``.
        overlap_with_forward: with ``module=``: :meth:`step` doesn't wait for the updated parameters of
            other ranks; the next forward does, module by module, as does whatever reads or loads
            ``module.state_dict()``. Before anything else reads parameters (an EMA, ``deepcopy``, a
            plot, another module's weight), call :meth:`wait`: it would see old values. Works best
            where parameters don't pass through staging buffers: ``parameters_as_bucket_view=True``.
        partition: ``"parameters"``: each belongs to one rank as a whole, which works with any
            optimizer class. ``"elements"``: all are cut evenly, at any element, so that every rank
            has the same load however large the largest parameter is; the class must be
            element-wise. A param group may have its own choice under the key ``"partition"``. What
            can't be cut stays whole: frozen parameters, those that share memory, those given twice,
            those without axes, and ``DTensor``\ s. Gradients must be dense.
        flat_step: steps one flat tensor per bucket where it can, instead of each parameter: faster
            where parameters are many and small. The class must be element-wise. Always so for
            ``partition="elements"``. Either moves the parameters into flat buffers, as
            ``parameters_as_bucket_view=True`` does, and may differ from the plain optimizer in the
            last bit, as kernels round differently in a vector's middle and at its end.
        elementwise: says that ``optimizer_class`` updates each element from its own gradient and
            state alone; needed for classes that aren't in ``torch.optim``.
        **defaults: options for ``optimizer_class``.

    Attributes:
        optim: the local optimizer. It holds the parameters that this rank owns, or flat slices of
            buckets; where a group has none, it holds an empty placeholder, since some optimizers
            need a parameter.
        param_groups: all parameters and options, live: what schedulers change here is used.
        state: the state of the parameters that this rank owns, live. Of a parameter that is stepped
            in a flat slice: views of its part, ``(numel of the part,)``, in the order of memory, in
            a mapping that can't be assigned to.

    Raises:
        RuntimeError: if no process group is initialised, or the ranks disagree about parameters,
            options or world size; on every rank, naming the first difference.
        ValueError: if this rank isn't in the group, ``optimizer_class`` couples all parameters
            (LBFGS, Prodigy, D-Adaptation) or, where it must be, isn't element-wise, or a parameter is
            on a device for which the group has no backend; also whatever ``optimizer_class`` raises.
            The other ranks raise too.
        TypeError: for sparse parameters, and for a ``DTensor`` of which the ranks of the group hold
            different parts.

    Example:
        >>> model = DistributedDataParallel(model)
        >>> optimizer = ZeroRedundancyOptimizer(
        ...     model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3
        ... )
        >>> loss_fn(model(inputs), targets).backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        shard_gradients: bool = False,
        module: nn.Module | None = None,
        overlap_with_backward: bool | None = None,
        overlap_with_forward: bool = False,
        partition: str = "parameters",
        flat_step: bool = False,
        elementwise: bool = False,
        **defaults: Any,
    ) -> None:
        if overlap_with_backward is not None and not shard_gradients:
            raise ValueError(
                f"overlap_with_backward={overlap_with_backward} says when the optimizer reduces "
                "gradients, which it does with shard_gradients=True only; leave it out"
            )
        Joinable.__init__(self)
        self._communicator = connect(process_group, type(self).__name__)
        self._agreement = Agreement(self._communicator, type(self).__name__)
        self.process_group = self._communicator.process_group
        self.parameters_as_bucket_view = bool(parameters_as_bucket_view)
        self._stage = (
            StepAndGather(self._communicator) if overlap_with_ddp and shard_gradients else None
        )
        self.overlapped_step = (
            self._make_overlapped_step() if overlap_with_ddp and not shard_gradients else None
        )
        reducer_module = None if overlap_with_forward and not shard_gradients else module
        self._gradients: Gradients
        if shard_gradients:
            self._gradients = ReducedToOwners(
                self._communicator,
                self._agreement,
                reducer_module,
                WeakMethod(self._announce_backward),
                during_backward=overlap_with_backward,
                stage=self._stage,
            )
        elif self.overlapped_step is not None:
            group_rank = self._communicator.members.group_rank
            self._gradients = SteppedInBackward(group_rank, reducer_module, self.overlapped_step)
        else:
            self._gradients = AveragedElsewhere(
                self._communicator.members.group_rank, reducer_module
            )
        self._forward_gather: ForwardGather | None = None
        self._policy = ShardingPolicy(
            partition,
            flat_step=bool(flat_step),
            is_confirmed_elementwise=bool(elementwise),
            resident=self.parameters_as_bucket_view,
            overlaps_step=bool(overlap_with_ddp),
            shares_buckets=self._stage is not None,
            sends_in_backward=bool(overlap_with_backward),
        )
        self._sharded = sharded = ShardedParameters(self._communicator, self._policy)
        self._local = LocalGroups(sharded, self._communicator.members.group_rank)
        self._uneven_inputs = UnevenInputs(self._communicator, self._agreement, sharded)
        self._whole_gradients = WholeGradients(self._communicator, self._agreement, sharded)
        self._full_state = FullState(self._communicator, self._agreement, sharded)
        error = None
        try:
            self._plan_and_build(params, optimizer_class, defaults)
            require_module(module, needed=overlap_with_forward, gathers_early=overlap_with_ddp)
        except Exception as problem:  # noqa: BLE001 - the other ranks must hear of it first
            error = problem
        self._agreement.settle(
            "__init__",
            None
            if error
            else {
                "parameters_as_bucket_view": self.parameters_as_bucket_view,
                "partition": sharded.describe_partitions(),
                "flat_step": self._policy.flat_step,
                "overlap_with_forward": bool(overlap_with_forward),
                "gradients": self._gradients.describe(),
                **sharded.describe(self.param_groups),
                "optimizer_class": f"{type(self.optim).__module__}.{type(self.optim).__qualname__}",
                "world_size": self._communicator.members.world_size,
            },
            error,
        )
        sharded.move_in(self._agreement, "__init__", sharded.plan.layouts)
        if self._stage is not None:
            problem_finder = WeakMethod(self._find_replaced)
            self._stage.attach(self, problem_finder, sharded.parameters, sharded.buckets)
        self._gradients.watch(sharded.parameters, sharded.plan, sharded.plan.gradient_layouts)
        if overlap_with_forward and module is not None:
            self._forward_gather = ForwardGather(module, sharded.buckets, sharded.parameters)
        self._update = ShardedStep(
            self._communicator,
            self._agreement,
            sharded,
            self._local,
            self._forward_gather,
            overlaps=overlap_with_backward,
        )

    def _plan_and_build(
        self, params: Iterable[Any], optimizer_class: type[Optimizer], defaults: dict[str, Any]
    ) -> None:
        refuse_coupled(optimizer_class, *COUPLED)
        groups = canonical_groups(params)
        partitions = [self._policy.take_from(group) for group in groups]
        super().__init__(groups, defaults={})  # the local optimizer knows them
        self._sharded.extend(self.param_groups, partitions, optimizer_class, self._gradients.refuse)
        self.optim = self._local.build(optimizer_class, self.param_groups, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters and gives each an owner; nobody else's owner changes.

        Every rank must call it, with the same group.

        Args:
            param_group: as for ``torch.optim.Optimizer.add_param_group``; it isn't changed.

        Raises:
            RuntimeError: if the ranks' groups differ; on every rank, and nothing is added.
            TypeError, ValueError: for an invalid group; the other ranks raise too.
        """
        if "optim" not in vars(self):  # `Optimizer.__init__` adds the first groups
            super().add_param_group(param_group)
            return
        self.wait()
        sharded, place, error = self._sharded, len(self.param_groups), None
        before, num_own = sharded.extent, len(self.optim.param_groups)
        try:
            canonical = canonical_group(param_group)
            partition = self._policy.take_from(canonical)
            super().add_param_group(canonical)
            sharded.extend(self.param_groups, [partition], type(self.optim), self._gradients.refuse)
            self._local.add_to(self.optim, place, self.param_groups[place])
        except Exception as problem:  # noqa: BLE001 - the other ranks must hear of it first
            error = problem
        try:
            self._agreement.settle(
                "add_param_group",
                None
                if error
                else {
                    "partition": sharded.describe_partitions(),
                    **sharded.describe(self.param_groups, before.num_parameters),
                },
                error,
            )
        except BaseException:
            del self.param_groups[place:], self.optim.param_groups[num_own:]
            sharded.go_back(before)
            raise
        self._local.drop_placeholder_state(self.optim)
        plan = sharded.plan
        sharded.move_in(
            self._agreement, "add_param_group", plan.layouts[len(before.plan.layouts) :]
        )
        if self._stage is not None:
            self._stage.refresh()
        added = plan.gradient_layouts[len(before.plan.gradient_layouts) :]
        self._gradients.watch(sharded.parameters, plan, added)
        if self._forward_gather is not None:
            self._forward_gather.watch()

    def wait(self) -> None:
        """Waits for parameters that other ranks have updated, before they are read by other means.

        With ``overlap_with_forward=True``; otherwise there is nothing to wait for. It begins no
        communication: any rank may call it alone.

        Raises:
            CommunicationError: if the backend fails or a rank doesn't come in time.
        """
        if self._forward_gather is not None:
            self._forward_gather.wait()

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Steps what this rank owns, then brings every rank's parameters up to date.

        Every rank must call it. If the update fails on a rank, the parameters are made equal on all
        ranks all the same, and all of them raise. With ``overlap_with_ddp=True`` backward has done
        all that, and it only calls ``closure``.

        Args:
            closure: re-evaluates the model and returns the loss. The local optimizer calls it, on
                every rank, as often as its algorithm says.
            **kwargs: passed to the local optimizer's ``step``.

        Returns:
            What the local optimizer's ``step`` returns: usually the closure's loss, or ``None``.

        Raises:
            CommunicationError: if the backend fails or a rank doesn't come within the group's
                time-out; a ``RuntimeError`` that names call, bucket and rank.
            RuntimeError: if the ranks' options differ (naming option and values), a parameter's
                storage, dtype, shape or device was replaced, or the parameters in ``param_groups``
                were; on every rank, before anything changes.
        """
        self.wait()
        if self._stage is not None:
            return self._stage.stand_in_for_step(self, self._gradients, closure, kwargs)
        if self.overlapped_step is not None:
            scales = vars(self).pop("grad_scale", _ABSENT) is not _ABSENT  # GradScaler sets it
            return self.overlapped_step.step_called(closure, kwargs, scales=scales)
        if self._join_config.enable:
            self._uneven_inputs.begin_step(
                self, self._gradients, self.param_groups, has_closure=closure is not None
            )
        with record_function(f"{type(self).__name__}.agree"):
            problem = self._find_replaced() or self._gradients.find_unfinished()
            if problem is None:
                copy_options_(self.param_groups, self.optim.param_groups)
            some_unreduced = self._agreement.settle(
                "step",
                {**describe_options(self.param_groups), **self._describe_missing(closure)},
                problem,
                flag=int(closure is None and self._gradients.has_unreduced()),
            )
        if some_unreduced:
            self._gradients.reduce("step (reduce)")
        return self._update.run(self, self._gradients, closure, kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``torch.optim.Optimizer.zero_grad``, for all parameters. No communication."""
        self._gradients.forget()
        if not set_to_none:
            super().zero_grad(set_to_none)
            return
        with record_function(f"Optimizer.zero_grad#{type(self).__name__}.zero_grad"):
            for group in self.param_groups:  # of thousands, so the loop isn't Python's
                assign(group["params"], "grad", itertools.repeat(None))

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside accumulate gradients on each rank, without communication.

        With ``shard_gradients=True``. The gradients are reduced by the first backward pass that
        ends outside, or by :meth:`step`. Use it on every rank for the same passes. No communication.

        Raises:
            RuntimeError: without ``shard_gradients=True``; then DDP has its own.
        """
        return self._gradients.no_sync()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scales all averaged gradients so that their norm together is at most ``max_norm``.

        Every rank must call it, between backward and :meth:`step`. It equals
        ``torch.nn.utils.clip_grad_norm_`` on the unsharded model, with a norm that is accurate for
        any number of elements; each rank computes its own part.

        Args:
            max_norm: the largest norm allowed.
            norm_type: p > 0 of the p-norm, or ``inf``.
            error_if_nonfinite: whether to raise if the norm is infinite or not a number.

        Returns:
            The norm before clipping, a scalar on the first parameter's device.

        Raises:
            RuntimeError: if the norm isn't finite and ``error_if_nonfinite`` is set; on every rank,
                and no gradient changes. Also where ranks pass different arguments; and with
                ``overlap_with_ddp=True``.
            TypeError: if a parameter is a ``DTensor``.
        """
        self._require_gradients("clip_grad_norm_")
        max_norm, norm_type = float(max_norm), float(norm_type)
        self._announce(
            "clip_grad_norm_",
            max_norm=max_norm,
            norm_type=norm_type,
            error_if_nonfinite=error_if_nonfinite,
        )
        return self._whole_gradients.clip_(self._gradients, max_norm, norm_type, error_if_nonfinite)

    def full_grad(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The averaged gradient of any parameter, on every rank. Every rank must call it.

        Args:
            parameter: one of the optimizer's.

        Returns:
            A copy in the parameter's shape and dtype, ``None`` if no rank has a gradient.

        Raises:
            ValueError: if it isn't a parameter of this optimizer; the other ranks raise too.
            RuntimeError: with ``overlap_with_ddp=True``.
        """
        self._require_gradients("full_grad")
        index = self._sharded.index_of(parameter)
        self._announce("full_grad", index=index)
        return self._whole_gradients.full(self._gradients, index)

    def _require_gradients(self, call: str) -> None:
        if self._stage is not None:
            raise RuntimeError(
                f"{call}() needs the averaged gradients, which overlap_with_ddp=True has used and "
                "freed inside backward, before the last of them was known. Leave it False to clip "
                "or to look at them"
            )

    def _announce_backward(self) -> None:
        self._announce("backward", num_begun=self._gradients.num_begun)
        if self._stage is not None and self.is_in_join:
            joined = self._uneven_inputs.has_joined
            self._uneven_inputs.round.run(self.param_groups, joined=joined, gradients=False)

    def _announce(self, call: str, **arguments: Json) -> None:
        self._uneven_inputs.announce(self, self._gradients, call, **arguments)

    def _follow(self) -> None:
        """On a rank that has joined: takes part in one call of the active ones."""
        call, arguments = self._uneven_inputs.follow(self._gradients)
        with self._uneven_inputs.taking_part():
            if call == "backward":
                self._gradients.reduce_nothing(**arguments)
            elif call == "clip_grad_norm_":
                self.clip_grad_norm_(**arguments)
            elif call == "full_grad":
                self.full_grad(self._sharded.parameters[arguments["index"]])
            else:
                self.step()
                self.zero_grad()

    def _step_when_joined(self) -> None:
        try:
            with self._uneven_inputs.taking_part():
                self.step()
        finally:
            for parameter in self._sharded.parameters:
                parameter.grad = None  # they were received for this step only

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The hook with which a rank that has run out of inputs goes on stepping its shard.

        For the ``Join`` of ``tensorplay.distributed.algorithms.join``, in any order, or torch's,
        with ``DistributedDataParallel`` first. The joined rank gets its shard's averaged gradients
        and the options of all groups from an active one.
        """
        if self._gradients.can_follow:
            self._gradients.divides_by_world_size = kwargs.get("divide_by_initial_world_size", True)
            return FollowWhenJoined(self.zero_grad, self._follow)
        if self.overlapped_step is not None:
            return EndWhenJoined(self.overlapped_step)
        return StepWhenJoined(self._step_when_joined)

    @property
    def join_device(self) -> torch.device:
        """The device of the first parameter."""
        return self._sharded.parameters[0].device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group across which the state is sharded."""
        return self.process_group

    def _describe_misfit(self, misfit: torch.Tensor) -> Exception:
        return self._sharded.describe_misfit(misfit, self.optim, self.param_groups)

    # Under hooks of DDP

    def take_gradients_from_hooks(self, model: Sequence[torch.Tensor]) -> ReducedInHooks:
        """From now on DDP's hook averages each gradient to the rank that owns the parameter.

        For ``reduce_to_owners_hook``. Every rank must call it.

        Args:
            model: the parameters that DDP has.

        Raises:
            ValueError: if the optimizer was built to get its gradients otherwise.
            TypeError: if a parameter is a ``DTensor``.
        """
        error: Exception | None = None
        if type(self._gradients) not in {AveragedElsewhere, ReducedInHooks}:
            error = ValueError(
                "reduce_to_owners_hook needs an optimizer that was built without shard_gradients and "
                "overlap_with_ddp, which reduce gradients or use them in their own way"
            )
        elif any(map(is_dtensor, self._sharded.parameters)):
            error = TypeError("reduce_to_owners_hook can't reduce the gradient of a DTensor")
        self._agreement.settle("reduce_to_owners_hook (gradients)", None, error)
        gradients = ReducedInHooks(
            self._communicator, self._sharded.parameters, self._sharded.plan, model
        )
        self._gradients = gradients
        return gradients

    def _make_overlapped_step(self) -> OverlappedStep:
        self._step_supports_amp_scaling = True  # so that GradScaler shows itself in step()
        return OverlappedStep(
            self._communicator,
            self._agreement,
            OptimizerSide(
                lambda: self.optim,
                self._settle_overlapped,
                lambda: copy_options_(self.optim.param_groups, self.param_groups),
                self._describe_misfit,
            ),
        )

    def _settle_overlapped(self, problem: Exception | None, joined: bool) -> Settlement:
        if self.is_in_join:
            self._uneven_inputs.round.run(self.param_groups, joined=joined, gradients=False)
        problem = problem or self._find_replaced()
        if problem is None:
            copy_options_(self.param_groups, self.optim.param_groups)
        description = describe_options(self.param_groups)
        return self._agreement.start("backward (step)", description, problem)

    def settle_call(self, call: str, description: Json, error: Exception | None) -> None:
        """Settles a call of a function that takes this optimizer. Every rank must call it.

        Raises:
            RuntimeError: if the ranks' descriptions differ.
            Exception: ``error``; the other ranks raise one that names this rank.
        """
        self._agreement.settle(call, description, error)

    @property
    def is_in_join(self) -> bool:
        """Whether this optimizer takes part in a ``Join`` at the moment."""
        return bool(self._join_config.enable)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Brings the full optimizer state to one rank, where :meth:`state_dict` then returns it.

        Every rank must call it. Each byte is sent once, from its owner to the target. The copy is
        a snapshot: later steps don't change it. It takes the memory of the full state on the target
        until :meth:`release_consolidated_state_dict` or the next consolidation.

        Args:
            to: group rank that receives the state.

        Raises:
            ValueError: if ``to`` is no rank of the group.
            TypeError: if a parameter's state holds something that is neither a tensor nor plain
                data; the other ranks raise too.
        """
        self._full_state.consolidate(self.optim, self.param_groups, to)

    def release_consolidated_state_dict(self) -> None:
        """Drops the copy that :meth:`consolidate_state_dict` made. No communication."""
        self._full_state.release()

    def state_dict(self) -> dict[str, Any]:
        """The full state as it was at the last consolidation, in the plain optimizer's format.

        It loads into the plain optimizer and into this class on any number of ranks. The tensors
        belong to the consolidated copy; the containers are fresh. No communication.

        Raises:
            RuntimeError: if :meth:`consolidate_state_dict` hasn't brought the state to this rank.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        snapshot = self._full_state.snapshot()
        if snapshot is None:
            raise RuntimeError(
                "Optimizer state has not been consolidated on this rank. Please call "
                f"`consolidate_state_dict(to={self._communicator.members.group_rank})` on all ranks "
                "beforehand if you meant to save the global state."
            )
        return self._run_state_dict_hooks(snapshot)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads this rank's part of a full state dict, from this class or the plain optimizer.

        Every rank must call it, with the full dict. Each rank copies only what it owns, to where
        the local optimizer wants it; the caller's dict stays as it is.

        Args:
            state_dict: what :meth:`state_dict` or the plain optimizer's ``state_dict()`` returned,
                from any number of ranks.

        Raises:
            ValueError: if the dict doesn't fit; the other ranks raise too, and nothing has changed
                on any rank.
            RuntimeError: if the ranks' dicts have different options.
        """
        self._full_state.load_(
            self.optim, self.param_groups, lambda: self._run_load_hooks(state_dict)
        )
        if self._stage is not None:
            self._stage.refresh()
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def sharding_report(self) -> ShardingReport:
        """Who owns how much, in how many buckets it travels, and how many bytes a step sends.

        No communication; any rank may call it alone. State sizes are measured for this rank and
        estimated for the others.
        """
        return ShardingReport.of(
            self._sharded.plan,
            self._communicator.members.group_rank,
            self._local.state_nbytes(self.optim),
            reduces=self._gradients.can_follow,
        )

    def __repr__(self) -> str:
        members = self._communicator.members
        return (
            f"{super().__repr__()[:-1]}sharded {type(self.optim).__name__} on "
            f"{members.name(members.group_rank)} of {members.world_size}\n)"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} can't be copied or pickled: it holds a process group and only "
            "a part of the state. Use consolidate_state_dict() and state_dict() to save it, and "
            "construct a new one on every rank to copy it"
        )

    # What this rank owns

    @property
    def state(self) -> Any:
        """The local optimizer's state under the user's parameters, live."""
        if "optim" not in vars(self) or not self._sharded.slices.slices:
            return super().state
        return StateByParameter(self.optim, self._sharded.slices, self._sharded.parameters)

    @state.setter
    def state(self, value: Any) -> None:
        WrappedOptimizer.state.fset(self, value)  # type: ignore[attr-defined] # mypy takes a property for a function

    # What the ranks agree on, and what must hold

    def _describe_missing(self, closure: Callable[[], Any] | None) -> dict[str, Json]:
        """Where each rank steps a part of a parameter, all must step, or none."""
        if closure is not None or self._join_config.enable:  # not known yet, or sent as needed
            return {}
        missing: list[Json] = self._gradients.missing_parts()
        return {"parameters without a gradient": missing} if missing else {}

    def _find_replaced(self) -> RuntimeError | None:
        return self._sharded.find_replaced(self.param_groups)
