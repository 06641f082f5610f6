"""The full state of a sharded optimizer: brought together on one rank, and loaded part by part.

It has the format of the plain optimizer's state dict, so that it fits any number of ranks.
"""

import copy
import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from tensorplay.distributed.optim._core import tagged_json
from tensorplay.distributed.optim._core.agreement import Agreement
from tensorplay.distributed.optim._core.collectives import Communicator
from tensorplay.distributed.optim._core.local_shard import rewrap, unwrap
from tensorplay.distributed.optim._core.parameter_checks import describe_options
from tensorplay.distributed.optim._core.partition import IN_PARTS
from tensorplay.distributed.optim._core.ranks import GroupRank
from tensorplay.distributed.optim._core.state_dicts import full_indexed, own_part, require_fit
from tensorplay.distributed.optim._core.tagged_json import Json
from tensorplay.distributed.optim._core.wrapped_optimizer import (
    NOT_OPTIONS,
    options_of,
    parameter_indices,
)
from tensorplay.distributed.optim.zero.checkpoint import consolidate
from tensorplay.distributed.optim.zero.flat_slices import SlicedState, merge
from tensorplay.distributed.optim.zero.sharded_parameters import ShardedParameters
from tensorplay.distributed.optim.zero.sharding_plan import ShardingPlan

Groups = Sequence[dict[str, Any]]


class FullState:
    """The copy of the full state that one rank has, from :meth:`consolidate` to :meth:`release`.

    The methods get the local optimizer and the user's param groups as they are.

    Args:
        communicator: carries it.
        agreement: settles that it can be brought together, or has been loaded, on every rank.
        sharded: all parameters, of whose state each rank has a part.
    """

    def __init__(
        self, communicator: Communicator, agreement: Agreement, sharded: ShardedParameters
    ) -> None:
        self._communicator = communicator
        self._agreement = agreement
        self._sharded = sharded
        self._consolidated: dict[str, Any] | None = None

    def consolidate(self, local: Optimizer, groups: Groups, to: Any) -> None:
        """Brings it to group rank ``to``; every rank must call it.

        Raises:
            ValueError: if ``to`` is no rank of the group.
            TypeError: if some state is neither tensor nor plain data; the other ranks raise too.
        """
        own: dict[int, Any] = {}
        parts: dict[int, Any] = {}
        description: dict[str, Json] = {}
        error = None
        try:
            target = self._require_rank(to)
            inner = local.state_dict()
            own, shared, rest = full_indexed(inner, local.param_groups, groups)
            own, parts = self._with_sliced(unwrap(own), inner, local, groups)
            description = {
                "to": target,
                "shared state": {str(k): tagged_json.describe(v) for k, v in shared.items()},
                "state dict": {str(k): tagged_json.describe(v) for k, v in rest.items()},
            }
            if target == self._communicator.members.group_rank:
                shared, packed, rest = copy.deepcopy((shared, _packed(groups), rest))
        except Exception as problem:  # noqa: BLE001 - the other ranks must hear of it first
            error = problem
        self._agreement.settle("consolidate_state_dict", description, error)
        self._consolidated = None
        full = self._bring(own, target)
        if any(map(self._sharded.plan.is_in_parts, self._sharded.plan.flat_layouts)):
            full = _merged(full, self._bring(parts, target), self._sharded.plan)
        if full is not None:
            parameter_at = {i: p for p, i in parameter_indices(groups).items()}
            full = {index: rewrap(state, parameter_at[index]) for index, state in full.items()}
            self._consolidated = {"state": {**full, **shared}, "param_groups": packed, **rest}

    def release(self) -> None:
        """Drops the copy. No communication."""
        self._consolidated = None

    def snapshot(self) -> dict[str, Any] | None:
        """The copy in fresh containers, ``None`` if this rank has none. No communication."""
        if self._consolidated is None:
            return None
        return {
            **self._consolidated,
            "state": {
                key: dict(value) if isinstance(value, dict) else value
                for key, value in self._consolidated["state"].items()
            },
            "param_groups": [
                {**group, "params": list(group["params"])}
                for group in self._consolidated["param_groups"]
            ],
        }

    def load_(self, local: Optimizer, groups: Groups, read: Callable[[], dict[str, Any]]) -> None:
        """Loads this rank's part of a full state; every rank must call it.

        Args:
            local: gets the state.
            groups: get the options.
            read: returns the full state dict, or raises.

        Raises:
            ValueError: if the dict doesn't fit; the other ranks raise too, and nothing has changed
                on any rank.
            RuntimeError: if the ranks' dicts have different options.
        """
        slices = self._sharded.slices
        slices_before = tuple(slices.slices)
        state_before = local.state
        local_before = [dict(group) for group in local.param_groups]
        groups_before = [dict(group) for group in groups]
        error = None
        try:
            state_dict = read()
            require_fit(state_dict, groups)
            self._load_own(local, groups, state_dict)
            _adopt_loaded_(groups, local, state_dict["param_groups"])
        except Exception as problem:  # noqa: BLE001 - the other ranks must hear of it first
            error = problem
        try:
            self._agreement.settle(
                "load_state_dict", None if error else describe_options(groups), error
            )
        except BaseException:
            local.state = state_before
            local.param_groups = local_before
            slices.drop(slices.num_buckets, slices_before)
            for group, before in zip(groups, groups_before, strict=True):
                _become_(group, before)
            raise

    def _bring(self, state: dict[int, Any], target: GroupRank) -> dict[int, Any] | None:
        devices = self._sharded.device_of_type
        return consolidate(self._communicator, self._agreement, state, target, devices)

    def _with_sliced(
        self, own: dict[int, Any], inner: dict[str, Any], local: Optimizer, groups: Groups
    ) -> tuple[dict[int, Any], dict[int, Any]]:
        """Adds the state in flat slices by index; what is a part of a parameter's is apart."""
        plan, own_index = self._sharded.plan, parameter_indices(local.param_groups)
        by_tensor = {
            each.tensor: inner["state"][own_index[each.tensor]]
            for each in self._sharded.slices.slices
            if own_index[each.tensor] in inner["state"]
        }
        index_of = parameter_indices(groups)
        rank, world_size = self._communicator.members.group_rank, len(plan.loads)
        parts: dict[int, Any] = {}
        for number, part in self._sharded.slices.states(by_tensor).items():
            spec, index = plan.specs[number], index_of[self._sharded.parameters[number]]
            if plan.partition.owners[number] == IN_PARTS:
                parts[number * world_size + rank] = [index, *part]
            else:
                own[index] = merge([part], spec)
        return {index: own[index] for index in sorted(own)}, parts

    def _load_own(self, local: Optimizer, groups: Groups, state_dict: dict[str, Any]) -> None:
        """Loads what this rank owns of a full state dict that fits into the local optimizer."""
        saved = state_dict["state"]
        saved_index = {
            parameter: index
            for group, ours in zip(state_dict["param_groups"], groups, strict=True)
            for parameter, index in zip(ours["params"], group["params"], strict=True)
        }
        sliced = self._sharded.slices.load(
            local,
            {
                index: saved[saved_index[parameter]]
                for index, parameter in enumerate(self._sharded.parameters)
                if saved_index.get(parameter) in saved
            },
        )
        own = own_part(state_dict, groups, local.param_groups)
        own_index = parameter_indices(local.param_groups)
        own["state"].update({own_index[tensor]: state for tensor, state in sliced.items()})
        local.load_state_dict(own)

    def _require_rank(self, rank: Any) -> GroupRank:
        world_size = self._communicator.members.world_size
        if rank not in range(world_size):
            raise ValueError(f"to={rank!r} is not a rank of a group of {world_size}")
        return GroupRank(operator.index(rank))


