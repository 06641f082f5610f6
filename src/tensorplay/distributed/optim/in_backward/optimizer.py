"""``apply_optimizer_in_backward``: the step runs inside ``backward()``, and gradients are freed there."""

import copy
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn import utils
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from tensorplay.distributed.optim._core.bucket_step import BucketStepper, equal
from tensorplay.distributed.optim._core.coupled_optimizers import (
    refuse_coupled,
    refuse_coupling_options,
)
from tensorplay.distributed.optim._core.wrapped_optimizer import (
    WrappedOptimizer,
    all_parameters,
    canonical_group,
    canonical_groups,
    options_of,
)
from tensorplay.distributed.optim.in_backward.clipping import Clipping, GradientNorm
from tensorplay.distributed.optim.in_backward.ddp_gradients import DDPGradients
from tensorplay.distributed.optim.in_backward.local_gradients import LocalGradients
from tensorplay.distributed.optim.in_backward.registration import (
    register,
    registration_of,
    unregister,
)
from tensorplay.distributed.optim.in_backward.watched_module import WatchedModule

__all__ = ["InBackwardOptimizer", "apply_optimizer_in_backward", "get_in_backward_optimizers"]

PREVIOUS_NORM = "previous_gradient_norm"
"""The key under which the first param group keeps what ``clip_previous_norm`` needs to resume."""

_COUPLED = ("stepped inside backward", "and there are never all of them. Use it after backward")
_CLIPPING = (
    "stepped inside backward",
    "the norm of all gradients isn't known there. Set max_grad_norm to 0 or None, and clip_previous_norm",
)


def apply_optimizer_in_backward(
    optimizer_class: type[Optimizer],
    params: Iterable[Any],
    optimizer_kwargs: Mapping[str, Any],
    register_hook: bool = True,
    *,
    module: nn.Module | None = None,
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
            two kinds; whatever ``optimizer_class`` raises.
        TypeError: as ``torch.optim``.

    Example:
        >>> optimizer = apply_optimizer_in_backward(
        ...     torch.optim.AdamW, model.parameters(), {"lr": 1e-3, "fused": True}, module=model
        ... )
        >>> for inputs, targets in batches:
        ...     loss_fn(model(inputs), targets).backward()  # also updates the parameters
    """
    clipping = Clipping(clip_value, clip_parameter_norm, clip_previous_norm)
    refuse_coupled(optimizer_class, *_COUPLED)
    groups = canonical_groups(params)
    request = _Request(optimizer_class, bool(register_hook), {})
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
        return present
    bare = len(groups) == 1 and list(groups[0]) == ["params"]
    inner = optimizer_class(groups[0]["params"] if bare else groups, **optimizer_kwargs)
    refuse_coupled(type(inner), *_COUPLED)
    refuse_coupling_options(inner, *_CLIPPING)
    return InBackwardOptimizer(inner, request, clipping, module)


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
        self._gradients = LocalGradients(weakref.ref(self))
        self._hooks: dict[int, RemovableHandle] = {}
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
            self._listen_if_first(parameter)
        if module is not None:
            try:
                self._watched = WatchedModule(module, parameters, self)
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
        for parameter in all_parameters(self.param_groups):
            self._stop_listening(parameter)
            unregister(parameter, self)
            for next_one in registration_of(parameter)[:1]:
                next_one._listen_if_first(parameter)  # noqa: SLF001 - the same class
        if self._watched is not None:
            self._watched.remove()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, as ``torch.optim.Optimizer.add_param_group``, to be updated like the others.

        With ``module=`` given, call `apply_optimizer_in_backward` for them instead.

        Raises:
            ValueError: another class steps one of the parameters inside backward, or ``module=``
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
        self.optim.add_param_group(group)
        self._stepper.refresh()
        for parameter in self.param_groups[-1]["params"]:
            self._positions[id(parameter)] = len(self._positions)
            if self.is_registered:
                register(parameter, self)
                self._listen_if_first(parameter)

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

    def _listen_if_first(self, parameter: torch.Tensor) -> None:
        first = registration_of(parameter)[0]
        if first is not self:
            first._has_followers = True  # noqa: SLF001 - the same class
        elif self.is_registered and (parameter.is_floating_point() or parameter.is_complex()):
            requires_grad = parameter.requires_grad
            parameter.requires_grad_(True)  # a frozen one refuses hooks, and keeps those it has
            hook = parameter.register_post_accumulate_grad_hook(self._gradients.receive)  # type: ignore[no-untyped-call] # torch leaves it untyped
            parameter.requires_grad_(requires_grad)
            self._hooks[id(parameter)] = hook

    def _stop_listening(self, parameter: torch.Tensor) -> None:
        hook = self._hooks.pop(id(parameter), None)
        if hook is not None:
            hook.remove()
        self._gradients.forget(parameter)
        ddp = self._ddp()
        if ddp is not None:
            DDPGradients.of(ddp).forget(parameter)

    @contextmanager
    def _accumulating(self) -> Iterator[None]:
        before, self.is_accumulating = self.is_accumulating, True
        ddp = self._ddp()
        without_sync: AbstractContextManager[Any] = nullcontext() if ddp is None else ddp.no_sync()
        try:
            with without_sync:
                yield
        finally:
            self.is_accumulating = before

    # What the module's forward tells: a Watcher of watched_module.py

    def postpone(self, parameters: list[torch.Tensor]) -> None:
        """The gradients of ``parameters`` are complete only when the next backward ends."""
        for parameter in parameters:
            registration_of(parameter)[0]._gradients.postpone(parameter)  # noqa: SLF001 - the same class

    def attach_to_ddp(self, ddp: DistributedDataParallel) -> None:
        """From now on the gradients come from ``ddp``, averaged."""
        gradients = DDPGradients.of(ddp)
        averaged = set(ddp.parameters())
        for parameter in all_parameters(self.param_groups):
            if parameter in averaged:
                first = registration_of(parameter)[0]
                first._stop_listening(parameter)  # noqa: SLF001 - the same class
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
        self._stop_listening(old)
        unregister(old, self)
        register(new, self)
        self._listen_if_first(new)

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
