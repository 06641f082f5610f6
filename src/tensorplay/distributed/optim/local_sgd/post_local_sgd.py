"""``PostLocalSGDOptimizer``: every rank steps on its own, and periodically parameters are averaged."""

import copy
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from tensorplay.distributed.optim._core.wrapped_optimizer import (
    SameGroupsOptimizer,
    all_parameters,
    canonical_group,
)
from tensorplay.distributed.optim.local_sgd.averagers import ScheduledAverager
from tensorplay.distributed.optim.local_sgd.ddp_hooks import PostLocalSGDState
from tensorplay.distributed.optim.zero import ZeroRedundancyOptimizer

__all__ = ["PostLocalSGDOptimizer"]

COUNTERS = ("averager_step", "hook_iter", "buffer_averager_step", "state_averager_step")
"""What :meth:`PostLocalSGDOptimizer.state_dict` adds to each param group."""


class Averager(Protocol):
    """What the optimizer asks of an averager; torch's are such, too."""

    step: int
    process_group: Any

    def average_parameters(self, params: Any) -> None:
        """Counts a step, and averages if it is time."""


class PostLocalSGDOptimizer(SameGroupsOptimizer, Joinable):
    r"""Lets each rank run its own optimizer, and an averager replace parameters by their mean.

    This is `post-local SGD <https://arxiv.org/abs/1808.07217>`_. During a warm-up, gradients are
    averaged over all ranks as always; after it within subgroups or not at all (see
    ``post_localSGD_hook``), and every so many steps ``averager`` averages the parameters over all
    ranks.

    Follows ``torch.distributed.optim.PostLocalSGDOptimizer``, with the differences that it is an
    optimizer in all respects (closures, hooks, ``defaults``, copies, schedulers after
    ``load_state_dict``), and that the count is the same on all ranks whatever ``GradScaler`` skips
    on some of them.

    Every rank must call :meth:`step` equally often.

    Args:
        optim: the optimizer that updates this rank's parameters. A ``ZeroRedundancyOptimizer`` must
            be on the ranks that average gradients after the warm-up.
        averager: decides when parameters are averaged, and over which ranks.

    Keyword Args:
        hook_state: the state of ``post_localSGD_hook``, if the model has that hook. It is compared
            with ``averager``, and its counter is saved and loaded along.
        buffers: tensors to be averaged as well, such as ``model.buffers()``; those of integer type
            are left out.
        buffer_averager: when (default: with the parameters).
        state_averager: when the floating-point state of ``optim`` is averaged (default: never).
            What only some ranks have yet isn't, nor are the optimizer's step counts.

    Attributes:
        optim: the local optimizer. ``param_groups``, ``state`` and ``defaults`` are its own, live.
        averager: the averager.

    Raises:
        ValueError: if ``hook_state`` ends the warm-up at another step than ``averager``, or a
            ``ZeroRedundancyOptimizer`` doesn't fit.
        TypeError: for things of the wrong kind.

    Example:
        >>> averager = PeriodicModelAverager(period=4, warmup_steps=100)
        >>> optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
        >>> loss_fn(model(inputs), targets).backward()
        >>> optimizer.step()
    """

    # GradScaler then calls `step` always, and leaves unscaling and skipping to it: the averager
    # counts, and averages with the other ranks, whether or not this rank's update is skipped.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        optim: Optimizer,
        averager: Averager,
        *,
        hook_state: PostLocalSGDState | None = None,
        buffers: Iterable[torch.Tensor] = (),
        buffer_averager: ScheduledAverager | None = None,
        state_averager: ScheduledAverager | None = None,
    ) -> None:
        if not isinstance(optim, Optimizer):
            raise TypeError(f"optim must be an optimizer, got {optim!r}; construct it first")
        if not hasattr(averager, "average_parameters"):
            raise TypeError(f"averager must be a ModelAverager, got {averager!r}")
        if hook_state is not None and not isinstance(hook_state, PostLocalSGDState):
            raise TypeError(
                f"hook_state must be a PostLocalSGDState, got {hook_state!r}; import it from "
                "tensorplay.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook"
            )
        _refuse_other_warm_up(averager, hook_state)
        _refuse_unfit_zero(optim, averager, hook_state, state_averager)
        # What it assigns gives way to the inner optimizer's as soon as there is one.
        super().__init__([torch.empty(0)], {})
        Joinable.__init__(self)
        self._has_joined = False
        self._hold(
            {
                "optim": optim,
                "averager": averager,
                "hook_state": hook_state,
                "buffers": list(buffers),
                "buffer_averager": buffer_averager,
                "state_averager": state_averager,
            }
        )

    def _hold(self, parts: Mapping[str, Any]) -> None:
        self.optim: Optimizer = parts["optim"]
        self.averager: Averager = parts["averager"]
        self.hook_state: PostLocalSGDState | None = parts["hook_state"]
        self.buffers: list[torch.Tensor] = parts["buffers"]
        self.buffer_averager: ScheduledAverager | None = parts["buffer_averager"]
        self.state_averager: ScheduledAverager | None = parts["state_averager"]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the local optimizer; every rank must, before its next :meth:`step`.

        Args:
            param_group: as for ``torch.optim.Optimizer.add_param_group``; it isn't changed.
        """
        if "optim" in self.__dict__:
            self.optim.add_param_group(canonical_group(param_group))
        else:  # `Optimizer.__init__`
            super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the local optimizer does."""
        self.optim.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """One step of the local optimizer; then the averager's turn.

        Args:
            closure: re-evaluates the model and returns the loss, if the local optimizer takes one.
            **kwargs: passed to the local optimizer's ``step``.

        Returns:
            What the local optimizer's ``step`` returns.

        Raises:
            RuntimeError: if ranks disagree; see the averager's ``average_parameters``. Whatever
                the local optimizer raises; if this step averages, the other ranks raise as well.
        """
        if self._join_config.enable and not self._has_joined:
            Join.notify_join_context(self)
        if self._is_only_creating_state():
            return self._step_inner(closure, kwargs)
        loss, error = None, None
        try:
            loss = self._step_unless_overflown(closure, kwargs)
        except Exception as problem:  # noqa: BLE001 - the other ranks must hear of it first
            error = problem
        self._average(error)
        return loss

    def _step_unless_overflown(
        self, closure: Callable[[], Any] | None, kwargs: Mapping[str, Any]
    ) -> Any:
        """The local step, as ``GradScaler`` expects it if it is the caller."""
        if "found_inf" not in self.__dict__:
            return self._step_inner(closure, kwargs)
        grad_scale, found_inf = self.__dict__["grad_scale"], self.__dict__["found_inf"]
        if getattr(self.optim, "_step_supports_amp_scaling", False):
            inner: Any = self.optim
            inner.grad_scale, inner.found_inf = grad_scale, found_inf
            try:
                return self._step_inner(closure, kwargs)
            finally:
                del inner.grad_scale, inner.found_inf
        if float(found_inf):
            return None
        if grad_scale is not None:
            _unscale_(self.param_groups, grad_scale)
        return self._step_inner(closure, kwargs)

    def _average(self, error: Exception | None = None) -> None:
        parameters: list[Any] = list(self.param_groups)
        if self.buffer_averager is None:
            parameters.append({"params": self.buffers})
        averager = self.averager
        if _decides_by_itself(averager):
            if error is not None:
                raise error
            averager.average_parameters(params=parameters if self.buffers else self.param_groups)
        else:
            assert isinstance(averager, ScheduledAverager)  # noqa: S101 - narrows a type
            averager.average_(parameters, joined=self._has_joined, error=error)
        if self.buffer_averager is not None:
            self.buffer_averager.average_(self.buffers, joined=self._has_joined)
        if self.state_averager is not None:
            self.state_averager.average_common_(self._named_state(), joined=self._has_joined)

    def _named_state(self) -> dict[str, torch.Tensor]:
        return {
            f"{number} {key}": value
            for number, parameter in enumerate(all_parameters(self.param_groups))
            for key, value in self.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
            and (value.is_floating_point() or value.is_complex())
            and key != "step"
        }

    def _is_only_creating_state(self) -> bool:
        """Whether this is how ``torch.distributed.checkpoint`` lets an optimizer create its state.

        It steps an empty optimizer with learning rates and gradients that are zero, on its own.
        """
        return (
            not self.state
            and all("lr" in group and not group["lr"] for group in self.param_groups)
            and all(
                parameter.grad is not None and not parameter.grad.any()
                for parameter in all_parameters(self.param_groups)
                if parameter.requires_grad
            )
        )

    # Saving and loading

    def state_dict(self) -> dict[str, Any]:
        """The local optimizer's state dict, and ``"step"``, the averager's count.

        Each param group has the counters as well, since ``torch.distributed.checkpoint`` keeps
        nothing else. What the averager's ``state_dict`` holds beyond ``"step"`` is under
        ``"averager"``.

        Ranks' parameters and state differ between two averages: save each rank's, or save after an
        average.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        state = dict(self.optim.state_dict())
        counters = self._counters()
        extra = self._averager_extra()
        groups = [{**group, **counters} for group in state["param_groups"]]
        if extra:
            groups[0]["averager"] = state["averager"] = extra
        state["param_groups"] = groups
        state["step"] = self.averager.step
        return self._run_state_dict_hooks(state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` returned, torch's, or the local optimizer's own.

        A dict without a count sets it to 0, with a warning. The caller's dict isn't changed, nor
        are its tensors kept.

        Args:
            state_dict: the dict, of this rank if it was saved between two averages.

        Raises:
            ValueError: if it doesn't fit; nothing has changed then.
        """
        state_dict = self._run_load_hooks(state_dict)
        counters = _counters_in(state_dict)
        groups = state_dict["param_groups"]
        extra = state_dict.get("averager", groups[0].get("averager") if groups else None)
        plain = {key: value for key, value in state_dict.items() if key not in {"step", "averager"}}
        if not isinstance(self.optim, ZeroRedundancyOptimizer):
            plain["state"] = copy.deepcopy(plain["state"])  # torch's optimizers would alias it
        plain["param_groups"] = [
            {key: value for key, value in group.items() if key not in {*COUNTERS, "averager"}}
            for group in groups
        ]
        self.optim.load_state_dict(plain)
        if counters is None:
            warnings.warn(
                "the loaded state dict does not contain a step counter for an averager; it starts "
                "at 0, with the warm-up",
                stacklevel=2,
            )
            counters = {"averager_step": 0}
        self._set_counters(counters, extra)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _counters(self) -> dict[str, int]:
        counters = {"averager_step": self.averager.step}
        if self.hook_state is not None:
            counters["hook_iter"] = self.hook_state.iter
        if self.buffer_averager is not None:
            counters["buffer_averager_step"] = self.buffer_averager.step
        if self.state_averager is not None:
            counters["state_averager_step"] = self.state_averager.step
        return counters

    def _set_counters(self, counters: Mapping[str, int], extra: Mapping[str, Any] | None) -> None:
        step = counters["averager_step"]
        if extra:
            self.averager.load_state_dict({"step": step, **extra})  # type: ignore[attr-defined] # mypy can't see that it has this
        else:
            self.averager.step = step
        if self.hook_state is not None:
            start = self.hook_state.start_localSGD_iter
            self.hook_state.iter = counters.get("hook_iter", min(step, start))
        if self.buffer_averager is not None:
            self.buffer_averager.step = counters.get("buffer_averager_step", step)
        if self.state_averager is not None:
            self.state_averager.step = counters.get("state_averager_step", step)

    def _averager_extra(self) -> dict[str, Any]:
        saved: dict[str, Any] = getattr(self.averager, "state_dict", dict)()
        return {key: value for key, value in saved.items() if key != "step"}

    # Copies

    def __getstate__(self) -> dict[str, Any]:
        # Not a step that a scheduler has patched, nor hooks: as torch's optimizers.
        names = (
            *("optim", "averager", "hook_state", "buffers"),
            *("buffer_averager", "state_averager"),
        )
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Joinable.__init__(self)
        self._has_joined = False
        self._hold(state)
        super().__setstate__({})

    def __repr__(self) -> str:
        averaged = f"averaged by {self.averager!r} at step {self.averager.step}"
        return f"{type(self).__name__} ({averaged}, of\n{self.optim!r}\n)"

    # Uneven inputs

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The hook with which a rank that has run out of inputs takes part in the averages.

        It receives the mean of the active ranks, without counting itself. For the ``Join`` of
        ``tensorplay.distributed.algorithms.join``, or torch's with the model first.
        """
        inner = self.optim.join_hook(**kwargs) if isinstance(self.optim, Joinable) else None
        return _AverageWhenJoined(self, inner)

    @property
    def join_device(self) -> torch.device:
        """The device of the first parameter."""
        return next(all_parameters(self.param_groups)).device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The ranks that average."""
        group: dist.ProcessGroup = self.averager.process_group
        return group

    @property
    def _join_config(self) -> Any:
        return self.__dict__["_join_config"]

    @_join_config.setter
    def _join_config(self, config: Any) -> None:
        self.__dict__["_join_config"] = config
        inner = self.__dict__.get("optim")
        if isinstance(inner, Joinable):
            # It takes part too, but tells the context nothing.
            inner._join_config = config._replace(is_first_joinable=False)  # noqa: SLF001 - as Join does


