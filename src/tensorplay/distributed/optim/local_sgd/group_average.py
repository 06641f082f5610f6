"""The average over one process group: settle with the other ranks, then average in place."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from tensorplay.distributed.optim._core import tagged_json
from tensorplay.distributed.optim._core.agreement import Agreement, Description
from tensorplay.distributed.optim._core.collectives import (
    CommunicationError,
    Communicator,
    Waitable,
)
from tensorplay.distributed.optim._core.local_shard import (
    describe_placement,
    is_dtensor,
    shards_across,
)
from tensorplay.distributed.optim._core.ranks import GroupRank
from tensorplay.distributed.optim._core.tagged_json import Json
from tensorplay.distributed.optim.local_sgd.averaged_tensors import (
    ALIGNMENT_BYTES,
    AveragedTensors,
    RingMemory,
)
from tensorplay.distributed.optim.local_sgd.averaging_plan import Bucket, Stretch

MEMORY_BYTES = 25 * 1024 * 1024
"""What an average may use beside the tensors: as much as one of DDP's buckets."""


class GroupAverage:
    """Averages tensors over the ranks of one group.

    Args:
        communicator: of the group.
        owner: the class whose calls are settled.
    """

    def __init__(self, communicator: Communicator, owner: str) -> None:
        self.communicator = communicator
        self._agreement = Agreement(communicator, owner)
        self._averaged: AveragedTensors | None = None
        self._description = Description(None)
        self._memories: dict[torch.device, RingMemory] = {}

    def settle(
        self,
        call: str,
        tensors: Sequence[torch.Tensor],
        schedule: Json,
        *,
        error: BaseException | None = None,
        flag: int = 0,
    ) -> int:
        """Agrees that all ranks average the same tensors by the same schedule; see ``Agreement``.

        No tensor may stand twice in ``tensors``.
        """
        try:
            if error is None:
                self._adopt(tensors, schedule)
        except Exception as problem:  # noqa: BLE001 - the other ranks must hear of it first
            error = problem
        return self._agreement.settle(call, None if error else self._description, error, flag)

    def find_common(
        self, call: str, named: Mapping[str, torch.Tensor], error: BaseException | None = None
    ) -> list[torch.Tensor]:
        """The tensors whose names all ranks have, in order of name; every rank must call it."""
        self._agreement.settle(f"{call}: names", error=error)
        everyones = self.communicator.all_gather_bytes("\n".join(named).encode())
        common = set(named).intersection(*(each.decode().split("\n") for each in everyones))
        return [named[name] for name in sorted(common)]

    def find_contributors(self, *, joined: bool) -> list[GroupRank]:
        """The ranks that haven't run out of inputs; every rank must call it."""
        flags = self.communicator.all_gather_bytes(b"joined" if joined else b"")
        members = self.communicator.members
        return [rank for rank, flag in zip(members, flags, strict=True) if not flag]

    @torch.no_grad()
    def average_(self, contributors: Sequence[GroupRank] | None = None) -> None:
        """Averages, in place, what was settled.

        Args:
            contributors: the ranks whose values count, by default all.

        Raises:
            CommunicationError: if the backend fails or times out, naming what was under way.
        """
        averaged = self._averaged
        if averaged is None or self.communicator.members.world_size == 1:
            return
        ranks = list(self.communicator.members) if contributors is None else contributors
        under_way: deque[_UnderWay] = deque()
        parcels = averaged.plan.parcels
        try:
            for parcel in parcels:
                while under_way and (parcel.alone or under_way[-1].alone):
                    under_way.popleft().finish()
                memory = self._take(parcel, under_way)
                under_way.append(self._launch(averaged, parcel, memory, ranks))
            while under_way:
                under_way.popleft().finish()
        except CommunicationError as error:
            self._memories.clear()  # whatever is still under way keeps what it uses
            raise CommunicationError(
                f"averaging {len(averaged.tensors)} tensors in {len(parcels)} parcels failed, {error}"
            ) from error

    def _launch(
        self,
        averaged: AveragedTensors,
        parcel: Stretch | Bucket,
        memory: torch.Tensor,
        contributors: Sequence[GroupRank],
    ) -> "_UnderWay":
        ring = self._memories[parcel.device]
        if isinstance(parcel, Stretch):
            scratch = memory.view(parcel.dtype)
            averaging = self.communicator.average_(averaged.stretch(parcel), scratch, contributors)
            return _UnderWay(averaging, ring.give_back, parcel.alone)
        packed_nbytes = _aligned(parcel.nbytes)
        flat = memory[: parcel.nbytes].view(parcel.dtype)
        scratch = memory[packed_nbytes:].view(parcel.dtype)
        averaged.pack_(parcel, flat)

        def finish() -> None:
            averaged.unpack_(parcel, flat)
            ring.give_back()

        return _UnderWay(
            self.communicator.average_(flat, scratch, contributors), finish, parcel.alone
        )

    def _take(self, parcel: Stretch | Bucket, under_way: "deque[_UnderWay]") -> torch.Tensor:
        nbytes = self._needed_nbytes(parcel)
        ring = self._memories.get(parcel.device)
        if ring is None or ring.nbytes < nbytes:
            while under_way:
                under_way.popleft().finish()
            ring = self._memories[parcel.device] = RingMemory(
                max(nbytes, self._memory_nbytes(parcel.device)), parcel.device
            )
        while (memory := ring.take(nbytes)) is None:
            under_way.popleft().finish()
        return memory

    def _needed_nbytes(self, parcel: Stretch | Bucket) -> int:
        scratch = self.communicator.scratch_numel(parcel.numel, parcel.device)
        packed = _aligned(parcel.nbytes) if isinstance(parcel, Bucket) else 0
        return packed + scratch * parcel.dtype.itemsize

    def _memory_nbytes(self, device: torch.device) -> int:
        averaged = self._averaged
        needed = sum(
            _aligned(self._needed_nbytes(parcel))
            for parcel in (averaged.plan.parcels if averaged else ())
            if parcel.device == device
        )
        return min(needed, MEMORY_BYTES)

    def _adopt(self, tensors: Sequence[torch.Tensor], schedule: Json) -> None:
        if self._averaged is not None and self._averaged.are(tensors):
            if self._description.value["schedule"] == schedule:
                return
        else:
            for index, tensor in enumerate(tensors):
                _refuse_what_cannot_be_averaged(index, tensor, self.communicator)
            self._averaged = AveragedTensors(tensors)
            self._memories.clear()
        specs = self._averaged.plan.specs
        self._description = Description(
            {
                "schedule": schedule,
                "tensors": [
                    {
                        "shape": list(spec.shape),
                        "dtype": tagged_json.describe(spec.dtype),
                        "device": spec.device.type,
                        "stride": list(spec.stride),
                        "part of a DTensor": describe_placement(tensor),
                        "shares memory with tensor": spec.memory_unit,
                    }
                    for spec, tensor in zip(specs, tensors, strict=True)
                ],
            }
        )


class _UnderWay(NamedTuple):
    averaging: Waitable
    when_done: Callable[[], None]
    alone: bool

    def finish(self) -> None:
        self.averaging.wait()
        self.when_done()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _refuse_what_cannot_be_averaged(
    index: int, tensor: torch.Tensor, communicator: Communicator
) -> None:
    if is_dtensor(tensor):
        if shards_across(tensor, communicator.members):
            raise TypeError(
                f"tensor {index} to average is a DTensor of which the ranks of the process group hold "
                f"different parts ({tensor.placements} on {tensor.device_mesh}); pass a "  # type: ignore[attr-defined]
                "process_group whose ranks hold the same part: the one that replicates"
            )
    elif tensor.layout is not torch.strided or hasattr(tensor, "__tensor_flatten__"):
        raise TypeError(
            f"tensor {index} to average is a {type(tensor.data).__name__} with layout "
            f"{tensor.layout}; only dense tensors that hold their elements themselves can be averaged"
        )
    if not communicator.can_send(tensor.device):
        raise ValueError(
            f"tensor {index} to average is on {tensor.device}, for which the process group has no "
            f"backend ({communicator.describe_backend()}); move the model, or initialise the group "
            f"with a backend for {tensor.device.type!r}"
        )
