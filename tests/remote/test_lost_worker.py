"""Workers that are lost during a step: an error names them, in time, and the others agree."""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import rpc

from tensorplay.distributed.optim import DistributedOptimizer
from tensorplay.distributed.optim.remote import calls
from tensorplay.distributed.optim.remote.owner import LocalOptimizer
from tensorplay.distributed.optim.remote.turns import Turns
from tests.reference.training import require_equal
from tests.remote.workers import Placed, Plain, Workers

RPC_TIMEOUT_S = 4.0
VICTIMS = ("victim1", "victim2", "victim3", "victim4", "trainer2")


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sleep(*_: Any, **__: Any) -> None:
    time.sleep(2 * RPC_TIMEOUT_S)


def arm_step(what: Any) -> None:
    LocalOptimizer.step = what  # type: ignore[method-assign] # replaced for the test


def arm_keeping(what: Any) -> None:
    Turns.end = what  # type: ignore[method-assign] # replaced for the test


def lose(victim: str, arm: Any, what: Any, *, atomic: bool) -> tuple[str, bool]:
    """The error of a step that a worker is lost in, and whether the survivor has stepped."""
    placed = Placed({"survivor": [0], victim: [1]})
    twin = Plain(torch.optim.Adam, 1, lr=0.1, fused=True)
    optimizer = DistributedOptimizer(torch.optim.Adam, placed.params(), lr=0.1, atomic=atomic)
    placed.train(optimizer, [0])
    twin.train([0])
    before = twin.values()
    rpc.rpc_sync(victim, arm, (what,))
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        placed.train(optimizer, [1])
    assert time.monotonic() - start < RPC_TIMEOUT_S + 2.0
    twin.train([1])
    del placed.models[victim]
    (value,) = placed.values()
    has_stepped = bool(torch.equal(value, twin.values()[0]))
    require_equal((twin.values() if has_stepped else before)[0], value)

    # And it is ready for the next: the survivor alone.
    again = DistributedOptimizer(torch.optim.SGD, placed.params(0), lr=0.1, atomic=atomic)
    placed.train(again, [2], used=[0])
    assert not torch.equal(placed.values()[0], value)
    return str(caught.value), has_stepped


def step_and_die(placed: Placed) -> None:
    optimizer = DistributedOptimizer(torch.optim.SGD, placed.params(), lr=0.1, atomic=True)
    ask = calls.ask

    def ask_or_die(requests: Any) -> Any:
        if any(request[0] == "end_turn" for request in requests.values()):
            die()
        return ask(requests)

    calls.ask = ask_or_die
    placed.train(optimizer, [0])


def _workers_are_lost() -> None:
    message, has_stepped = lose("victim1", arm_step, die, atomic=False)
    assert message.startswith("step() failed on 1 of 2 workers (victim1); it is done on survivor")
    assert has_stepped

    message, has_stepped = lose("victim2", arm_step, die, atomic=True)
    assert message.startswith(
        "step() failed on 1 of 2 workers (victim2); nothing has changed on any worker"
    )
    assert not has_stepped

    message, has_stepped = lose("victim3", arm_keeping, die, atomic=True)
    assert message.startswith("step() failed on 1 of 2 workers (victim3); it is done on survivor")
    assert "whether it is done there is unknown" in message
    assert has_stepped

    message, has_stepped = lose("victim4", arm_step, sleep, atomic=False)
    assert "(victim4)" in message
    assert "timeout" in message
    assert has_stepped


def _a_trainer_is_lost() -> None:
    placed = Placed({"survivor": [0, 1]})
    before = placed.values()
    with contextlib.suppress(RuntimeError):
        rpc.rpc_sync("trainer2", step_and_die, (placed,))
    optimizer = DistributedOptimizer(torch.optim.SGD, placed.params(), lr=0.0)
    placed.train(optimizer, [1])  # waits until the other's turn has been taken back
    require_equal(before, placed.values(), "what it had done is undone: ")


def _lose_all() -> None:  # in one run, since those who have died take part in no other
    _workers_are_lost()
    _a_trainer_is_lost()


def test_workers_lost_at_every_stage_of_a_step(tmp_path: Path) -> None:
    names = ("trainer", "survivor", *VICTIMS)
    with contextlib.closing(Workers(tmp_path, names, RPC_TIMEOUT_S)) as workers:
        workers.train(_lose_all)
