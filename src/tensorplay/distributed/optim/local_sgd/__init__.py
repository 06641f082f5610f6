"""Local SGD: ranks step on their own, and average their parameters now and then.

Read ``schedule.py`` (when), ``averaging_plan.py`` (what travels together), ``averaged_tensors.py``
(its memory), ``group_average.py`` (the average over one group), ``averagers.py`` (what the user
holds), then ``post_local_sgd.py`` (the optimizer) and ``ddp_hooks.py`` (gradients in the meantime).
"""

from tensorplay.distributed.optim.local_sgd.averagers import (
    HierarchicalModelAverager,
    ModelAverager,
    PeriodicModelAverager,
)
from tensorplay.distributed.optim.local_sgd.ddp_hooks import PostLocalSGDState, post_localSGD_hook
from tensorplay.distributed.optim.local_sgd.post_local_sgd import PostLocalSGDOptimizer

__all__ = [
    "PostLocalSGDOptimizer",
    "ModelAverager",
    "PeriodicModelAverager",
    "HierarchicalModelAverager",
    "PostLocalSGDState",
    "post_localSGD_hook",
]
