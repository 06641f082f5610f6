"""A model that is updated inside backward over a process group, and its twin on one process."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorplay.distributed.optim import InBackwardOptimizer, apply_optimizer_in_backward
from tests.reference.data_parallel import ADAMW, OneProcess, Passes, unsigned_zeros
from tests.reference.training import first_difference, require_equal, values_of


class GroupTwins:
    """The plain optimizer on averaged gradients, and ours on every rank.

    Args:
        make: makes the model; twice.
        optimizer_class: the optimizer.
        options: its options.
        group: the process group; the default one if absent.
        with_module: whether ours gets ``module=``.
        params_of: what an optimizer gets of a model.
        ours: further arguments of ours.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        optimizer_class: Any = torch.optim.AdamW,
        options: dict[str, Any] = ADAMW,
        *,
        group: dist.ProcessGroup | None = None,
        with_module: bool = True,
        params_of: Callable[[nn.Module], Any] = nn.Module.parameters,
        **ours: Any,
    ) -> None:
        self.group = group or dist.group.WORLD
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.plain_model, self.model = make(), make()
        self.one = OneProcess(self.plain_model, self.world_size)
        self.plain = optimizer_class(params_of(self.plain_model), **options)
        self.inside: InBackwardOptimizer = apply_optimizer_in_backward(
            optimizer_class,
            params_of(self.model),
            options,
            module=self.model if with_module else None,
            process_group=self.group,
            **ours,
        )

    def plain_step(self, passes: Passes, clip: Callable[[Any], Any] = lambda _: None) -> None:
        """The ordinary loop's iteration, on one process."""
        self.plain.zero_grad()
        self.one.backward(passes)
        clip(self.plain_model.parameters())
        self.plain.step()

    def train(
        self,
        passes_of: Callable[[int], Passes],
        steps: int = 3,
        what: str = "",
        clip: Callable[[Any], Any] = lambda _: None,
    ) -> None:
        """Both loops, compared after every step."""
        for step in range(steps):
            passes_of(step)(self.model, self.rank)
            left = [n for n, p in enumerate(self.model.parameters()) if p.grad is not None]
            assert left == [], f"{what}gradients are left"
            self.plain_step(passes_of(step), clip)
            self.require_same(f"{what} step {step}, ")

    def require_same(self, what: str = "") -> None:
        """Values and strides are bitwise those of the plain optimizer; state but for signs of zeros."""
        plains, ours = list(self.plain_model.parameters()), list(self.model.parameters())
        difference = first_difference(
            values_of(plains), values_of(ours), f"{what}parameters", strides=True
        )
        assert difference is None, difference
        expected, actual = (unsigned_zeros(o.state_dict()) for o in (self.plain, self.inside))
        expected["state"] = {key: expected["state"][key] for key in actual["state"]}
        require_equal(expected, actual, f"{what}state: ")
        assert len(self.plain.state_dict()["state"]) == len(actual["state"])
