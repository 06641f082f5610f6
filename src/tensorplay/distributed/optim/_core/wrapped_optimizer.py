"""An ``Optimizer`` around an ``Optimizer``: what both show the user is one thing."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from tensorplay.distributed.optim._core.fused_adam import FUSED_ADAM, step_fused

NOT_OPTIONS = ("params", "param_names")
"""Keys of a param group that say *what* is optimized; all others are options: how."""


_GLOBAL_HOOKS = _global_optimizer_pre_hooks, _global_optimizer_post_hooks


class StateDictHooks(Optimizer):
    """Runs the hooks registered for state dicts, for classes that make and load these themselves."""

    def _run_state_dict_hooks(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        for hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = _or(hook(self, state_dict), state_dict)
        return state_dict

    def _run_load_hooks(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = _or(hook(self, state_dict), state_dict)
        return state_dict


class WrappedOptimizer(StateDictHooks):
    """A real ``torch.optim.Optimizer`` that lets an inner one, ``self.optim``, do the updates.

    ``state`` and ``defaults`` are the inner optimizer's own, so that schedulers, which read
    ``defaults``, and users, who read ``state``, see what is really there. Step hooks registered on
    the wrapper fire for the wrapper; torch's global step hooks fire once per step, not a second
    time for the inner optimizer.
    """

    optim: Optimizer
    """The inner optimizer, as ``optimizer_class`` made it."""

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """The inner optimizer's state: by parameter, live."""
        return self.optim.state

    @state.setter
    def state(self, value: defaultdict[torch.Tensor, Any]) -> None:
        if "optim" in self.__dict__:  # `Optimizer.__init__` assigns before there is one
            self.optim.state = value

    @property
    def defaults(self) -> dict[str, Any]:
        """The inner optimizer's default options, live."""
        return self.optim.defaults if "optim" in self.__dict__ else self.__dict__["_defaults"]

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        if "optim" in self.__dict__:
            self.optim.defaults = value
        else:
            self.__dict__["_defaults"] = value

    def _step_inner(self, closure: Callable[[], Any] | None, kwargs: Mapping[str, Any]) -> Any:
        """One step of the inner optimizer, with its own step hooks but not the global ones again."""
        return step_inner(self.optim, closure, kwargs)


def step_inner(
    optimizer: Optimizer,
    closure: Callable[[], Any] | None,
    kwargs: Mapping[str, Any],
    *,
    runs_global_hooks: bool = False,
) -> Any:
    """``optimizer.step`` inside the step of the one around it, which has run the global hooks.

    Args:
        optimizer: the inner one.
        closure: for its ``step``.
        kwargs: as above.
        runs_global_hooks: whether there is no step around it, so that the hooks run here.
    """
    bare = bare_step(optimizer)
    if bare is None or (runs_global_hooks and any(_GLOBAL_HOOKS)):
        return _call(optimizer.step, closure, kwargs)
    with torch.autograd.profiler.record_function(f"Optimizer.step#{type(optimizer).__name__}.step"):
        return _call(bare, closure, kwargs)


def bare_step(optimizer: Optimizer) -> Callable[..., Any] | None:
    """``optimizer.step`` with its own hooks but without the global ones and the profiler's mark.

    ``None`` where somebody patched it, so that ``step`` itself must be called.
    """
    step = type(optimizer).step
    bare = getattr(step, "__wrapped__", None)
    if (
        "step" in vars(optimizer)
        or bare is None
        or not getattr(step, "hooked", False)
        or getattr(bare, "hooked", False)  # a decorator copied the mark from what it wraps
    ):
        return None
    if type(optimizer) in FUSED_ADAM:
        bare = _shortened(bare)
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:  # noqa: SLF001 - torch has no public name for it
        bare = _with_own_hooks(bare)
    bound: Callable[..., Any] = bare.__get__(optimizer)
    return bound


def is_plain_torch(optimizer: Optimizer) -> bool:
    """Whether a step is what ``torch.optim`` makes it, and nobody wants to be told of it.

    Its classes step each parameter by itself, those aside that couple all, and where it lies.
    """
    return (
        type(optimizer).__module__.startswith("torch.optim.")
        and bare_step(optimizer) is not None
        and not optimizer._optimizer_step_pre_hooks  # noqa: SLF001 - torch has no public name for it
        and not optimizer._optimizer_step_post_hooks  # noqa: SLF001 - as above
    )


