"""The full state dict of an optimizer, and the part of it that belongs to some of the parameters."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tensorplay.distributed.optim._core.wrapped_optimizer import options_of, parameter_indices

IndexedState = dict[int, Any]
"""The state of some parameters, by parameter index."""


def require_fit(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raises ``ValueError`` if a full state dict isn't one of an optimizer with ``groups``."""
    missing = {"state", "param_groups"} - set(state_dict)
    if missing:
        raise ValueError(
            f"the state dict lacks {sorted(missing)}; pass the full dict that state_dict() of this "
            "class or of the plain optimizer returned"
        )
    saved_groups = state_dict["param_groups"]
    if len(saved_groups) != len(groups):
        raise ValueError(
            "loaded state dict has a different number of parameter groups: "
            f"{len(saved_groups)} instead of {len(groups)}"
        )
    for position, (saved, group) in enumerate(zip(saved_groups, groups, strict=True)):
        if len(saved["params"]) != len(group["params"]):
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of "
                f"optimizer's group: group {position} has {len(saved['params'])} parameters "
                f"instead of {len(group['params'])}"
            )


def full_indexed(
    own_dict: Mapping[str, Any],
    own_groups: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
) -> tuple[IndexedState, dict[Any, Any], dict[str, Any]]:
    """Takes the local optimizer's state dict apart; nothing is copied.

    Args:
        own_dict: what its ``state_dict()`` gave.
        own_groups: its groups, whose parameters are some of ``groups``, or placeholders.
        groups: all parameters.

    Returns:
        The state by index among all parameters, in index order; the state that belongs to no
        parameter (some optimizers keep a counter there); and what the class added to the dict.
    """
    indices = parameter_indices(groups)
    parameter_at = {own: parameter for parameter, own in parameter_indices(own_groups).items()}
    state = {
        indices[parameter]: own_dict["state"][own]
        for own, parameter in parameter_at.items()
        if own in own_dict["state"] and parameter in indices
    }
    shared = {key: value for key, value in own_dict["state"].items() if key not in parameter_at}
    return {index: state[index] for index in sorted(state)}, shared, _additions(own_dict)


def own_part(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    own_groups: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Copies out of a full state dict what the parameters of ``own_groups`` need.

    Args:
        state_dict: the full dict, which fits ``groups``; it isn't changed.
        groups: all parameters.
        own_groups: the groups of the local optimizer, whose parameters are some of these.

    Returns:
        A state dict for the local optimizer: its indices, the saved options, copies, and what its
        class has added to the dict.
    """
    saved_index: dict[torch.Tensor, Any] = {}
    for saved, group in zip(state_dict["param_groups"], groups, strict=True):
        for index, parameter in zip(saved["params"], group["params"], strict=True):
            saved_index.setdefault(parameter, index)
    own_index = parameter_indices(own_groups)
    saved_state = state_dict["state"]
    state = {
        own: clone(saved_state[saved_index[parameter]])
        for parameter, own in own_index.items()
        if parameter in saved_index and saved_index[parameter] in saved_state
    }
    of_parameters = set(saved_index.values())
    shared = {key: clone(value) for key, value in saved_state.items() if key not in of_parameters}
    return {
        **clone(_additions(state_dict)),
        "state": {**state, **shared},
        "param_groups": [
            {
                **clone(options_of(saved)),
                **_own_names(saved, group, own),
                "params": [own_index[p] for p in own["params"]],
            }
            for saved, group, own in zip(
                state_dict["param_groups"], groups, own_groups, strict=True
            )
        ],
    }


def _additions(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    return {key: state_dict[key] for key in state_dict if key not in {"state", "param_groups"}}


def _own_names(
    saved: Mapping[str, Any], group: Mapping[str, Any], own: Mapping[str, Any]
) -> dict[str, list[str]]:
    """The saved names, so that named groups can be added later: torch wants all named, or none."""
    if "param_names" not in saved:
        return {}
    names = dict(zip(group["params"], saved["param_names"], strict=True))
    return {"param_names": [names.get(p, "a placeholder") for p in own["params"]]}


def clone(value: Any, device: torch.device | None = None) -> Any:
    """A deep copy in which a tensor that is a view doesn't bring its whole storage along.

    Args:
        value: what to copy.
        device: where the copies of tensors go; ``None``: to the tensor's own.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().to(value.device if device is None else device, copy=True)
    if isinstance(value, dict):
        return {key: clone(item, device) for key, item in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(clone(item, device) for item in value)
    return copy.deepcopy(value)
