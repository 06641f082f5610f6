"""The hooks that overlap ``ZeroRedundancyOptimizer`` with DDP, as in torch's module of this name."""

from tensorplay.distributed.optim.zero import (
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)

__all__ = ["hook_with_zero_step", "hook_with_zero_step_interleaved"]