class _AverageWhenJoined(JoinHook):
    def __init__(self, optimizer: PostLocalSGDOptimizer, inner: JoinHook | None) -> None:
        self._optimizer = optimizer
        self._inner = inner

    def main_hook(self) -> None:
        """Shadows one step of the active ranks."""
        if self._inner is not None:
            self._inner.main_hook()
        optimizer = self._optimizer
        optimizer._has_joined = True  # noqa: SLF001 - one class in two parts
        try:
            optimizer._average()  # noqa: SLF001 - one class in two parts
        finally:
            optimizer._has_joined = False  # noqa: SLF001 - one class in two parts


def _decides_by_itself(averager: Averager) -> bool:
    """Whether it is somebody else's, whose ``average_parameters`` has to be called."""
    own = ScheduledAverager.average_parameters
    return getattr(type(averager), "average_parameters", None) is not own


def _unscale_(groups: Iterable[Mapping[str, Any]], grad_scale: torch.Tensor) -> None:
    inverse = grad_scale.double().reciprocal().float()
    for parameter in all_parameters(groups):
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.dtype == torch.float16:
            raise ValueError(
                "a gradient in float16 can't be unscaled without losing what scaling has saved; keep "
                "the parameters in float32, and use autocast"
            )
        values = gradient._values() if gradient.is_sparse else gradient  # noqa: SLF001 - of an uncoalesced one
        values.mul_(inverse.to(values.device))


