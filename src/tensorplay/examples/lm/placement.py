"""Where the optimizer state lives, or when it is used: the one thing that differs between two runs.

All placements build the same optimizers over the same parameters and speak the same checkpoint
format, so that a file saved by one is resumed by another.
"""

from collections.abc import Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from tensorplay.distributed.optim import ZeroRedundancyOptimizer, apply_optimizer_in_backward


class Placement(Protocol):
    """Builds one optimizer; every rank calls it."""

    def __call__(  # noqa: D102
        self,
        parameters: list[nn.Parameter],
        optimizer_class: type[torch.optim.Optimizer],
        **defaults: Any,
    ) -> torch.optim.Optimizer: ...


def replicated(
    parameters: list[nn.Parameter],
    optimizer_class: type[torch.optim.Optimizer],
    **defaults: Any,
) -> torch.optim.Optimizer:
    """Every rank holds all of the state: plain data parallelism."""
    return optimizer_class(parameters, **defaults)


def sharded(
    parameters: list[nn.Parameter],
    optimizer_class: type[torch.optim.Optimizer],
    **defaults: Any,
) -> torch.optim.Optimizer:
    """Every rank holds the state of its own share of the parameters."""
    return ZeroRedundancyOptimizer(parameters, optimizer_class=optimizer_class, **defaults)


def in_backward(model: nn.Module) -> Placement:
    """Every rank holds all of the state, and updates ``model`` inside backward, clipped there."""

    def place(
        parameters: list[nn.Parameter],
        optimizer_class: type[torch.optim.Optimizer],
        **defaults: Any,
    ) -> torch.optim.Optimizer:
        return apply_optimizer_in_backward(
            optimizer_class,
            parameters,
            defaults,
            module=model,
            clip_parameter_norm=LARGEST_GRADIENT_NORM,
        )

    return place


LARGEST_GRADIENT_NORM = 1.0

# What language models are usually trained with: a shorter memory of squared gradients.
_ADAMW: dict[str, Any] = {"betas": (0.9, 0.95), "fused": True}

PLACEMENTS: dict[str, Placement] = {"replicated": replicated, "sharded": sharded}


def build_optimizers(
    name: str, model: nn.Module, place: Placement, lr: float
) -> list[torch.optim.Optimizer]:
    """Returns the optimizers of ``--optimizer name``, which step together.

    Args:
        name: ``"adamw"``, ``"sgd"`` (with momentum) or ``"muon"``: Muon for the matrices of the
            blocks, AdamW for the embeddings and norms.
        model: Whose parameters are trained.
        place: Where their state lives.
        lr: Learning rate of all of them.
    """
    if name == "sgd":
        return [place(list(model.parameters()), torch.optim.SGD, lr=lr, momentum=0.9)]
    if name == "adamw":
        return [place(list(model.parameters()), torch.optim.AdamW, lr=lr, **_ADAMW)]
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for key, parameter in model.named_parameters():
        hidden_matrix = key.startswith("blocks.") and parameter.dim() == 2
        (matrices if hidden_matrix else rest).append(parameter)
    return [
        # "match_rms_adamw" gives Muon's updates the size of AdamW's: one learning rate fits both.
        place(matrices, torch.optim.Muon, lr=lr, adjust_lr_fn="match_rms_adamw"),
        place(rest, torch.optim.AdamW, lr=lr, **_ADAMW),
    ]


def state_nbytes(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Returns the bytes of state that this rank's optimizers hold."""
    return sum(
        value.nbytes
        for optimizer in optimizers
        for parameter_state in optimizer.state.values()
        for value in parameter_state.values()
        if isinstance(value, torch.Tensor)
    )


def full_states(optimizers: Iterable[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """Returns on rank 0 the whole state dicts, as the plain classes write them; ``[]`` elsewhere.

    Every rank calls it.
    """
    states = []
    for optimizer in optimizers:
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            optimizer.consolidate_state_dict(to=0)
        if dist.get_rank() == 0:
            states.append(optimizer.state_dict())
    return states


def gather_nbytes(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Returns the bytes that all ranks together send in one step beyond DDP's all-reduce."""
    return sum(
        optimizer.sharding_report().bytes_per_step
        for optimizer in optimizers
        if isinstance(optimizer, ZeroRedundancyOptimizer)
    )


def describe_shards(optimizers: Iterable[torch.optim.Optimizer]) -> list[str]:
    """Returns who holds what, in words; ``[]`` where nothing is sharded."""
    return [
        str(optimizer.sharding_report())
        for optimizer in optimizers
        if isinstance(optimizer, ZeroRedundancyOptimizer)
    ]
