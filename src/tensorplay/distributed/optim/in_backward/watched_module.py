"""What the module's forward can tell: parameters that were replaced, a copy, DDP around it, uses.

Post-accumulate hooks are lost without a word when a parameter is replaced by another object.
"""

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tensorplay.distributed.optim._core.local_shard import is_dtensor


class Watcher(Protocol):
    """Who wants to know."""

    def replace_parameter(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """``load_state_dict(assign=True)`` has put ``new`` in the place of ``old``."""

    def begin_forward(self) -> None:
        """A forward of the module begins that needs gradients."""

    def attach_to_ddp(self, ddp: DistributedDataParallel) -> None:
        """The gradients of the module are averaged by ``ddp``."""

    def postpone(self, parameters: list[torch.Tensor]) -> None:
        """``parameters`` are used in a way that their hooks don't see before backward ends."""


class WatchedModule:
    """A forward pre-hook on ``module`` and on each submodule that has some of ``parameters``.

    Args:
        module: on which training calls ``forward``.
        parameters: the ones to look after; those outside of ``module`` are not.
        watcher: hears of what happens.

    Raises:
        ValueError: if none of ``parameters`` is in ``module``.
    """

    def __init__(
        self, module: nn.Module, parameters: Iterable[torch.Tensor], watcher: Watcher
    ) -> None:
        watched = set(parameters)
        self.module = module
        self._watcher = watcher
        self._ddp: weakref.ref[DistributedDataParallel] | None = None
        self._is_training = False
        # The dicts themselves: this is looked through before each forward.
        self._places: list[tuple[nn.Module, dict[str, Any], str, nn.Parameter]] = [
            (owner, own, name, parameter)
            for owner in module.modules()
            for own in [owner._parameters]  # noqa: SLF001 - torch's public ways are slow
            for name, parameter in own.items()
            if parameter is not None and parameter in watched
        ]
        if not self._places:
            raise ValueError(
                f"none of the params is a parameter of the {type(module).__name__} passed as "
                "module=; pass the module that params come from"
            )
        forget_copied(module)
        owners = dict.fromkeys([module, *(owner for owner, *_ in self._places)])
        self._hooks = [owner.register_forward_pre_hook(self) for owner in owners]
        self._hooks.append(module.register_load_state_dict_post_hook(_LoadHook(self)))  # type: ignore[no-untyped-call] # torch leaves it untyped

    def remove(self) -> None:
        """Leaves the module as it was."""
        for hook in self._hooks:
            hook.remove()

    def __call__(self, module: nn.Module, _args: Any) -> None:
        """Before ``module``'s forward."""
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:  # noqa: SLF001 - torch has no public name for it
            return  # in the second case, checkpointing recomputes
        if module is self.module:
            self._is_training = torch.is_grad_enabled()
            if self._is_training:
                self._require_unreplaced()
                self.look_for_ddp()
                self._watcher.begin_forward()
        if self._is_training and not torch.is_grad_enabled():
            # As reentrant checkpointing runs its segments.
            self._watcher.postpone([p for owner, _, _, p in self._places if owner is module])

    def follow_load(self) -> None:
        """After ``load_state_dict``: with ``assign=True`` the parameters are new ones."""
        successors: dict[nn.Parameter, nn.Parameter] = {}
        for _, own, name, old in self._places:
            new = own.get(name)
            if new is old or not isinstance(new, nn.Parameter) or is_dtensor(old):
                continue
            if self._ddp is not None:
                raise RuntimeError(
                    "DistributedDataParallel goes on with the parameters that "
                    "load_state_dict(assign=True) has replaced; load before wrapping, or without "
                    "assign=True"
                )
            if successors.setdefault(old, new) is not new:
                raise RuntimeError(
                    f"load_state_dict(assign=True) has parted the tied parameter {name!r}; tie it "
                    "again, and call apply_optimizer_in_backward anew"
                )
        for old, new in successors.items():
            self._watcher.replace_parameter(old, new)
        self._places = [
            (owner, own, name, successors.get(parameter, parameter))
            for owner, own, name, parameter in self._places
        ]

    def _require_unreplaced(self) -> None:
        for owner, own, name, parameter in self._places:
            new = own.get(name)
            # functional_call puts other tensors there, for one call.
            if new is parameter or not isinstance(new, nn.Parameter) or is_dtensor(parameter):
                continue
            raise RuntimeError(
                f"{name!r} of {type(owner).__name__} is no longer the parameter that is updated inside "
                "backward, so that its updates would be lost. Call remove() on what "
                "apply_optimizer_in_backward has returned, and call it again with the new parameters "
                "(where fully_shard has replaced them: only after fully_shard)"
            )

    def look_for_ddp(self) -> None:
        """Notices a ``DistributedDataParallel`` that is the module, or calls it."""
        active = DistributedDataParallel._active_ddp_module  # noqa: SLF001 - torch has no public name for it
        if isinstance(self.module, DistributedDataParallel):
            if self._ddp is None:
                self._attach(self.module)
            return
        if active is not None:
            if self._ddp is None or self._ddp() is not active:
                self._attach(active)
        elif self._ddp is not None and self.module.training:
            raise RuntimeError(
                "the module was wrapped in DistributedDataParallel and is now called without it, "
                "where gradients aren't averaged and parameters would not be updated. Call the "
                "DistributedDataParallel module; for evaluation, use eval() or torch.no_grad()"
            )

    def _attach(self, ddp: DistributedDataParallel) -> None:
        self._ddp = weakref.ref(ddp)
        self._watcher.attach_to_ddp(ddp)

    def __deepcopy__(self, _memo: object) -> "_OfACopy":
        return _OfACopy()

    def __reduce__(self) -> tuple[Any, ...]:
        return _OfACopy, ()


class _OfACopy:
    """What stands for :class:`WatchedModule` in a copied module."""

    def __call__(self, module: nn.Module, _args: Any) -> None:
        if torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters(False)):
            raise RuntimeError(
                f"this {type(module).__name__} is a copy of one whose parameters are updated inside "
                "backward; those of the copy are not. Call apply_optimizer_in_backward with the "
                "copy's parameters and module=; and then remove() on what it returns, to train the "
                "copy in another way"
            )


class _LoadHook:
    """Tells a :class:`WatchedModule` that a state dict was loaded; a copy of it does nothing."""

    def __init__(self, watched: WatchedModule) -> None:
        self._watched = watched

    def __call__(self, _module: nn.Module, _incompatible_keys: Any) -> None:
        self._watched.follow_load()

    def __deepcopy__(self, _memo: object) -> "_NoHook":
        return _NoHook()

    def __reduce__(self) -> tuple[Any, ...]:
        return _NoHook, ()


class _NoHook:
    def __call__(self, _module: nn.Module, _incompatible_keys: Any) -> None:
        """Does nothing."""


def forget_copied(module: nn.Module) -> None:
    """Takes away what a copied module has from the one it was copied from."""
    for each in module.modules():
        for hooks in (each._forward_pre_hooks, each._load_state_dict_post_hooks):  # noqa: SLF001 - torch has no public name for them
            copied = [key for key, hook in hooks.items() if isinstance(hook, (_OfACopy, _NoHook))]
            for key in copied:
                del hooks[key]
