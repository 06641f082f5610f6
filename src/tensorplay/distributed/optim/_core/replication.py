"""Every rank gets the tensors of one rank: parameters at the start, buffers after a backward."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch

from tensorplay.distributed.optim._core.collectives import Communicator
from tensorplay.distributed.optim._core.parameter_spec import is_dense
from tensorplay.distributed.optim._core.ranks import GroupRank


@torch.no_grad()
def replicate_(
    communicator: Communicator,
    tensors: Iterable[torch.Tensor],
    source: GroupRank,
    capacity_bytes: int,
) -> None:
    """Overwrites ``tensors`` with those of ``source``. Every rank must call it.

    Args:
        communicator: carries them.
        tensors: of the same shapes and dtypes on every rank, in the same order.
        source: whose values everybody gets.
        capacity_bytes: of the buffer through which small ones travel together.
    """
    num_ranks = communicator.members.world_size

    def send(flat: torch.Tensor) -> None:
        cuts = [0 if rank <= source else flat.numel() for rank in range(num_ranks + 1)]
        communicator.gather_from_owners(flat, cuts).wait()

    for batch in _batches(tensors, capacity_bytes):
        (first, *others) = batch
        if not others and is_dense(first) and first.is_contiguous():
            # Not `view(-1)`: the stride of one element may be any number.
            send(first.detach().as_strided((first.numel(),), (1,)))
            continue
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in batch])
        send(flat)
        if communicator.members.group_rank != source:
            pieces = torch.split(flat, [tensor.numel() for tensor in batch])
            for tensor, piece in zip(batch, pieces, strict=True):
                tensor.detach().copy_(piece.view(tensor.shape))


def _batches(
    tensors: Iterable[torch.Tensor], capacity_bytes: int
) -> Iterator[Sequence[torch.Tensor]]:
    kinds: defaultdict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.numel():
            kinds[tensor.dtype, tensor.device].append(tensor)
    for members in kinds.values():
        batch: list[torch.Tensor] = []
        free = capacity_bytes
        for tensor in members:
            if batch and tensor.nbytes > free:
                yield batch
                batch, free = [], capacity_bytes
            batch.append(tensor)
            free -= tensor.nbytes
        yield batch
