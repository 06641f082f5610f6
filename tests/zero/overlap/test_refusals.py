"""What can't be right with the update inside backward raises on every rank, with the cure."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from tensorplay.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tests.launch import run_ranks
from tests.reference.ddp import ADAMW, make_net
from tests.reference.training import require_equal, values_of
from tests.zero.overlap.twins import Twins, backward

Run = Callable[..., list[Any]]


def make_zero(params: Any, **options: Any) -> ZeroRedundancyOptimizer:
    options = {"overlap_with_ddp": True, **options}
    return ZeroRedundancyOptimizer(params, torch.optim.AdamW, **options, **ADAMW)


def _arguments() -> None:
    model = DistributedDataParallel(make_net())
    zero = make_zero(model.parameters())
    usual = make_zero(model.parameters(), overlap_with_ddp=False)
    with pytest.raises(ValueError, match="built with overlap_with_ddp=True; this one has"):
        hook_with_zero_step(allreduce_hook, model, usual)
    wrong: Any
    for wrong in ((None, model, zero), (allreduce_hook, make_net(), zero)):
        with pytest.raises(TypeError, match="needs a"):
            hook_with_zero_step(*wrong)
    with pytest.raises(TypeError, match=r"needs a tensorplay.*got torch.optim"):
        hook_with_zero_step(allreduce_hook, model, torch.optim.AdamW(model.parameters()))  # type: ignore[arg-type] # the test passes what the types don't allow


def test_wrong_arguments(run: Run) -> None:
    run(1, _arguments)


def _disagreement() -> None:
    model = DistributedDataParallel(make_net())
    zero = make_zero(model.parameters())
    with pytest.raises(RuntimeError, match=r"shard_buckets is False on .*0 but True on .*1"):
        hook_with_zero_step(allreduce_hook, model, zero, shard_buckets=dist.get_rank() == 1)
    with pytest.raises(RuntimeError, match="overlap_with_ddp"):
        make_zero(make_net().parameters(), overlap_with_ddp=dist.get_rank() == 1)


def test_ranks_that_differ(run: Run) -> None:
    run(2, _disagreement)


def _groups() -> None:
    pair = dist.new_group([1, 2])
    model = DistributedDataParallel(make_net())
    if dist.get_rank():
        zero = make_zero(model.parameters(), process_group=pair)
        with pytest.raises(ValueError, match=r"averages on .*\[0, 1, 2\] .* across .*\[1, 2\]"):
            hook_with_zero_step(allreduce_hook, model, zero)


def test_model_and_optimizer_on_different_groups(run: Run) -> None:
    run(3, _groups)


def _parameters() -> None:
    model, other = DistributedDataParallel(make_net()), make_net()
    zero = make_zero([*model.parameters(), *other.parameters()])
    with pytest.raises(ValueError, match=r"parameter 6 of the optimizer is trained, but"):
        hook_with_zero_step(allreduce_hook, model, zero)
    twins = Twins()
    twins.train(2)
    twins.zero.add_param_group({"params": list(other.parameters())})
    before = values_of(twins.model.parameters())
    with pytest.raises((ValueError, RuntimeError), match=r"parameter 6 of the optimizer is traine"):
        backward(twins.model, 2)
    require_equal(before, values_of(twins.model.parameters()))


def test_parameters_that_the_model_lacks(run: Run) -> None:
    run(2, _parameters)


def _thawed_too_late() -> None:
    net = make_net()
    net[0].requires_grad_(False)
    model = DistributedDataParallel(net)
    zero = make_zero(model.parameters())
    model.register_comm_hook(None, hook_with_zero_step(allreduce_hook, model, zero))
    backward(model, 0)
    net[0].requires_grad_(True)
    with pytest.raises((ValueError, RuntimeError), match="parameter 0 of the optimizer is trained"):
        backward(model, 1)


def test_parameters_that_ddp_took_for_frozen(run: Run) -> None:
    run(2, _thawed_too_late)


def _no_hook() -> None:
    model = DistributedDataParallel(make_net())
    zero = make_zero(model.parameters())
    hook = hook_with_zero_step(allreduce_hook, model, zero)
    backward(model, 0)
    with pytest.raises(RuntimeError, match=r"nothing has been updated.*register_comm_hook\("):
        zero.step()
    model.register_comm_hook(None, hook)
    backward(model, 1)
    zero.step()


def test_a_hook_that_was_never_registered(run: Run) -> None:
    run(2, _no_hook)


def _methods() -> None:
    twins = Twins()
    twins.train(1)
    zero = twins.zero
    with pytest.raises(RuntimeError, match="before the norm of all gradients is known; to clip"):
        zero.clip_grad_norm_(1.0)
    with pytest.raises(RuntimeError, match="use the no_sync\\(\\) of DistributedDataParallel"):
        zero.no_sync()
    with pytest.raises(ValueError, match="a closure can't be used with overlap_with_ddp=True"):
        zero.step(lambda: None)
    with pytest.raises(TypeError, match="step\\(\\) got scale, but"):
        zero.step(scale=2.0)
    parameter = next(twins.model.parameters())
    require_equal(parameter.grad, zero.full_grad(parameter))
    twins.train(2, first=1)


def test_methods_that_come_too_late(run: Run) -> None:
    run(2, _methods)


def _grad_scaler(unscale: bool) -> None:
    twins = Twins()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    inputs = torch.ones(4, 6)
    scaler.scale(twins.model(inputs).square().mean()).backward()
    if unscale:
        scaler.unscale_(twins.zero)
    with pytest.raises(RuntimeError, match="GradScaler can't be used with overlap_with_ddp=True"):
        scaler.step(twins.zero)
    switched_off = torch.amp.GradScaler("cpu", enabled=False)
    twins.zero.zero_grad()
    switched_off.scale(twins.model(inputs).square().mean()).backward()
    switched_off.step(twins.zero)


@pytest.mark.parametrize("unscale", [False, True])
def test_a_grad_scaler(run: Run, unscale: bool) -> None:
    run(2, _grad_scaler, unscale)


def _changed_gradients(view: bool) -> None:
    twins = Twins(gradient_as_bucket_view=view)
    twins.train(2)
    twins.zero.zero_grad()
    backward(twins.model, 2)
    nn.utils.clip_grad_norm_(twins.model.parameters(), 1.0)
    with pytest.raises(RuntimeError, match="gradients were changed between backward and step"):
        twins.zero.step()
    for set_to_none in (True, False):
        twins.zero.zero_grad(set_to_none)
        backward(twins.model, 3)
        twins.zero.zero_grad(set_to_none)
        twins.zero.step()


@pytest.mark.parametrize("view", [False, True])
def test_gradients_changed_after_they_were_used(run: Run, view: bool) -> None:
    run(2, _changed_gradients, view)


def _options_differ() -> None:
    twins = Twins()
    twins.train(2)
    twins.require_state_equal()
    before = values_of(twins.model.parameters())
    twins.zero.param_groups[0]["lr"] = 0.05 if dist.get_rank() == 0 else 0.5
    with pytest.raises(RuntimeError, match=r"lr is 0\.05 on .*0 but 0\.5 on .*1"):
        backward(twins.model, 2)
    require_equal(before, values_of(twins.model.parameters()))
    twins.require_state_equal()
    twins.zero.param_groups[0]["lr"] = 0.05
    twins.train(2, first=2)


def test_options_that_differ_change_nothing(run: Run) -> None:
    run(2, _options_differ)


def _replaced_storage() -> None:
    twins = Twins(resident=True)
    twins.train(2)
    parameter = next(twins.model.parameters())
    if dist.get_rank() == 1:
        parameter.data = parameter.data.clone()
    with pytest.raises(RuntimeError, match=r"the storage of parameter 0 .*was replaced"):
        backward(twins.model, 2)


def test_a_storage_replaced_on_one_rank() -> None:
    run_ranks(2, _replaced_storage)


class Failing(torch.optim.SGD):
    """Raises on demand."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails and any(group["params"] for group in self.param_groups):
            raise ValueError("on purpose")
        return super().step(closure)


