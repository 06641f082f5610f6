"""The step of a fused ``Adam`` or ``AdamW`` without torch's loops around the kernel.

With thousands of small tensors, or a few that are very small, torch's own ``step`` takes longer to
collect them, and to count the steps of each by itself, than the kernel takes to update them. Here
loops of C collect them, and the counts lie side by side (see Note), so that one operation advances
all. The kernel is torch's, and so is all that it is given: results are the same, bit for bit.

Note [Counts side by side]
    The state keeps a scalar tensor under ``"step"`` for each parameter, as torch's does; but those
    of a group are views that together are all of one tensor. Whoever replaces one, or loads others,
    gets the right results too: counts that aren't views of anything are laid side by side, and what
    isn't exactly all of one tensor is left to torch.
"""

import operator
from collections.abc import Mapping, Sequence
from itertools import chain, compress, repeat
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.optim import Optimizer

FUSED_ADAM = (torch.optim.Adam, torch.optim.AdamW)
"""Exactly these classes; what derives from them may do anything."""

Tensors: TypeAlias = tuple[torch.Tensor, ...] | list[torch.Tensor]

_PLAIN = {torch.Tensor, torch.nn.Parameter}

_gradient_of = operator.attrgetter("grad")
_base_of = operator.attrgetter("_base")
_is_sparse = operator.attrgetter("is_sparse")
_is_on_cpu = operator.attrgetter("is_cpu")
_address_of = operator.methodcaller("data_ptr")


class _Update(NamedTuple):
    """What the step of one group reads and writes, of each parameter with a gradient."""

    group: Mapping[str, Any]
    parameters: Tensors
    gradients: Tensors
    averages: Tensors
    squares: Tensors
    counts: Tensors
    all_counts: torch.Tensor


@torch.no_grad()
def step_fused(optimizer: Optimizer) -> bool:
    """Steps ``optimizer``, if its step can be shortened; says whether it has.

    It can for exactly ``torch.optim.Adam`` and ``AdamW`` with ``fused=True``, parameters on the CPU,
    and state for all that have gradients. Neither step hooks nor a patched ``step`` are looked at:
    that is for the caller.
    """
    if (
        type(optimizer) not in FUSED_ADAM
        or getattr(optimizer, "found_inf", None) is not None
        or torch.compiler.is_compiling()
    ):
        return False
    updates: list[_Update] = []
    for group in optimizer.param_groups:
        used = _with_gradients(group["params"])
        if used[0]:
            update = _prepare(optimizer, group, *used)
            if update is None:
                return False
            updates.append(update)
    scale = getattr(optimizer, "grad_scale", None)
    for update in updates:
        _run_(update, scale)
    return True


def _with_gradients(
    parameters: Sequence[torch.Tensor],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    gradients = list(map(_gradient_of, parameters))
    have_one = list(map(operator.is_not, gradients, repeat(None)))
    return list(compress(parameters, have_one)), list(compress(gradients, have_one))


def _prepare(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
) -> _Update | None:
    """``None`` where torch's ``step`` must make state, refuse something, or goes another way."""
    options = group["lr"], *group["betas"]
    if (
        not group["fused"]
        or group["amsgrad"]
        or group["capturable"]
        or group["differentiable"]
        or not all(isinstance(option, float | int) for option in options)
    ):
        return None
    states: list[Any] = list(map(optimizer.state.get, parameters))
    try:
        # Three loops, so that there is no tuple of each for the garbage collector to look at.
        counts, averages, squares = (
            list(map(operator.itemgetter(name), states))
            for name in ("step", "exp_avg", "exp_avg_sq")
        )
    except (KeyError, TypeError):  # there is none yet, or only a part
        return None
    kinds = set(map(type, chain(parameters, gradients, averages, squares, counts)))
    if (
        not kinds <= _PLAIN
        or any(map(_is_sparse, gradients))
        or not all(map(_is_on_cpu, parameters))
    ):
        return None
    found = _side_by_side(states, counts)
    return found and _Update(group, parameters, gradients, averages, squares, *found)


def _side_by_side(
    states: Sequence[dict[str, Any]], counts: list[torch.Tensor]
) -> tuple[Tensors, torch.Tensor] | None:
    """The counts, and the tensor of which they are all elements; ``None`` if there can't be one.

    See Note [Counts side by side].
    """
    bases = list(map(_base_of, counts))
    base = bases[0]
    if base is not None:
        is_whole = (
            base.shape == (len(counts),)
            and all(map(operator.is_, bases, repeat(base)))
            and len(set(map(_address_of, counts))) == len(counts)
        )
        return (counts, base) if is_whole else None
    if (
        any(map(operator.is_not, bases, repeat(None)))
        or not all(map(_is_count, counts))
        or len(set(map(_address_of, counts))) < len(counts)  # one counts for several, or twice
        or torch.is_inference_mode_enabled()  # what is made there can't be written to elsewhere
    ):
        return None
    base = torch.stack(counts)
    views = base.unbind()
    for state, view in zip(states, views, strict=True):
        state["step"] = view
    return views, base


def _is_count(tensor: torch.Tensor) -> bool:
    return (
        tensor.dtype == torch.float32
        and tensor.is_cpu
        and not tensor.ndim
        and not tensor.requires_grad
        and not tensor.is_inference()
    )


def _run_(update: _Update, scale: torch.Tensor | None) -> None:
    group = update.group
    beta1, beta2 = group["betas"]
    update.all_counts.add_(1)
    kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    kernel(
        update.parameters,
        update.gradients,
        update.averages,
        update.squares,
        [],
        update.counts,
        amsgrad=False,
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
        grad_scale=scale,
        found_inf=None,
    )
