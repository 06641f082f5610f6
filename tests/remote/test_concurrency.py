"""Several trainers and threads step the same parameters at once: all steps count, nobody waits for ever."""

from typing import Any

import pytest
import torch
import torch.distributed.autograd as dist_autograd
from torch import Tensor
from torch.distributed import rpc

from tensorplay.distributed.optim import DistributedOptimizer
from tests.remote.workers import OWNERS, Workers, run_threads

SHARED: dict[str, Tensor] = {}
STEPS = 6


def shared() -> Tensor:
    """The same parameter for all who ask; it starts at zero."""
    return SHARED.setdefault("weight", torch.zeros(2, requires_grad=True))


def reset() -> None:
    SHARED.clear()


def loss(times: float) -> Tensor:
    return shared().sum() * times


class OwnGradients(torch.optim.SGD):
    """SGD that fails if a gradient isn't of one piece."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                assert p.grad is None or p.grad[0] == p.grad[1]
        return super().step(closure)


def _steps(atomic: bool, num_threads: int) -> None:
    def train() -> None:
        params = [rpc.remote(name, shared) for name in OWNERS]
        optimizer = DistributedOptimizer(OwnGradients, params, lr=1.0, atomic=atomic)
        for _ in range(STEPS):
            with dist_autograd.context() as context_id:
                losses = [rpc.rpc_sync(name, loss, (-1.0,)) for name in OWNERS]
                dist_autograd.backward(context_id, losses)
                optimizer.step(context_id)

    errors = run_threads(*[train] * num_threads)
    assert not errors, errors


def _mixed() -> None:
    errors = run_threads(lambda: _steps(True, 2), lambda: _steps(False, 2))
    assert not errors, errors


def _one_optimizer(atomic: bool) -> None:
    params = [rpc.remote(name, shared) for name in OWNERS]
    optimizer = DistributedOptimizer(OwnGradients, params, lr=1.0, atomic=atomic)

    def train() -> None:
        for _ in range(STEPS):
            with dist_autograd.context() as context_id:
                losses = [rpc.rpc_sync(name, loss, (-1.0,)) for name in OWNERS]
                dist_autograd.backward(context_id, losses)
                optimizer.step(context_id)

    errors = run_threads(*[train] * 8)
    assert not errors, errors


def _reset() -> None:
    for name in OWNERS:
        rpc.rpc_sync(name, reset)


def _values() -> list[list[float]]:
    return [rpc.rpc_sync(name, shared).tolist() for name in OWNERS]


@pytest.mark.parametrize("atomic", [False, True])
def test_steps_of_two_trainers_with_two_threads_each_all_count(
    workers: Workers, atomic: bool
) -> None:
    workers.train(_reset)
    workers.train(_steps, atomic, 2, ranks=(0, 3))
    (values,) = workers.train(_values)
    assert values == [[4.0 * STEPS] * 2] * 2


@pytest.mark.parametrize("atomic", [False, True])
def test_threads_that_share_an_optimizer(workers: Workers, atomic: bool) -> None:
    workers.train(_reset)
    workers.train(_one_optimizer, atomic)
    (values,) = workers.train(_values)
    assert values == [[8.0 * STEPS] * 2] * 2


def test_atomic_and_other_steps_at_once_all_count(workers: Workers) -> None:
    workers.train(_reset)
    workers.train(_mixed, ranks=(0, 3))
    (values,) = workers.train(_values)
    assert values == [[8.0 * STEPS] * 2] * 2


def _many() -> None:
    # More than RPC has threads: whoever waits for a turn must not occupy one.
    _steps(True, 24)


def test_more_trainers_than_rpc_has_threads(workers: Workers) -> None:
    workers.train(_reset)
    workers.train(_many)
    (values,) = workers.train(_values)
    assert values == [[24.0 * STEPS] * 2] * 2
