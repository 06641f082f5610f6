"""The memory of an average: the tensors themselves, and the bucket they are packed into."""

import ctypes
import hashlib
import itertools
import operator
from collections import defaultdict
from collections.abc import Sequence

import torch

from tensorplay.distributed.optim._core.local_shard import is_dtensor, local_memory
from tensorplay.distributed.optim._core.parameter_spec import describe_parameters, is_dense
from tensorplay.distributed.optim.local_sgd.averaging_plan import (
    NUM_SLOTS,
    Parcel,
    fits_slot,
    plan_parcels,
)

SAMPLE_NUMEL = 1000


class AveragedTensors:
    """Tensors that are averaged together, and the plan for them.

    Args:
        tensors: no tensor twice; of a ``DTensor`` it is the local tensor.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self._memories = [local_memory(tensor).detach() for tensor in tensors]
        dense = [is_dense(memory) for memory in self._memories]
        self.specs = describe_parameters(tensors)
        # In memory order, whatever the strides; complex numbers as pairs of real ones.
        self._flats = [
            _as_real(memory.as_strided((memory.numel(),), (1,)) if is_flat else memory)
            for memory, is_flat in zip(self._memories, dense, strict=True)
        ]
        self.parcels = [
            PlacedParcel(parcel, self._flats) for parcel in plan_parcels(self.specs, dense)
        ]
        self._have_dtensors = any(map(is_dtensor, tensors))
        self._places = self._places_of(tensors)
        self._is_allocated = False

    def are(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are the same tensors, still in the same memory."""
        return (
            len(tensors) == len(self.tensors)
            and all(map(operator.is_, tensors, self.tensors))
            and self._places_of(tensors) == self._places
        )

    def _places_of(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        # This object keeps the memories alive: what has the same address is in the same memory.
        memories = list(map(local_memory, tensors)) if self._have_dtensors else tensors
        return [*map(torch.Tensor.data_ptr, memories), *map(torch.Tensor.numel, memories)]

    def allocate(self) -> None:
        """Finds memory for what is packed, unless it has been found."""
        if self._is_allocated:
            return
        self._is_allocated = True
        by_device: defaultdict[torch.device, list[PlacedParcel]] = defaultdict(list)
        for parcel in self.parcels:
            if parcel.plan.packed and fits_slot(parcel.plan):
                by_device[parcel.plan.device].append(parcel)
        for device, parcels in by_device.items():
            nbytes = max(parcel.plan.nbytes for parcel in parcels)
            slots = [
                torch.empty(nbytes, dtype=torch.uint8, device=device)
                for _ in range(min(NUM_SLOTS, len(parcels)))
            ]
            for parcel, slot in zip(parcels, itertools.cycle(slots), strict=False):
                parcel.place(slot)

    def release(self) -> None:
        """Lets the memory go; whatever is still under way keeps what it uses."""
        self._is_allocated = False
        for parcel in self.parcels:
            parcel.displace()

    def sample(self) -> bytes:
        """A digest of some elements from all over the largest tensor."""
        largest = max(self._flats, key=torch.Tensor.numel)
        step = max(1, largest.numel() // SAMPLE_NUMEL)
        return _digest([largest.reshape(-1)[::step]])

    def digest(self) -> bytes:
        """A digest of all bits of all tensors; as slow as hashing is."""
        return _digest(self._flats)


class PlacedParcel:
    """A parcel, where its pieces are, and where they are packed."""

    def __init__(self, parcel: Parcel, flats: Sequence[torch.Tensor]) -> None:
        self.plan = parcel
        self.pieces = [
            flats[piece.tensor]
            if piece.numel == flats[piece.tensor].numel()
            else flats[piece.tensor][piece.start : piece.end]
            for piece in parcel.pieces
        ]
        self.slot: torch.Tensor | None = None
        """The part of the bucket that it has, before and after other parcels."""
        self._packed: torch.Tensor | None = None
        self._places: list[torch.Tensor] = []
        self._can_be_joined = all(
            piece.dim() == 1 and piece.dtype == parcel.dtype for piece in self.pieces
        )

    def place(self, slot: torch.Tensor) -> None:
        """Decides on its slot, of at least ``plan.nbytes`` bytes."""
        self.slot = slot
        self._packed = slot[: self.plan.nbytes].view(self.plan.dtype)
        parts = torch.split(self._packed, [piece.numel() for piece in self.pieces])
        self._places = [
            part if piece.dim() == 1 else part.view(piece.shape)
            for part, piece in zip(parts, self.pieces, strict=True)
        ]

    def displace(self) -> None:
        """Gives its slot up."""
        self.slot = self._packed = None
        self._places = []

    def pack_(self) -> torch.Tensor:
        """Returns ``(numel,)``: what travels, a copy of the pieces or the only one itself.

        What has no slot gets memory of its own, until it is unpacked.
        """
        if not self.plan.packed:
            return self.pieces[0]
        if self._packed is None:
            self.place(torch.empty(self.plan.nbytes, dtype=torch.uint8, device=self.plan.device))
        assert self._packed is not None  # noqa: S101 - narrows a type; it has a place now
        if self._can_be_joined:
            torch.cat(self.pieces, out=self._packed)
        else:
            torch._foreach_copy_(self._places, self.pieces)
        return self._packed

    def unpack_(self) -> None:
        """Copies what has travelled back to where the pieces are."""
        if not self.plan.packed:
            return
        torch._foreach_copy_(self.pieces, self._places)
        if not fits_slot(self.plan):
            self.displace()


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_complex():
        return tensor
    real = torch.view_as_real(tensor)
    return real.view(-1) if tensor.dim() == 1 and tensor.is_contiguous() else real


def _digest(tensors: Sequence[torch.Tensor]) -> bytes:
    hashed = hashlib.blake2b(digest_size=7)
    for tensor in tensors:
        elements = tensor.reshape(-1).contiguous().view(torch.uint8).cpu()
        hashed.update((ctypes.c_char * elements.numel()).from_address(elements.data_ptr()))
    return hashed.digest()
