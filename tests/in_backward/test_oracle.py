"""Training with the step inside backward equals the ordinary loop, bit for bit."""

import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from tensorplay.distributed.optim import apply_optimizer_in_backward
from tensorplay.distributed.optim.in_backward import local_gradients
from tests.in_backward.models import (
    ADAMW,
    USES,
    Net,
    batch,
    loss_of,
    make_twins,
    require_twins_equal,
    train_inside,
    train_plain,
)
from tests.reference.optimizers import OPTIMIZERS
from tests.reference.training import require_equal


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_class(name: str) -> None:
    optimizer_class, options = OPTIMIZERS[name]
    twins = make_twins(optimizer_class, options)
    train_plain(*twins[:2])
    train_inside(twins[2])
    require_twins_equal(*twins)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", ["AdamW fused", "KeepsCounters"])
def test_reused_and_checkpointed_layers(use: str, name: str) -> None:
    twins = make_twins(*OPTIMIZERS[name], use)
    train_plain(*twins[:2])
    train_inside(twins[2])
    require_twins_equal(*twins)


@pytest.mark.parametrize("use", ["twice", "checkpointed", "reentrant"])
def test_without_the_module(use: str) -> None:
    twins = make_twins(use=use, with_module=False)
    train_plain(*twins[:2])
    train_inside(twins[2])
    require_twins_equal(*twins)


def test_what_cannot_be_seen_without_the_module_raises(bucket_nbytes: int) -> None:
    *plain, net, _ = twins = make_twins(use="reentrant, inside and outside", with_module=False)
    if bucket_nbytes > 1000:  # nothing is stepped before backward ends
        train_plain(*plain)
        train_inside(net)
        require_twins_equal(*twins)
        return
    with pytest.raises(RuntimeError, match=r"reentrant checkpointing.*Pass module="):
        train_inside(net)


def test_a_parameter_whose_checkpointed_use_is_not_its_owners_forward() -> None:
    """A whole model inside reentrant checkpointing: its hooks fire in nested backwards only."""

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net("reentrant")

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            switch = torch.ones((), requires_grad=True)

            def run(switch: torch.Tensor) -> torch.Tensor:
                with torch.enable_grad():
                    return self.net(words) * switch

            return torch.utils.checkpoint.checkpoint(run, switch, use_reentrant=True)

    plain, inside = Wrapper(), Wrapper()
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW)
    handle = apply_optimizer_in_backward(torch.optim.AdamW, inside.parameters(), ADAMW)
    train_plain(plain, optimizer)
    train_inside(inside)
    require_twins_equal(plain, optimizer, inside, handle)


def test_a_scheduler_drives_several_groups() -> None:
    def groups(net: Net) -> list[dict[str, Any]]:
        named = dict(net.named_parameters())
        rest = [p for name, p in named.items() if not name.startswith("inner")]
        return [{"params": net.inner.parameters(), "lr": 0.01}, {"params": rest, "lr": 0.2}]

    plain_net, net = Net(), Net()
    optimizer = torch.optim.SGD(groups(plain_net), momentum=0.9)
    inside = apply_optimizer_in_backward(torch.optim.SGD, groups(net), {"momentum": 0.9})
    schedulers = [OneCycleLR(each, [0.1, 0.3], total_steps=6) for each in (optimizer, inside)]
    for step in range(5):
        train_plain(plain_net, optimizer, 1, step)
        train_inside(net, 1, step)
        for scheduler in schedulers:
            scheduler.step()
    require_twins_equal(plain_net, optimizer, net, inside)


def test_named_parameters_and_a_generator() -> None:
    plain_net, net = Net(), Net()
    optimizer = torch.optim.AdamW(plain_net.named_parameters(), **ADAMW)
    inside = apply_optimizer_in_backward(torch.optim.AdamW, net.named_parameters(), ADAMW)
    train_plain(plain_net, optimizer)
    train_inside(net)
    require_twins_equal(plain_net, optimizer, net, inside)
    assert inside.state_dict()["param_groups"][0]["param_names"][:2] == ["scale", "frozen"]


def test_bfloat16() -> None:
    plain_net, net = Net().bfloat16(), Net().bfloat16()
    optimizer = torch.optim.AdamW(plain_net.parameters(), **ADAMW)
    inside = apply_optimizer_in_backward(torch.optim.AdamW, net.parameters(), ADAMW)
    train_plain(plain_net, optimizer)
    train_inside(net)
    require_twins_equal(plain_net, optimizer, net, inside)


