"""``DistributedOptimizer`` over local parameters: gradients are averaged in backward.

Read ``optimizer.py`` first (what the user holds), then ``gradients.py`` (backward -> averages on every
rank), which stands on the core's reducer.
"""

from tensorplay.distributed.optim.data_parallel.optimizer import DataParallelOptimizer
from tensorplay.distributed.optim.data_parallel.replicas import ReplicaDifference
from tensorplay.distributed.optim.data_parallel.step_times import StepProfile

__all__ = ["DataParallelOptimizer", "ReplicaDifference", "StepProfile"]
