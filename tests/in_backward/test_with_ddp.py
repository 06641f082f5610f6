"""Under DistributedDataParallel: each bucket is stepped with the averaged gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn import utils
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from tensorplay.distributed.optim import InBackwardOptimizer, apply_optimizer_in_backward
from tensorplay.distributed.optim._core import collectives
from tensorplay.distributed.optim.in_backward import ddp_gradients, local_gradients
from tests.launch import run_ranks
from tests.reference.ddp import ADAMW, batch, make_net, train
from tests.reference.training import require_equal
from tests.zero.test_compile_and_checkpointing import Branching, Checkpointed


@pytest.fixture(autouse=True)
def bucket_nbytes() -> None:
    """DDP's buckets are what counts here."""


Trained = tuple[DistributedDataParallel, InBackwardOptimizer]


def wrap_before(net: nn.Module, **ddp_options: Any) -> Trained:
    """Registered while not wrapped yet."""
    inside = apply_optimizer_in_backward(AdamW, net.parameters(), ADAMW, module=net)
    return DistributedDataParallel(net, **ddp_options), inside


def wrap_after(net: nn.Module, **ddp_options: Any) -> Trained:
    """Registered with the wrapped module."""
    model = DistributedDataParallel(net, **ddp_options)
    return model, apply_optimizer_in_backward(AdamW, model.parameters(), ADAMW, module=model)


def backward(model: nn.Module, step: int) -> None:
    inputs, targets = batch(step)
    nn.functional.mse_loss(model(inputs), targets).backward()


def train_inside(model: nn.Module, steps: int = 4, first: int = 0) -> None:
    for step in range(first, first + steps):
        backward(model, step)
        assert [name for name, p in model.named_parameters() if p.grad is not None] == []


def compare(
    make: Callable[[], nn.Module], wrap: Callable[..., Trained], steps: int = 4, **options: Any
) -> Trained:
    """Trains as the ordinary loop does and inside backward, and requires the same bits."""
    plain = DistributedDataParallel(make(), **options)
    optimizer = AdamW(plain.parameters(), **ADAMW)
    model, inside = wrap(make(), **options)
    train(plain, optimizer, steps)
    train_inside(model, steps)
    require_equal(dict(plain.state_dict()), dict(model.state_dict()), f"{options}: ")
    expected, actual = optimizer.state_dict()["state"], inside.state_dict()["state"]
    require_equal({key: expected[key] for key in sorted(expected)}, actual, f"{options} state: ")
    return model, inside


def _options() -> None:
    local_gradients.BUCKET_NBYTES = 100
    for options in (
        {},
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": 0.0001},
        {"static_graph": True},
        {"static_graph": True, "gradient_as_bucket_view": True},
    ):
        for wrap in (wrap_before, wrap_after):
            compare(make_net, wrap, **options)


@pytest.mark.parametrize("world_size", [1, 3])
def test_before_and_after_wrapping_with_ddps_options(world_size: int) -> None:
    run_ranks(world_size, _options)


def _special_models() -> None:
    for wrap in (wrap_before, wrap_after):
        for options in ({}, {"gradient_as_bucket_view": True}):
            model, inside = compare(Branching, wrap, 6, find_unused_parameters=True, **options)
            never_used = set(model.module.branches[3].parameters())  # type: ignore[index,union-attr] # mypy takes it for any attribute of a module
            assert not never_used & set(inside.state)
        for use_reentrant in (False, True):
            compare(lambda: Checkpointed(use_reentrant), wrap, static_graph=True)  # noqa: B023 - called at once


def test_unused_parameters_and_checkpointing() -> None:
    run_ranks(2, _special_models)


