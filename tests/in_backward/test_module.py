"""Parameters that are replaced, converted or copied: updates go on, or the next forward raises."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

from tensorplay.distributed.optim import apply_optimizer_in_backward, get_in_backward_optimizers
from tests.in_backward.models import (
    ADAMW,
    batch,
    loss_of,
    make_twins,
    require_twins_equal,
    train_inside,
    train_plain,
)

ADAM = torch.optim.Adam


@pytest.mark.parametrize("with_module", [True, False])
@pytest.mark.parametrize("options", [ADAMW, {**ADAMW, "fused": True}], ids=["loop", "fused"])
def test_after_double_it_goes_on(with_module: bool, options: dict[str, Any]) -> None:
    plain_net, optimizer, net, inside = make_twins(options=options, with_module=with_module)
    train_plain(plain_net, optimizer, 2)
    train_inside(net, 2)
    net.double()
    plain_net.double()
    optimizer.load_state_dict(optimizer.state_dict())  # the plain one's way to convert its state
    train_plain(plain_net, optimizer, 2, 2)
    train_inside(net, 2, 2)
    require_twins_equal(plain_net, optimizer, net, inside)
    assert net.scale.dtype == torch.float64


def test_after_loading_with_assign_it_goes_on() -> None:
    plain_net, optimizer, net, inside = make_twins()
    train_plain(plain_net, optimizer, 2)
    train_inside(net, 2)
    saved = {name: value + 0.01 for name, value in net.state_dict().items()}
    saved["head.weight"] = saved["words.weight"]
    plain_net.load_state_dict(saved)
    old = net.inner.weight
    with pytest.raises(RuntimeError, match="parted the tied parameter 'weight'"):
        net.load_state_dict(saved, assign=True)
    net.head.weight = net.words.weight
    inside.remove()
    inside = apply_optimizer_in_backward(torch.optim.AdamW, net.parameters(), ADAMW, module=net)
    inside.load_state_dict(optimizer.state_dict())
    train_plain(plain_net, optimizer, 2, 2)
    train_inside(net, 2, 2)
    require_twins_equal(plain_net, optimizer, net, inside)
    assert net.inner.weight is not old


def make_mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def run(net: nn.Module, step: int) -> None:
    inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
    net(inputs).square().sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parameters_that_load_state_dict_assigns_inherit_state_and_hooks(
    dtype: torch.dtype,
) -> None:
    plain_net, net = make_mlp(), make_mlp()
    plain = ADAM(plain_net.parameters(), lr=0.1)
    others = [
        apply_optimizer_in_backward(ADAM, net.parameters(), {"lr": 0.1}, module=net),
        apply_optimizer_in_backward(torch.optim.SGD, net[0].parameters(), {"lr": 0.0}, module=net),
    ]
    saved = {name: value.to(dtype) for name, value in make_mlp(1).state_dict().items()}
    for step in range(4):
        if step == 2:
            old = list(net.parameters())
            net.load_state_dict(copy.deepcopy(saved), assign=True)
            plain_net.to(dtype).load_state_dict(saved)
            plain.load_state_dict(plain.state_dict())
        if step >= 2:
            inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(step)).to(dtype)
            for each in (plain_net, net):
                each.zero_grad()
                each(inputs).square().sum().backward()
        else:
            for each in (plain_net, net):
                each.zero_grad()
                run(each, step)
        plain.step()
    require_twins_equal(plain_net, plain, net, others[0])
    assert not {*old} & {*net.parameters()}
    assert get_in_backward_optimizers(net) == others
    assert all(p.grad is None for p in net.parameters())
    others[0].remove()
    assert not any(p._post_accumulate_grad_hooks for p in net[2].parameters())  # type: ignore[attr-defined] # mypy can't see that it has this


def test_a_replaced_parameter_raises_at_the_next_forward() -> None:
    *_, net, _ = make_twins()
    net.inner.weight = nn.Parameter(torch.zeros(6, 6))
    with pytest.raises(RuntimeError, match=r"'weight' of Linear is no longer the parameter"):
        net(batch(0))
    with torch.no_grad():
        net(batch(0))


@pytest.mark.parametrize("through_file", [False, True])
def test_a_copy_raises_at_its_next_forward_until_somebody_sees_to_it(through_file: bool) -> None:
    plain_net, optimizer, net, inside = make_twins()
    train_inside(net, 1)
    if through_file:
        file = io.BytesIO()
        torch.save(net, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    else:
        copied = copy.deepcopy(net)
    assert get_in_backward_optimizers(copied) == []
    with torch.no_grad():
        copied(batch(0))
    for part, inputs in ((copied, batch(0)), (copied.inner, torch.ones(6))):
        with pytest.raises(RuntimeError, match=r"is a copy .*Call apply_optimizer_in_backward"):
            part(inputs)
    copied.load_state_dict(net.state_dict())
    anew = apply_optimizer_in_backward(torch.optim.AdamW, copied.parameters(), ADAMW, module=copied)
    anew.load_state_dict(inside.state_dict())
    train_inside(copied, 2, 1)
    train_plain(plain_net, optimizer, 3)
    require_twins_equal(plain_net, optimizer, copied, anew)
    train_inside(net, 2, 1)
    require_twins_equal(plain_net, optimizer, net, inside)


def test_a_copied_optimizer_is_refused() -> None:
    *_, net, inside = make_twins()
    with pytest.raises(TypeError, match=r"can't be copied or pickled.*state_dict\(\)"):
        copy.deepcopy([net, inside])


def test_a_file_of_the_parameters_holds_nothing_of_it() -> None:
    *_, net, _ = make_twins()
    file = io.BytesIO()
    torch.save(dict(net.named_parameters()), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert torch.equal(loaded["scale"], net.scale)


def test_functional_call_with_other_tensors_is_no_replacement() -> None:
    *plain, net, _ = twins = make_twins()
    other = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    functional_call(net, other, (batch(0),))
    train_plain(*plain)  # type: ignore[misc] # mypy can't check what is unpacked or optional here
    train_inside(net)
    require_twins_equal(*twins)


def test_evaluation_between_forward_and_backward_changes_nothing() -> None:
    *plain, net, _ = twins = make_twins()
    train_plain(*plain)  # type: ignore[misc] # mypy can't check what is unpacked or optional here
    for step in range(4):
        loss = loss_of(net, batch(step))
        with torch.no_grad():
            net(batch(9))
        loss.backward()
    require_twins_equal(*twins)


def test_a_compiled_model() -> None:
    *plain, net, _ = twins = make_twins()
    train_plain(torch.compile(plain[0], backend="eager"), plain[1])  # type: ignore[arg-type] # the test passes what the types don't allow, or a wrapper
    compiled = torch.compile(net, backend="eager")
    for step in range(4):
        loss_of(compiled, batch(step)).backward()  # type: ignore[arg-type] # the test passes what the types don't allow, or a wrapper
    require_twins_equal(*twins)
