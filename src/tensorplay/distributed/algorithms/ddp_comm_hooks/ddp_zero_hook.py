"""Hooks that overlap ``ZeroRedundancyOptimizer`` with DDP, as torch's module has, and one that reduces
to owners only, which torch's hasn't.
"""

from tensorplay.distributed.optim.zero import (
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    reduce_to_owners_hook,
)

__all__ = ["hook_with_zero_step", "hook_with_zero_step_interleaved", "reduce_to_owners_hook"]
