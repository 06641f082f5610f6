"""What can't be right is refused, on every rank, with the value and the cure."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState as TorchState,
)

from tensorplay.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from tensorplay.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from tensorplay.distributed.algorithms.model_averaging.hierarchical_model_averager import (
    HierarchicalModelAverager,
)
from tensorplay.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from tensorplay.distributed.optim._core.collectives import CommunicationError
from tests.launch import run_ranks


def refusal(kind: type[Exception], function: Callable[[], Any]) -> str:
    with pytest.raises(kind) as raised:
        function()
    return str(raised.value)


def _constructors() -> None:
    assert "period=0 " in refusal(ValueError, lambda: PeriodicModelAverager(0))
    assert "warmup_steps=-1 " in refusal(ValueError, lambda: PeriodicModelAverager(2, -1))
    with pytest.warns(UserWarning, match="period=1 averages the parameters in every step"):
        PeriodicModelAverager(1)
    with pytest.warns(UserWarning, match="a longest period of 1"):
        HierarchicalModelAverager({1: 4})
    for levels, words in (
        (None, "at least one period"),
        ({}, "at least one period"),
        ({0: 4}, "period of 0"),
        ({2: 2}, "is 2, and must be the number of ranks in process_group, 4"),
        ({8: 2, 4: 4}, r"must ascend, but are \[8, 4\]; sort the dict"),
        ({2: 3, 4: 4}, r"are \[3, 4\], but each must divide the next"),
        ({2: 0, 4: 4}, r"sizes in period_group_size_dict are \[0, 4\]"),
    ):
        message = refusal(ValueError, lambda: HierarchicalModelAverager(levels))  # noqa: B023 - called before the loop goes on
        assert re.search(words, message), message
    assert "warmup_steps=-2" in refusal(ValueError, lambda: HierarchicalModelAverager({2: 4}, -2))
    averager = PeriodicModelAverager(2, 5)
    local = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert "construct it first" in refusal(
        TypeError,
        lambda: PostLocalSGDOptimizer(torch.optim.SGD, averager),  # type: ignore[arg-type] # the test passes what the types don't allow, or a wrapper
    )
    assert "must be a ModelAverager" in refusal(
        TypeError,
        lambda: PostLocalSGDOptimizer(local, 4),  # type: ignore[arg-type] # the test passes what the types don't allow, or a wrapper
    )
    torchs = TorchState(None, dist.group.WORLD, 5)
    assert "import it from tensorplay" in refusal(
        TypeError,
        lambda: PostLocalSGDOptimizer(local, averager, hook_state=torchs),  # type: ignore[arg-type] # the test passes what the types don't allow, or a wrapper
    )
    state = PostLocalSGDState(None, dist.group.WORLD, 4)
    message = refusal(ValueError, lambda: PostLocalSGDOptimizer(local, averager, hook_state=state))
    assert "for 4 iterations" in message
    assert "warm-up lasts 5 steps" in message


def _wrong_tensors() -> None:
    averager = PeriodicModelAverager(2)
    parameter = nn.Parameter(torch.ones(2))
    assert "'a' of type str" in refusal(
        NotImplementedError,
        lambda: averager.average_parameters(["a"]),  # type: ignore[list-item] # what shall be refused
    )
    assert "put it into a list" in refusal(
        NotImplementedError, lambda: averager.average_parameters(parameter)
    )
    sparse = torch.ones(2, 2).to_sparse()
    assert "tensor 0 to average is a Tensor with layout torch.sparse_coo" in refusal(
        TypeError, lambda: averager.average_parameters([sparse])
    )
    meta = torch.ones(2, device="meta")
    assert "is on meta, for which the process group has no backend" in refusal(
        ValueError, lambda: averager.average_parameters([meta])
    )
    assert averager.step == 0
    averager.average_parameters([parameter])
    assert averager.step == 1


def _zero() -> None:
    parameters = [nn.Parameter(torch.ones(3))]
    halves, _ = dist.new_subgroups(group_size=2)
    averager = PeriodicModelAverager(2, 1)

    def build(group: Any, **options: Any) -> PostLocalSGDOptimizer:
        local = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, group, lr=0.1)
        return PostLocalSGDOptimizer(local, averager, **options)

    build(halves)
    build(halves, hook_state=PostLocalSGDState(None, halves, 1))
    message = refusal(ValueError, lambda: build(None))
    assert "shards over ranks [0, 1, 2, 3], which must be some of those" in message
    state = PostLocalSGDState(None, halves, 1)
    own = [0, 1] if dist.get_rank() < 2 else [2, 3]
    message = refusal(ValueError, lambda: build(None, hook_state=state))
    assert f"over ranks [0, 1, 2, 3], but gradients are averaged over {own}" in message
    state = PostLocalSGDState(None, halves, 1, post_local_gradient_allreduce=False)
    message = refusal(ValueError, lambda: build(halves, hook_state=state))
    assert f"over ranks {own}, but gradients are averaged over no ranks" in message
    message = refusal(ValueError, lambda: build(halves, state_averager=averager))
    assert "can't average the state of a ZeroRedundancyOptimizer" in message


def test_wrong_arguments() -> None:
    run_ranks(4, _constructors)


def test_what_cannot_be_averaged() -> None:
    run_ranks(2, _wrong_tensors)


def test_a_sharded_optimizer_over_other_ranks_than_the_gradients() -> None:
    run_ranks(4, _zero)


def test_without_a_process_group() -> None:
    with pytest.raises(RuntimeError, match=r"no process group to average over: .*init_process_gr"):
        PeriodicModelAverager(2)


# Ranks that disagree


def _disagree(what: str) -> str:
    rank = dist.get_rank()
    sizes = [3, 4, 5]
    period, warmup_steps, steps = 4, 3, 0
    if rank == 1:
        match what:
            case "period":
                period = 5
            case "warm-up":
                warmup_steps = 2
            case "shape":
                sizes[1] = 7
            case "number":
                del sizes[-1]
            case "step":
                steps = 1
    averager = PeriodicModelAverager(period, warmup_steps)
    averager.step = steps
    parameters = [nn.Parameter(torch.ones(size)) for size in sizes]
    if what == "frozen" and rank == 1:
        parameters[2].requires_grad_(False)
    return refusal(RuntimeError, lambda: averager.average_parameters(parameters))


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("period", "schedule.period is 4 on rank 0 but 5 on rank 1"),
        ("warm-up", "schedule.warmup_steps is 3 on rank 0 but 2 on rank 1"),
        ("shape", "tensors[1].shape[0] is 4 on rank 0 but 7 on rank 1"),
        ("number", "tensors[2] is"),
        ("frozen", "tensors[2] is"),
        ("step", "'average_parameters (step 0)' on rank 0 but 'average_parameters (step 1)' on ra"),
    ],
)
def test_ranks_that_disagree_are_told_in_the_first_step(what: str, expected: str) -> None:
    for message in run_ranks(2, _disagree, what):
        assert expected in message


def _an_update_fails() -> list[Any]:
    parameter = nn.Parameter(torch.full((2,), float(dist.get_rank())))
    local = torch.optim.SGD([parameter], lr=0.1)
    optimizer = PostLocalSGDOptimizer(local, PeriodicModelAverager(2, 1))
    optimizer.step()

    def fail(*_: Any) -> None:
        raise ArithmeticError("on one rank")

    if dist.get_rank() == 1:
        handle = local.register_step_pre_hook(fail)
    with pytest.raises(ArithmeticError if dist.get_rank() == 1 else RuntimeError) as raised:
        optimizer.step()
    assert "on one rank" in str(raised.value)
    if dist.get_rank() == 1:
        handle.remove()
    optimizer.step()
    return [parameter.tolist(), optimizer.averager.step]


def test_where_an_update_fails_on_one_rank_all_raise_and_can_go_on() -> None:
    assert run_ranks(2, _an_update_fails) == [[[0.5, 0.5], 2]] * 2


def _late() -> str:
    averager = PeriodicModelAverager(2)
    if dist.get_rank() == 1:
        return "never came"
    return refusal(
        CommunicationError, lambda: averager.average_parameters([nn.Parameter(torch.ones(1))])
    )


def test_a_rank_that_does_not_come_is_an_error_and_no_hang() -> None:
    message, _ = run_ranks(2, _late, collective_timeout_s=1.0)
    assert "PeriodicModelAverager: not every rank of the process group has come" in message
