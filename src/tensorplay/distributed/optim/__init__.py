"""Distributed-aware optimizers: their state is sharded, averaged or moved, not replicated.

* :class:`ZeroRedundancyOptimizer` (``zero/``) shards the state of any optimizer across ranks.
* :class:`PostLocalSGDOptimizer` (``local_sgd/``) steps on every rank for itself, and averages the
  parameters periodically.
* :class:`DistributedOptimizer` averages gradients in backward over the ranks that all have the
  parameters (``data_parallel/``), or steps parameters that live on other workers (``remote/``).
* :func:`detach_copy` copies a state dict so that no tensor takes its bucket along into a file.
* :func:`as_functional_optim` and :func:`functional_adam` and its siblings (``functional/``) are
  optimizers that are handed their gradients, in place or pure.
* :func:`apply_optimizer_in_backward` (``in_backward/``) has parameters updated inside ``backward()``
  and their gradients freed there.

A sharded step is three verbs: gradients are *reduced* to their owners, owners *step* what they own,
and updated parameters are *gathered* by everyone. Plans say who owns what; they are pure functions
of the parameters' metadata (``_core/partition.py``, ``_core/bucket_layout.py``). Read ``_core`` in
the order in which its ``__init__`` lists it, then ``zero/optimizer.py``.
"""

from tensorplay.distributed.optim.data_parallel import (
    DataParallelOptimizer,
    ReplicaDifference,
    StepProfile,
)
from tensorplay.distributed.optim.distributed_optimizer import DistributedOptimizer
from tensorplay.distributed.optim.functional import (
    FunctionalOptimizer,
    FunctionalUpdate,
    as_functional_optim,
    functional_adadelta,
    functional_adagrad,
    functional_adam,
    functional_adamax,
    functional_adamw,
    functional_rmsprop,
    functional_rprop,
    functional_sgd,
    register_functional_optim,
)
from tensorplay.distributed.optim.in_backward import (
    InBackwardOptimizer,
    apply_optimizer_in_backward,
    get_in_backward_optimizers,
)
from tensorplay.distributed.optim.local_sgd import PostLocalSGDOptimizer
from tensorplay.distributed.optim.model_state import detach_copy
from tensorplay.distributed.optim.zero import (
    RankShare,
    ShardingReport,
    ZeroRedundancyOptimizer,
)

__all__ = [
    "ZeroRedundancyOptimizer",
    "DistributedOptimizer",
    "DataParallelOptimizer",
    "ReplicaDifference",
    "StepProfile",
    "ShardingReport",
    "RankShare",
    "PostLocalSGDOptimizer",
    "detach_copy",
    "apply_optimizer_in_backward",
    "get_in_backward_optimizers",
    "InBackwardOptimizer",
    "as_functional_optim",
    "register_functional_optim",
    "FunctionalOptimizer",
    "FunctionalUpdate",
    "functional_adadelta",
    "functional_adagrad",
    "functional_adam",
    "functional_adamax",
    "functional_adamw",
    "functional_rmsprop",
    "functional_rprop",
    "functional_sgd",
]
