"""The optimizer that does the updates: made from a class or a factory, or the user's instance."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from tensorplay.distributed.optim._core.wrapped_optimizer import all_parameters, canonical_groups


def make_inner(optim: Any, params: Any, options: Mapping[str, Any]) -> Optimizer:
    """The optimizer to wrap.

    Args:
        optim: an optimizer class, something that makes an optimizer from parameters, or one.
        params: what it is made from; of an instance, ``None`` or exactly its parameters.
        options: for the class.

    Raises:
        TypeError: if the arguments don't go together.
        ValueError: if ``params`` aren't the optimizer's parameters.
    """
    if isinstance(optim, Optimizer):
        if options:
            raise TypeError(
                f"optim is a {type(optim).__name__} that has its options already, but got "
                f"{sorted(options)} as well; pass them to its constructor, or pass the class"
            )
        if params is not None:
            _require_same(optim, canonical_groups(params))
        return optim
    if not callable(optim):
        raise TypeError(
            f"optim must be an optimizer, its class, or a function that makes one, got {optim!r}"
        )
    if params is None:
        raise TypeError(
            f"params is missing: {getattr(optim, '__name__', optim)} needs parameters, such as "
            "params=model.parameters()"
        )
    groups = canonical_groups(params)
    # Some classes look at the parameters before torch turns them into groups.
    bare = len(groups) == 1 and list(groups[0]) == ["params"]
    given = [dict(group, params=_tensors(group)) for group in groups]
    made = optim(groups[0]["params"] if bare else groups, **options)
    if not isinstance(made, Optimizer):
        raise TypeError(
            f"optim must make a torch.optim.Optimizer, but {getattr(optim, '__name__', optim)} made "
            f"{made!r}"
        )
    _require_same(made, given)
    return made


_FUSED = frozenset({torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad})


def scales_gradients(optimizer: Optimizer) -> bool:
    """Whether its kernels divide gradients by ``grad_scale`` first, and nobody looks at them before.

    They leave the scaled gradients in ``.grad``, as if these had been scaled by other means.
    """
    return (
        type(optimizer) in _FUSED
        and all(group["fused"] is True for group in optimizer.param_groups)
        and "step" not in vars(optimizer)
        and not optimizer._optimizer_step_pre_hooks  # noqa: SLF001 - torch has no public name for it
        and len({p.device for p in all_parameters(optimizer.param_groups)}) == 1
    )


def _require_same(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    own = list(all_parameters(optimizer.param_groups))
    given = [tensor for group in groups for tensor in _tensors(group)]
    if set(own) == set(given):
        return
    foreign = sum(tensor not in set(own) for tensor in given)
    missing = sum(tensor not in set(given) for tensor in own)
    raise ValueError(
        f"params and the parameters of the {type(optimizer).__name__} aren't the same: {foreign} of "
        f"params aren't the optimizer's, and {missing} of the optimizer's aren't in params; leave "
        "params out, or pass all of the optimizer's"
    )


def _tensors(group: Mapping[str, Any]) -> list[torch.Tensor]:
    return [entry[1] if isinstance(entry, tuple) else entry for entry in group["params"]]


def names_of(
    named_parameters: Mapping[str, Any] | Iterable[tuple[str, Any]] | None, optimizer: Optimizer
) -> list[str] | None:
    """The name of each of an optimizer's parameters, in order.

    Raises:
        ValueError: for a parameter without a name, a name or a parameter that occurs twice, and a
            name of something that isn't the optimizer's parameter.
    """
    if named_parameters is None:
        return None
    pairs = list(
        named_parameters.items() if isinstance(named_parameters, Mapping) else named_parameters
    )
    parameters = list(all_parameters(optimizer.param_groups))
    names: dict[torch.Tensor, str] = {}
    seen: set[str] = set()
    for name, parameter in pairs:
        if name in seen:
            raise ValueError(f"named_parameters has the name {name!r} twice")
        seen.add(name)
        if parameter in names:
            raise ValueError(
                f"named_parameters has one parameter under two names, {names[parameter]!r} and "
                f"{name!r}; name it once, as model.named_parameters() does"
            )
        names[parameter] = name
    known = set(parameters)
    unknown = [name for parameter, name in names.items() if parameter not in known]
    if unknown:
        raise ValueError(
            f"named_parameters has {_listed(unknown)}, which isn't among params; name the "
            "optimizer's parameters only"
        )
    unnamed = [
        f"parameter {index} of shape {tuple(parameter.shape)}"
        for index, parameter in enumerate(parameters)
        if parameter not in names
    ]
    if unnamed:
        raise ValueError(
            f"named_parameters lacks {_listed(unnamed)}; pass all of params with their names, such as "
            "model.named_parameters(), or leave named_parameters out"
        )
    return [names[parameter] for parameter in parameters]


def _listed(things: Sequence[str]) -> str:
    more = f" and {len(things) - 4} more" if len(things) > 4 else ""
    return ", ".join(map(str, things[:4])) + more
