"""The local optimizer, which holds what this rank owns of the user's param groups."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from tensorplay.distributed.optim._core.coupled_optimizers import (
    refuse_coupled,
    refuse_coupling_options,
)
from tensorplay.distributed.optim._core.local_shard import is_dtensor, local_memory
from tensorplay.distributed.optim._core.parameter_checks import same_members
from tensorplay.distributed.optim._core.ranks import GroupRank
from tensorplay.distributed.optim._core.wrapped_optimizer import (
    all_parameters,
    copy_options_,
    options_of,
)
from tensorplay.distributed.optim.zero.sharded_parameters import ShardedParameters

COUPLED = (
    "sharded",
    "so that every rank would compute something else. Use it without sharding",
)
_CLIPPING = (
    "sharded",
    (
        "a rank knows the norm of its own gradients only. Set max_grad_norm to 0 or None, and call "
        "torch.nn.utils.clip_grad_norm_ before step()"
    ),
)


class LocalGroups:
    """The local optimizer's groups: at each place of the user's, what this rank owns of it.

    Some optimizers need a parameter in each group: where a rank owns none, there is an empty
    placeholder.

    Args:
        sharded: all parameters.
        group_rank: this rank.
    """

    def __init__(self, sharded: ShardedParameters, group_rank: GroupRank) -> None:
        self._sharded = sharded
        self._group_rank = group_rank
        self._placeholders: set[torch.Tensor] = set()
        self._memories: tuple[Any, list[torch.Tensor]] = ((), [])

    def build(
        self,
        optimizer_class: type[Optimizer],
        groups: Sequence[dict[str, Any]],
        defaults: dict[str, Any],
    ) -> Optimizer:
        """Makes the local optimizer, and writes the options that it adds into the user's ``groups``.

        Raises:
            ValueError: if its class can't be sharded; also whatever it raises.
        """
        own_groups = [self._own(*entry) for entry in enumerate(groups)]
        members = [list(map(_tensor_in, group["params"])) for group in own_groups]
        # Some classes look at the parameters before torch turns them into groups.
        bare = len(own_groups) == 1 and list(own_groups[0]) == ["params"]
        optimizer = optimizer_class(own_groups[0]["params"] if bare else own_groups, **defaults)
        refuse_coupled(type(optimizer), *COUPLED)
        refuse_coupling_options(optimizer, *_CLIPPING)
        self._sharded.require_elementwise(type(optimizer))
        if not same_members(optimizer.param_groups, members):
            raise ValueError(
                f"{type(optimizer).__name__} rearranges the param groups that it is given, so that "
                "options couldn't be kept the same here and there; pass groups as it makes them"
            )
        self.drop_placeholder_state(optimizer)
        copy_options_(optimizer.param_groups, groups)
        return optimizer

    def add_to(self, optimizer: Optimizer, place: int, group: dict[str, Any]) -> None:
        """Adds the user's ``group`` at ``place``, which gets the options that it lacks."""
        optimizer.add_param_group(self._own(place, group))
        copy_options_(optimizer.param_groups[-1:], [group])

    def _own(self, place: int, group: dict[str, Any]) -> dict[str, Any]:
        plan, parameters, slices = (
            self._sharded.plan,
            self._sharded.parameters,
            self._sharded.slices,
        )
        owners = dict(zip(parameters, plan.partition.owners, strict=True))
        flat = {parameters[slot.parameter] for each in plan.flat_layouts for slot in each.slots}
        owned: list[Any] = [
            p for p in group["params"] if owners[p] == self._group_rank and p not in flat
        ]
        owned += slices.in_group(place)
        if group["params"] and not owned:
            owned = [_placeholder_like(group["params"][0])]
            self._placeholders.update(owned)
        if "param_names" in group:  # torch wants all groups to have names, or none
            names = dict(zip(group["params"], group["param_names"], strict=True))
            number = itertools.count()
            owned = [
                (names[p] if p in names else f"{group['param_names'][0]} (slice {next(number)})", p)
                for p in owned
            ]
        return {**options_of(group), "params": owned}

    def drop_placeholder_state(self, optimizer: Optimizer) -> None:
        """Drops the state that some classes make for placeholders at once."""
        for placeholder in self._placeholders:
            optimizer.state.pop(placeholder, None)

    def memories(self, optimizer: Optimizer) -> list[torch.Tensor]:
        """What ``optimizer`` steps in memory that must stay."""
        formed = len(optimizer.param_groups), self._sharded.slices.num_formed
        if self._memories[0] != formed:
            self._memories = (
                formed,
                [
                    parameter
                    for parameter in all_parameters(optimizer.param_groups)
                    if parameter not in self._placeholders and not is_dtensor(parameter)
                ],
            )
        return self._memories[1]

    def state_nbytes(self, optimizer: Optimizer) -> int:
        """The memory that its state takes, in bytes."""
        return sum(
            tensor.numel() * tensor.element_size()
            for parameter, state in optimizer.state.items()
            if parameter not in self._placeholders
            for tensor in _tensors_in(state)
        )


def _tensor_in(entry: Any) -> torch.Tensor:
    """A member of a group, which may come with its name."""
    parameter: torch.Tensor = entry[1] if isinstance(entry, tuple) else entry
    return parameter


def _placeholder_like(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter without elements, of the same dtype, device and number of axes."""
    empty = local_memory(parameter).detach().new_empty((0,) * max(1, parameter.ndim))
    return torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)


def _tensors_in(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
