"""Data-parallel training as one process sees it: every rank's gradients, summed in rank order."""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tests.reference.training import (
    first_difference,
    require_close,
    require_equal,
    values_of,
)

Passes = Callable[[nn.Module, int], Any]
"""Runs forward and backward passes of a model with the data of a rank."""

ADAMW: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}


def average(contributions: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """The mean in rank order, 16-bit floats in float32; missing ones count as zero."""
    like = next((each for each in contributions if each is not None), None)
    if like is None:
        return None
    precise = torch.float32 if like.dtype in (torch.float16, torch.bfloat16) else like.dtype
    total: torch.Tensor | None = None
    for each in contributions:
        part = (torch.zeros_like(like) if each is None else each).to(precise)
        total = part if total is None else total + part
    assert total is not None
    return (total / len(contributions)).to(like.dtype)


class OneProcess:
    """Does all ranks' passes in turn, on one model."""

    def __init__(self, model: nn.Module, world_size: int) -> None:
        self.model = model
        self.local: list[dict[nn.Parameter, torch.Tensor]] = [{} for _ in range(world_size)]

    def backward(self, passes: Passes, *, sync: bool = True) -> None:
        parameters = list(self.model.parameters())
        averages = [parameter.grad for parameter in parameters]
        for rank, local in enumerate(self.local):
            for parameter in parameters:
                parameter.grad = local.get(parameter)
            passes(self.model, rank)
            local.update({p: p.grad.detach() for p in parameters if p.grad is not None})
        for parameter, before in zip(parameters, averages, strict=True):
            parameter.grad = before
        if sync:
            self.reduce()

    def reduce(self) -> None:
        """Adds the mean of what hasn't been averaged to the gradients."""
        for parameter in self.model.parameters():
            mean = average([local.pop(parameter, None) for local in self.local])
            if mean is not None:
                parameter.grad = mean if parameter.grad is None else mean + parameter.grad


class Twins:
    """The plain optimizer on one process, and ours with ``shard_gradients=True`` on every rank.

    Args:
        make: makes the model; twice.
        optimizer_class: the optimizer.
        options: its options.
        params_of: what an optimizer gets of a model.
        group: the process group.
        with_module: whether ours is given its model as ``module``.
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
        with_module: bool = False,
        **ours: Any,
    ) -> None:
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.plain_model, self.model = make(), make()
        if with_module:
            ours = {"module": self.model, **ours}
        self.one = OneProcess(self.plain_model, self.world_size)
        self.plain = optimizer_class(params_of(self.plain_model), **options)
        self.sharded = ZeroRedundancyOptimizer(
            params_of(self.model), optimizer_class, group, shard_gradients=True, **ours, **options
        )

    def backward(self, passes: Passes, *, sync: bool = True) -> None:
        with nullcontext() if sync else self.sharded.no_sync():
            passes(self.model, self.rank)
        self.one.backward(passes, sync=sync)

    def step(self) -> None:
        self.one.reduce()
        self.plain.step()
        self.sharded.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.plain.zero_grad(set_to_none)
        self.sharded.zero_grad(set_to_none)

    def train(self, passes_of: Callable[[int], Passes], steps: int = 3, what: str = "") -> None:
        """The usual loop, compared after every step."""
        for step in range(steps):
            self.zero_grad()
            self.backward(passes_of(step))
            self.require_same_gradients(f"{what} step {step}, ")
            self.step()
            self.require_same(f"{what} step {step}, ")

    def require_same_gradients(self, what: str = "") -> None:
        """All gradients are the averages, asked for one by one."""
        self.one.reduce()
        pairs = zip(self.plain_model.parameters(), self.model.parameters(), strict=True)
        for number, (plain, ours) in enumerate(pairs):
            full = self.sharded.full_grad(ours)
            expected, actual = unsigned_zeros(plain.grad), unsigned_zeros(full)
            require = (
                require_close if self.sharded._sharded.is_flat else require_equal
            )  # as parameters are
            require(expected, actual, f"{what}gradient of parameter {number}")
            assert (plain.grad is None) == (ours.grad is None), f"{what}parameter {number}"

    def require_same(self, what: str = "") -> None:
        """Values, strides and state are bitwise those of the plain optimizer.

        But for the sign of a zero in gradients and state: adding to a buffer of zeros loses it. Where
        flat slices are stepped, values and the consolidated state are equal up to rounding.
        """
        if self.sharded._sharded.is_flat:
            self._require_close(what)
            return
        plains, ours = list(self.plain_model.parameters()), list(self.model.parameters())
        difference = first_difference(
            values_of(plains), values_of(ours), f"{what}parameters", strides=True
        )
        assert difference is None, difference
        for number, (plain, mine) in enumerate(zip(plains, ours, strict=True)):
            if mine in self.sharded.optim.state:
                pair = self.plain.state[plain], self.sharded.optim.state[mine]
                expected, actual = map(unsigned_zeros, pair)
                require_equal(expected, actual, f"{what}state of parameter {number}")
        num_states = torch.tensor([num_parameters_in(self.sharded.optim.state)])
        dist.all_reduce(num_states, group=self.sharded.process_group)
        assert num_states.item() == num_parameters_in(self.plain.state), f"{what}number of states"

    def _require_close(self, what: str) -> None:
        plains, ours = values_of(self.plain_model.parameters()), values_of(self.model.parameters())
        require_close(plains, ours, f"{what}parameters")
        self.sharded.consolidate_state_dict(to=0)
        if self.rank == 0:
            expected = self.plain.state_dict()["state"]
            indices = sorted(key for key in expected if isinstance(key, int))
            shared = [key for key in expected if not isinstance(key, int)]
            expected = {key: expected[key] for key in [*indices, *shared]}
            require_close(expected, self.sharded.state_dict()["state"], f"{what}state")
            self.sharded.release_consolidated_state_dict()


def unsigned_zeros(value: Any) -> Any:
    """A copy without negative zeros."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor + 0, value)


def num_parameters_in(state: dict[Any, Any]) -> int:
    """How many parameters have state."""
    return sum(isinstance(key, torch.Tensor) for key in state)


def squares(
    seed: int, *, without: Callable[[int], Collection[int]] = lambda _: (), scale: float = 1.0
) -> Passes:
    """One backward of a weighted sum of the squares of all parameters, whatever they are.

    Args:
        seed: of the weights, which differ between ranks.
        without: the numbers of the parameters that a rank doesn't use.
        scale: of the loss.
    """

    def passes(model: nn.Module, rank: int) -> None:
        (scale * square_loss(model.parameters(), 1000 * seed + rank, without(rank))).backward()

    return passes


def square_loss(
    parameters: Iterable[torch.Tensor], seed: int, without: Collection[int] = ()
) -> torch.Tensor:
    """The loss of :func:`squares`."""
    generator = torch.Generator().manual_seed(seed)
    terms = []
    for number, parameter in enumerate(parameters):
        weights = torch.randn(parameter.shape, generator=generator)
        if number not in without and parameter.requires_grad:
            square = (parameter * parameter.conj()).real
            terms.append((weights.to(square.dtype) * square).sum().double())
    return torch.stack(terms).sum()


def make_parameters(*shapes: Any, dtype: torch.dtype = torch.float32) -> nn.ParameterList:
    """Parameters of these shapes; a shape may end with a dtype of its own."""
    torch.manual_seed(0)
    made = []
    for shape in shapes:
        *sizes, kind = shape if shape and isinstance(shape[-1], torch.dtype) else (*shape, dtype)
        made.append(torch.randn(*sizes, dtype=kind) if sizes else torch.randn((), dtype=kind))
    return nn.ParameterList(made)
