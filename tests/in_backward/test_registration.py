"""Who steps a parameter: several classes, tied weights, removal, lifetime, what is refused."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from tensorplay.distributed.optim import (
    InBackwardOptimizer,
    apply_optimizer_in_backward,
    get_in_backward_optimizers,
)
from tests.in_backward.models import ADAMW, Net, batch, loss_of, make_twins, train_inside
from tests.reference.training import require_equal

SGD, ADAM = torch.optim.SGD, torch.optim.Adam


@pytest.mark.parametrize("accumulating", [0, 1, 2])
def test_several_classes_step_in_order_of_registration(accumulating: int) -> None:
    plain_net, net = Net(), Net()
    plain = [
        SGD(plain_net.parameters(), lr=0.1),
        ADAM(plain_net.inner.parameters(), lr=0.05),
        torch.optim.RMSprop(plain_net.parameters(), lr=0.02),
    ]
    inside = [
        apply_optimizer_in_backward(SGD, net.parameters(), {"lr": 0.1}),
        apply_optimizer_in_backward(ADAM, net.inner.parameters(), {"lr": 0.05}),
        apply_optimizer_in_backward(torch.optim.RMSprop, net.parameters(), {"lr": 0.02}),
    ]
    assert get_in_backward_optimizers(net) == [inside[0], inside[2], inside[1]]
    assert get_in_backward_optimizers(net.inner) == inside
    for step in range(4):
        plain_net.zero_grad()
        for micro in range(2):
            loss_of(plain_net, batch(2 * step + micro)).backward()
        for optimizer in plain:
            optimizer.step()
        with inside[accumulating].accumulate():  # whichever it is: the gradients are one's
            loss_of(net, batch(2 * step)).backward()
        train_inside(net, 1, 2 * step + 1)
    require_equal(dict(plain_net.state_dict()), dict(net.state_dict()))


def test_removing_one_class_leaves_the_others() -> None:
    net, plain_net = Net(), Net()
    first = apply_optimizer_in_backward(SGD, net.parameters(), {"lr": 0.1})
    second = apply_optimizer_in_backward(ADAM, net.parameters(), {"lr": 0.05})
    first.remove()
    plain = ADAM(plain_net.parameters(), lr=0.05)
    train_inside(net, 2)
    for step in range(2):
        plain.zero_grad()
        loss_of(plain_net, batch(step)).backward()
        plain.step()
    require_equal(dict(plain_net.state_dict()), dict(net.state_dict()))
    second.remove()
    loss_of(net, batch(2)).backward()
    require_equal(dict(plain_net.state_dict()), dict(net.state_dict()))
    assert get_in_backward_optimizers(net) == []


def test_a_tied_parameter_registered_through_both_owners_is_stepped_once() -> None:
    net, plain_net = Net(), Net()
    plain = SGD(plain_net.parameters(), lr=0.1)
    first = apply_optimizer_in_backward(SGD, net.words.parameters(), {"lr": 0.1})
    assert apply_optimizer_in_backward(SGD, net.head.parameters(), {"lr": 0.1}) is first
    second = apply_optimizer_in_backward(SGD, [*net.parameters(), *net.parameters()], {"lr": 0.1})
    assert get_in_backward_optimizers(net) == [second, first]
    assert len(second.param_groups[0]["params"]) == len(list(net.parameters())) - 1
    loss_of(plain_net, batch(0)).backward()
    plain.step()
    train_inside(net, 1)
    require_equal(dict(plain_net.state_dict()), dict(net.state_dict()))


def test_the_same_class_with_other_options_is_refused() -> None:
    net = Net()
    apply_optimizer_in_backward(SGD, net.words.parameters(), {"lr": 0.1})
    with pytest.raises(ValueError, match=r"SGD updates a parameter of shape \(13, 6\) .*'lr': 0.2"):
        apply_optimizer_in_backward(SGD, net.parameters(), {"lr": 0.2})
    assert len(get_in_backward_optimizers(net)) == 1
    with pytest.raises(ValueError, match="register_hook=True already"):
        apply_optimizer_in_backward(ADAM, net.parameters(), {}, register_hook=False)


def test_what_is_refused() -> None:
    net = Net()
    with pytest.raises(ValueError, match="LBFGS can't be stepped inside backward: its search"):
        apply_optimizer_in_backward(torch.optim.LBFGS, net.parameters(), {})
    with pytest.raises(TypeError, match="must be a class"):
        apply_optimizer_in_backward(SGD(net.parameters()), net.parameters(), {})  # type: ignore[arg-type] # the test passes what the types don't allow, or a wrapper
    with pytest.raises(ValueError, match="Invalid learning rate"):
        apply_optimizer_in_backward(SGD, net.parameters(), {"lr": -1.0})
    with pytest.raises(ValueError, match="empty parameter list"):
        apply_optimizer_in_backward(SGD, [], {"lr": 1.0})
    with pytest.raises(TypeError, match="can only optimize Tensors"):
        apply_optimizer_in_backward(SGD, [1], {"lr": 1.0})
    with pytest.raises(ValueError, match="non-leaf"):
        apply_optimizer_in_backward(SGD, [net.scale * 2], {"lr": 1.0})
    with pytest.raises(ValueError, match="none of the params is a parameter of the Linear"):
        apply_optimizer_in_backward(SGD, [net.scale], {"lr": 1.0}, module=net.inner)
    with pytest.raises(ValueError, match="clip_value=0 must be positive"):
        apply_optimizer_in_backward(SGD, net.parameters(), {}, clip_value=0)
    with pytest.raises(ValueError, match="not clip_value and clip_previous_norm"):
        apply_optimizer_in_backward(SGD, net.parameters(), {}, clip_value=1, clip_previous_norm=1)
    assert get_in_backward_optimizers(net) == []
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())  # type: ignore[attr-defined] # mypy can't see that it has this


def test_the_callers_dicts_stay_the_callers() -> None:
    net = Net()
    options, group = {"lr": 0.1}, {"params": [net.scale], "lr": 0.5}
    apply_optimizer_in_backward(SGD, [group], options)
    loss_of(net, batch(0)).backward()
    assert options == {"lr": 0.1}
    assert group.keys() == {"params", "lr"}


def test_without_hooks_it_is_the_plain_optimizer() -> None:
    net, plain_net = Net(), Net()
    inside = apply_optimizer_in_backward(SGD, net.parameters(), {"lr": 0.1}, register_hook=False)
    assert get_in_backward_optimizers(net) == [inside]
    plain = SGD(plain_net.parameters(), lr=0.1)
    for each, optimizer in ((net, inside), (plain_net, plain)):
        loss_of(each, batch(0)).backward()
        assert each.scale.grad is not None
        optimizer.step()
        optimizer.zero_grad()
    require_equal(dict(plain_net.state_dict()), dict(net.state_dict()))


def test_remove_leaves_a_plain_optimizer_and_the_parameters_as_they_were() -> None:
    net = Net()
    before = {name: dict(vars(p)) for name, p in net.named_parameters()}
    modules = {name: list(m._forward_pre_hooks) for name, m in net.named_modules()}
    inside = apply_optimizer_in_backward(SGD, net.parameters(), {"lr": 0.1}, module=net)
    assert not hasattr(net.scale, "_in_backward_optimizers")
    inside.remove()
    inside.remove()
    assert {name: dict(vars(p)) for name, p in net.named_parameters()} == before
    assert {name: list(m._forward_pre_hooks) for name, m in net.named_modules()} == modules
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())  # type: ignore[attr-defined] # mypy can't see that it has this
    loss_of(net, batch(0)).backward()
    assert net.scale.grad is not None
    value = net.scale.item()
    inside.step()
    assert net.scale.item() == pytest.approx(value - 0.1 * net.scale.grad.item())


def test_parameters_added_later() -> None:
    net = Net()
    inside = apply_optimizer_in_backward(SGD, net.inner.parameters(), {"lr": 0.1})
    inside.add_param_group({"params": net.other.parameters(), "lr": 0.0})
    inside.add_param_group({"params": [net.scale]})
    before = copy.deepcopy(net.state_dict())
    loss_of(net, batch(0)).backward()
    changed = [k for k, v in net.state_dict().items() if not torch.equal(v, before[k])]
    assert changed == ["scale", "inner.weight", "inner.bias"]
    assert net.other.weight.grad is None
    with pytest.raises(ValueError, match="updated inside backward already"):
        inside.add_param_group({"params": [net.scale]})


@pytest.mark.parametrize("with_module", [True, False])
def test_nothing_is_kept_alive(with_module: bool) -> None:
    *_, net, inside = twins = make_twins(with_module=with_module)
    train_inside(net, 2)
    alive: list[Any] = [weakref.ref(each) for each in (net, inside, net.scale, net.words.weight)]
    del twins, net, inside, _
    gc.collect()
    assert [each() for each in alive] == [None] * 4


def test_the_handle_need_not_be_kept() -> None:
    net = nn.Linear(3, 2)
    apply_optimizer_in_backward(torch.optim.AdamW, net.parameters(), ADAMW)
    gc.collect()
    before = net.weight.detach().clone()
    net(torch.ones(3)).sum().backward()
    assert not torch.equal(net.weight, before)
    assert isinstance(get_in_backward_optimizers(net)[0], InBackwardOptimizer)
