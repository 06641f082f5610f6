"""What raises on a worker raises here: every failing worker is named, and what holds elsewhere."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import rpc

from tensorplay.distributed.optim import DistributedOptimizer
from tensorplay.distributed.optim.remote import endpoints
from tests.reference.training import require_equal
from tests.remote.workers import Placed, Workers


class RefusesNaN(torch.optim.Adam):
    """Fails after the update, for parameters that have an option set."""

    def __init__(self, params: Any, fails: bool = False, **options: Any) -> None:
        super().__init__(params, **options)
        for group in self.param_groups:
            group.setdefault("fails", fails)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            group["lr"] = group["lr"] / 2
            if group["fails"]:
                raise ArithmeticError("Error running optimizer.")
        return loss


class FailsWhenMade(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        raise ValueError("Error creating optimizer.")


def _groups(placed: Placed, **fails: bool) -> list[dict[str, Any]]:
    return [
        {"params": placed.params(index), "fails": fails.get(rref.owner_name(), False)}
        for index, rref in placed.rrefs.items()
    ]


def _in_the_constructor() -> None:
    placed = Placed({"owner1": [0], "owner2": [1]})
    with pytest.raises(ValueError, match=r"(?s)2 of 2 workers \(owner1, owner2\).*Error creating"):
        DistributedOptimizer(FailsWhenMade, placed.params())


def test_a_constructor_that_raises(workers: Workers) -> None:
    workers.train(_in_the_constructor)


def _in_the_step() -> None:
    placed = Placed({"owner1": [0], "owner2": [1], "trainer0": [2]})
    failing = {"owner1": True, "trainer0": True}
    optimizer = DistributedOptimizer(RefusesNaN, _groups(placed, **failing), lr=0.1)
    before = placed.values()
    with pytest.raises(RuntimeError, match="step") as caught:
        placed.train(optimizer, range(1))
    message = str(caught.value)
    assert message.startswith(
        "step() failed on 2 of 3 workers (owner1, trainer0); it is done on owner2"
    )
    assert message.count("ArithmeticError: Error running optimizer.") == 2
    assert message.count("in step\n") >= 2, "the original traceback"
    assert not torch.equal(placed.values()[1], before[1])


def test_a_step_that_raises_on_two_of_three_workers(workers: Workers) -> None:
    workers.train(_in_the_step)


def _atomic(num_steps_before: int) -> None:
    placed = Placed({"owner1": [0, 3], "owner2": [1], "trainer0": [2]})
    optimizer = DistributedOptimizer(RefusesNaN, _groups(placed), lr=0.1, atomic=True)
    twin = Placed({"owner1": [0, 3], "owner2": [1], "trainer0": [2]})
    expected = DistributedOptimizer(RefusesNaN, _groups(twin), lr=0.1)
    placed.train(optimizer, range(num_steps_before))
    twin.train(expected, range(num_steps_before))
    before, state = placed.values(), optimizer.state_dict()
    optimizer.param_groups[2]["fails"] = True
    with pytest.raises(RuntimeError, match="nothing has changed on any worker"):
        placed.train(optimizer, range(90, 91))
    optimizer.param_groups[2]["fails"] = False
    require_equal(before, placed.values(), "parameters: ")
    require_equal(state, optimizer.state_dict(), "state: ")
    placed.train(optimizer, range(5, 7))
    twin.train(expected, range(5, 7))
    require_equal(twin.values(), placed.values(), "training went on: ")
    require_equal(expected.state_dict(), optimizer.state_dict(), "with state: ")


@pytest.mark.parametrize("num_steps_before", [0, 2])
def test_an_atomic_step_that_raises_anywhere_changes_nothing_anywhere(
    workers: Workers, num_steps_before: int
) -> None:
    workers.train(_atomic, num_steps_before)


class Leaves(torch.optim.SGD):
    """Wants to end the process after the update, if it has an option set."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.param_groups[0]["leaves"] = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().step(closure)
        if self.param_groups[0]["leaves"]:
            raise SystemExit("Leaving.")
        return loss


def _leaving(atomic: bool) -> None:
    placed = Placed({"owner1": [0], "owner2": [1]})
    optimizer = DistributedOptimizer(Leaves, placed.params(), lr=0.1, atomic=atomic)
    before = placed.values()
    optimizer.param_groups[0]["leaves"] = True
    with pytest.raises(RuntimeError, match=r"(?s)owner1, owner2.*SystemExit: Leaving"):
        placed.train(optimizer, range(1))
    if atomic:
        require_equal(before, placed.values(), "parameters: ")
    optimizer.param_groups[0]["leaves"] = False
    placed.train(optimizer, range(1))


@pytest.mark.parametrize("atomic", [False, True])
def test_a_step_that_wants_to_end_its_process_fails_like_others(
    workers: Workers, atomic: bool
) -> None:
    workers.train(_leaving, atomic)


def _resent() -> None:
    placed = Placed({"owner1": [0], "owner2": [1]})
    optimizer = DistributedOptimizer(
        RefusesNaN, _groups(placed, owner1=True), lr=0.1, betas=(0.0, 0.0)
    )
    optimizer.param_groups[1]["betas"] = (0.5, 0.5)
    with pytest.raises(RuntimeError, match="owner1"):
        placed.train(optimizer, range(1))
    optimizer.param_groups[0]["fails"] = False
    optimizer.param_groups[1]["betas"] = (0.0, 0.0)  # what it was before owner2 got the other
    placed.train(optimizer, range(1, 2))
    held = optimizer.remote_optimizers[1].rpc_sync().describe()[1]
    assert held[0]["betas"] == (0.0, 0.0)


def test_options_reach_a_worker_after_a_failed_step(workers: Workers) -> None:
    workers.train(_resent)


def test_a_restarted_worker_knows_no_key_from_before() -> None:
    script = """
from tensorplay.distributed.optim.remote import endpoints
print(next(endpoints._keys))
"""
    runs = [
        subprocess.run(  # noqa: S603  # our own interpreter, our own statements
            [sys.executable, "-c", script], check=True, capture_output=True, text=True
        )
        for _ in range(2)
    ]
    assert int(runs[0].stdout) != int(runs[1].stdout)


def _restarted() -> None:
    placed = Placed({"owner1": [0], "owner2": [1]})
    optimizer = DistributedOptimizer(torch.optim.SGD, placed.params(), lr=0.1)
    before = placed.values()
    rpc.rpc_sync("owner2", _forget_all)
    with pytest.raises(RuntimeError, match=r"(?s)\(owner2\).*owner1.*was this worker restarted"):
        placed.train(optimizer, range(1))
    torch.testing.assert_close(placed.values()[1], before[1], rtol=0.0, atol=0.0)


def _forget_all() -> None:
    endpoints._optimizers.clear()


def test_the_error_asks_whether_a_worker_was_restarted(workers: Workers) -> None:
    workers.train(_restarted)
