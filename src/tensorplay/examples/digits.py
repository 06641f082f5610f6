"""The data and the network of the examples of functional optimizers: 1,797 handwritten digits."""

import importlib.util
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

NUM_PIXELS, NUM_CLASSES = 64, 10
NUM_HELD_OUT = 397

Params = dict[str, Tensor]


@dataclass(frozen=True)
class Digits:
    """scikit-learn's digits, split.

    Args:
        x: Images to learn from, (1400, 64), between 0 and 1.
        y: What they show, (1400,).
        held_out_x: Images to judge by, (397, 64).
        held_out_y: What they show, (397,).
    """

    x: Tensor
    y: Tensor
    held_out_x: Tensor
    held_out_y: Tensor


def load_digits(seed: int) -> Digits:
    """Loads the images, which scikit-learn brings along, in an order that ``seed`` chooses.

    Raises:
        SystemExit: scikit-learn, or a package for the curves, isn't installed.
    """
    for package, project in (
        ("sklearn", "scikit-learn"),
        ("matplotlib", "matplotlib"),
        ("tqdm", "tqdm"),
    ):
        if importlib.util.find_spec(package) is None:
            raise SystemExit(f"{project} is not installed; pip install 'tensorplay[examples]'")
    from sklearn import datasets

    pixels, labels = datasets.load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    x = torch.as_tensor(pixels, dtype=torch.float32)[order] / 16
    y = torch.as_tensor(labels, dtype=torch.int64)[order]
    return Digits(x[NUM_HELD_OUT:], y[NUM_HELD_OUT:], x[:NUM_HELD_OUT], y[:NUM_HELD_OUT])


def make_network(width: int) -> Params:
    """The weights of a network with one hidden layer, drawn by torch's global generator."""
    return {
        "w1": torch.randn(NUM_PIXELS, width) / NUM_PIXELS**0.5,
        "b1": torch.zeros(width),
        "w2": torch.randn(width, NUM_CLASSES) / width**0.5,
        "b2": torch.zeros(NUM_CLASSES),
    }


def compute_logits(params: Params, x: Tensor) -> Tensor:
    """The network's output for images ``x`` (batch, 64): (batch, 10)."""
    return torch.tanh(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def compute_loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
    """The mean cross entropy, shape ``()``."""
    return F.cross_entropy(compute_logits(params, x), y)


def make_run_folder(out: Path | None, example: str) -> Path:
    """The folder that the user chose, or one under ``runs`` that is named for the moment."""
    folder = out or Path("runs", f"{example}-{time.strftime('%Y%m%d-%H%M%S')}")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