def _counters_in(state_dict: Mapping[str, Any]) -> dict[str, int] | None:
    """The counters of a state dict, or ``None`` if it has no count of steps.

    Raises:
        ValueError: if one isn't a number of steps.
    """
    first: Mapping[str, Any] = next(iter(state_dict["param_groups"]), {})
    found = {name: first[name] for name in COUNTERS if name in first}
    if "step" in state_dict:
        found["averager_step"] = state_dict["step"]
    if "averager_step" not in found:
        return None
    counters = {}
    for name, value in found.items():
        try:
            counters[name] = operator.index(value)
        except TypeError:
            counters[name] = -1
        if counters[name] < 0:
            raise ValueError(f"{name}={value!r} in the state dict isn't a number of steps")
    return counters


def _refuse_other_warm_up(averager: Averager, hook_state: PostLocalSGDState | None) -> None:
    warmup_steps = getattr(averager, "warmup_steps", None)
    if hook_state is None or warmup_steps is None:
        return
    if hook_state.start_localSGD_iter != warmup_steps:
        raise ValueError(
            f"the hook averages gradients over all ranks for {hook_state.start_localSGD_iter} "
            f"iterations (start_localSGD_iter), but the averager's warm-up lasts {warmup_steps} steps "
            "(warmup_steps); pass the same number to both"
        )