def test_mixed_dtypes_and_sparse_gradients() -> None:
    def make() -> nn.ModuleList:
        torch.manual_seed(0)
        return nn.ModuleList(
            [nn.Embedding(9, 3, sparse=True), nn.Linear(3, 2).double(), nn.Linear(2, 2)]
        )

    def run(net: nn.ModuleList) -> None:
        h = net[1](net[0](torch.tensor([1, 4, 4])).double())
        net[2](h.float()).square().sum().backward()

    plain_net, net = make(), make()
    optimizer = torch.optim.SGD(plain_net.parameters(), lr=0.1)
    apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    for _ in range(3):
        optimizer.zero_grad()
        run(plain_net)
        optimizer.step()
        run(net)
    require_equal(dict(plain_net.state_dict()), dict(net.state_dict()))


def test_freezing_and_thawing() -> None:
    *plain, net, _ = twins = make_twins()
    for frozen in ([True, False], [True, True], [False, False]):
        for each in (plain[0], net):
            each.frozen.requires_grad_(not frozen[0])
            each.inner.requires_grad_(not frozen[1])
        train_plain(*plain, steps=2)  # type: ignore[misc] # mypy can't check what is unpacked or optional here
        train_inside(net, steps=2)
    require_twins_equal(*twins)


def fail(_: torch.Tensor) -> None:
    raise ValueError("on purpose")


def test_after_a_backward_that_raised_and_zero_grad_training_goes_on() -> None:
    plain_net, optimizer, net, inside = make_twins(torch.optim.SGD, {"lr": 0.1, "momentum": 0.5})
    loss = loss_of(net, batch(0))
    hook = net.words.weight.register_hook(fail)  # the last gradient of all
    with pytest.raises(ValueError, match="on purpose"):
        loss.backward()
    hook.remove()
    net.zero_grad()
    plain_net.load_state_dict(net.state_dict())
    optimizer.load_state_dict(copy.deepcopy(inside.state_dict()))
    train_plain(plain_net, optimizer, first=1)
    train_inside(net, first=1)
    require_twins_equal(plain_net, optimizer, net, inside)


def test_a_gradient_that_a_raised_backward_left_is_stepped_once_with_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_gradients, "BUCKET_NBYTES", 1 << 20)  # not stepped before the error
    parameter, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    apply_optimizer_in_backward(torch.optim.SGD, [parameter, other], {"lr": 1.0})
    parameter.grad = torch.ones(3)
    hook = other.register_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        (other * 1 + parameter).sum().backward()
    hook.remove()
    left = 1.0 if parameter.grad is None else float(parameter.grad[0])
    assert torch.equal(parameter, torch.ones(3))
    (2 * parameter).sum().backward()
    assert torch.equal(parameter, torch.full((3,), 1.0 - left - 2.0))
    assert parameter.grad is None


class Couples(Optimizer):
    """Its groups learn something from all gradients."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "largest": 0.0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override] # the base class leaves it untyped or wider
        for group in self.param_groups:
            grads = [p.grad for p in group["params"] if p.grad is not None]
            group["largest"] = max([0.0, *(float(g.abs().sum()) for g in grads)])


def test_what_depends_on_all_gradients_raises(bucket_nbytes: int) -> None:
    *_, net, _ = make_twins(Couples, {"lr": 0.1})
    if bucket_nbytes > 1000:  # they come all at once
        train_inside(net)
        return
    with pytest.raises(RuntimeError, match=r"Couples writes options 'largest'"):
        train_inside(net)


def test_from_another_thread() -> None:
    *plain, net, _ = twins = make_twins(use="reentrant")
    train_plain(*plain)  # type: ignore[misc] # mypy can't check what is unpacked or optional here
    thread = threading.Thread(target=train_inside, args=(net,))
    thread.start()
    thread.join()
    require_twins_equal(*twins)


def test_create_graph_and_autograd_grad() -> None:
    *plain, net, _ = twins = make_twins(torch.optim.SGD, {"lr": 0.1})
    torch.autograd.grad(loss_of(net, batch(0)), [net.scale])  # accumulates nothing, steps nothing
    for each, optimizer in (plain, (net, None)):
        loss = loss_of(each, batch(0))
        (slope,) = torch.autograd.grad(loss, [each.scale], create_graph=True)
        (loss + slope.square()).backward()
        if optimizer is not None:
            optimizer.step()
    require_twins_equal(*twins)
