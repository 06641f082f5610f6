"""Sparse gradients: every rank gets every rank's rows, and adds up those that occur twice."""

import json
from collections.abc import Sequence
from itertools import accumulate
from math import prod

import torch

from tensorplay.distributed.optim._core.collectives import Communicator, Waitable
from tensorplay.distributed.optim._core.ranks import GroupRank

_LOW_PRECISION = frozenset({torch.float16, torch.bfloat16})


def average_sparse(
    communicator: Communicator,
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    divisor: float,
) -> list[torch.Tensor]:
    """The averages of sparse gradients. Every rank must call it, for the same parameters.

    Args:
        communicator: carries indices and values.
        parameters: whose gradients these are.
        gradients: this rank's; ``None`` counts as zero, and a dense one is made sparse.
        divisor: of the sums.

    Returns:
        Coalesced gradients of the parameters' dtypes, the same on every rank.
    """
    headers = communicator.all_gather_bytes(
        json.dumps([None if each is None else each.sparse_dim() for each in gradients]).encode()
    )
    dims = [
        min(dim for dim in theirs if dim) for theirs in zip(*map(json.loads, headers), strict=True)
    ]
    own = [
        _rows(gradient, parameter, dim)
        for gradient, parameter, dim in zip(gradients, parameters, dims, strict=True)
    ]
    headers = communicator.all_gather_bytes(json.dumps([len(rows) for rows, _ in own]).encode())
    counts = list(zip(*map(json.loads, headers), strict=True))
    gathered = [
        (_Gathering(communicator, rows, theirs), _Gathering(communicator, values, theirs))
        for (rows, values), theirs in zip(own, counts, strict=True)
    ]
    averages = []
    for (rows, values), parameter in zip(gathered, parameters, strict=True):
        precise = torch.float32 if parameter.dtype in _LOW_PRECISION else parameter.dtype
        total = torch.sparse_coo_tensor(
            rows.wait().t(), values.wait().to(precise), parameter.shape, check_invariants=False
        ).coalesce()
        averages.append(total.div(divisor).to(parameter.dtype).coalesce())
    return averages


def _rows(
    gradient: torch.Tensor | None, parameter: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(nnz, dim)`` indices and ``(nnz, ...)`` values."""
    if gradient is None:
        empty = parameter.detach().new_empty((0, *parameter.shape[dim:]))
        return torch.empty(0, dim, dtype=torch.int64, device=parameter.device), empty
    gradient = gradient.detach()
    if not gradient.is_sparse or gradient.sparse_dim() != dim:
        gradient = gradient.to_dense().to_sparse(dim)
    gradient = gradient.coalesce()
    return gradient.indices().t().contiguous(), gradient.values().contiguous()


class _Gathering:
    """The rows of all ranks, on their way."""

    def __init__(
        self, communicator: Communicator, own: torch.Tensor, counts: Sequence[int]
    ) -> None:
        self._all = own.new_empty((sum(counts), *own.shape[1:]))
        row = prod(own.shape[1:])
        cuts = [0, *accumulate(count * row for count in counts)]
        rank: GroupRank = communicator.members.group_rank
        flat = self._all.view(-1)
        flat[cuts[rank] : cuts[rank + 1]] = own.view(-1)
        self._work: Waitable = communicator.gather_from_owners(flat, cuts)

    def wait(self) -> torch.Tensor:
        self._work.wait()
        return self._all
