"""What a rank must know of a tensor before it can receive it."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tensorplay.distributed.optim._core.parameter_spec import is_dense


@dataclass(frozen=True)
class TensorSpec:
    """How a state tensor travels and where it goes: metadata only."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device_type: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorSpec":
        """Reads the metadata; a tensor that isn't dense arrives contiguous."""
        dense = is_dense(tensor)
        stride = tensor.stride() if dense else torch.empty(tensor.shape, device="meta").stride()
        return cls(tensor.dtype, tuple(tensor.shape), tuple(stride), tensor.device.type)

    def allocate(self, device_of_type: Mapping[str, torch.device]) -> torch.Tensor:
        """Memory to receive the tensor, on this rank's device of the same type."""
        device = device_of_type.get(self.device_type, torch.device(self.device_type))
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
