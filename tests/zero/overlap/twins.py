"""Twins under DDP with the same reduction: the plain optimizer, and ZeRO that steps in backward."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tensorplay.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import (
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)
from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tests.reference.ddp import ADAMW, batch, make_net
from tests.reference.training import require_equal, values_of

MANY_BUCKETS_MB = 0.0001
"""A bucket for nearly each parameter."""

HOOKS: dict[str, Callable[..., Any]] = {
    "step": hook_with_zero_step,
    "interleaved": hook_with_zero_step_interleaved,
}


class Twins:
    """Both models and optimizers; to be made on every rank of the group.

    Args:
        make: makes the module.
        optimizer_class: of both optimizers.
        options: theirs.
        interleaved: which of the hooks.
        resident: whether parameters live in buckets.
        group: the process group.
        hook: how gradients are reduced in both.
        params: makes what the optimizers are given from a module.
        **ddp_options: of both models.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module] = make_net,
        optimizer_class: type[Optimizer] = torch.optim.AdamW,
        options: dict[str, Any] | None = None,
        *,
        interleaved: bool = True,
        resident: bool = False,
        group: dist.ProcessGroup | None = None,
        hook: Callable[..., Any] = allreduce_hook,
        params: Callable[[nn.Module], Iterable[Any]] = lambda module: module.parameters(),
        **ddp_options: Any,
    ) -> None:
        options = ADAMW if options is None else options
        ddp_options = {"bucket_cap_mb": MANY_BUCKETS_MB, "process_group": group, **ddp_options}
        state = group if group is not None else dist.group.WORLD
        self.plain_model = DistributedDataParallel(make(), **ddp_options)
        self.plain_model.register_comm_hook(state, hook)
        self.plain = optimizer_class(params(self.plain_model), **options)
        self.model = DistributedDataParallel(make(), **ddp_options)
        self.zero = ZeroRedundancyOptimizer(
            params(self.model),
            optimizer_class,
            process_group=group,
            parameters_as_bucket_view=resident,
            overlap_with_ddp=True,
            **options,
        )
        combine = HOOKS["interleaved" if interleaved else "step"]
        self.model.register_comm_hook(state, combine(hook, self.model, self.zero))

    @property
    def both(self) -> tuple[tuple[nn.Module, Optimizer], tuple[nn.Module, Optimizer]]:
        """The plain pair, then the sharded one."""
        return (self.plain_model, self.plain), (self.model, self.zero)

    def train(self, steps: int = 4, first: int = 0) -> None:
        """Both twins go on; after each iteration they must be equal."""
        for step in range(first, first + steps):
            for model, optimizer in self.both:
                optimizer.zero_grad()
                backward(model, step)
                optimizer.step()
            self.require_equal(f"iteration {step}: ")

    def require_equal(self, what: str = "") -> None:
        """Asserts that the models are bitwise equal, buffers included, and so are the gradients."""
        require_equal(
            values_of(self.plain_model.state_dict().values()),
            values_of(self.model.state_dict().values()),
            what,
        )
        for (name, plain), actual in zip(
            self.plain_model.named_parameters(), self.model.parameters(), strict=True
        ):
            require_equal(plain.grad, actual.grad, f"{what}gradient of {name}: ")

    def require_state_equal(self) -> None:
        """Asserts that the sharded state, consolidated on group rank 0, is the plain one."""
        self.zero.consolidate_state_dict()
        if dist.get_rank(self.zero.process_group) == 0:
            expected, actual = self.plain.state_dict(), self.zero.state_dict()
            keys = sorted(expected["state"], key=str)
            assert keys == sorted(actual["state"], key=str)
            for key in keys:
                require_equal(expected["state"][key], actual["state"][key], f"state {key}: ")
            require_equal(expected["param_groups"], actual["param_groups"], "groups: ")


def backward(model: nn.Module, step: int) -> None:
    """Forward and backward of this rank's batch."""
    inputs, targets = batch(step)
    nn.functional.mse_loss(model(inputs), targets).backward()
