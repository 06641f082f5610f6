"""Every form of ``params`` that ``torch.optim`` takes trains what was passed, and stays untouched."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tests.launch import run_ranks
from tests.reference.training import make_model, require_equal, set_gradients, values_of

Form = Callable[[torch.nn.Module], Any]

FORMS: dict[str, Form] = {
    "list": lambda model: list(model.parameters()),
    "generator": lambda model: model.parameters(),
    "tuple": lambda model: tuple(model.parameters()),
    "named": lambda model: model.named_parameters(),
    "groups of lists": lambda model: [
        {"params": list(model.parameters())[:4]},
        {"params": list(model.parameters())[4:], "lr": 0.5},
    ],
    "groups of generators": lambda model: (
        {"params": (p for p in list(model.parameters())[part::2]), "lr": 0.1 * (part + 1)}
        for part in (0, 1)
    ),
    "group of one tensor": lambda model: [
        {"params": next(model.parameters()), "lr": 0.5},
        {"params": list(model.parameters())[1:]},
    ],
    "groups of names": lambda model: [
        {"params": list(model.named_parameters())[:4]},
        {"params": iter(list(model.named_parameters())[4:]), "weight_decay": 0.5},
    ],
    "an empty group": lambda model: [{"params": []}, {"params": list(model.parameters())}],
}


def _train_form(form: str) -> None:
    model, plain_model = make_model(), make_model()
    sharded = ZeroRedundancyOptimizer(FORMS[form](model), torch.optim.AdamW, lr=0.1)
    plain = torch.optim.AdamW(FORMS[form](plain_model), lr=0.1)
    for step in range(2):
        set_gradients(model.parameters(), step)
        set_gradients(plain_model.parameters(), step)
        sharded.step()
        plain.step()
    require_equal(values_of(plain_model.parameters()), values_of(model.parameters()))
    options = [{k: v for k, v in g.items() if k != "params"} for g in sharded.param_groups]
    assert options == [{k: v for k, v in g.items() if k != "params"} for g in plain.param_groups]
    assert sharded.defaults == plain.defaults


@pytest.mark.parametrize("form", FORMS)
def test_form_trains_exactly_what_was_passed(form: str) -> None:
    run_ranks(2, _train_form, form)


def _small_named_groups() -> None:
    model = make_model()
    optimizer = ZeroRedundancyOptimizer(
        [{"params": [named]} for named in model.named_parameters()], torch.optim.AdamW
    )
    optimizer.add_param_group({"params": [("late", torch.nn.Parameter(torch.ones(2)))]})
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    assert names == [*(name for name, _ in model.named_parameters()), "late"]


def test_named_groups_of_which_a_rank_owns_nothing() -> None:
    run_ranks(2, _small_named_groups)


def _callers_dicts() -> None:
    model = make_model()
    parameters = list(model.parameters())
    groups = [{"params": parameters[:3], "lr": 0.3}, {"params": parameters[3:]}]
    optimizer = ZeroRedundancyOptimizer(groups, torch.optim.SGD, lr=0.1)
    optimizer.param_groups[0]["lr"] = 7.0
    assert list(groups[0]) == ["params", "lr"]
    assert groups[0]["lr"] == 0.3
    assert list(groups[1]) == ["params"]
    assert groups[1]["params"] is not optimizer.param_groups[1]["params"]


def test_the_callers_group_dicts_are_neither_kept_nor_changed() -> None:
    run_ranks(2, _callers_dicts)


def _refusals() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    cases: list[tuple[Any, type[Exception], str]] = [
        ([], ValueError, "empty parameter list"),
        (parameter, TypeError, "put the tensor into a list"),
        ([1], TypeError, "can only optimize Tensors"),
        ({parameter}, TypeError, "ordered collections"),
        ([parameter * 2], ValueError, "non-leaf"),
        ([{"params": [parameter]}, {"params": [parameter]}], ValueError, "more than one"),
        ([{"param": [parameter]}], ValueError, "needs the key 'params'"),
        ([("a", parameter), parameter], ValueError, "with/without names"),
    ]
    for params, error, message in cases:
        with pytest.raises(error, match=message):
            ZeroRedundancyOptimizer(
                [{"params": params}] if isinstance(params, set) else params, torch.optim.SGD
            )
    with pytest.raises(ValueError, match="Invalid learning rate"):
        ZeroRedundancyOptimizer([parameter], torch.optim.SGD, lr=-1.0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'momentun'"):
        ZeroRedundancyOptimizer([parameter], torch.optim.SGD, momentun=0.9)
    with pytest.raises(TypeError, match=r"optimizer_class must be a class such as torch.optim.Ad"):
        ZeroRedundancyOptimizer([parameter], torch.optim.SGD([parameter]))
    dist.barrier()  # all ranks are still in step


def test_what_torch_refuses_is_refused_on_every_rank() -> None:
    run_ranks(2, _refusals)


def _duplicates() -> None:
    parameter, plain_parameter = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = ZeroRedundancyOptimizer([parameter, parameter], torch.optim.SGD, lr=0.1)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        plain = torch.optim.SGD([plain_parameter, plain_parameter], lr=0.1)
    set_gradients([parameter], 0)
    set_gradients([plain_parameter], 0)
    optimizer.step()
    plain.step()
    assert torch.equal(parameter, plain_parameter)


def test_duplicates_warn_and_step_as_in_torch() -> None:
    run_ranks(2, _duplicates)


def _later_group(resident: bool) -> None:
    model, plain_model = make_model(), make_model()
    late, plain_late = (
        [
            torch.nn.Parameter(torch.ones(3, dtype=dtype))
            for dtype in (torch.bfloat16, torch.float64)
        ]
        for _ in range(2)
    )
    sharded = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=0.1, parameters_as_bucket_view=resident
    )
    plain = torch.optim.AdamW(plain_model.parameters(), lr=0.1)
    owners = dict(
        zip(sharded._sharded.parameters, sharded._sharded.plan.partition.owners, strict=True)
    )
    group = {"params": iter(late), "lr": 0.5}
    for step in range(4):
        if step == 2:
            sharded.add_param_group(group)
            plain.add_param_group({"params": plain_late, "lr": 0.5})
        set_gradients([*model.parameters(), *late], step)
        set_gradients([*plain_model.parameters(), *plain_late], step)
        sharded.step()
        plain.step()
    assert list(group) == ["params", "lr"]
    later = dict(
        zip(sharded._sharded.parameters, sharded._sharded.plan.partition.owners, strict=True)
    )
    assert owners.items() <= later.items(), "an earlier parameter moved"
    assert [p.dtype for p in model.parameters()] == [p.dtype for p in plain_model.parameters()]
    require_equal(
        values_of([*plain_model.parameters(), *plain_late]),
        values_of([*model.parameters(), *late]),
    )


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_group_of_other_dtypes_added_later(world_size: int, resident: bool) -> None:
    run_ranks(world_size, _later_group, resident)


def _bad_later_group() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = ZeroRedundancyOptimizer([parameter], torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="more than one"):
        optimizer.add_param_group({"params": [parameter]})
    newcomer = torch.nn.Parameter(torch.ones(2 + dist.get_rank()))
    with pytest.raises(RuntimeError, match=r"parameters\[0\].shape\[0\] is 2 on rank 0 but 3 on"):
        optimizer.add_param_group({"params": [newcomer]})
    assert len(optimizer.param_groups) == len(optimizer.optim.param_groups) == 1
    set_gradients([parameter], 0)
    optimizer.step()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})


def test_a_bad_later_group_changes_nothing() -> None:
    run_ranks(2, _bad_later_group)
