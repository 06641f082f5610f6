"""``apply_optimizer_in_backward``: the step runs inside ``backward()``, and gradients are freed there."""

import copy
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import utils
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tensorplay.distributed.optim._core.bucket_step import BucketStepper, equal
from tensorplay.distributed.optim._core.coupled_optimizers import (
    refuse_coupled,
    refuse_coupling_options,
)
from tensorplay.distributed.optim._core.parameter_checks import Groups
from tensorplay.distributed.optim._core.tagged_json import Json
from tensorplay.distributed.optim._core.wrapped_optimizer import (
    WrappedOptimizer,
    all_parameters,
    canonical_group,
    canonical_groups,
    options_of,
)
from tensorplay.distributed.optim.in_backward.clipping import Clipping, GradientNorm
from tensorplay.distributed.optim.in_backward.ddp_gradients import DDPGradients
from tensorplay.distributed.optim.in_backward.group_gradients import Group, GroupGradients
from tensorplay.distributed.optim.in_backward.local_gradients import LocalGradients
from tensorplay.distributed.optim.in_backward.registration import (
    register,
    registration_of,
    unregister,
)
from tensorplay.distributed.optim.in_backward.watched_module import WatchedModule
from tensorplay.distributed.optim.zero import ZeroRedundancyOptimizer

__all__ = ["InBackwardOptimizer", "apply_optimizer_in_backward", "get_in_backward_optimizers"]

PREVIOUS_NORM = "previous_gradient_norm"
"""The key under which the first param group keeps what ``clip_previous_norm`` needs to resume."""

_COUPLED = ("stepped inside backward", "and there are never all of them. Use it after backward")
_CLIPPING = (
    "stepped inside backward",
    "the norm of all gradients isn't known there. Set max_grad_norm to 0 or None, and clip_previous_norm",
)


_TWO_AVERAGES = (
    "process_group= averages gradients, and so does DistributedDataParallel; pass the module inside "
    "it, or leave process_group out"
)


