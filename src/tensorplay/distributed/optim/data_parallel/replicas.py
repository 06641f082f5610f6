"""Whether all ranks hold the same parameters and state, and how they get one rank's."""

import ctypes
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tensorplay.distributed.optim._core import tagged_json
from tensorplay.distributed.optim._core.agreement import Agreement
from tensorplay.distributed.optim._core.collectives import Communicator
from tensorplay.distributed.optim._core.ranks import GroupRank
from tensorplay.distributed.optim._core.replication import replicate_
from tensorplay.distributed.optim._core.tensor_spec import TensorSpec

_DIGEST_BYTES = 8


@dataclass(frozen=True)
class ReplicaDifference:
    """Where replicas differ first.

    Attributes:
        name: of the parameter: its name if it has one, else its index.
        what: ``"value"``, or the key of its state.
        ranks: group ranks that hold something else than rank 0.
        num_differing: how many parameters differ in value or state.
    """

    name: str
    what: str
    ranks: tuple[int, ...]
    num_differing: int

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        return (
            f"the {self.what} of parameter {self.name} on rank {ranks} isn't that of rank 0; "
            f"{self.num_differing} parameters differ"
        )


def first_difference(
    communicator: Communicator,
    parameters: Sequence[torch.Tensor],
    state: Mapping[torch.Tensor, Any],
    names: Sequence[str],
) -> ReplicaDifference | None:
    """Compares parameters and their state bit for bit. Every rank must call it."""
    own = [
        {what: _digest(value) for what, value in _parts(parameter, state)}
        for parameter in parameters
    ]
    everybody = [
        json.loads(each) for each in communicator.all_gather_bytes(json.dumps(own).encode())
    ]
    differing = [
        index
        for index, versions in enumerate(zip(*everybody, strict=True))
        if any(version != versions[0] for version in versions)
    ]
    if not differing:
        return None
    index = differing[0]
    versions = [each[index] for each in everybody]
    keys = dict.fromkeys(key for version in versions for key in version)
    what = next(key for key in keys if len({version.get(key) for version in versions}) > 1)
    return ReplicaDifference(
        names[index],
        what,
        tuple(
            rank
            for rank, version in enumerate(versions)
            if version.get(what) != versions[0].get(what)
        ),
        len(differing),
    )


def _parts(parameter: torch.Tensor, state: Mapping[torch.Tensor, Any]) -> Iterator[tuple[str, Any]]:
    yield "value", parameter
    own = state.get(parameter, {})
    if isinstance(own, Mapping):
        for key in sorted(own, key=str):
            yield str(key), own[key]


def _digest(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return json.dumps(tagged_json.describe(value), sort_keys=True)
    tensor = value.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    memory = tensor.resolve_conj().resolve_neg().cpu().contiguous()
    digest = hashlib.blake2b(
        f"{memory.dtype}{tuple(memory.shape)}".encode(), digest_size=_DIGEST_BYTES
    )
    if memory.numel():
        digest.update((ctypes.c_char * memory.nbytes).from_address(memory.data_ptr()))
    return digest.hexdigest()


def broadcast(
    communicator: Communicator,
    agreement: Agreement,
    call: str,
    value: Any,
    root: GroupRank,
    devices: Mapping[str, torch.device],
    capacity_bytes: int,
) -> Any:
    """One rank's nest of tensors and plain data, on every rank. Every rank must call it.

    Args:
        communicator: carries it.
        agreement: settles that it can be sent.
        call: what messages call the call.
        value: on ``root``: what to send.
        root: the rank that has it.
        devices: this rank's device of each type.
        capacity_bytes: of the buffer through which small tensors travel together.

    Raises:
        TypeError: if there is something else in it; the other ranks raise ``PeerError``.
    """
    is_root = communicator.members.group_rank == root
    tensors: list[torch.Tensor] = []
    header, error = b"", None
    if is_root:
        try:
            structure = tagged_json.encode(value, tensors, "the state dict")
            specs = [TensorSpec.of(tensor) for tensor in tensors]
            header = json.dumps(
                [
                    structure,
                    [
                        (str(s.dtype).removeprefix("torch."), s.shape, s.stride, s.device_type)
                        for s in specs
                    ],
                ]
            ).encode()
        except Exception as problem:  # noqa: BLE001 - the other ranks must hear of it first
            error = problem
    agreement.settle(call, {"root": int(root)}, error)
    header = communicator.all_gather_bytes(header)[root]
    structure, described = json.loads(header)
    if not is_root:
        tensors = [
            TensorSpec(getattr(torch, dtype), tuple(shape), tuple(stride), kind).allocate(devices)
            for dtype, shape, stride, kind in described
        ]
    transport = communicator.transport_device()
    wires = [t if communicator.can_send(t.device) else t.to(transport) for t in tensors]
    replicate_(communicator, wires, root, capacity_bytes)
    if is_root:
        return value
    arrived = [wire.to(t.device) for wire, t in zip(wires, tensors, strict=True)]
    return tagged_json.decode(structure, arrived)
