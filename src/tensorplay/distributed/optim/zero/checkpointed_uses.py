"""Which parameters reentrant checkpoints use, as the module's forward shows it.

Such a checkpoint runs its part of forward without recording, and a nested backward differentiates
it. A parameter that is also used outside gets two gradients, and the first looks like its last.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


class CheckpointedUses:
    """Forward pre-hooks on a module and its submodules.

    Args:
        module: on which training calls ``forward``.
        hear: refers to what is called with the parameters of a submodule that forward, though it
            is recorded as a whole, runs without recording.
    """

    def __init__(
        self,
        module: nn.Module,
        hear: "weakref.WeakMethod[Callable[[Sequence[torch.Tensor]], None]]",
    ) -> None:
        self._root = weakref.ref(module)
        self._hear = hear
        self._is_recorded = False
        for each in module.modules():
            each.register_forward_pre_hook(_Hook(weakref.ref(self)))

    def enter(self, module: nn.Module) -> None:
        """Before the forward of ``module``."""
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:  # noqa: SLF001 - torch has no public name for it
            return  # in the second case, checkpointing recomputes
        if module is self._root():
            self._is_recorded = torch.is_grad_enabled()
        if self._is_recorded and not torch.is_grad_enabled():
            hear = self._hear()
            if hear is not None:
                hear(list(module.parameters(recurse=False)))


class _Hook:
    """Does nothing when what it belongs to is gone; and nothing in a copied or saved module."""

    def __init__(self, uses: "weakref.ref[CheckpointedUses] | None") -> None:
        self._uses = uses

    def __call__(self, module: nn.Module, _args: Any) -> None:
        uses = None if self._uses is None else self._uses()
        if uses is not None:
            uses.enter(module)

    def __deepcopy__(self, _memo: object) -> "_Hook":
        return _Hook(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (None,)