class SameGroupsOptimizer(WrappedOptimizer):
    """One that holds the same parameters as the inner optimizer, so that the groups are its own too."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's groups, live."""
        return self.optim.param_groups if "optim" in self.__dict__ else self.__dict__["_groups"]

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        if "optim" in self.__dict__:
            self.optim.param_groups = value
        else:
            self.__dict__["_groups"] = value


def canonical_groups(params: Any) -> list[dict[str, Any]]:
    """Turns any form of ``params`` that ``torch.optim`` takes into fresh group dicts of lists.

    The caller's dicts and lists are neither kept nor changed. What isn't valid is left for
    ``torch.optim.Optimizer`` to refuse, with its own words.
    """
    if isinstance(params, torch.Tensor):
        raise TypeError(
            "params argument given to the optimizer should be an iterable of Tensors or dicts, but "
            f"got {torch.typename(params)}; put the tensor into a list"
        )
    if isinstance(params, torch.nn.Module) and not isinstance(params, Iterable):
        raise TypeError(
            f"params argument given to the optimizer should be its parameters, but got the "
            f"{torch.typename(params)} itself; pass its .parameters()"
        )
    _refuse_unordered(params)
    entries = list(params)
    if not entries:
        raise ValueError("optimizer got an empty parameter list")
    if not isinstance(entries[0], dict):
        return [{"params": entries}]
    return [canonical_group(group) for group in entries]


def canonical_group(group: Any) -> dict[str, Any]:
    """Copies one group, its ``params`` as a list; a single tensor becomes a list of one."""
    if not isinstance(group, dict):
        raise TypeError(f"param_group must be a dict, but got {type(group)}")
    if "params" not in group:
        raise ValueError(f"a param group needs the key 'params', but this one has {list(group)}")
    params = group["params"]
    _refuse_unordered(params)
    return {**group, "params": [params] if isinstance(params, torch.Tensor) else list(params)}


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group without what it optimizes."""
    return {key: value for key, value in group.items() if key not in NOT_OPTIONS}


def copy_options_(sources: Iterable[Mapping[str, Any]], targets: Iterable[dict[str, Any]]) -> None:
    """Writes every option of each source group into the target group at the same place."""
    for source, target in zip(sources, targets, strict=True):
        target.update(options_of(source))


def parameter_indices(groups: Iterable[Mapping[str, Any]]) -> dict[torch.Tensor, int]:
    """The index that ``Optimizer.state_dict`` gives each parameter: its last place in its group."""
    return {parameter: index for index, parameter in enumerate(all_parameters(groups))}


def all_parameters(groups: Iterable[Mapping[str, Any]]) -> Iterator[torch.Tensor]:
    """The parameters of all groups, in order."""
    return chain.from_iterable(group["params"] for group in groups)


def _refuse_unordered(params: Any) -> None:
    if isinstance(params, (set, frozenset)):  # torch refuses a set only inside a group
        raise TypeError(
            "optimizer parameters need to be organized in ordered collections, but the ordering of "
            "tensors in sets differs between ranks and runs. Please use a list instead."
        )


def _call(
    step: Callable[..., Any], closure: Callable[[], Any] | None, kwargs: Mapping[str, Any]
) -> Any:
    return step(**kwargs) if closure is None else step(closure, **kwargs)


def _shortened(step: Callable[..., Any]) -> Callable[..., Any]:
    """``step``, which is left out where the kernel can be called without torch's loops."""

    def shortened(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs and step_fused(optimizer):
            return None
        return step(optimizer, *args, **kwargs)

    return shortened


def _with_own_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """``step`` between the hooks registered on its optimizer, as torch calls them."""

    def hooked(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        arguments: tuple[Any, ...] = (optimizer, *args)
        for pre_hook in optimizer._optimizer_step_pre_hooks.values():  # noqa: SLF001 - torch has no public name for it
            arguments, kwargs = _or(pre_hook(optimizer, arguments, kwargs), (arguments, kwargs))
        result = step(*arguments, **kwargs)
        for post_hook in optimizer._optimizer_step_post_hooks.values():  # noqa: SLF001 - torch has no public name for it
            post_hook(optimizer, arguments, kwargs)
        return result

    return hooked


def _or(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value
