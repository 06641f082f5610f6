"""``torch.optim.swa_utils`` over a sharded optimizer: the same averages as with the plain one."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from tests.launch import run_ranks
from tests.reference.ddp import MODES, Trainer, batch, make_twins, require_twins_equal, train
from tests.reference.training import require_equal, values_of

AVERAGES: dict[str, Callable[[nn.Module], AveragedModel]] = {
    "SWA": AveragedModel,
    "EMA": lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
    "EMA with buffers": lambda model: AveragedModel(
        model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True
    ),
}


def make_normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 17), nn.BatchNorm1d(17), nn.ReLU(), nn.Linear(17, 3))


def state_of(model: nn.Module) -> list[torch.Tensor]:
    return values_of(model.state_dict().values())


def train_averaged(trainer: Trainer, averaged: AveragedModel) -> None:
    """Torch's recipe: a schedule, averages from the third step on, batch norm at the end."""
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(trainer.optimizer, T_max=4)
    swa_schedule = SWALR(trainer.optimizer, swa_lr=0.01, anneal_epochs=2)
    for step in range(6):
        train(*trainer, steps=1, first=step)
        if step < 2:
            schedule.step()
        else:
            averaged.update_parameters(trainer.module)
            swa_schedule.step()
    update_bn([batch(step) for step in range(3)], averaged)


def _averaged(resident: bool, kind: str) -> None:
    plain, sharded = make_twins(make_normed, resident)
    plain_averaged, averaged = (AVERAGES[kind](t.module) for t in (plain, sharded))
    train_averaged(plain, plain_averaged)
    train_averaged(sharded, averaged)
    require_equal(state_of(plain_averaged), state_of(averaged))
    require_twins_equal(plain, sharded)


@MODES
@pytest.mark.parametrize("kind", AVERAGES)
def test_averages_schedule_and_batch_norm(resident: bool, kind: str) -> None:
    run_ranks(2, _averaged, resident, kind)


def _own_memory() -> None:
    _, sharded = make_twins(make_normed, True)
    averaged = AveragedModel(sharded.module)
    before = state_of(averaged)
    train(*sharded)
    require_equal(before, state_of(averaged))
    for parameter in averaged.parameters():
        nbytes = parameter.numel() * parameter.element_size()
        assert parameter.untyped_storage().nbytes() == nbytes


def test_the_average_of_a_model_in_bucket_view_has_its_own_memory() -> None:
    run_ranks(2, _own_memory)


def _averages_loaded_back(resident: bool) -> None:
    plain, sharded = make_twins(make_normed, resident)
    for trainer in (plain, sharded):
        averaged = AveragedModel(trainer.module)
        for step in range(3):
            train(*trainer, steps=1, first=step)
            averaged.update_parameters(trainer.module)
        trainer.module.load_state_dict(averaged.module.state_dict())
        train(*trainer, steps=2, first=3)
    require_twins_equal(plain, sharded)


@MODES
def test_training_goes_on_from_averages_that_are_loaded_back(resident: bool) -> None:
    run_ranks(3, _averages_loaded_back, resident)
