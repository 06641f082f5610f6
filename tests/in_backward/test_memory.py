"""What is alive during backward, by a ledger of all storages that torch's operators return."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tensorplay.distributed.optim import apply_optimizer_in_backward
from tensorplay.distributed.optim.in_backward import local_gradients

LARGEST = 64 * 256 * 4
BUCKET = 40_000
ADAM: dict[str, Any] = {"lr": 1e-3, "fused": True}


@pytest.fixture(autouse=True)
def bucket_nbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_gradients, "BUCKET_NBYTES", BUCKET)


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    small = [nn.Linear(64, 64) for _ in range(20)]
    return nn.Sequential(
        *small[:10], nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64), *small[10:]
    )


class Ledger(TorchDispatchMode):
    """Counts the bytes of all storages that are alive, those of ``present`` included."""

    def __init__(self, present: list[torch.Tensor]) -> None:
        super().__init__()
        self._alive: dict[StorageWeakRef, int] = {}
        self.peak = 0
        for tensor in present:
            self._enter(tensor)

    def _enter(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._alive[StorageWeakRef(storage)] = storage.nbytes()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_iter(result):
            if isinstance(each, torch.Tensor):
                self._enter(each)
        self._alive = {ref: size for ref, size in self._alive.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self._alive.values()))
        return result


def nbytes(net: nn.Module) -> int:
    return sum(p.nbytes for p in net.parameters())


def largest_gradients(net: nn.Module, run: Callable[[], None]) -> int:
    """The most bytes of ``.grad`` that were alive whenever a gradient had come."""
    seen = [0]

    def look(_: torch.Tensor) -> None:
        seen.append(sum(p.grad.nbytes for p in net.parameters() if p.grad is not None))

    # Before our own hooks, which free: registered first.
    hooks = [p.register_post_accumulate_grad_hook(look) for p in net.parameters()]
    run()
    for hook in hooks:
        hook.remove()
    return max(seen)


@pytest.mark.parametrize("with_module", [True, False])
def test_gradients_alive_are_the_largest_and_a_bucket_from_the_first_backward_on(
    with_module: bool,
) -> None:
    net = make_net()
    inside = []

    def train() -> None:
        inside.append(
            apply_optimizer_in_backward(
                torch.optim.Adam, net.parameters(), ADAM, module=net if with_module else None
            )
        )
        for _ in range(3):
            net(torch.ones(1, 64)).sum().backward()

    most = largest_gradients(net, train)
    assert most <= LARGEST + BUCKET
    assert nbytes(net) > 4 * (LARGEST + BUCKET)  # so that it says something


def test_the_ordinary_loop_keeps_all_gradients() -> None:
    net = make_net()
    assert largest_gradients(net, lambda: net(torch.ones(1, 64)).sum().backward()) == nbytes(net)


def peak_of(net: nn.Module, step: Callable[[], None]) -> int:
    """Peak of live tensors over two whole steps, the one that creates the state included."""
    inputs = torch.ones(1, 64)
    with Ledger([*net.parameters(), inputs]) as ledger:
        for _ in range(2):
            net(inputs).sum().backward()
            step()
    return ledger.peak


def test_peak_of_live_tensors_with_adam() -> None:
    plain, net = make_net(), make_net()
    optimizer = torch.optim.Adam(plain.parameters(), **ADAM)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    apply_optimizer_in_backward(torch.optim.Adam, net.parameters(), ADAM)
    size = nbytes(net)
    activations = 40 * 256 * 4
    assert peak_of(plain, step) >= 4 * size
    assert peak_of(net, lambda: None) <= 3 * size + LARGEST + BUCKET + activations


def test_measuring_the_norm_keeps_no_more() -> None:
    net = make_net()
    inside = []

    def train() -> None:
        inside.append(apply_optimizer_in_backward(torch.optim.Adam, net.parameters(), ADAM))
        inside[0].clip_norm_in_two_passes(lambda: net(torch.ones(1, 64)).sum().backward(), 1.0)

    assert largest_gradients(net, train) <= LARGEST + BUCKET
