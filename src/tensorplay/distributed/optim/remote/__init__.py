"""``DistributedOptimizer`` over RRefs: parameters that live on remote workers.

``turns`` (who may change a worker's parameters) and ``failures`` -> ``owner`` (the local optimizer
on a worker) -> ``endpoints`` (what others call there) -> ``calls`` (the only place that issues RPCs)
-> ``optimizer`` (what the user holds).
"""

from tensorplay.distributed.optim.remote.optimizer import RemoteOptimizer

__all__ = ["RemoteOptimizer"]