def _packed(groups: Groups) -> list[dict[str, Any]]:
    indices = parameter_indices(groups)
    return [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "params": [indices[parameter] for parameter in group["params"]],
        }
        for group in groups
    ]


def _adopt_loaded_(groups: Groups, local: Optimizer, loaded: Sequence[dict[str, Any]]) -> None:
    """The user's groups take the options that the local optimizer has after loading."""
    for group, inner, saved in zip(groups, local.param_groups, loaded, strict=True):
        kept = {key: group[key] for key in NOT_OPTIONS if key in group}
        if "param_names" in saved:
            kept["param_names"] = list(saved["param_names"])
        _become_(group, {**options_of(inner), **kept})


def _merged(
    full: dict[int, Any] | None, parts: dict[int, Any] | None, plan: ShardingPlan
) -> dict[int, Any] | None:
    """The state of all parameters, on the rank that received it: parts are put together, and let go."""
    if full is None or parts is None:
        return None
    by_parameter: dict[int, list[Any]] = {}
    for key in list(parts):
        by_parameter.setdefault(key // len(plan.loads), []).append(parts.pop(key))
    for number in list(by_parameter):
        held = by_parameter.pop(number)
        full[held[0][0]] = merge([SlicedState(*part[1:]) for part in held], plan.specs[number])
    return {index: full[index] for index in sorted(full)}


def _become_(target: dict[str, Any], source: dict[str, Any]) -> None:
    """Makes ``target`` equal to ``source`` without replacing it: others hold it."""
    target.clear()
    target.update(source)