def apply_optimizer_in_backward(
    optimizer_class: type[Optimizer],
    params: Iterable[Any],
    optimizer_kwargs: Mapping[str, Any],
    register_hook: bool = True,
    *,
    module: nn.Module | None = None,
    process_group: dist.ProcessGroup | None = None,
    clip_value: float | None = None,
    clip_parameter_norm: float | None = None,
    clip_previous_norm: float | None = None,
) -> "InBackwardOptimizer":
    """Has ``params`` updated inside ``backward()``, and their gradients freed there.

    As soon as a parameter's gradient is complete, the parameter is stepped and its ``.grad`` is set
    to ``None``: a large one alone, small ones together in buckets of 4 MB. So at most the largest
    gradient and one bucket of others are alive, instead of all of them. The result equals that of
    ``optimizer_class`` stepped after backward, bit for bit if its kernel treats each parameter
    alike. A loop that trains with it has neither ``step()`` nor ``zero_grad()``.

    Where reentrant activation checkpointing runs a backward inside the backward, the gradients of
    the checkpointed parts are kept until the outermost ends. ``use_reentrant=False`` needs no such
    care.

    Follows ``torch.distributed.optim._apply_optimizer_in_backward``, with the differences that one
    optimizer for all parameters is returned, small parameters are stepped together, a tied parameter
    is updated once even if it's registered through both its owners, frozen ones are accepted, and
    what follows below.

    Args:
        optimizer_class: any class that updates each parameter from its own gradient and state. If
            a parameter is registered with several classes, they step it in order of registration.
        params: what ``torch.optim`` takes: tensors, named tensors, or dicts of them with options.
            Those that the same class updates already, with the same options, are left out.
        optimizer_kwargs: options for ``optimizer_class``; the mapping is not kept.
        register_hook: if false, nothing runs in backward: the returned optimizer is an ordinary one,
            for hooks of your own to step.

    Keyword Args:
        module: the module that ``params`` belong to and whose ``forward`` you call. With it,
            ``load_state_dict(assign=True)`` is followed, copies (``copy.deepcopy``) and parameters
            that were replaced otherwise raise at their next ``forward`` instead of no longer being
            updated, and a parameter that is used both inside and outside of reentrant checkpointing
            is exact. It may be a ``DistributedDataParallel``, or be wrapped in one later:
            parameters are then stepped with the averaged gradients, in DDP's communication hook.
        process_group: a group of ranks whose gradients are averaged, without
            ``DistributedDataParallel``: each bucket while backward goes on; it is then stepped on
            every rank, and freed. At most the largest gradient and two buckets (25 MB each) are
            alive. Every rank must call this function, and `remove` and ``add_param_group`` later.
            Every rank gets the parameters of group rank 0; with ``module=`` those of the module and
            its buffers too, and the buffers again after each backward. ``None``: this process alone,
            or as ``module=`` says.
        clip_value: gradients are first clipped to this largest absolute value of an element.
        clip_parameter_norm: each parameter's gradient is first scaled to at most this 2-norm.
        clip_previous_norm: gradients are scaled by what would have brought the *previous* backward's
            gradients to at most this 2-norm in all; the first backward is not clipped.
            `InBackwardOptimizer.clip_norm_in_two_passes` clips by the norm itself.

    Returns:
        The optimizer: for schedulers, checkpoints, accumulation and removal. It needs not be kept.
        The optimizer that does it already, if all of ``params`` were left out.

    Raises:
        ValueError: an optimizer that couples all parameters; a parameter that the same class
            updates already with other options; ``params`` that aren't in ``module``; clipping of
            two kinds; whatever ``optimizer_class`` raises. With ``process_group=``, the other ranks
            raise too.
        TypeError: as ``torch.optim``; a ``DTensor`` with ``process_group=``;
            `ZeroRedundancyOptimizer`, which steps inside backward by itself.
        RuntimeError: ranks of ``process_group`` that disagree; on every rank, naming the difference.

    Example:
        >>> optimizer = apply_optimizer_in_backward(
        ...     torch.optim.AdamW, model.parameters(), {"lr": 1e-3, "fused": True}, module=model
        ... )
        >>> for inputs, targets in batches:
        ...     loss_fn(model(inputs), targets).backward()  # also updates the parameters
    """
    group = None if process_group is None else Group(process_group)
    built: InBackwardOptimizer | None = None
    error = None
    try:
        clipping = Clipping(clip_value, clip_parameter_norm, clip_previous_norm)
        request = _Request(optimizer_class, bool(register_hook), {}, group)
        built, is_new = _build(params, optimizer_kwargs, request, clipping, module)
    except Exception as problem:
        if group is None:
            raise
        error = problem  # the other ranks must hear of it first
    if group is not None:
        _settle(group, built, error, {"clipping": dict(vars(clipping))} if error is None else {})
    assert built is not None  # noqa: S101 - narrows a type; else an error was raised
    if is_new:
        built.listen()
    return built


