"""A model with what is awkward inside backward, and loops that train it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from tensorplay.distributed.optim import InBackwardOptimizer, apply_optimizer_in_backward
from tests.reference.training import require_equal

NUM_WORDS = 13
ADAMW: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}


def plain(hidden: Callable[[Any], Any], net: "Net", h: torch.Tensor) -> torch.Tensor:
    return hidden(net.inner(net.inner(h)) + net.other(h))


def _checkpointed(use_reentrant: bool) -> Callable[..., torch.Tensor]:
    def use(_: Any, net: "Net", h: torch.Tensor) -> torch.Tensor:
        for layer in (net.inner, net.other, net.inner):
            h = checkpoint(layer, h, use_reentrant=use_reentrant)
        return torch.tanh(h)

    return use


def nested(_: Any, net: "Net", h: torch.Tensor) -> torch.Tensor:
    def outer(x: torch.Tensor) -> torch.Tensor:
        return net.other(checkpoint(net.inner, x * 2, use_reentrant=True))

    with torch.enable_grad():  # or torch warns that the inner segment's input needs no gradient
        return checkpoint(outer, checkpoint(net.inner, h, use_reentrant=True), use_reentrant=True)


def inside_and_outside(_: Any, net: "Net", h: torch.Tensor) -> torch.Tensor:
    return net.inner(net.other(checkpoint(net.inner, h, use_reentrant=True)))


USES: dict[str, Callable[..., torch.Tensor]] = {
    "twice": plain,
    "checkpointed": _checkpointed(use_reentrant=False),
    "reentrant": _checkpointed(use_reentrant=True),
    "reentrant, inside and outside": inside_and_outside,
}


class Net(nn.Module):
    """A tied embedding, layers used twice, unused, frozen, empty and scalar parameters."""

    def __init__(self, use: str = "twice", seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(NUM_WORDS, 6)
        self.inner = nn.Linear(6, 6)
        self.other = nn.Linear(6, 6)
        self.unused = nn.Linear(3, 2)
        self.head = nn.Linear(6, NUM_WORDS, bias=False)
        self.head.weight = self.words.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.full((6,), 0.5), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.use = use

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        h = USES[self.use](torch.tanh, self, self.words(words))
        return self.head(h * self.scale + self.frozen) + self.empty.sum()


def batch(step: int) -> torch.Tensor:
    return torch.randint(NUM_WORDS, (4, 5), generator=torch.Generator().manual_seed(step))


def loss_of(net: nn.Module, words: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(net(words).flatten(0, 1).float(), words.flatten())


def train_plain(
    net: nn.Module, optimizer: Optimizer, steps: int = 4, first: int = 0, *, clip: Any = None
) -> None:
    """The ordinary loop."""
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(net, batch(step)).backward()
        if clip is not None:
            clip(net.parameters())
        optimizer.step()


def train_inside(net: nn.Module, steps: int = 4, first: int = 0) -> None:
    """The loop without ``step()``: afterwards no gradient is left."""
    for step in range(first, first + steps):
        loss_of(net, batch(step)).backward()
        left = [name for name, p in net.named_parameters() if p.grad is not None]
        assert left == []


def make_twins(
    optimizer_class: Any = torch.optim.AdamW,
    options: dict[str, Any] | None = None,
    use: str = "twice",
    *,
    with_module: bool = True,
    **extras: Any,
) -> tuple[Net, Optimizer, Net, InBackwardOptimizer]:
    """The plain net and optimizer, and the net that is updated inside backward."""
    options = ADAMW if options is None else options
    plain_net, net = Net(use), Net(use)
    optimizer = optimizer_class(plain_net.parameters(), **options)
    module = net if with_module else None
    inside = apply_optimizer_in_backward(
        optimizer_class, net.parameters(), options, module=module, **extras
    )
    return plain_net, optimizer, net, inside


def require_twins_equal(
    plain_net: nn.Module, optimizer: Optimizer, net: nn.Module, inside: Optimizer
) -> None:
    """Parameters, state and options are bitwise equal."""
    require_equal(dict(plain_net.state_dict()), dict(net.state_dict()))
    expected, actual = optimizer.state_dict(), inside.state_dict()
    expected["state"] = {key: expected["state"][key] for key in actual["state"]}
    require_equal(expected, actual, "state: ")
