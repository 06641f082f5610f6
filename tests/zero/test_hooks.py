"""Step hooks and profiler ranges: each fires once per step, as with the plain optimizer."""

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tests.launch import run_ranks
from tests.reference.training import make_model, set_gradients


def _step_hooks() -> list[str]:
    model = make_model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    events: list[str] = []

    def recorder(event: str):
        def record(current: torch.optim.Optimizer, *_: object) -> None:
            events.append(f"{event} {type(current).__name__}")

        return record

    handles = [
        register_optimizer_step_pre_hook(recorder("global pre")),
        register_optimizer_step_post_hook(recorder("global post")),
        optimizer.register_step_pre_hook(recorder("pre")),
        optimizer.register_step_post_hook(recorder("post")),
        optimizer.optim.register_step_pre_hook(recorder("inner pre")),
        optimizer.optim.register_step_post_hook(recorder("inner post")),
    ]
    set_gradients(model.parameters(), 0)
    optimizer.step()
    for handle in handles:
        handle.remove()
    return events


def test_step_hooks_fire_once_and_global_ones_not_again_for_the_local_optimizer() -> None:
    outer = "ZeroRedundancyOptimizer"
    expected = [
        f"global pre {outer}",
        f"pre {outer}",
        "inner pre SGD",
        "inner post SGD",
        f"post {outer}",
        f"global post {outer}",
    ]
    assert run_ranks(2, _step_hooks) == [expected, expected]


def _profiled() -> set[str]:
    model = make_model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    set_gradients(model.parameters(), 0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    return {event.name for event in profile.events() or []}


def test_profiler_ranges_are_named_after_the_phases() -> None:
    expected = {
        "Optimizer.step#ZeroRedundancyOptimizer.step",
        "ZeroRedundancyOptimizer.agree",
        "Optimizer.step#SGD.step",
        "ZeroRedundancyOptimizer.gather",
    }
    for names in run_ranks(2, _profiled):
        assert expected <= names


def _patched_inner_step() -> int:
    model = make_model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    calls = []
    original = optimizer.optim.step

    def step(*args: object) -> None:
        calls.append(args)
        original(*args)  # type: ignore[arg-type]

    optimizer.optim.step = step  # type: ignore[method-assign]
    set_gradients(model.parameters(), 0)
    optimizer.step()
    return len(calls)


def test_a_patched_step_of_the_local_optimizer_is_called() -> None:
    assert run_ranks(2, _patched_inner_step) == [1, 1]