def _failing_step(interleaved: bool) -> list[torch.Tensor]:
    twins = Twins(optimizer_class=Failing, options={"lr": 0.1}, interleaved=interleaved)
    twins.train(2)
    inner: Any = twins.zero.optim
    inner.fails = dist.get_rank() == 1
    error, message = (
        (ValueError, "^on purpose") if inner.fails else (RuntimeError, r"rank 1.*: on p")
    )
    with pytest.raises(error, match=message):
        backward(twins.model, 2)
    replica = values_of(twins.model.parameters())
    inner.fails = False
    backward(twins.model, 3)
    return replica


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_step_that_fails_on_one_rank_raises_on_all_and_leaves_equal_replicas(
    run: Run, interleaved: bool
) -> None:
    first, *others = run(3, _failing_step, interleaved)
    for other in others:
        require_equal(first, other)


def _depends_on_gradients() -> None:
    class Counts(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["seen"] = group.get("seen", 0) + sum(p.numel() for p in group["params"])
            return super().step(closure)

    twins = Twins(make_net, Counts, {"lr": 0.1})
    backward(twins.model, 0)  # DDP forms its buckets in the second iteration
    with pytest.raises(RuntimeError, match=r"writes options 'seen'.*overlap_with_ddp=False"):
        backward(twins.model, 1)


def test_an_optimizer_that_looks_at_all_gradients_together() -> None:
    run_ranks(1, _depends_on_gradients)
