"""What the hook that reduces to owners can't do raises on every rank, with the cure."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tensorplay.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import reduce_to_owners_hook
from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tests.launch import run_ranks
from tests.reference.ddp import ADAMW, make_net
from tests.reference.training import require_equal, values_of
from tests.zero.ddp_hook.twins import Twins
from tests.zero.overlap.twins import backward

Run = Callable[..., list[Any]]


def _construction() -> None:
    model = DistributedDataParallel(make_net())
    for option in ("shard_gradients", "overlap_with_ddp"):
        zero = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, **{option: True}, **ADAMW
        )
        with pytest.raises(ValueError, match="built without shard_gradients and overlap_with_ddp"):
            reduce_to_owners_hook(model, zero)
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **ADAMW)
    with pytest.raises(TypeError, match="needs a DistributedDataParallel module, got Sequential"):
        reduce_to_owners_hook(make_net(), zero)  # type: ignore[arg-type] # the test passes what the types don't allow
    with pytest.raises(TypeError, match=r"got torch\.optim\.adamw\.AdamW"):
        reduce_to_owners_hook(model, torch.optim.AdamW(model.parameters()))  # type: ignore[arg-type] # as above
    reduce_to_owners_hook(model, zero)
    with pytest.raises(RuntimeError, match=r"use its no_sync\(\)"):
        zero.no_sync()


def test_wrong_arguments(run: Run) -> None:
    run(2, _construction)


def _groups() -> None:
    pair = dist.new_group([1, 2])
    model = DistributedDataParallel(make_net())
    if dist.get_rank():
        zero = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, process_group=pair, **ADAMW
        )
        with pytest.raises(ValueError, match=r"averages on .*\[0, 1, 2\] .* across .*\[1, 2\]"):
            reduce_to_owners_hook(model, zero)


def test_model_and_optimizer_on_different_groups(run: Run) -> None:
    run(3, _groups)


def _unreduced() -> None:
    twins = Twins()
    twins.train(2)
    before = values_of(twins.model.parameters())
    twins.zero.zero_grad()
    with twins.model.no_sync():
        backward(twins.model, 2)
    with pytest.raises(RuntimeError, match="ran under no_sync\\(\\) of DistributedDataParallel"):
        twins.zero.step()
    require_equal(before, values_of(twins.model.parameters()))
    twins.train(2, first=2)


def test_a_step_on_gradients_that_were_not_reduced(run: Run) -> None:
    run(2, _unreduced)


def _taken_for_whole() -> None:
    twins = Twins()
    backward(twins.model, 0)
    foreign = [p for p in twins.model.parameters() if type(p.grad) is not torch.Tensor]
    assert foreign
    for parameter in foreign:
        gradient: Any = parameter.grad
        with pytest.raises(TypeError, match="this rank holds only a part of it"):
            gradient.norm()


def test_what_other_ranks_own_does_not_pass_for_a_gradient(run: Run) -> None:
    run(2, _taken_for_whole)


def _two_hooks() -> None:
    model = DistributedDataParallel(make_net())
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **ADAMW)
    model.register_comm_hook(None, reduce_to_owners_hook(model, zero))
    backward(model, 0)
    zero.step()
    reduce_to_owners_hook(model, zero)
    zero.zero_grad()
    with pytest.raises(RuntimeError, match="another hook or optimizer has been made for these"):
        backward(model, 1)


def test_a_hook_that_was_made_anew_but_not_registered() -> None:
    run_ranks(2, _two_hooks)


def _raises_in_backward() -> None:
    twins = Twins()
    twins.train(2)
    twins.zero.zero_grad()
    first = next(twins.model.parameters())

    def fail(_: torch.Tensor) -> None:
        raise ValueError("on purpose")

    handle = first.register_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        backward(twins.model, 2)
    handle.remove()
    with pytest.raises(RuntimeError, match="ended in an exception, so that its gradients were not"):
        twins.zero.step()


def test_a_backward_that_ended_half_way_on_all_ranks() -> None:
    run_ranks(2, _raises_in_backward)
