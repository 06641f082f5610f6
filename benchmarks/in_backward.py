"""How long a whole step takes with the update inside backward, next to the ordinary loop's.

Forward, backward and update of AdamW, fused. The candidates take turns in random order, round by
round; a figure is the median of the rounds, and a ratio is the median of each round's ratio to the
ordinary loop. Torch's own is ``torch.distributed.optim._apply_optimizer_in_backward``. Gradients are
the most bytes of ``.grad`` alive at once during a backward.
"""

import argparse
import random
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.step.models import MODELS
from tensorplay.distributed.optim import apply_optimizer_in_backward

OPTIONS: dict[str, Any] = {"lr": 1e-6, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
ORDINARY, OURS, TORCHS = "ordinary loop", "apply_optimizer_in_backward", "torch's own"
CHECKED_STEPS = 2


class Candidate:
    """A model and how it is stepped.

    Attributes:
        most_gradient_bytes: alive at once, until counting stops.
    """

    def __init__(self, net: nn.Module, register: Callable[[nn.Module], Callable[[], None]]) -> None:
        self.net = net
        self.most_gradient_bytes = 0
        self._hooks = [p.register_post_accumulate_grad_hook(self._count) for p in net.parameters()]
        self._after_backward = register(net)

    def step(self, batch: tuple[torch.Tensor, ...]) -> None:
        """Forward, backward, update."""
        torch.autograd.backward(self.net(*batch))
        self._after_backward()

    def stop_counting(self) -> None:
        """From here on, time may be taken."""
        for hook in self._hooks:
            hook.remove()

    def _count(self, _: torch.Tensor) -> None:
        alive = sum(p.grad.nbytes for p in self.net.parameters() if p.grad is not None)
        self.most_gradient_bytes = max(self.most_gradient_bytes, alive)


def ordinary(net: nn.Module) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(net.parameters(), **OPTIONS)

    def after() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return after


def ours(net: nn.Module) -> Callable[[], None]:
    apply_optimizer_in_backward(torch.optim.AdamW, net.parameters(), OPTIONS, module=net)
    return lambda: None


def torchs(net: nn.Module) -> Callable[[], None]:
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(torch.optim.AdamW, net.parameters(), OPTIONS)
    return lambda: None


REGISTRATIONS = {ORDINARY: ordinary, OURS: ours, TORCHS: torchs}


def build(name: str, names: list[str]) -> dict[str, Candidate]:
    torch.manual_seed(0)
    start = MODELS[name].build()
    candidates = {}
    for each in names:
        net = MODELS[name].build()
        net.load_state_dict(start.state_dict())
        candidates[each] = Candidate(net, REGISTRATIONS[each])
    return candidates


def compare(candidates: dict[str, Candidate], batch: tuple[torch.Tensor, ...]) -> None:
    """The same bits after some steps, during which gradients are counted."""
    for candidate in candidates.values():
        for _ in range(CHECKED_STEPS):
            candidate.step(batch)
        candidate.stop_counting()
    reference = candidates[ORDINARY].net.state_dict()
    for name, candidate in candidates.items():
        for key, value in candidate.net.state_dict().items():
            assert torch.equal(value, reference[key]), f"{name} differs in {key}"


def measure(
    candidates: dict[str, Candidate], batch: tuple[torch.Tensor, ...], num_rounds: int
) -> dict[str, list[float]]:
    """Milliseconds of each candidate's step, by round."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    order = list(candidates)
    generator = random.Random(0)  # noqa: S311 - no secrets here
    for i in range(num_rounds + 2):
        generator.shuffle(order)
        for name in order:
            start = time.perf_counter()
            candidates[name].step(batch)
            elapsed = (time.perf_counter() - start) * 1e3
            if i >= 2:  # the first rounds warm up
                times[name].append(elapsed)
    return times


def report(title: str, candidates: dict[str, Candidate], times: dict[str, list[float]]) -> None:
    print(f"\n{title:<44} {'ms':>9} {'ratio':>7} {'gradients':>12}")
    for name, candidate in candidates.items():
        ms = statistics.median(times[name])
        pairs = zip(times[name], times[ORDINARY], strict=True)
        ratio = statistics.median(one / other for one, other in pairs)
        megabytes = candidate.most_gradient_bytes / 1e6
        print(f"  {name:<42} {ms:>9.1f} {ratio:>7.3f} {megabytes:>9.1f} MB")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks in_backward", description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="turns of each candidate")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch's kernels")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["gpt", "many"])
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    names = list(REGISTRATIONS)
    # Recorded, because torch switches the filter off before it warns of what it deprecates.
    with warnings.catch_warnings(record=True):
        try:
            from torch.distributed.optim import _apply_optimizer_in_backward  # noqa: F401 - imported to see whether it is there
        except ImportError as error:  # private: it may go
            print(f"torch's own is left out: {error}")
            names.remove(TORCHS)
    for name in arguments.models:
        model = MODELS[name]
        candidates = build(name, names)
        batch = model.batch(torch.Generator().manual_seed(0))
        compare(candidates, batch)
        times = measure(candidates, batch, arguments.rounds)
        parameters = list(candidates[ORDINARY].net.parameters())
        millions = sum(p.numel() for p in parameters) / 1e6
        report(f"{name}: {len(parameters)} tensors, {millions:.1f} M elements", candidates, times)
