"""Functional optimizers: an algorithm as a function, without an optimizer object's parameters.

Read in this order: ``rules.py`` (one table, and the pure form made from it), ``functions.py``
(``functional_adam`` and its siblings), ``optimizer.py`` and ``registry.py``
(`as_functional_optim`).
"""

from tensorplay.distributed.optim.functional.functions import (
    FunctionalUpdate,
    functional_adadelta,
    functional_adagrad,
    functional_adam,
    functional_adamax,
    functional_adamw,
    functional_rmsprop,
    functional_rprop,
    functional_sgd,
)
from tensorplay.distributed.optim.functional.optimizer import FunctionalOptimizer
from tensorplay.distributed.optim.functional.registry import (
    as_functional_optim,
    register_functional_optim,
)

__all__ = [
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
