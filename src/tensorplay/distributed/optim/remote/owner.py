"""What runs on the worker that owns the parameters: a local optimizer, fed from autograd contexts."""

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
from torch.optim import Optimizer

from tensorplay.distributed.optim._core.coupled_optimizers import refuse_coupling_options
from tensorplay.distributed.optim._core.gradient_norm import norm_of_own
from tensorplay.distributed.optim._core.state_dicts import clone
from tensorplay.distributed.optim._core.wrapped_optimizer import (
    all_parameters,
    bare_step,
    options_of,
)
from tensorplay.distributed.optim.remote.known_options import KnownOptions

CPU = torch.device("cpu")

Changes = dict[int, dict[str, Any]]
"""New options by the position of the group in the local optimizer."""

Undo = Callable[[], None]


class LocalOptimizer:
    """An optimizer of any class over parameters of this worker.

    Its methods return what the trainer is to know; those that change something take ``undoable``
    and also return how to undo it. They are called by one thread at a time.

    Args:
        optimizer_class: makes the optimizer.
        groups: param groups of tensors.
        names: how messages call the parameters of each group.
        args: for the class, after the parameters.
        kwargs: likewise.
        whole: whether no other worker has parameters of the same optimizer.
    """

    def __init__(
        self,
        optimizer_class: Callable[..., Optimizer],
        groups: Sequence[dict[str, Any]],
        names: Sequence[Sequence[str]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        whole: bool,
    ) -> None:
        self._names: dict[torch.Tensor, str] = {}
        self._take_names(groups, names)
        bare = len(groups) == 1 and list(groups[0]) == ["params"]
        # Some classes look at the parameters before torch turns them into groups.
        self._optim = optimizer_class(groups[0]["params"] if bare else groups, *args, **kwargs)
        if not whole:
            refuse_coupling_options(
                self._optim,
                "spread over several workers",
                "a worker knows the norm of its own gradients only. Set max_grad_norm to 0 or None, "
                "and pass clip_grad_norm= to DistributedOptimizer",
            )
        step = inspect.unwrap(type(self._optim).step)
        self._may_fuse = step in _FUSED_STEPS
        self._writes_options = not step.__module__.startswith("torch.optim.")
        self._look_again()

    def describe(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The defaults, and each group's options."""
        optim = self._optim
        return (
            clone(optim.defaults, CPU),
            [clone(options_of(group), CPU) for group in optim.param_groups],
        )

    def step(
        self, context_id: int, scale: float | None, changes: Changes, *, undoable: bool
    ) -> tuple[Changes, Undo | None]:
        """One step with the gradients of an autograd context.

        Args:
            context_id: the context.
            scale: what to multiply the gradients with; the context's own stay as they are.
            changes: options that are new since the last step.
            undoable: whether to keep copies of what the step may change.

        Returns:
            The options that the optimizer has changed itself, and how to undo the step.
        """
        optim = self._optim
        gradients = self._gradients(context_id)
        undo = self._remember(gradients) if undoable else None
        try:
            for position, options in changes.items():
                optim.param_groups[position].update(options)
            if changes:
                self._look_again()
            before = _known(optim.param_groups) if self._writes_options else []
            if scale is not None:
                gradients = {p: gradient * scale for p, gradient in gradients.items()}
            self._step_with(gradients)
        except BaseException:
            if undo is not None:
                undo()
            raise
        return _news(before, optim.param_groups), undo

    def squared_norm(self, context_id: int) -> float:
        """The sum of the squares of the gradients' elements."""
        gradients = self._gradients(context_id).values()
        values = [each.coalesce().values() if each.is_sparse else each for each in gradients]
        return float(norm_of_own(values, 2.0, CPU))

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Clears the parameters' ``.grad``, which no step reads."""
        self._optim.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """A copy of the local optimizer's state dict, in CPU memory."""
        copied: dict[str, Any] = clone(self._optim.state_dict(), CPU)
        return copied

    def load_state_dict(self, state_dict: dict[str, Any]) -> tuple[list[dict[str, Any]], Undo]:
        """Loads, and returns each group's options and how to undo it."""
        optim = self._optim
        state, groups = optim.state, [dict(group) for group in optim.param_groups]

        def undo() -> None:
            optim.state, optim.param_groups = state, groups
            self._look_again()

        try:
            optim.load_state_dict(state_dict)
            self._look_again()
            return self.describe()[1], undo
        except BaseException:
            undo()
            raise

    def add_param_group(
        self, group: dict[str, Any], names: Sequence[str]
    ) -> tuple[dict[str, Any], Undo]:
        """Adds a group of tensors, and returns its options and how to undo it."""
        optim, before = self._optim, len(self._optim.param_groups)
        known = dict(self._names)

        def undo() -> None:
            del optim.param_groups[before:]
            self._names = known
            self._look_again()

        try:
            self._take_names([group], [names])
            optim.add_param_group(group)
            self._look_again()
            return self.describe()[1][-1], undo
        except BaseException:
            undo()
            raise

    def _take_names(
        self, groups: Iterable[Mapping[str, Any]], names: Iterable[Sequence[str]]
    ) -> None:
        for group, group_names in zip(groups, names, strict=True):
            for parameter, name in zip(group["params"], group_names, strict=True):
                if not isinstance(parameter, torch.Tensor):
                    raise TypeError(
                        f"{name} refers to a {type(parameter).__name__}, not to a tensor; pass the "
                        "RRefs of the parameters, such as RemoteModule.remote_parameters() gives"
                    )
                other = self._names.setdefault(parameter, name)
                if other != name:
                    raise ValueError(
                        f"{other} and {name} are the same tensor on its worker, which would be "
                        "updated twice in a step; pass each parameter once"
                    )

    def _gradients(self, context_id: int) -> dict[torch.Tensor, torch.Tensor]:
        """The gradients of this optimizer's parameters in a context, in the parameters' order."""
        try:
            found = dist_autograd.get_gradients(context_id)  # type: ignore[attr-defined]  # torch re-exports it implicitly
        except RuntimeError:
            try:
                dist_autograd._is_valid_context(context_id)  # type: ignore[attr-defined]  # noqa: SLF001 - torch has no public name for it
            except RuntimeError:
                return {}  # the trainer knows the context: this worker had no part in it
            raise
        parameters = self._parameters
        pairs = zip(parameters, map(found.get, parameters), strict=True)
        return {parameter: gradient for parameter, gradient in pairs if gradient is not None}

    def _look_again(self) -> None:
        """Takes note of the groups after they have changed, so that a step needn't look at them."""
        groups = self._optim.param_groups
        self._parameters = list(all_parameters(groups))
        self._fusable = [
            (group, not _takes_one_kernel(group))
            for group in groups
            if self._may_fuse and self._is_fusable(group)
        ]

    def _is_fusable(self, group: Mapping[str, Any]) -> bool:
        """Whether the fused kernel may step a group; see Note [Fused by default]."""
        return (
            group["fused"] is None
            and group["foreach"] is None
            and not group["differentiable"]
            and not group.get("capturable")
            and not any(isinstance(option, torch.Tensor) for option in group.values())
            and all(
                parameter.device.type == "cpu"
                and parameter.dtype in {torch.float32, torch.float64}
                and _is_float32(self._optim.state.get(parameter, {}).get("step"))
                for parameter in group["params"]
            )
        )

    def _step_with(self, gradients: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Steps with these gradients and no others; ``.grad`` is afterwards what it was."""
        kept = [parameter.grad for parameter in self._parameters]
        fused = self._fusable
        if fused and not {torch.strided}.issuperset(map(_layout_of, gradients.values())):
            fused = []
        try:
            for parameter in self._parameters:
                parameter.grad = gradients.get(parameter)
            for group, choice in fused:
                group["fused"] = choice
            (bare_step(self._optim) or self._optim.step)()
        finally:
            for group, _ in fused:
                group["fused"] = None
            for parameter, gradient in zip(self._parameters, kept, strict=True):
                parameter.grad = gradient

    def _remember(self, gradients: Iterable[torch.Tensor]) -> Undo:
        """Copies what a step with these gradients may change; see ``step``."""
        optim = self._optim
        values = {parameter: parameter.detach().clone() for parameter in gradients}
        others = set(self._names) - set(values)
        state = {key: clone(value) for key, value in optim.state.items() if key not in others}
        groups = [{**group, **clone(options_of(group))} for group in optim.param_groups]

        @torch.no_grad()
        def undo() -> None:
            for parameter, value in values.items():
                parameter.copy_(value)
            for key in [key for key in optim.state if key not in others]:
                del optim.state[key]
            optim.state.update(state)
            for group, before in zip(optim.param_groups, groups, strict=True):
                group.clear()
                group.update(before)
            self._look_again()

        return undo


# Note [Fused by default]
# ~~~~~~~~~~~~~~~~~~~~~~~
# `fused=None` and `foreach=None` leave the choice of the kernel to torch, which on the CPU takes the
# loop over the parameters. Here it is the fused kernel (Adam's is three to four times as fast) where it
# gives the loop's result up to the last bits: on the CPU, in single and double precision, for dense gradients
# and plain numbers as options, and where the loop takes more than one kernel for each parameter:
# small ones take longer through the fused one. Saying so spares torch the choice in each step. The
# groups and the state dict go on saying None. `fused=False` asks for the loop.


# torch wraps `step` in each class that is instantiated.
_FUSED_STEPS = {
    inspect.unwrap(known.step)
    for known in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
}


def _takes_one_kernel(group: Mapping[str, Any]) -> bool:
    """Whether the loop is plain gradient descent, which the fused kernel does no better."""
    return group.get("momentum") == 0 and group["weight_decay"] == 0 and not group["maximize"]


_layout_of = operator.attrgetter("layout")


def _is_float32(step: Any) -> bool:
    """Whether a parameter's counter is what the fused kernels read; those yet to be made will be."""
    return step is None or (isinstance(step, torch.Tensor) and step.dtype == torch.float32)


def _known(groups: Iterable[Mapping[str, Any]]) -> list[KnownOptions]:
    """Copies of the options, since a step may write to them in place."""
    known = []
    for group in groups:
        known.append(KnownOptions())
        known[-1].take(options_of(group))
    return known


def _news(before: Iterable[KnownOptions], groups: Iterable[Mapping[str, Any]]) -> Changes:
    changes = {}
    for position, (known, group) in enumerate(zip(before, groups, strict=False)):  # maybe none
        news = known.news(group)
        if news:
            changes[position] = news
    return changes
