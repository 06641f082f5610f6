"""The memory of an average: the tensors themselves, and the buckets they are packed into."""

import ctypes
import hashlib
import operator
from collections import deque
from collections.abc import Sequence

import torch

from tensorplay.distributed.optim._core.local_shard import is_dtensor, local_memory
from tensorplay.distributed.optim._core.parameter_spec import describe_parameters, is_dense
from tensorplay.distributed.optim.local_sgd.averaging_plan import Parcel, plan_parcels

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

    def sample(self) -> bytes:
        """A digest of some elements from all over the largest tensor."""
        largest = max(self._flats, key=torch.Tensor.numel)
        step = max(1, largest.numel() // SAMPLE_NUMEL)
        return _digest([largest.reshape(-1)[::step]])

    def digest(self) -> bytes:
        """A digest of all bits of all tensors; as slow as hashing is."""
        return _digest(self._flats)


class PlacedParcel:
    """A parcel, and where its pieces are."""

    def __init__(self, parcel: Parcel, flats: Sequence[torch.Tensor]) -> None:
        self.plan = parcel
        self.pieces = [
            flats[piece.tensor]
            if piece.numel == flats[piece.tensor].numel()
            else flats[piece.tensor][piece.start : piece.end]
            for piece in parcel.pieces
        ]
        self._sizes = [piece.numel() for piece in self.pieces]
        self._can_be_split = all(
            piece.dim() == 1 and piece.dtype == parcel.dtype for piece in self.pieces
        )

    def pack_(self, bucket: torch.Tensor) -> None:
        """Copies the pieces into ``bucket``, which is ``(numel,)``."""
        pieces = self.pieces
        if not self._can_be_split:
            pieces = [piece.reshape(-1) for piece in pieces]
        torch.cat(pieces, out=bucket)

    def unpack_(self, bucket: torch.Tensor) -> None:
        """Copies ``bucket`` back to where the pieces are."""
        if self._can_be_split:
            torch.split_with_sizes_copy(bucket, self._sizes, out=self.pieces)
            return
        for piece, values in zip(self.pieces, torch.split(bucket, self._sizes), strict=True):
            piece.copy_(values.view(piece.shape))


class BucketMemory:
    """Two buckets, used in turn and allocated when they are needed.

    They stay until the tensors change.
    """

    def __init__(self, parcels: Sequence[Parcel], device: torch.device) -> None:
        self._nbytes = max(parcel.nbytes for parcel in parcels)
        self._device = device
        self._free: deque[torch.Tensor] = deque()
        self._num_unmade = min(2, len(parcels))

    def take(self) -> torch.Tensor | None:
        """A bucket, or ``None`` while both are in use."""
        if self._free:
            return self._free.popleft()
        if not self._num_unmade:
            return None
        self._num_unmade -= 1
        return torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)

    def give_back(self, bucket: torch.Tensor) -> None:
        """Lets the next one have it."""
        self._free.append(bucket)


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
