"""Trains eight networks at once, each with a learning rate of its own, and plots their curves.

``python -m tensorplay.examples.ensemble``; see ``--help``. The whole training step of one member,
optimizer included, is a pure function, so ``vmap`` makes it that of the ensemble.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from tensorplay.distributed import optim
from tensorplay.examples.digits import (
    Digits,
    Params,
    compute_logits,
    compute_loss,
    load_digits,
    make_network,
    make_run_folder,
)

ALGORITHMS = ("adadelta", "adagrad", "adam", "adamax", "adamw", "rmsprop", "sgd")
LEARNING_RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)


def train(
    algorithm: Any, learning_rates: Tensor, digits: Digits, *, width: int, batch: int, steps: int
) -> tuple[Params, Tensor]:
    """Trains one network per learning rate on the same batches.

    Args:
        algorithm: ``functional_adam`` or a sibling.
        learning_rates: One per member, shape (members,).
        digits: What to learn.
        width: Hidden units of each network.
        batch: Images per step.
        steps: Number of steps.

    Returns:
        The weights, each with a first dimension of members, and the losses, (steps, members).
    """
    from tqdm import tqdm

    members = [make_network(width) for _ in learning_rates]
    params = {key: torch.stack([member[key] for member in members]) for key in members[0]}
    state = vmap(algorithm.init)(params)

    def step(params: Params, state: Any, lr: Tensor, x: Tensor, y: Tensor) -> tuple[Any, ...]:
        grads, loss = grad_and_value(compute_loss)(params, x, y)
        return *algorithm.update(grads, state, params, lr=lr), loss

    step_all = vmap(step, in_dims=(0, 0, 0, None, None))
    losses = []
    for _ in tqdm(range(steps), desc="training", disable=None):
        chosen = torch.randint(len(digits.y), (batch,))
        params, state, loss = step_all(
            params, state, learning_rates, digits.x[chosen], digits.y[chosen]
        )
        losses.append(loss)
    return params, torch.stack(losses)


def measure_accuracy(params: Params, digits: Digits) -> Tensor:
    """The share of held-out images that each member recognises, shape (members,)."""
    logits = vmap(compute_logits, in_dims=(0, None))(params, digits.held_out_x)
    return (logits.argmax(-1) == digits.held_out_y).float().mean(-1)


def plot(path: Path, labels: Sequence[str], losses: Tensor) -> None:
    """Draws each member's loss, averaged over the last steps, into a file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="training loss", yscale="log")
    span = max(1, len(losses) // 40)
    smooth = losses.unfold(0, span, 1).mean(-1)
    for label, curve in zip(labels, smooth.T.tolist(), strict=True):
        axes.plot(range(span, span + len(curve)), curve, label=label)
    figure.legend(title="learning rate,\nheld-out accuracy", loc="outside right upper")
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tensorplay.examples.ensemble",
        description="Train eight networks at once, each with its own learning rate, by vmap.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="adam")
    parser.add_argument(
        "--lrs", type=float, nargs="+", default=LEARNING_RATES, help="one per network"
    )
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=128, help="images per step")
    parser.add_argument("--width", type=int, default=64, help="hidden units")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for the plot; by default under runs/")
    options = parser.parse_args(arguments)

    digits = load_digits(options.seed)
    torch.set_num_threads(1)  # with tensors this small, threads mostly wait for each other
    torch.manual_seed(options.seed)
    params, losses = train(
        getattr(optim, f"functional_{options.algorithm}"),
        torch.tensor(options.lrs),
        digits,
        width=options.width,
        batch=options.batch,
        steps=options.steps,
    )
    accuracies = measure_accuracy(params, digits).tolist()
    print(f"{'learning rate':>13} {'final loss':>11} {'held-out accuracy':>18}")
    for lr, loss, accuracy in zip(options.lrs, losses[-1].tolist(), accuracies, strict=True):
        print(f"{lr:>13g} {loss:>11.4f} {accuracy:>18.1%}")
    path = make_run_folder(options.out, "ensemble") / "curves.png"
    labels = [f"{lr:g}, {share:.1%}" for lr, share in zip(options.lrs, accuracies, strict=True)]
    plot(path, labels, losses)
    print(f"Plot: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
