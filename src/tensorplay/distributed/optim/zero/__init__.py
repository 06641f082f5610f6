"""Zero-redundancy optimizer: optimizer state sharded across ranks (ZeRO).

Read ``optimizer.py`` first (what the user holds), then ``sharding_plan.py`` (who owns what),
``gather_parameters.py`` (shards -> every rank) and ``checkpoint.py`` (shards -> the full state).
``overlap.py`` makes the update in pieces while backward goes on, ``ddp_hooks.py`` under DDP;
``ddp_reduction.py`` has DDP's buckets reduced to owners only.
"""

from tensorplay.distributed.optim.zero.ddp_hooks import (
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    reduce_to_owners_hook,
)
from tensorplay.distributed.optim.zero.optimizer import ZeroRedundancyOptimizer
from tensorplay.distributed.optim.zero.sharding_report import RankShare, ShardingReport

__all__ = [
    "ZeroRedundancyOptimizer",
    "ShardingReport",
    "RankShare",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "reduce_to_owners_hook",
]
