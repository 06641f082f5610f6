"""How gradients are averaged: what the user chose, checked once."""

from dataclasses import dataclass

import torch

OPS = ("average", "sum")

COMPRESSIONS = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}

_COMPRESSIBLE = frozenset({torch.float32, torch.float64})


@dataclass(frozen=True)
class ReductionPolicy:
    """The options of a reduction.

    Attributes:
        op: ``"average"`` or ``"sum"``.
        gradient_predivide_factor: what gradients are divided by before the average's sum; the rest
            of the division comes after it.
        backward_passes_per_step: how many backward passes accumulate before a reduction.
        compression: ``"none"``, ``"fp16"`` or ``"bf16"``: the type in which gradients travel.
        sparse_as_dense: whether sparse gradients are made dense.
        overlap_with_backward: whether buckets are averaged while backward goes on; ``None``: where
            parameters are on an accelerator.
    """

    op: str = "average"
    gradient_predivide_factor: float = 1.0
    backward_passes_per_step: int = 1
    compression: str = "none"
    sparse_as_dense: bool = False
    overlap_with_backward: bool | None = None

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise ValueError(f"op={self.op!r} must be one of {list(OPS)}")
        if self.compression not in COMPRESSIONS:
            raise ValueError(f"compression={self.compression!r} must be one of {[*COMPRESSIONS]}")
        if not 0 < self.gradient_predivide_factor < float("inf"):
            raise ValueError(
                f"gradient_predivide_factor={self.gradient_predivide_factor} must be greater than 0"
            )
        if self.gradient_predivide_factor != 1 and self.op != "average":
            raise ValueError(
                "gradient_predivide_factor splits the division of op='average'; leave it 1.0 with "
                f"op={self.op!r}"
            )
        passes = self.backward_passes_per_step
        if not isinstance(passes, int) or passes < 1:
            raise ValueError(f"backward_passes_per_step={passes!r} must be a positive integer")

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The type in which gradients of ``dtype`` travel; wider ones only are compressed."""
        compressed = COMPRESSIONS[self.compression]
        return dtype if compressed is None or dtype not in _COMPRESSIBLE else compressed

    def divisor(self, num_ranks: int) -> float:
        """What the sum over ranks of predivided gradients is divided by."""
        return num_ranks / self.gradient_predivide_factor if self.op == "average" else 1
