"""How long a functional step takes: in place next to torch's, and an ensemble next to a loop.

The candidates take turns, round by round; a figure is the median of the rounds, and a ratio is the
median of each round's ratio to the reference. Times are milliseconds on one thread by default.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad, stack_module_state, vmap

from benchmarks.step.models import MODELS
from tensorplay.distributed.optim import as_functional_optim, functional_adamw

NUM_MEMBERS = 8
Step = Callable[[], object]


def small_tensors() -> list[Tensor]:
    return [torch.randn(8, 8) for _ in range(200)]


def gpt_tensors() -> list[Tensor]:
    return [parameter.detach() for parameter in MODELS["gpt"].build().parameters()]


TENSORS: dict[str, tuple[Callable[[], list[Tensor]], int]] = {
    "gpt": (gpt_tensors, 1),
    "small": (small_tensors, 10),
}
"""The sets of tensors, and the number of steps in a round."""


def copies(params: list[Tensor]) -> list[Tensor]:
    return [param.clone() for param in params]


def in_place_candidates(params: list[Tensor]) -> dict[str, Step]:
    """One AdamW step each; the reference comes first."""
    grads = [torch.randn_like(param) for param in params]
    options: dict[str, Any] = {"lr": 1e-6, "fused": True}

    eager_params = copies(params)
    for param, gradient in zip(eager_params, grads, strict=True):
        param.grad = gradient
    eager = torch.optim.AdamW(eager_params, **options)

    ours = as_functional_optim(torch.optim.AdamW, **options)
    ours.param_group["params"] = copies(params)

    listed = copies(params)
    lists = [[torch.zeros_like(param) for param in params] for _ in range(2)]
    steps = [torch.zeros(()) for _ in params]

    candidates: dict[str, Step] = {
        "torch.optim.AdamW, fused": eager.step,
        "as_functional_optim, fused": lambda: ours.step(grads),
        "functional_adamw, fused": lambda: functional_adamw(
            listed, grads, *lists, [], steps, **options
        ),
    }
    try:
        # Recorded, because torch switches the filter off before it warns.
        with warnings.catch_warnings(record=True):
            from torch.distributed.optim import as_functional_optim as torchs

            theirs = torchs(torch.optim.AdamW, lr=1e-6)
            theirs.param_group["params"] = copies(params)
            theirs.step(grads)
    except Exception as error:  # noqa: BLE001 - deprecated: it may go, or stop working
        print(f"torch's functional AdamW is left out: {error}")
    else:
        candidates["torch's functional AdamW"] = lambda: theirs.step(grads)
    return candidates


def ensemble_candidates() -> dict[str, Step]:
    """One training step of eight MLPs each; the loop comes first."""

    def mlp() -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10)
        )

    models = [mlp() for _ in range(NUM_MEMBERS)]
    x, y = torch.randn(64, 64), torch.randint(10, (64,))
    rates = torch.logspace(-4, -2, NUM_MEMBERS)

    def loss(params: dict[str, Tensor]) -> Tensor:
        return torch.nn.functional.cross_entropy(functional_call(models[0], params, (x,)), y)

    def step(params: dict[str, Tensor], state: Any, lr: Tensor) -> Any:
        return functional_adamw.update(grad(loss)(params), state, params, lr=lr)

    stacked = {key: value.detach() for key, value in stack_module_state(models)[0].items()}
    members = [{key: value[i] for key, value in stacked.items()} for i in range(NUM_MEMBERS)]
    states = [functional_adamw.init(member) for member in members]
    stacked_state = vmap(functional_adamw.init)(stacked)
    together = vmap(step)

    looped = [step(*each) for each in zip(members, states, rates, strict=True)]
    at_once, _ = together(stacked, stacked_state, rates)
    for i, (member, _) in enumerate(looped):
        for key, value in member.items():
            torch.testing.assert_close(at_once[key][i], value, rtol=1e-6, atol=1e-6)
    return {
        "a loop over the members": lambda: [
            step(*each) for each in zip(members, states, rates, strict=True)
        ],
        "vmap": lambda: together(stacked, stacked_state, rates),
    }


def measure(
    candidates: dict[str, Step], num_rounds: int, steps_per_round: int
) -> list[list[float]]:
    """Milliseconds per step, by round and candidate."""
    rounds = []
    for i in range(num_rounds + 2):
        times = []
        for step in candidates.values():
            start = time.perf_counter()
            for _ in range(steps_per_round):
                step()
            times.append((time.perf_counter() - start) / steps_per_round * 1e3)
        if i >= 2:  # the first rounds warm up
            rounds.append(times)
    return rounds


def report(title: str, candidates: dict[str, Step], rounds: list[list[float]]) -> None:
    print(f"\n{title:<50} {'ms':>9} {'ratio':>7}")
    for i, name in enumerate(candidates):
        ms = statistics.median(times[i] for times in rounds)
        ratio = statistics.median(times[i] / times[0] for times in rounds)
        print(f"  {name:<48} {ms:>9.3f} {ratio:>7.3f}")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks functional", description=__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="turns of each candidate")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch's kernels")
    parser.add_argument("--tensors", nargs="+", choices=TENSORS, default=list(TENSORS))
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    for name in arguments.tensors:
        make, steps_per_round = TENSORS[name]
        params = make()
        millions = sum(param.numel() for param in params) / 1e6
        candidates = in_place_candidates(params)
        rounds = measure(candidates, arguments.rounds, steps_per_round)
        report(f"{name}: {len(params)} tensors, {millions:.2f} M elements", candidates, rounds)
    candidates = ensemble_candidates()
    rounds = measure(candidates, arguments.rounds, 5)
    report(f"training step of {NUM_MEMBERS} MLPs", candidates, rounds)
