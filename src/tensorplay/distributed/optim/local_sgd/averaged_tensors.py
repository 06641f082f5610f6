"""The memory of an average: the tensors themselves, and what they are packed into."""

import operator
from collections import deque
from collections.abc import Sequence

import torch

from tensorplay.distributed.optim._core.local_shard import local_memory
from tensorplay.distributed.optim._core.parameter_spec import describe_parameters, is_dense
from tensorplay.distributed.optim.local_sgd.averaging_plan import AveragingPlan, Bucket, Stretch

ALIGNMENT_BYTES = 64


class AveragedTensors:
    """Tensors that are averaged together, and the plan for them.

    Args:
        tensors: no tensor twice; of a ``DTensor`` it is the local tensor.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        memories = [local_memory(tensor).detach() for tensor in tensors]
        dense = [is_dense(memory) for memory in memories]
        self.plan = AveragingPlan.of(describe_parameters(tensors), dense)
        self._memories = memories
        # In memory order, whatever the strides: cheap to cut, to pack and to unpack.
        self._flats = [
            memory.as_strided((memory.numel(),), (1,)) if is_flat else None
            for memory, is_flat in zip(memories, dense, strict=True)
        ]
        self._pointers = [memory.data_ptr() for memory in memories]

    def are(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are the same tensors, still in the same memory."""
        return (
            len(tensors) == len(self.tensors)
            and all(map(operator.is_, tensors, self.tensors))
            and [local_memory(tensor).data_ptr() for tensor in tensors] == self._pointers
            and all(
                tensor.dtype == memory.dtype and tensor.shape == memory.shape
                for tensor, memory in zip(map(local_memory, tensors), self._memories, strict=True)
            )
        )

    def stretch(self, stretch: Stretch) -> torch.Tensor:
        """``(numel,)``: the stretch itself, no copy."""
        flat = self._flats[stretch.tensor]
        assert flat is not None  # noqa: S101 - only dense tensors are planned in stretches
        return flat[stretch.start : stretch.end]

    def pack_(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Copies the bucket's tensors into ``flat``."""
        torch.cat([self._flat_copy_of(index) for index in bucket.tensors], out=flat)

    def unpack_(self, bucket: Bucket, flat: torch.Tensor) -> None:
        """Copies ``flat`` back to where the bucket's tensors live."""
        flats = [self._flats[index] for index in bucket.tensors]
        whole = [each for each in flats if each is not None]
        sizes = [self._memories[index].numel() for index in bucket.tensors]
        if len(whole) == len(flats):
            torch.split_with_sizes_copy(flat, sizes, out=whole)
            return
        for index, part in zip(bucket.tensors, torch.split(flat, sizes), strict=True):
            self._memories[index].copy_(part.view(self._memories[index].shape))

    def _flat_copy_of(self, index: int) -> torch.Tensor:
        flat = self._flats[index]
        return self._memories[index].reshape(-1) if flat is None else flat


class RingMemory:
    """Memory that is lent piece by piece and comes back in the order in which it was lent."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._next = 0
        self._lent: deque[int] = deque()
        self._num_lent = 0

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self._memory.numel()

    def take(self, nbytes: int) -> torch.Tensor | None:
        """``(nbytes,)`` bytes, or ``None`` while too much is lent."""
        needed = -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        skipped = self.nbytes - self._next if self._next + needed > self.nbytes else 0
        if self._num_lent + skipped + needed > self.nbytes:
            return None
        start = 0 if skipped else self._next
        self._next = start + needed
        self._lent.append(skipped + needed)
        self._num_lent += skipped + needed
        return self._memory[start : start + nbytes]

    def give_back(self) -> None:
        """Ends the oldest loan."""
        self._num_lent -= self._lent.popleft()
        if not self._lent:
            self._next = 0
