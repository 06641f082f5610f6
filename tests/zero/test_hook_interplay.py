"""Hooks of others around a sharded step: DDP's, the parameters' and the optimizers'."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from tests.launch import run_ranks
from tests.reference.ddp import MODES, make_net, make_twins, require_twins_equal, train
from tests.reference.training import values_of


def _communication_hook(resident: bool) -> None:
    plain, sharded = make_twins(make_net, resident)
    for trainer in (plain, sharded):
        trainer.model.register_comm_hook(None, default_hooks.fp16_compress_hook)  # type: ignore[operator] # mypy takes it for a plain tensor or module
        train(*trainer)
    require_twins_equal(plain, sharded)


@MODES
def test_a_communication_hook_of_ddp(resident: bool) -> None:
    run_ranks(3, _communication_hook, resident)


def _gradient_hooks(resident: bool) -> None:
    plain, sharded = make_twins(make_net, resident)
    for trainer in (plain, sharded):
        calls: list[torch.Tensor] = []
        for parameter in trainer.module.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
            parameter.register_post_accumulate_grad_hook(calls.append)
        train(*trainer, steps=2)
        assert len(calls) == 2 * len(list(trainer.module.parameters()))
    require_twins_equal(plain, sharded)


@MODES
def test_hooks_of_parameters_stay_with_them(resident: bool) -> None:
    run_ranks(2, _gradient_hooks, resident)


def _post_hook_sees_everything(resident: bool) -> list[Any]:
    _, sharded = make_twins(make_net, resident)
    seen = []

    def look(*_: object) -> None:
        seen.append(values_of(sharded.module.parameters()))

    sharded.optimizer.register_step_post_hook(look)
    train(*sharded, steps=2)
    return [[tensor.tolist() for tensor in values] for values in seen]


@MODES
def test_a_step_post_hook_sees_every_ranks_update(resident: bool) -> None:
    first, second = run_ranks(2, _post_hook_sees_everything, resident)
    assert first == second


def _failing_local_hook() -> None:
    plain, sharded = make_twins(make_net, False)
    local: torch.optim.Optimizer = sharded.optimizer.optim  # type: ignore[attr-defined] # mypy can't see that it has this

    def fail(*_: object) -> None:
        if dist.get_rank() == 1:
            raise ArithmeticError("not today")

    handle = local.register_step_post_hook(fail)
    expected: type[Exception] = ArithmeticError if dist.get_rank() == 1 else RuntimeError
    with pytest.raises(expected, match="not today"):
        train(*sharded, steps=1)
    handle.remove()
    train(*plain, steps=1)
    require_twins_equal(plain, sharded)
    train(*plain, steps=1, first=1)
    train(*sharded, steps=1, first=1)
    require_twins_equal(plain, sharded)


def test_a_hook_of_the_local_optimizer_that_fails_on_one_rank_is_an_error_on_all() -> None:
    run_ranks(2, _failing_local_hook)


def _arguments_from_a_pre_hook() -> None:
    plain, sharded = make_twins(make_net, False)
    for trainer in (plain, sharded):
        losses: list[float] = []

        def add_closure(_: Any, args: Any, kwargs: Any, losses: list[float] = losses) -> Any:
            return args, {**kwargs, "closure": lambda: losses.append(0.5)}

        trainer.optimizer.register_step_pre_hook(add_closure)
        train(*trainer, steps=2)
        assert losses == [0.5, 0.5]
    require_twins_equal(plain, sharded)


def test_a_pre_hook_may_change_the_arguments() -> None:
    run_ranks(2, _arguments_from_a_pre_hook)