def _build(
    params: Iterable[Any],
    optimizer_kwargs: Mapping[str, Any],
    request: "_Request",
    clipping: Clipping,
    module: nn.Module | None,
) -> tuple["InBackwardOptimizer", bool]:
    """The optimizer, and whether it is new: else it's one that does the same already."""
    optimizer_class = request.optimizer_class
    if isinstance(optimizer_class, type) and issubclass(optimizer_class, ZeroRedundancyOptimizer):
        raise TypeError(
            "ZeroRedundancyOptimizer steps inside backward by itself: construct "
            "ZeroRedundancyOptimizer(params, optimizer_class, shard_gradients=True, "
            "overlap_with_ddp=True, **options)"
        )
    refuse_coupled(optimizer_class, *_COUPLED)
    if request.group is not None:
        request.require_group_fits(module)
    groups = canonical_groups(params)
    present = None
    for group in groups:
        options = {**optimizer_kwargs, **options_of(group)}
        entries = {id(p): (p, e) for p, e in zip(_tensors(group), group["params"], strict=True)}
        for key, (parameter, _) in list(entries.items()):
            if (same := request.find_same(parameter, options)) is not None:
                present = same
                del entries[key]
        request.options.update(dict.fromkeys(entries, options))
        group["params"] = [entry for _, entry in entries.values()]
    if present is not None and not request.options:
        return present, False
    bare = len(groups) == 1 and list(groups[0]) == ["params"]
    inner = optimizer_class(groups[0]["params"] if bare else groups, **optimizer_kwargs)
    refuse_coupled(type(inner), *_COUPLED)
    refuse_coupling_options(inner, *_CLIPPING)
    if request.group is not None:
        parameters = list(all_parameters(inner.param_groups))
        request.group.refuse(parameters, inner.param_groups)
    return InBackwardOptimizer(inner, request, clipping, module), True


def _settle(
    group: Group,
    optimizer: "InBackwardOptimizer | None",
    error: Exception | None,
    facts: dict[str, Json],
) -> None:
    """Lets the ranks know what each of them has built, before any of them listens."""
    groups: Groups = []
    if optimizer is not None:
        groups = optimizer.param_groups
        kind = type(optimizer.optim)
        facts = {**facts, "optimizer_class": f"{kind.__module__}.{kind.__qualname__}"}
    try:
        group.settle("__init__", groups, facts, error)
    except BaseException:
        if optimizer is not None and not optimizer.is_listening:
            optimizer.remove()
        raise


def get_in_backward_optimizers(module: nn.Module) -> list[Optimizer]:
    """Finds the optimizers that update parameters of ``module`` inside backward.

    Follows ``torch.distributed.optim._get_in_backward_optimizers``, which returns one per parameter.

    Args:
        module: any module.

    Returns:
        What `apply_optimizer_in_backward` returned for them, each once, in order of the parameters.
    """
    found = (each for p in module.parameters() for each in registration_of(p))
    return list(dict.fromkeys(found))