def _refuse_unfit_zero(
    optim: Optimizer,
    averager: Averager,
    hook_state: PostLocalSGDState | None,
    state_averager: ScheduledAverager | None,
) -> None:
    """Sharded state is right only where the ranks of the group get the same gradients."""
    if not isinstance(optim, ZeroRedundancyOptimizer):
        return
    if state_averager is not None:
        raise ValueError(
            "state_averager can't average the state of a ZeroRedundancyOptimizer: each rank holds "
            "that of other parameters"
        )
    shards = set(dist.get_process_group_ranks(optim.process_group))
    if hook_state is not None:
        group = hook_state.gradient_group()
        same = set(dist.get_process_group_ranks(group)) if group is not None else set()
        if shards != same and len(shards) > 1:
            raise ValueError(
                f"the ZeroRedundancyOptimizer shards over ranks {sorted(shards)}, but gradients are "
                f"averaged over {sorted(same) or 'no ranks'} after the warm-up (hook_state); give it "
                "that subgroup as process_group, or it would update with other ranks' gradients"
            )
    elif not shards < set(dist.get_process_group_ranks(averager.process_group)):
        raise ValueError(
            f"the ZeroRedundancyOptimizer shards over ranks {sorted(shards)}, which must be some of "
            "those that the averager averages over: the ones that average gradients, whose "
            "parameters are equal anyway"
        )
