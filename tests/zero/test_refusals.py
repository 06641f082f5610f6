"""What can't be right is refused, with the reason and the cure."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tests.launch import run_ranks
from tests.reference.training import make_model, require_equal, set_gradients, values_of


def test_without_a_process_group_the_error_says_how_to_get_one() -> None:
    with pytest.raises(RuntimeError, match=r"init_process_group\('gloo'\).*torchrun.*MASTER_PORT"):
        ZeroRedundancyOptimizer(make_model().parameters(), torch.optim.SGD)


def _non_member() -> None:
    group = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="global rank 1 is not a member of the process_group"):
            ZeroRedundancyOptimizer(make_model().parameters(), torch.optim.SGD, group)


def test_a_rank_outside_the_group() -> None:
    run_ranks(2, _non_member)


class Prodigy(torch.optim.SGD):
    """Stands for the real one, which isn't installed."""


class MyLBFGS(torch.optim.LBFGS):
    """A subclass counts as well."""


class DAdaptAdam(torch.optim.Adam):
    """Stands for the real one, which isn't installed."""


def _coupled(optimizer_class: type[torch.optim.Optimizer]) -> None:
    with pytest.raises(ValueError, match=f"{optimizer_class.__name__} can't be sharded: its "):
        ZeroRedundancyOptimizer(make_model().parameters(), optimizer_class)


@pytest.mark.parametrize("optimizer_class", [torch.optim.LBFGS, MyLBFGS, Prodigy, DAdaptAdam])
def test_optimizers_that_couple_all_parameters(optimizer_class: Any) -> None:
    run_ranks(2, _coupled, optimizer_class)


class Lamb(torch.optim.SGD):
    """Stands for those that clip by themselves."""

    def __init__(self, params: Any, max_grad_norm: float = 1.0) -> None:
        super().__init__(params)
        for group in self.param_groups:
            group["max_grad_norm"] = max_grad_norm


def _clips_by_itself() -> None:
    with pytest.raises(ValueError, match=r"max_grad_norm=1.0 can't be sharded.*clip_grad_norm_"):
        ZeroRedundancyOptimizer(make_model().parameters(), Lamb)
    ZeroRedundancyOptimizer(make_model().parameters(), Lamb, max_grad_norm=0)


def test_optimizers_that_clip_by_the_norm_of_all_gradients() -> None:
    run_ranks(2, _clips_by_itself)


def _contradicts(options: dict[str, Any], message: str) -> None:
    model = make_model()
    with pytest.raises(ValueError, match=message):
        ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, overlap_with_ddp=True, **options, lr=0.1
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partition": "elements"}, "steps parameters one by one"),
        ({"flat_step": True}, "steps parameters one by one"),
        ({"overlap_with_forward": True, "module": torch.nn.Linear(1, 1)}, "nothing to overlap"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("shard_gradients", [False, True])
def test_options_that_contradict_the_step_inside_backward(
    options: dict[str, Any], message: str, shard_gradients: bool
) -> None:
    run_ranks(2, _contradicts, {**options, "shard_gradients": shard_gradients}, message)


def _reduces_nothing() -> None:
    with pytest.raises(ValueError, match="overlap_with_backward=True says when"):
        ZeroRedundancyOptimizer(
            make_model().parameters(), torch.optim.SGD, overlap_with_backward=True
        )


def test_when_to_reduce_gradients_that_are_averaged_elsewhere() -> None:
    run_ranks(2, _reduces_nothing)


def _wrong_device() -> None:
    parameters = [
        torch.nn.Parameter(torch.ones(2)),
        torch.nn.Parameter(torch.ones(2, device="meta")),
    ]
    with pytest.raises(ValueError, match=r"parameter 1 of group 0 is on meta.*cpu:gloo"):
        ZeroRedundancyOptimizer(parameters, torch.optim.SGD)


def test_a_device_that_the_backend_cannot_send() -> None:
    run_ranks(2, _wrong_device)


def _copying() -> None:
    optimizer = ZeroRedundancyOptimizer(make_model().parameters(), torch.optim.SGD)
    for copying in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match=r"can't be copied or pickled.*state_dict\(\) to save"):
            copying(optimizer)  # type: ignore[operator] # mypy takes it for a plain tensor or module


def test_copying_and_pickling() -> None:
    run_ranks(1, _copying)


def _replaced(resident: bool, how: str) -> None:
    model = make_model()
    optimizer = ZeroRedundancyOptimizer(
        model.named_parameters(), torch.optim.SGD, lr=0.1, parameters_as_bucket_view=resident
    )
    if dist.get_rank() == 1:  # one rank is enough
        if how == "half":
            model.half()
        elif how == "shape":
            model[2].bias.data = torch.zeros(30)
        else:
            model[2].bias.data = model[2].bias.detach().clone()
    before = values_of(model.parameters())
    set_gradients(model.parameters(), 0)
    with pytest.raises(
        RuntimeError, match=r"parameter \d of group 0 \('.*'\).*build the optimizer"
    ):
        optimizer.step()
    require_equal(before, values_of(model.parameters()))


@pytest.mark.parametrize(
    ("resident", "how"),
    [(True, "half"), (True, "shape"), (True, "storage"), (False, "half"), (False, "shape")],
)
def test_replaced_storage_is_found_before_it_does_harm(resident: bool, how: str) -> None:
    run_ranks(2, _replaced, resident, how)


def _no_plain_parameters() -> None:
    sparse = torch.nn.Parameter(torch.eye(3).to_sparse())
    with pytest.raises(TypeError, match=r"parameter 0 of group 0 .* torch.sparse_coo.*only dense"):
        ZeroRedundancyOptimizer([sparse], torch.optim.SGD)


def test_parameters_that_hold_no_dense_elements_of_their_own() -> None:
    run_ranks(2, _no_plain_parameters)


def _exchanged(how: str) -> None:
    first, second, *others = make_model().parameters()
    optimizer = ZeroRedundancyOptimizer(
        [{"params": [first, *others]}, {"params": [second]}], torch.optim.SGD, lr=0.1
    )
    if how == "group removed":
        optimizer.param_groups.pop()
    elif how == "parameter replaced":
        optimizer.param_groups[1]["params"][0] = torch.nn.Parameter(torch.ones_like(second))
    else:
        optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop())
    before = values_of([first, second])
    set_gradients([first, second], 0)
    with pytest.raises(RuntimeError, match="no longer those that the optimizer was built with"):
        optimizer.step()
    require_equal(before, values_of([first, second]))


@pytest.mark.parametrize("how", ["group removed", "parameter replaced", "parameter moved"])
def test_parameters_exchanged_inside_param_groups(how: str) -> None:
    run_ranks(2, _exchanged, how)
