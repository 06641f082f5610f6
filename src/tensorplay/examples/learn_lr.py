"""Learns a learning rate by differentiating through the optimizer's updates.

``python -m tensorplay.examples.learn_lr``; see ``--help``. The loss on held-back images after a few
AdamW steps is a function of their learning rate. Its derivative tells another optimizer how to
change the logarithm of that rate, over and over.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.func import grad, grad_and_value

from tensorplay.distributed.optim import functional_adam, functional_adamw
from tensorplay.examples.digits import (
    Digits,
    compute_loss,
    load_digits,
    make_network,
    make_run_folder,
)


def loss_after_training(
    log_lr: Tensor, digits: Digits, *, width: int, batch: int, steps: int
) -> Tensor:
    """The loss of a fresh network after ``steps`` AdamW steps, on images it hasn't seen.

    Args:
        log_lr: The natural logarithm of the learning rate, shape ``()``.
        digits: What to learn; the last ``batch`` images to learn from are held back.
        width: Hidden units.
        batch: Images per step.
        steps: Number of steps.

    Returns:
        The loss, shape ``()``, differentiable with respect to ``log_lr``.
    """
    params = make_network(width)
    state = functional_adamw.init(params)
    for _ in range(steps):
        chosen = torch.randint(len(digits.y) - batch, (batch,))
        grads = grad(compute_loss)(params, digits.x[chosen], digits.y[chosen])
        params, state = functional_adamw.update(grads, state, params, lr=log_lr.exp())
    return compute_loss(params, digits.x[-batch:], digits.y[-batch:])


def plot(path: Path, rates: Sequence[float], losses: Sequence[float]) -> None:
    """Draws the learning rate and the loss it leads to, by update, into a file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    above.plot(rates)
    above.set(ylabel="learning rate", yscale="log")
    below.plot(losses)
    below.set(ylabel="loss after training", xlabel="update of the learning rate")
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tensorplay.examples.learn_lr",
        description="Learn AdamW's learning rate by differentiating through its updates.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--lr", type=float, default=1e-4, help="the learning rate to begin with")
    parser.add_argument("--updates", type=int, default=80, help="updates of the learning rate")
    parser.add_argument("--steps", type=int, default=20, help="AdamW steps that are seen through")
    parser.add_argument("--batch", type=int, default=128, help="images per step")
    parser.add_argument("--width", type=int, default=32, help="hidden units")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for the plot; by default under runs/")
    options = parser.parse_args(arguments)

    digits = load_digits(options.seed)
    from tqdm import trange

    torch.set_num_threads(1)  # with tensors this small, threads mostly wait for each other
    torch.manual_seed(options.seed)
    log_lr = torch.tensor(options.lr).log()
    state = functional_adam.init(log_lr)
    rates, losses = [], []
    with trange(options.updates, desc="learning", disable=None) as progress:
        for _ in progress:
            slope, loss = grad_and_value(loss_after_training)(
                log_lr, digits, width=options.width, batch=options.batch, steps=options.steps
            )
            rates.append(float(log_lr.exp()))
            losses.append(float(loss))
            progress.set_postfix(lr=f"{rates[-1]:.2e}", loss=f"{losses[-1]:.3f}")
            log_lr, state = functional_adam.update(slope, state, log_lr, lr=0.15)
    print(f"learning rate {rates[0]:g}: loss {losses[0]:.4f} after {options.steps} steps")
    print(f"learning rate {rates[-1]:g}: loss {losses[-1]:.4f} after {options.steps} steps")
    path = make_run_folder(options.out, "learn-lr") / "learning-rate.png"
    plot(path, rates, losses)
    print(f"Plot: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
