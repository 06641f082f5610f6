"""Zero-redundancy optimizer: optimizer state sharded across ranks (ZeRO).

Read ``optimizer.py`` first (what the user holds), then ``sharding_plan.py`` (who owns what),
``gather_parameters.py`` (shards -> every rank) and ``checkpoint.py`` (shards -> the full state).
"""

from tensorplay.distributed.optim.zero.optimizer import ZeroRedundancyOptimizer
from tensorplay.distributed.optim.zero.sharding_report import RankShare, ShardingReport

__all__ = ["ZeroRedundancyOptimizer", "ShardingReport", "RankShare"]
