"""Checkpoints at any time, also before the first iteration, and on to another number of ranks."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.launch import run_ranks
from tests.reference.training import require_equal, values_of
from tests.zero.overlap.twins import Twins

Run = Callable[..., list[Any]]


def _save(path: Path, resident: bool) -> None:
    twins = Twins(resident=resident)
    twins.train(3)
    twins.zero.consolidate_state_dict()
    if dist.get_rank() == 0:
        model = twins.model.module.state_dict()
        torch.save({"model": model, "optimizer": twins.zero.state_dict()}, path)
    dist.barrier()


def _resume(path: Path, resident: bool) -> None:
    saved = torch.load(path, weights_only=True)
    for interleaved in (False, True):
        twins = Twins(resident=resident, interleaved=interleaved)
        for model, optimizer in twins.both:
            model.module.load_state_dict(saved["model"])  # type: ignore[operator,union-attr] # mypy takes it for any attribute of a module
            optimizer.load_state_dict(saved["optimizer"])
        twins.train(4, first=3)
        twins.require_state_equal()


def test_resuming_on_another_number_of_ranks_is_resuming_the_plain_optimizer() -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "checkpoint.pt")
        for before, after, resident in ((2, 3, False), (3, 2, True), (1, 2, False)):
            run_ranks(before, _save, path, resident)
            run_ranks(after, _resume, path, resident)


def _at_any_time() -> None:
    twins = Twins()
    twins.require_state_equal()  # before the first iteration
    twins.plain.load_state_dict(twins.plain.state_dict())
    if dist.get_rank() == 0:
        state = twins.zero.state_dict()
    broadcast: list[Any] = [state if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(broadcast)
    twins.zero.load_state_dict(broadcast[0])
    twins.train(2)
    twins.require_state_equal()
    model, plain = values_of(twins.model.parameters()), twins.plain.state_dict()
    plain = torch.load(_written(plain), weights_only=True)
    twins.train(2, first=2)
    for module, optimizer in twins.both:  # back to where it was after two iterations
        with torch.no_grad():
            for parameter, value in zip(module.parameters(), model, strict=True):
                parameter.copy_(value)
        optimizer.load_state_dict(plain)
    twins.train(2, first=2)
    twins.require_state_equal()
    require_equal(len(twins.zero.param_groups), 1)


def _written(value: Any) -> Any:
    from io import BytesIO

    file = BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def test_saving_and_loading_between_iterations(run: Run) -> None:
    run(2, _at_any_time)
