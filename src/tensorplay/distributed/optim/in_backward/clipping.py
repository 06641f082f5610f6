"""Clipping of gradients of which only one bucket is there at a time."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import utils

from tensorplay.distributed.optim._core.local_shard import is_dtensor


@dataclass(frozen=True)
class Clipping:
    """What to do to a bucket's gradients before the step; the default does nothing.

    Attributes:
        value: largest absolute value of an element.
        parameter_norm: largest 2-norm of each parameter's gradient.
        previous_norm: largest 2-norm of all gradients, by the norm that the previous backward had.
    """

    value: float | None = None
    parameter_norm: float | None = None
    previous_norm: float | None = None

    def __post_init__(self) -> None:
        given = {name: limit for name, limit in vars(self).items() if limit is not None}
        for name, limit in given.items():
            if not limit > 0:
                raise ValueError(f"clip_{name}={limit!r} must be positive; None doesn't clip")
        if len(given) > 1:
            raise ValueError(
                f"one kind of clipping at a time, not {' and '.join(f'clip_{n}' for n in given)}"
            )

    def clip_(self, parameters: Sequence[torch.Tensor]) -> None:
        """Clips as far as that needs no other gradients."""
        if self.value is not None:
            utils.clip_grad_value_(parameters, self.value)
        if self.parameter_norm is not None:
            for parameter in parameters:
                utils.clip_grad_norm_(parameter, self.parameter_norm)


class GradientNorm:
    """The 2-norm of all gradients, from the norms of buckets that come in any order."""

    def __init__(self) -> None:
        self._squares: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def add(self, position: int, parameters: Sequence[torch.Tensor]) -> None:
        """Counts the gradients of one bucket; those of a ``DTensor`` over all ranks of its mesh.

        Args:
            position: of the bucket among all, the same on every rank.
            parameters: those of the bucket.
        """
        norm = utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if is_dtensor(norm):
            norm = norm.full_tensor()  # type: ignore[attr-defined] # mypy can't see that it has this
        self._squares[position] = norm.float().square()

    def value(self) -> torch.Tensor | None:
        """A scalar in single precision, the same bits on every rank; ``None`` without gradients."""
        squares = [self._squares[position] for position in sorted(self._squares)]
        if not squares:
            return None
        return torch.stack([square.to(squares[0].device) for square in squares]).sum().sqrt()
