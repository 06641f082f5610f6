"""Every scheduler of torch drives the sharded optimizer as it drives the plain one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from torch.optim import lr_scheduler as schedulers

from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tests.launch import run_ranks
from tests.reference.training import make_model, require_equal, set_gradients, values_of

NUM_STEPS = 8
RESUMED_AT = 3

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, [lambda n: 0.9**n, lambda n: 1.0 / (n + 1)]),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: schedulers.StepLR(o, 2),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 5]),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, total_iters=3),
    "LinearLR": lambda o: schedulers.LinearLR(o, total_iters=5),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.8),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 6),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, max_lr=0.3, total_steps=NUM_STEPS + 1),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, total_iters=3), schedulers.ExponentialLR(o, 0.9)], [3]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.LinearLR(o, total_iters=3), schedulers.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.01, anneal_epochs=4),
}


def groups_of(model: torch.nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.05}]


def advance(scheduler: Any, step: int) -> None:
    if isinstance(scheduler, schedulers.ReduceLROnPlateau):
        scheduler.step([3.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.0][step])
    else:
        scheduler.step()


def _train_scheduled() -> None:
    for name, make_scheduler in SCHEDULERS.items():
        model, plain_model = make_model(), make_model()
        plain = torch.optim.AdamW(groups_of(plain_model), lr=0.1)
        sharded = ZeroRedundancyOptimizer(groups_of(model), torch.optim.AdamW, lr=0.1)
        plain_scheduler, scheduler = make_scheduler(plain), make_scheduler(sharded)
        for step in range(NUM_STEPS):
            if step == RESUMED_AT:
                sharded, scheduler = resume(sharded, scheduler, model, make_scheduler)
            set_gradients(model.parameters(), step)
            set_gradients(plain_model.parameters(), step)
            plain.step()
            sharded.step()
            advance(plain_scheduler, step)
            advance(scheduler, step)
            what = f"{name}, step {step}: "
            require_equal(
                [group["lr"] for group in plain.param_groups],
                [group["lr"] for group in sharded.param_groups],
                what,
            )
            require_equal(values_of(plain_model.parameters()), values_of(model.parameters()), what)


def resume(
    optimizer: ZeroRedundancyOptimizer,
    scheduler: Any,
    model: torch.nn.Module,
    make_scheduler: Callable[[Optimizer], Any],
) -> tuple[ZeroRedundancyOptimizer, Any]:
    """What a restarted job does: build anew, then load."""
    saved = []
    for rank in range(torch.distributed.get_world_size()):
        optimizer.consolidate_state_dict(to=rank)
        if rank == torch.distributed.get_rank():
            saved.append(optimizer.state_dict())
    new = ZeroRedundancyOptimizer(groups_of(model), torch.optim.AdamW, lr=0.1)
    new_scheduler = make_scheduler(new)
    new_scheduler.load_state_dict(scheduler.state_dict())
    new.load_state_dict(saved[0])
    return new, new_scheduler


@pytest.mark.filterwarnings("default")
def test_every_scheduler_through_saving_and_resuming() -> None:
    missing = {
        name
        for name in dir(schedulers)
        if name.endswith(("LR", "Restarts", "Plateau", "ChainedScheduler"))
        and name not in SCHEDULERS
        and not name.startswith(("_", "LRScheduler"))
    }
    assert not missing
    run_ranks(2, _train_scheduled, timeout_s=100)


def _wrong_order() -> None:
    model = make_model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    scheduler = schedulers.StepLR(optimizer, 1)
    with pytest.warns(UserWarning, match=r"lr_scheduler.step\(\)` before `optimizer.step"):
        scheduler.step()


def test_a_scheduler_notices_that_step_was_not_called() -> None:
    run_ranks(1, _wrong_order)
