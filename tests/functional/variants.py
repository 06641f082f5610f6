"""Every class with every option that torch has, and the gradients to step with."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

NUM_STEPS = 50
SHAPES = ((7, 5), (3,), (), (0, 3))

CLASSES: dict[str, type[Optimizer]] = {
    "adadelta": torch.optim.Adadelta,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adamax": torch.optim.Adamax,
    "rmsprop": torch.optim.RMSprop,
    "rprop": torch.optim.Rprop,
    "sgd": torch.optim.SGD,
}
HAVE_FUSED = ("adagrad", "adam", "adamw", "sgd")

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "adadelta": [{"rho": 0.8, "eps": 1e-5}],
    "adagrad": [{"lr_decay": 0.01}, {"initial_accumulator_value": 0.5}],
    "adam": [
        {"amsgrad": True},
        {"betas": (0.8, 0.9), "eps": 1e-6},
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
        {"amsgrad": True, "maximize": True, "weight_decay": 0.1},
    ],
    "adamw": [{"amsgrad": True}, {"amsgrad": True, "maximize": True, "weight_decay": 0.2}],
    "adamax": [{"betas": (0.8, 0.9)}],
    "rmsprop": [
        {"momentum": 0.9},
        {"centered": True},
        {"momentum": 0.9, "centered": True, "alpha": 0.9, "maximize": True, "weight_decay": 0.1},
    ],
    "rprop": [{"etas": (0.4, 1.3), "step_sizes": (1e-5, 0.1)}],
    "sgd": [
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.5},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "nesterov": True, "maximize": True, "weight_decay": 0.1},
    ],
}


@dataclass(frozen=True)
class Variant:
    """A class with options.

    Args:
        name: As in ``functional_<name>``.
        options: What the class gets.
    """

    name: str
    options: dict[str, Any]

    @property
    def optimizer_class(self) -> type[Optimizer]:
        return CLASSES[self.name]

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{key}={value}" for key, value in self.options.items())])


def mathematical_variants() -> list[Variant]:
    """Every class with every option that changes the result beyond rounding."""

    def options_of(name: str) -> Iterator[dict[str, Any]]:
        yield {}
        yield {"lr": 0.03}
        yield {"maximize": True}
        if name != "rprop":
            yield {"weight_decay": 0.1}
        yield from OPTIONS[name]

    return [Variant(name, options) for name in CLASSES for options in options_of(name)]


def kernels_of(name: str) -> list[dict[str, Any]]:
    """The choices of a kernel that the class has on the CPU."""
    return [{}, {"foreach": True}, *([{"fused": True}] if name in HAVE_FUSED else [])]


def make_params(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=dtype, generator=generator) for shape in SHAPES]


def make_grads(
    num_steps: int = NUM_STEPS, dtype: torch.dtype = torch.float32, seed: int = 1
) -> list[list[Tensor]]:
    """The same in every test: what differs between two optimizers is their own doing."""
    return [make_params(dtype, 1000 * seed + step) for step in range(num_steps)]


def clone(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


def step_eagerly(
    variant: Variant, params: list[Tensor], grads: list[list[Tensor]], **more: Any
) -> tuple[list[Tensor], Optimizer]:
    """The oracle: the class in ``torch.optim``, on copies of ``params``."""
    params = clone(params)
    optimizer = variant.optimizer_class(params, **variant.options, **more)
    for of_step in grads:
        for param, grad in zip(params, of_step, strict=True):
            param.grad = grad.clone()
        optimizer.step()
    return params, optimizer


def equal(a: Any, b: Any) -> bool:
    """Whether two lists of tensors are the same, bit for bit."""
    return len(a) == len(b) and all(
        x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True)
    )