def _channels_last() -> None:
    """DDP lays gradients out in the strides of their parameters."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Unflatten(1, (3, 2, 1)),
            nn.Conv2d(3, 5, 3, padding=1).to(memory_format=torch.channels_last),
            nn.Flatten(),
            nn.Linear(10, 3),
        )

    for wrap in (wrap_before, wrap_after):
        for options in ({}, {"gradient_as_bucket_view": True}):
            compare(make, wrap, **options)


def test_weights_in_channels_last() -> None:
    run_ranks(2, _channels_last)


def _subgroup() -> None:
    members = [2, 1]
    group = dist.new_group(members)
    if dist.get_rank() in members:
        compare(make_net, wrap_after, process_group=group)
        compare(make_net, wrap_before, process_group=group)


def test_a_subgroup() -> None:
    run_ranks(3, _subgroup)


def _accumulation() -> None:
    for wrap in (wrap_before, wrap_after):
        plain = DistributedDataParallel(make_net())
        optimizer = AdamW(plain.parameters(), **ADAMW)
        model, inside = wrap(make_net())
        train_inside(model, 1)  # only the first forward shows the wrapper
        train(plain, optimizer, 1)
        for step in range(1, 9, 2):
            optimizer.zero_grad()
            with plain.no_sync():
                backward(plain, step)
            backward(plain, step + 1)
            optimizer.step()
            with inside.accumulate():
                backward(model, step)
                backward_only_adds = next(model.parameters()).grad
                assert backward_only_adds is not None
            train_inside(model, 1, step + 1)
        require_equal(dict(plain.state_dict()), dict(model.state_dict()))


def _accumulation_from_the_start() -> None:
    """The first forward, which shows the wrapper, is inside: its gradients are averaged at once."""
    plain = DistributedDataParallel(make_net())
    optimizer = AdamW(plain.parameters(), **ADAMW)
    model, inside = wrap_before(make_net())
    backward(plain, 0)
    backward(plain, 1)
    optimizer.step()
    with inside.accumulate():
        backward(model, 0)
    train_inside(model, 1, 1)
    require_equal(dict(plain.state_dict()), dict(model.state_dict()))


def _accumulations() -> None:
    _accumulation()
    _accumulation_from_the_start()


def test_accumulation_without_communication() -> None:
    run_ranks(2, _accumulations)


def _several_optimizers() -> None:
    """Two that step different parts inside backward, one of them chained; the rest as usual."""
    plain = DistributedDataParallel(make_net())
    first, middle, last = plain.module[0], plain.module[2], plain.module[3]
    optimizers = [
        torch.optim.SGD([*first.parameters(), *middle.parameters()], lr=0.1),
        torch.optim.Adam(middle.parameters(), lr=0.01),
        AdamW(last.parameters(), **ADAMW),
    ]
    model = DistributedDataParallel(make_net())
    first, middle, last = model.module[0], model.module[2], model.module[3]
    for parameters, optimizer_class, options in (
        (first.parameters(), torch.optim.SGD, {"lr": 0.1}),
        (middle.parameters(), torch.optim.SGD, {"lr": 0.1}),
        (middle.parameters(), torch.optim.Adam, {"lr": 0.01}),
    ):
        apply_optimizer_in_backward(optimizer_class, parameters, options, module=model)
    rest = AdamW(last.parameters(), **ADAMW)
    for step in range(4):
        plain.zero_grad()
        backward(plain, step)
        for optimizer in optimizers:
            optimizer.step()
        rest.zero_grad()
        backward(model, step)
        rest.step()
    require_equal(dict(plain.state_dict()), dict(model.state_dict()))


def _removal() -> None:
    plain, model = DistributedDataParallel(make_net()), DistributedDataParallel(make_net())
    optimizer = AdamW(plain.parameters(), **ADAMW)
    inside = apply_optimizer_in_backward(AdamW, model.parameters(), ADAMW, module=model)
    train(plain, optimizer)
    train_inside(model, 2)
    inside.remove()
    train(model, inside, 2, 2)
    require_equal(dict(plain.state_dict()), dict(model.state_dict()))


def _failing_step() -> None:
    model, inside = wrap_after(make_net(), bucket_cap_mb=0.0001)
    train_inside(model, 2)  # DDP forms its buckets in the second backward

    def fail(*_: Any) -> None:
        raise ValueError("on purpose")

    hook = inside.optim.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        backward(model, 2)
    hook.remove()


def _combinations() -> None:
    _several_optimizers()
    _removal()
    _failing_step()


def test_several_optimizers_removal_and_a_step_that_fails() -> None:
    run_ranks(2, _combinations)


def _clipped(previous: bool) -> None:
    """The norm is of the averaged gradients, and its bits are the same on all ranks."""
    options = {"lr": 0.1}
    plain = DistributedDataParallel(make_net())
    model = DistributedDataParallel(make_net(), bucket_cap_mb=0.0001)
    optimizer = torch.optim.SGD(plain.parameters(), **options)
    limit: float | None = 0.1 if previous else None
    inside = apply_optimizer_in_backward(
        torch.optim.SGD, model.parameters(), options, module=model, clip_previous_norm=limit
    )
    norm: Any = None
    for step in range(5):
        optimizer.zero_grad()
        backward(plain, step)
        if not previous:
            norm = utils.clip_grad_norm_(plain.parameters(), 0.1)
            inside.clip_norm_in_two_passes(lambda step=step: backward(model, step), 0.1)
        else:
            before, norm = norm, utils.get_total_norm([p.grad for p in plain.parameters()])
            if before is not None:
                utils.clip_grads_with_norm_(plain.parameters(), 0.1, before)
            backward(model, step)
        assert norm > 0.1
        optimizer.step()
    for expected, actual in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, [p.tolist() for p in model.parameters()])
    assert all(each == everyones[0] for each in everyones)


def _both_clipped() -> None:
    _clipped(previous=True)
    _clipped(previous=False)


def test_clipping_by_the_norm_of_all_averaged_gradients() -> None:
    run_ranks(3, _both_clipped)


def _refusals() -> None:
    for net in (make_net(), DistributedDataParallel(make_net())):
        apply_optimizer_in_backward(AdamW, net.parameters(), ADAMW)
        model = net if isinstance(net, DistributedDataParallel) else DistributedDataParallel(net)
        with pytest.raises(RuntimeError, match=r"this rank's own gradients. Pass module="):
            backward(model, 0)
    hooked = DistributedDataParallel(make_net())
    hooked.register_comm_hook(None, allreduce_hook)
    with pytest.raises(ValueError, match="has one already: allreduce_hook"):
        apply_optimizer_in_backward(AdamW, hooked.parameters(), ADAMW, module=hooked)
    for parameter in hooked.parameters():
        assert not parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined] # mypy can't see that it has this
    model, inside = wrap_before(make_net())
    train_inside(model)
    with pytest.raises(RuntimeError, match="is now called without it"):
        model.module(batch(0)[0])
    model.module.eval()(batch(0)[0])
    with pytest.raises(RuntimeError, match="goes on with the parameters"):
        model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}, assign=True)
    assert inside.state


def test_what_would_go_wrong_raises_on_every_rank() -> None:
    run_ranks(2, _refusals)


def _joined() -> None:
    plain, model = DistributedDataParallel(make_net()), DistributedDataParallel(make_net())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1}, module=model)
    for epoch in range(2):
        steps = range(10 * epoch, 10 * epoch + 2 + dist.get_rank())
        with Join([plain]):
            train(plain, optimizer, len(steps), steps[0])
        with Join([model]):
            train_inside(model, len(steps), steps[0])
        assert [name for name, p in model.named_parameters() if p.grad is not None] == []
        require_equal(dict(plain.state_dict()), dict(model.state_dict()), f"epoch {epoch}: ")


def test_a_rank_that_has_joined_follows_the_others() -> None:
    run_ranks(2, _joined)


def _traffic() -> tuple[int, int]:
    """Bytes all-reduced in one backward, by DDP's size and by what we launch."""
    sent: list[int] = []
    start = collectives.start_all_reduce_

    def counted(tensor: torch.Tensor, group: dist.ProcessGroup) -> Any:
        sent.append(tensor.nbytes)
        return start(tensor, group)

    ddp_gradients.start_all_reduce_ = counted  # this process ends with the test
    model, _ = wrap_after(make_net())
    train_inside(model, 2)
    sent.clear()
    train_inside(model, 1, 2)
    return sum(sent), sum(p.nbytes for p in model.parameters())


def test_nothing_but_the_gradients_is_sent() -> None:
    for sent, gradients in run_ranks(2, _traffic):
        assert sent == gradients
