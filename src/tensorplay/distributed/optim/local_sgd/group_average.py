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
    AveragedTensors,
    PlacedParcel,
)
from tensorplay.distributed.optim.local_sgd.averaging_plan import fit_bucket

EXACT_WORLD_SIZES = (1, 2, 4)
"""Numbers of ranks whose mean of equal float32 numbers is that number, bit for bit."""


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
        """Averages, in place, what was settled. What is equal on all ranks stays as it is.

        Args:
            contributors: the ranks whose values count, by default all.

        Raises:
            CommunicationError: if the backend fails or times out, naming what was under way.
        """
        averaged, world_size = self._averaged, self.communicator.members.world_size
        if averaged is None or not averaged.parcels or world_size == 1:
            return
        if contributors is None:
            if world_size not in EXACT_WORLD_SIZES and self._are_equal(averaged):
                return
            contributors = list(self.communicator.members)
        averaged.allocate()
        under_way: deque[_UnderWay] = deque()
        try:
            for parcel in averaged.parcels:
                while under_way and _must_wait(parcel, under_way):
                    under_way.popleft().finish()
                under_way.append(self._launch(parcel, contributors))
            while under_way:
                under_way.popleft().finish()
        except CommunicationError as error:
            averaged.release()
            raise CommunicationError(
                f"averaging {len(averaged.tensors)} tensors in {len(averaged.parcels)} parcels "
                f"failed, {error}"
            ) from error

    def _are_equal(self, averaged: AveragedTensors) -> bool:
        """Whether all ranks hold the same bits; costs next to nothing if they don't.

        A sum of equal numbers, divided by how many there are, differs from them in the last bit for
        most numbers of ranks.
        """
        return all(map(self._is_same, (averaged.sample, averaged.digest)))

    def _is_same(self, digest: Callable[[], bytes]) -> bool:
        own = int.from_bytes(digest(), "big")
        highest, lowest = self.communicator.max_([own, -own]).wait()
        return highest == -lowest

    def _launch(self, parcel: PlacedParcel, contributors: Sequence[GroupRank]) -> "_UnderWay":
        flat = parcel.pack_()
        return _UnderWay(parcel, self.communicator.average_(flat, contributors))

    def _adopt(self, tensors: Sequence[torch.Tensor], schedule: Json) -> None:
        if self._averaged is not None and self._averaged.are(tensors):
            if self._description.value["schedule"] == schedule:
                return
        else:
            for index, tensor in enumerate(tensors):
                _refuse_what_cannot_be_averaged(index, tensor, self.communicator)
            self._averaged = AveragedTensors(tensors)
        specs = self._averaged.specs
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
    """A parcel that is being averaged."""

    parcel: PlacedParcel
    averaging: Waitable

    def finish(self) -> None:
        """Waits until its pieces hold the average."""
        self.averaging.wait()
        self.parcel.unpack_()


def _must_wait(parcel: PlacedParcel, under_way: Sequence[_UnderWay]) -> bool:
    """Whether something that is under way must have come before a parcel may be packed."""
    if parcel.plan.alone or under_way[-1].parcel.plan.alone:
        return True
    if not fit_bucket([parcel.plan, *(one.parcel.plan for one in under_way)]):
        return True
    return parcel.slot is not None and any(one.parcel.slot is parcel.slot for one in under_way)


def _refuse_what_cannot_be_averaged(
    index: int, tensor: torch.Tensor, communicator: Communicator
) -> None:
    if is_dtensor(tensor):
        if shards_across(tensor, communicator.members):
            raise TypeError(
                f"tensor {index} to average is a DTensor of which the ranks of the process group hold "
                f"different parts ({tensor.placements} on {tensor.device_mesh}); pass a "  # type: ignore[attr-defined] # mypy can't see that it has this
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
