"""Training on uneven inputs: ``torch.distributed.algorithms.join``, with a ``Join`` that orders.

``Joinable`` and ``JoinHook`` are torch's own, since ``DistributedDataParallel`` looks for them.
"""

from collections.abc import Iterable
from typing import Any

from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

__all__ = ["JoinHook", "Joinable", "Join"]


class Join(TorchJoin):
    """torch's ``Join``, right in any order of ``joinables`` and with gradient accumulation.

    A rank that has run out of inputs shadows the others' collectives until all have. Two
    differences from ``torch.distributed.algorithms.join.Join``, where an optimizer before the model
    hangs, and so does an iteration without a step:

    * ``DistributedDataParallel`` modules come first, since forward and backward come before the
      step; the others follow in the order given.
    * In an iteration whose backward ran under ``no_sync()``, only DDP's hook runs: the optimizer is
      expected to step once per synchronised backward.

    Every rank must enter it with the same joinables.

    Args:
        joinables: models and optimizers to join, all on one process group.
        enable: false turns the context manager off.
        throw_on_early_termination: raise on every rank as soon as one runs out of inputs.
        **kwargs: for the joinables' ``join_hook``, for instance DDP's
            ``divide_by_initial_world_size``.

    Raises:
        ValueError: if there is no joinable, or they are on different process groups.
    """

    def __init__(
        self,
        joinables: Iterable[Joinable],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,
    ) -> None:
        given = list(joinables)
        models = [each for each in given if isinstance(each, DistributedDataParallel)]
        others = [each for each in given if not isinstance(each, DistributedDataParallel)]
        super().__init__([*models, *others], enable, throw_on_early_termination, **kwargs)
        if models:
            self._join_hooks[len(models) :] = [
                _AfterSynchronisedBackward(hook, models) for hook in self._join_hooks[len(models) :]
            ]


class _AfterSynchronisedBackward(JoinHook):
    """A hook that rests in iterations in which no model synchronised its gradients."""

    def __init__(self, hook: JoinHook, models: list[DistributedDataParallel]) -> None:
        self._hook = hook
        self._models = models

    def main_hook(self) -> None:
        # DDP's hook, which has just run, notes here what the active ranks told it.
        if any(model.require_forward_param_sync for model in self._models):
            self._hook.main_hook()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._hook.post_hook(is_last_joiner)
