"""The optimizer step inside backward: ``local_gradients.py``, ``ddp_gradients.py`` and
``group_gradients.py`` say when a bucket's gradients are final, the core's ``bucket_step.py`` steps it,
``optimizer.py`` is what the user holds.
"""

from tensorplay.distributed.optim.in_backward.optimizer import (
    InBackwardOptimizer,
    apply_optimizer_in_backward,
    get_in_backward_optimizers,
)

__all__ = ["InBackwardOptimizer", "apply_optimizer_in_backward", "get_in_backward_optimizers"]
