"""What must hold of the parameters, and what must be the same on every rank."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from tensorplay.distributed.optim._core import tagged_json
from tensorplay.distributed.optim._core.collectives import Communicator
from tensorplay.distributed.optim._core.local_shard import (
    describe_placement,
    is_dtensor,
    shards_across,
)
from tensorplay.distributed.optim._core.parameter_spec import ParameterSpec
from tensorplay.distributed.optim._core.tagged_json import Json
from tensorplay.distributed.optim._core.wrapped_optimizer import options_of

Groups = Sequence[Mapping[str, Any]]

CURE = (
    "build the optimizer after the model has its final dtype, device and storage (load values with "
    "copy_() or load_state_dict(), not by assigning .data)"
)


def name_of(parameter: torch.Tensor, groups: Groups) -> str:
    """How a message calls a parameter: its place, and its name if it has one."""
    for position, group in enumerate(groups):
        for place, candidate in enumerate(group["params"]):
            if candidate is parameter:
                name = f" ({group['param_names'][place]!r})" if "param_names" in group else ""
                return f"{place} of group {position}{name}"
    raise AssertionError("not a parameter of these groups")


def refuse_unsendable(
    parameters: Iterable[torch.Tensor], groups: Groups, communicator: Communicator
) -> None:
    """Raises for a parameter that can't be sent to other ranks.

    Raises:
        TypeError: if its elements aren't its own and dense.
        ValueError: if the group has no backend for its device.
    """
    for parameter in parameters:
        if is_dtensor(parameter):
            if shards_across(parameter, communicator.members):
                raise TypeError(
                    f"parameter {name_of(parameter, groups)} is a DTensor of which the ranks of the "
                    f"process group hold different parts ({_placements(parameter)}), so that they "
                    "can't take over each other's updates; pass a process_group whose ranks hold the "
                    "same part: the one of data parallelism. A plain optimizer keeps the state of "
                    "such parameters sharded by itself"
                )
        elif parameter.layout is not torch.strided or hasattr(parameter, "__tensor_flatten__"):
            raise TypeError(
                f"parameter {name_of(parameter, groups)} is a {type(parameter.data).__name__} with "
                f"layout {parameter.layout}; only dense parameters that hold their elements "
                "themselves can be sharded, no sparse ones and no wrappers such as DTensor; give these "
                "to the plain optimizer, which keeps the state of a DTensor distributed as it is"
            )
        if not communicator.can_send(parameter.device):
            raise ValueError(
                f"parameter {name_of(parameter, groups)} is on {parameter.device}, for which the "
                f"process group has no backend ({communicator.describe_backend()}); move the model "
                "to a device that it has (on GPUs: torch.cuda.set_device(local_rank), then "
                "model.to(torch.cuda.current_device())), or initialise the group with a backend for "
                f"{parameter.device.type!r}"
            )


_metadata_of = operator.attrgetter("dtype", "shape", "device")


class MetadataWatch:
    """Notices when parameters get another dtype, shape or device than they have now.

    A step looks at thousands of them, so the loop over them isn't Python's.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._planned = list(map(_metadata_of, parameters))

    def find_replaced(self, groups: Groups) -> RuntimeError | None:
        """An error that names the first parameter that has changed, if one has."""
        if list(map(_metadata_of, self._parameters)) == self._planned:
            return None
        for parameter, planned in zip(self._parameters, self._planned, strict=True):
            if _metadata_of(parameter) != planned:
                dtype, shape, device = planned
                return RuntimeError(
                    f"parameter {name_of(parameter, groups)} was {dtype} of shape {tuple(shape)} on "
                    f"{device} when the optimizer was built, and is now {parameter.dtype} of shape "
                    f"{tuple(parameter.shape)} on {parameter.device}; {CURE}"
                )
        return None


def describe_parameters(
    groups: Groups,
    parameters: Sequence[torch.Tensor],
    specs: Sequence[ParameterSpec],
    *,
    resident: bool,
) -> dict[str, Json]:
    """What the ranks must agree on about the parameters with ``specs``.

    Args:
        groups: the groups, which know names.
        parameters: all parameters, by index.
        specs: the metadata of those to describe.
        resident: whether parameters that own their storage are to live in buckets; otherwise it
            doesn't matter whether they do.
    """
    names = {
        parameter: name
        for group in groups
        for name, parameter in zip(group.get("param_names", ()), group["params"], strict=False)
    }
    positions = {
        parameter: position
        for position, group in enumerate(groups)
        for parameter in group["params"]
    }
    return {
        "parameters": [
            {
                "name": names.get(parameters[spec.index]),
                "shape": list(spec.shape),
                "dtype": tagged_json.describe(spec.dtype),
                "device": spec.device.type,
                "part of a DTensor": describe_placement(parameters[spec.index]),
                "requires_grad": spec.trainable,
                "stride": list(spec.stride),
                "group": positions[parameters[spec.index]],
                "shares memory with parameter": spec.memory_unit,
                "owns its storage": resident and spec.owns_storage,
            }
            for spec in specs
        ]
    }


def describe_options(groups: Groups) -> dict[str, Json]:
    """What the ranks must agree on about the options of all groups."""
    return {
        "param_groups": [
            {key: tagged_json.describe(value) for key, value in options_of(group).items()}
            for group in groups
        ]
    }


def _placements(parameter: Any) -> str:
    return f"{parameter.placements} on {parameter.device_mesh}"


def same_members(groups: Groups, members: Sequence[Sequence[torch.Tensor]]) -> bool:
    """Whether the groups hold exactly these tensors, in this order."""
    return len(groups) == len(members) and all(
        len(group["params"]) == len(expected) and all(map(operator.is_, group["params"], expected))
        for group, expected in zip(groups, members, strict=True)
    )
