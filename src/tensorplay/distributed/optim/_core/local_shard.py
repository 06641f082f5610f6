"""``DTensor`` parameters: the part of one that lies on this rank, and how it travels.

An optimizer steps a ``DTensor`` as it is; what is gathered, saved and loaded is its local tensor.
That is right where every rank of the optimizer's group holds the same shard, as in tensor
parallelism across and data parallelism inside the group; anything else is refused.

``torch.distributed.tensor`` is imported only where somebody else has imported it already.
"""

import sys
from collections.abc import Iterable
from typing import Any

import torch

from tensorplay.distributed.optim._core.ranks import GroupMembers
from tensorplay.distributed.optim._core.tagged_json import Json

_TAG = "DTensor"


def is_dtensor(value: Any) -> bool:
    """Whether ``value`` is a ``DTensor``."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def any_is_dtensor(values: Iterable[Any]) -> bool:
    """Whether one of many values is a ``DTensor``."""
    module = sys.modules.get("torch.distributed.tensor")
    kinds = set(map(type, values)) if module is not None else set()
    return any(issubclass(kind, module.DTensor) for kind in kinds)  # type: ignore[union-attr] # there are kinds only where it isn't None


def local_memory(parameter: torch.Tensor) -> torch.Tensor:
    """What holds the elements of a parameter on this rank: itself, or its local tensor."""
    if not is_dtensor(parameter):
        return parameter
    with torch.no_grad():
        local: torch.Tensor = parameter.to_local()  # type: ignore[attr-defined] # mypy can't see that it has this
        return local


def describe_placement(parameter: torch.Tensor) -> Json:
    """Which shard this rank holds; ``None`` for a plain tensor."""
    if not is_dtensor(parameter):
        return None
    return {
        "placements": [str(placement) for placement in _of(parameter).placements],
        "shape": list(parameter.shape),
        "coordinate": [
            place if placement.is_shard() else None
            for place, placement in zip(
                _of(parameter).device_mesh.get_coordinate() or (),
                _of(parameter).placements,
                strict=False,
            )
        ],
    }


def shards_across(parameter: torch.Tensor, members: GroupMembers) -> bool:
    """Whether ranks of the group hold different elements of a ``DTensor``, or partial sums."""
    mesh = _of(parameter).device_mesh
    for axis, placement in enumerate(_of(parameter).placements):
        if placement.is_partial():
            return True
        if placement.is_shard():
            holders = torch.distributed.get_process_group_ranks(mesh.get_group(axis))
            if len(set(holders) & set(members.global_ranks)) > 1:
                return True
    return False


def unwrap(value: Any) -> Any:
    """Replaces every ``DTensor`` in a nest by its local tensor and what :func:`rewrap` needs.

    Raises:
        TypeError: for placements other than ``Shard`` and ``Replicate``.
    """
    if is_dtensor(value):
        placements = []
        for placement in value.placements:
            if not (placement.is_shard() or placement.is_replicate()):
                raise TypeError(f"a DTensor with placement {placement} can't be sent")
            placements.append(placement.dim if placement.is_shard() else None)
        extent = (tuple(value.shape), tuple(value.stride()))
        return {_TAG: placements, "local": local_memory(value), "extent": extent}
    return _map(unwrap, value)


def rewrap(value: Any, parameter: torch.Tensor) -> Any:
    """Undoes :func:`unwrap`, on the mesh of ``parameter``."""
    if isinstance(value, dict) and _TAG in value:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        shape, stride = value["extent"]
        return DTensor.from_local(
            value["local"],
            _of(parameter).device_mesh,
            [Replicate() if dim is None else Shard(dim) for dim in value[_TAG]],
            run_check=False,
            shape=torch.Size(shape),
            stride=stride,
        )
    return _map(lambda item: rewrap(item, parameter), value)


def _map(change: Any, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: change(item) for key, item in value.items()}
    if type(value) in {list, tuple}:
        items: Iterable[Any] = (change(item) for item in value)
        return type(value)(items)
    return value


def _of(parameter: torch.Tensor) -> Any:
    """The parameter with the attributes of a ``DTensor``, which mypy doesn't know of."""
    return parameter
