"""The plain optimizer on one process that sees all ranks' batches, and ours on every rank."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from tensorplay.distributed.optim import DistributedOptimizer
from tests.reference.data_parallel import (
    ADAMW,
    OneProcess,
    Passes,
    make_parameters,
    num_parameters_in,
    unsigned_zeros,
)
from tests.reference.training import first_difference, require_equal, values_of

LARGE = (400, 400)
"""640 KB: its gradient is sent from its own memory."""


def make_small_and_large() -> nn.ParameterList:
    parameters = make_parameters((3, 4), LARGE, (17,), (), (0, 4), (2, 3), LARGE, (5, 3, 2))
    parameters.append(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    parameters.append(torch.randn(64, 64, 6, 6).to(memory_format=torch.channels_last))
    parameters.append(torch.randn(7, 9).t())
    return parameters


class Twins:
    """Trains both, and compares.

    Args:
        make: makes the model; twice.
        optimizer_class: the optimizer.
        options: its options.
        params_of: what an optimizer gets of a model.
        group: the process group.
        ours: further arguments of ours.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        optimizer_class: type[Optimizer] = torch.optim.AdamW,
        options: dict[str, Any] = ADAMW,
        *,
        params_of: Callable[[nn.Module], Iterable[Any]] = nn.Module.parameters,
        group: dist.ProcessGroup | None = None,
        **ours: Any,
    ) -> None:
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.plain_model, self.model = make(), make()
        self.one = OneProcess(self.plain_model, self.world_size)
        self.plain = optimizer_class(params_of(self.plain_model), **options)
        self.ours = DistributedOptimizer(
            optim=optimizer_class,
            params=params_of(self.model),
            process_group=group,
            **ours,
            **options,
        )

    def backward(self, passes: Passes, *, sync: bool = True, reduces: bool = True) -> None:
        """A pass; ``reduces`` is false where ours leaves the gradients to a later pass by itself."""
        with nullcontext() if sync else self.ours.no_sync():
            passes(self.model, self.rank)
        self.one.backward(passes, sync=sync and reduces)

    def step(self) -> None:
        self.one.reduce()
        self.plain.step()
        self.ours.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.plain.zero_grad(set_to_none)
        self.ours.zero_grad(set_to_none)

    def train(self, passes_of: Callable[[int], Passes], steps: int = 3, what: str = "") -> None:
        """The usual loop, compared after every backward and every step."""
        for step in range(steps):
            self.zero_grad()
            self.backward(passes_of(step))
            self.require_same_gradients(f"{what} step {step}, ")
            self.step()
            self.require_same(f"{what} step {step}, ")

    def require_same_gradients(self, what: str = "") -> None:
        """All gradients are the averages, bit for bit."""
        pairs = zip(self.plain_model.parameters(), self.model.parameters(), strict=True)
        for number, (plain, ours) in enumerate(pairs):
            expected, actual = unsigned_zeros(plain.grad), unsigned_zeros(ours.grad)
            require_equal(expected, actual, f"{what}gradient of parameter {number}")

    def require_same(self, what: str = "") -> None:
        """Values, strides and state are bitwise those of the plain optimizer."""
        plains, ours = list(self.plain_model.parameters()), list(self.model.parameters())
        difference = first_difference(
            values_of(plains), values_of(ours), f"{what}parameters", strides=True
        )
        assert difference is None, difference
        for number, (plain, mine) in enumerate(zip(plains, ours, strict=True)):
            pair = self.plain.state.get(plain), self.ours.state.get(mine)
            expected, actual = map(unsigned_zeros, pair)
            require_equal(expected, actual, f"{what}state of parameter {number}")
        assert num_parameters_in(self.ours.state) == num_parameters_in(self.plain.state)
