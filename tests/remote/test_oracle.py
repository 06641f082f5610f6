"""Every optimizer class steps remote parameters as it steps the same ones in one process."""

from typing import Any

import pytest
import torch

from tensorplay.distributed.optim import DistributedOptimizer
from tests.reference.optimizers import OPTIMIZERS
from tests.reference.training import require_equal
from tests.remote.workers import Placed, Plain, Workers

PLACEMENT = {"owner1": [0, 3, 4], "owner2": [1, 2, 5], "trainer0": [6]}
FUSABLE = {"SGD", "SGD momentum", "Adam", "AdamW", "Adagrad"}


class Stubborn(torch.optim.SGD):
    """Outside of every list of known classes."""


CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    **OPTIMIZERS,
    "a subclass of SGD": (Stubborn, {"lr": 0.1, "momentum": 0.9}),
}


def _train(name: str, frozen: tuple[int, ...]) -> None:
    optimizer_class, options = CLASSES[name]
    placed = Placed(PLACEMENT, frozen)
    optimizer = DistributedOptimizer(optimizer_class, placed.params(), **options)
    if name in FUSABLE | {"a subclass of SGD"}:
        options = {**options, "fused": True}
    plain = Plain(optimizer_class, 7, frozen, **options)
    for steps, used in ((range(2), None), (range(2, 4), [0, 2, 4]), (range(4, 5), None)):
        placed.train(optimizer, steps, used)
        plain.train(steps, used)
        require_equal(plain.values(), placed.values(), f"{name}, steps {steps}: ")


@pytest.mark.parametrize("name", CLASSES)
def test_equals_the_plain_optimizer_with_unused_and_frozen_parameters(
    workers: Workers, name: str
) -> None:
    workers.train(_train, name, (1,))