class InBackwardOptimizer(WrappedOptimizer):
    """What `apply_optimizer_in_backward` returns: one optimizer for all its parameters.

    ``param_groups``, ``state`` and ``defaults`` are those of ``optim``, live: what a scheduler
    writes counts in the next backward. ``state_dict()`` has the format of the optimizer class.

    Attributes:
        optim: the optimizer, an instance of the class given. Its step hooks fire for every bucket.
    """

    _step_supports_amp_scaling = True  # so that GradScaler calls step() in any case, which refuses

    def __init__(
        self,
        optim: Optimizer,
        request: "_Request",
        clipping: Clipping,
        module: nn.Module | None,
    ) -> None:
        super().__init__([{"params": list(g["params"])} for g in optim.param_groups], {})
        self.optim = optim
        self.param_groups = optim.param_groups
        self.is_accumulating = False
        self.is_registered = request.register_hook
        self.request = request
        self._clipping = clipping
        self._stepper = BucketStepper(optim)
        self._gradients: LocalGradients | GroupGradients = (
            LocalGradients(weakref.ref(self))
            if request.group is None
            else GroupGradients(request.group, module, weakref.ref(self))
        )
        self.is_listening = False
        self._ddp: Callable[[], DistributedDataParallel | None] = lambda: None
        self._measured: GradientNorm | None = None
        self._limit: tuple[float, torch.Tensor] | None = None
        self._norm = GradientNorm()
        self._has_followers = False
        self._stepped_followers: dict[InBackwardOptimizer, None] = {}
        self._watched: WatchedModule | None = None
        parameters = list(all_parameters(self.param_groups))
        self._positions = {id(p): position for position, p in enumerate(parameters)}
        for parameter in parameters:
            register(parameter, self)
        if module is not None:
            try:
                self._watched = WatchedModule(module, parameters, self)
            except BaseException:
                self.remove()
                raise

    def listen(self) -> None:
        """From now on parameters are updated. With a process group, every rank must call it."""
        self.is_listening = True
        parameters = list(all_parameters(self.param_groups))
        if self.request.group is not None:
            module = None if self._watched is None else self._watched.module
            self.request.group.replicate_(parameters, module)
        self._listen_where_first(parameters)
        if self._watched is not None:
            try:
                self._watched.look_for_ddp()
            except BaseException:
                self.remove()
                raise

    # What the user calls

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Does nothing, since backward has stepped, and explains that once.

        After `remove`, with ``register_hook=False``, and for
        ``torch.distributed.checkpoint``, which has an optimizer make its state by a step without
        effect, it is the plain optimizer's step.

        Args:
            closure: is called, and its loss returned.

        Raises:
            RuntimeError: when a ``GradScaler`` calls.
        """
        if "grad_scale" in vars(self) or "found_inf" in vars(self):
            for name in ("grad_scale", "found_inf"):
                vars(self).pop(name, None)
            raise RuntimeError(
                "GradScaler can't be used with apply_optimizer_in_backward: backward has updated the "
                "parameters already, with scaled gradients, and before anybody knew whether all are "
                "finite. Train in bfloat16, which needs no scaling, or step after backward"
            )
        if not self.is_registered or self._makes_state_only():
            return self.optim.step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not getattr(self, "_has_explained", False):
            self._has_explained = True
            warnings.warn(
                "step() does nothing: apply_optimizer_in_backward has these parameters updated, and "
                "their gradients freed, inside backward(). Remove the call; and zero_grad(), which "
                "isn't needed either",
                stacklevel=2,
            )
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``torch.optim.Optimizer.zero_grad``; the loop doesn't need it.

        With ``process_group=`` it also brings a backward to its end that an exception has ended
        here, as far as other ranks wait for it.

        Raises:
            RankDisagreementError: if that exception was not raised on every rank; the others raise
                too.
        """
        self.begin_forward()
        super().zero_grad(set_to_none)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Inside, backward adds to the gradients and updates nothing; the next backward outside does.

        The gradients of all parameters are then kept until that. Under ``DistributedDataParallel``
        they are not sent either; forward must be inside too, as with ``no_sync()``.
        """
        with ExitStack() as stack:
            for optimizer in self._leaders():
                stack.enter_context(optimizer._accumulating())  # noqa: SLF001 - the same class
            yield

    def clip_norm_in_two_passes(self, closure: Callable[[], Any], max_norm: float) -> Any:
        """One update with gradients scaled to a 2-norm of at most ``max_norm`` in all.

        ``closure`` runs twice: the first backward only measures, and frees what it has measured; the
        second updates. So nothing but time is spent: about that of another forward and backward.
        The random numbers are the same in both; buffers such as BatchNorm's averages are updated
        twice. Under DDP and FSDP2, every rank must call it.

        Args:
            closure: runs forward and backward, and returns the loss.
            max_norm: largest norm.

        Returns:
            What the second call of ``closure`` returns.

        Raises:
            RuntimeError: gradients are left from an earlier backward; or several optimizers step
                some of the parameters.
        """
        if self._gradients.has_kept():
            raise RuntimeError(
                "clip_norm_in_two_passes would lose the gradients that have been accumulated; "
                "accumulate inside the closure, or call zero_grad() before"
            )
        if any(len(registration_of(p)) > 1 for p in all_parameters(self.param_groups)):
            raise RuntimeError("clip_norm_in_two_passes needs to be the only one to step")
        parameters = all_parameters(self.param_groups)
        devices = {p.device.index for p in parameters if p.device.type == "cuda"}
        self._measured = GradientNorm()
        try:
            with torch.random.fork_rng(list(devices)), torch.enable_grad():
                closure()
            norm = self._measured.value()
        finally:
            self._measured = None
        self._limit = None if norm is None else (max_norm, norm)
        try:
            with torch.enable_grad():
                return closure()
        finally:
            self._limit = None

    def clip_grad_norm_(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """Refuses: after backward there are no gradients left, and torch's function returns 0.

        Raises:
            RuntimeError: always; it names what there is instead.
        """
        raise RuntimeError(
            "the gradients can't be clipped by their norm after backward, which has used and freed "
            "them. Pass clip_previous_norm= (by the norm of the previous backward) or "
            "clip_parameter_norm= to apply_optimizer_in_backward, or call clip_norm_in_two_passes()"
        )

    def remove(self) -> None:
        """Ends the updates inside backward. Parameters and state stay; this is a plain optimizer now.

        Other classes that step the same parameters go on.
        """
        self.is_registered = False
        self._stop_listening(list(all_parameters(self.param_groups)))
        successors: dict[InBackwardOptimizer, list[torch.Tensor]] = {}
        for parameter in all_parameters(self.param_groups):
            unregister(parameter, self)
            for next_one in registration_of(parameter)[:1]:
                successors.setdefault(next_one, []).append(parameter)
        for next_one, parameters in successors.items():
            next_one._listen_where_first(parameters)  # noqa: SLF001 - the same class
        if self._watched is not None:
            self._watched.remove()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, as ``torch.optim.Optimizer.add_param_group``, to be updated like the others.

        With ``module=`` or ``process_group=`` given, call `apply_optimizer_in_backward` for them
        instead.

        Raises:
            ValueError: another class steps one of the parameters inside backward, or one of these
                was given.
        """
        if "optim" not in vars(self):  # `Optimizer.__init__` adds the first groups
            super().add_param_group(param_group)
            return
        group = canonical_group(param_group)
        if self._watched is not None or any(registration_of(p) for p in _tensors(group)):
            raise ValueError(
                "add_param_group can't be used with module=, or for parameters that are updated inside "
                "backward already; call apply_optimizer_in_backward for the new parameters"
            )
        if self.request.group is not None:
            raise ValueError(
                "add_param_group can't be used with process_group=; call apply_optimizer_in_backward "
                "for the new parameters, on every rank"
            )
        self.optim.add_param_group(group)
        self._stepper.refresh()
        added = self.param_groups[-1]["params"]
        for parameter in added:
            self._positions[id(parameter)] = len(self._positions)
            if self.is_registered:
                register(parameter, self)
        self._listen_where_first(added)

    def state_dict(self) -> dict[str, Any]:
        """The state dict of the optimizer class, with the state in order of the parameters."""
        packed = self.optim.state_dict()
        keys = sorted(packed["state"], key=lambda key: key if isinstance(key, int) else -1)
        packed["state"] = {key: packed["state"][key] for key in keys}
        return self._run_state_dict_hooks(packed)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what the optimizer class, or this one, has saved; the dict stays the caller's.

        Raises:
            ValueError: it doesn't fit; nothing has changed.
        """
        state_dict = self._run_load_hooks(state_dict)
        self.optim.load_state_dict({**state_dict, "state": copy.deepcopy(state_dict["state"])})
        self.param_groups = self.optim.param_groups
        self._stepper.refresh()
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"an {type(self).__name__} can't be copied or pickled: its hooks are on these parameters. "
            "Save its state_dict(), and call apply_optimizer_in_backward for the other parameters"
        )

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}{type(self.optim).__name__} inside backward\n)"

    # What comes from within backward: a Consumer of local_gradients.py

    def step_bucket(self, parameters: list[torch.Tensor]) -> None:
        """Steps parameters whose ``.grad`` is final; whoever calls frees it."""
        if self._measured is not None:
            self._measured.add(self._positions[id(parameters[0])], parameters)
            return
        self._clip_(parameters)
        self._step(parameters)
        if self._has_followers:
            self._step_followers(parameters)

    def end_backward(self) -> None:
        """All buckets of this backward have been stepped."""
        for optimizer in (self, *self._stepped_followers):
            optimizer._stepper.end_iteration()  # noqa: SLF001 - the same class
        self._stepped_followers.clear()
        norm, self._norm = self._norm.value(), GradientNorm()
        if norm is not None:
            self.param_groups[0][PREVIOUS_NORM] = norm

    def options(self) -> list[Groups]:
        """See :class:`GroupConsumer`."""
        steppers = dict.fromkeys(
            each for p in all_parameters(self.param_groups) for each in registration_of(p)
        )
        return [
            [{k: v for k, v in group.items() if k != PREVIOUS_NORM} for group in each.param_groups]
            for each in steppers
        ]

    def _step(self, parameters: list[torch.Tensor]) -> None:
        self._stepper.step(parameters)
        self._opt_called = True  # a scheduler looks for it

    def _step_followers(self, parameters: list[torch.Tensor]) -> None:
        """The other classes that step some of ``parameters``, in order of registration."""
        place = 1
        while parameters := [p for p in parameters if len(registration_of(p)) > place]:
            members: dict[InBackwardOptimizer, list[torch.Tensor]] = {}
            for parameter in parameters:
                members.setdefault(registration_of(parameter)[place], []).append(parameter)
            for follower, own in members.items():
                follower._step(own)  # noqa: SLF001 - the same class
                self._stepped_followers[follower] = None
            place += 1

    def _clip_(self, parameters: list[torch.Tensor]) -> None:
        self._clipping.clip_(parameters)
        if self._limit is not None:
            utils.clip_grads_with_norm_(parameters, *self._limit)
        if self._clipping.previous_norm is not None:
            self._norm.add(self._positions[id(parameters[0])], parameters)
            previous = self.param_groups[0].get(PREVIOUS_NORM)
            if previous is not None:
                utils.clip_grads_with_norm_(parameters, self._clipping.previous_norm, previous)

    # Where the gradients come from

    def _leaders(self) -> list["InBackwardOptimizer"]:
        """Who hears of the gradients of our parameters: usually we."""
        firsts = (registration_of(p)[:1] for p in all_parameters(self.param_groups))
        return list(dict.fromkeys(optimizer for first in firsts for optimizer in first))

    def _listen_where_first(self, parameters: Iterable[torch.Tensor]) -> None:
        own = []
        for parameter in parameters:
            first = next(iter(registration_of(parameter)), None)
            if first is not None and first is not self:
                first._has_followers = True  # noqa: SLF001 - the same class
            elif self.is_registered and (parameter.is_floating_point() or parameter.is_complex()):
                own.append(parameter)
        if own:
            self._gradients.watch(own)

    def _stop_listening(self, parameters: list[torch.Tensor]) -> None:
        self._gradients.unwatch(parameters)
        ddp = self._ddp()
        if ddp is not None:
            for parameter in parameters:
                DDPGradients.of(ddp).forget(parameter)

    @contextmanager
    def _accumulating(self) -> Iterator[None]:
        before, self.is_accumulating = self.is_accumulating, True
        ddp = self._ddp()
        without_sync: AbstractContextManager[Any] = nullcontext() if ddp is None else ddp.no_sync()
        try:
            with without_sync, self._gradients.no_sync():
                yield
        finally:
            self.is_accumulating = before

    # What the module's forward tells: a Watcher of watched_module.py

    def postpone(self, parameters: list[torch.Tensor]) -> None:
        """The gradients of ``parameters`` are complete only when the next backward ends."""
        for parameter in parameters:
            registration_of(parameter)[0]._gradients.postpone(parameter)  # noqa: SLF001 - the same class

    def begin_forward(self) -> None:
        """A forward of the module begins that needs gradients."""
        if self.request.group is not None:
            for leader in self._leaders():
                leader._gradients.begin_forward()  # noqa: SLF001 - the same class

    def attach_to_ddp(self, ddp: DistributedDataParallel) -> None:
        """From now on the gradients come from ``ddp``, averaged."""
        if self.request.group is not None:
            raise RuntimeError(_TWO_AVERAGES)
        gradients = DDPGradients.of(ddp)
        averaged = set(ddp.parameters())
        for parameter in all_parameters(self.param_groups):
            if parameter in averaged:
                first = registration_of(parameter)[0]
                first._stop_listening([parameter])  # noqa: SLF001 - the same class
                first._ddp = weakref.ref(ddp)  # noqa: SLF001 - the same class
                if first.is_registered:
                    gradients.pass_to(parameter, weakref.ref(first))

    def replace_parameter(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """``new`` is stepped instead of ``old`` and inherits its state, for every class."""
        for optimizer in registration_of(old):
            optimizer._replace(old, new)

    def _replace(self, old: torch.Tensor, new: torch.Tensor) -> None:
        for group in self.param_groups:
            group["params"][:] = [new if p is old else p for p in group["params"]]
        if old in self.state:
            self.state[new] = self.state.pop(old)
        self._stepper.replace(old, new)
        self._positions[id(new)] = self._positions.pop(id(old))
        self.request.options[id(new)] = self.request.options.pop(id(old))
        leads = registration_of(old)[0] is self
        unregister(old, self)
        register(new, self)
        if leads and self.is_registered:
            self._gradients.replace(old, new)

    def _makes_state_only(self) -> bool:
        """Whether a step now would have no effect but new state, as DCP asks for it."""
        if self.optim.state or any(group.get("lr", 1.0) != 0 for group in self.param_groups):
            return False
        gradients = [p.grad for p in all_parameters(self.param_groups) if p.grad is not None]
        return bool(gradients) and not any(gradient.any() for gradient in gradients)


@dataclass(frozen=True)
class _Request:
    """What `apply_optimizer_in_backward` was asked for, by ``id`` of the parameter."""

    optimizer_class: type[Optimizer]
    register_hook: bool
    options: dict[int, dict[str, Any]]
    group: Group | None

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Whose gradients are averaged."""
        return None if self.group is None else self.group.process_group

    def require_group_fits(self, module: nn.Module | None) -> None:
        """Raises ``ValueError`` for what can't go with a process group."""
        if not self.register_hook:
            raise ValueError(
                "process_group= has gradients averaged inside backward, where register_hook=False "
                "has nothing run; leave one of them out"
            )
        if isinstance(module, DistributedDataParallel):
            raise ValueError(_TWO_AVERAGES)  # noqa: TRY004 - both are modules

    def find_same(self, parameter: Any, options: dict[str, Any]) -> InBackwardOptimizer | None:
        """Who does the same for ``parameter`` already; raises for a contradiction."""
        optimizers: list[InBackwardOptimizer] = registration_of(parameter)
        for optimizer in optimizers:
            other = optimizer.request
            if other.register_hook is not self.register_hook:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} is registered with "
                    f"register_hook={other.register_hook} already; use the same for all of its "
                    "optimizers"
                )
            if other.process_group is not self.process_group:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} is registered with another "
                    "process_group already; use the same for all of its optimizers"
                )
            if other.optimizer_class is not self.optimizer_class:
                continue
            if not equal(other.options[id(parameter)], options):
                raise ValueError(
                    f"{type(optimizer.optim).__name__} updates a parameter of shape "
                    f"{tuple(parameter.shape)} in backward already, with other options: "
                    f"{other.options[id(parameter)]} instead of {options}. Call remove() on what "
                    "the first call has returned, or pass the parameter in one of the calls only"
                )
            return optimizer
        return None


def _tensors(group: Mapping[str, Any]) -> list[Any]:
    """The parameters of a group as the user wrote it: they may come with names."""
    return [entry[1] if isinstance(entry, tuple) else entry for entry in group["params"]]
