"""``DistributedOptimizer`` is one name for two classes; which one is meant is seen from its arguments."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tensorplay.distributed.optim import DistributedOptimizer
from tensorplay.distributed.optim.data_parallel import DataParallelOptimizer
from tests.remote.workers import Placed, Workers

MODEL = torch.nn.Linear(2, 2)
LOCAL_FORMS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "by keywords": (
        (),
        {
            "optim": torch.optim.Adam,
            "params": MODEL.parameters(),
            "named_parameters": dict(MODEL.named_parameters()),
        },
    ),
    "by one keyword": ((torch.optim.Adam,), {"params": MODEL.parameters()}),
    "by the first parameter": ((torch.optim.Adam, MODEL.parameters()), {"lr": 0.1}),
    "by the first parameter of a group": (
        (torch.optim.Adam, ({"params": p} for p in MODEL.parameters())),
        {},
    ),
    "by the first named parameter": ((torch.optim.Adam, MODEL.named_parameters()), {}),
}


@pytest.mark.parametrize("form", LOCAL_FORMS)
def test_local_parameters_are_recognised(form: str) -> None:
    args, kwargs = LOCAL_FORMS[form]
    optimizer = DistributedOptimizer(*args, **kwargs)
    assert isinstance(optimizer, DistributedOptimizer)
    assert isinstance(optimizer, DataParallelOptimizer)
    assert isinstance(optimizer.optim, torch.optim.Adam)


def test_an_optimizer_alone_is_local() -> None:
    inner = torch.optim.Adam(MODEL.parameters())
    assert DistributedOptimizer(inner).optim is inner


def test_both_kinds_of_keywords_are_refused() -> None:
    with pytest.raises(TypeError, match=r"\['params'\].*\['params_rref'\].*not both"):
        DistributedOptimizer(torch.optim.SGD, params=[], params_rref=[])


def test_missing_arguments_are_named() -> None:
    with pytest.raises(TypeError, match="needs an optimizer class and parameters"):
        DistributedOptimizer(torch.optim.SGD)


def test_it_can_t_be_subclassed() -> None:
    class Mine(DistributedOptimizer):
        pass

    with pytest.raises(TypeError, match="let Mine hold one"):
        Mine(torch.optim.SGD, [])


def test_without_rpc_the_error_shows_init_rpc() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)not initialised.*init_rpc\(\"trainer\""):
        DistributedOptimizer(optimizer_class=torch.optim.SGD, params_rref=[], lr=0.1)


def test_without_rpc_in_torch_the_error_says_so() -> None:
    script = """
import torch
import torch.distributed.rpc as rpc
rpc.is_available = lambda: False
from tensorplay.distributed.optim import DistributedOptimizer
try:
    DistributedOptimizer(optimizer_class=torch.optim.SGD, params_rref=[1], lr=0.1)
except RuntimeError as error:
    print(error)
"""
    run = subprocess.run(  # noqa: S603  # our own interpreter, our own statements
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert "this build of PyTorch doesn't have" in run.stdout


def test_importing_it_imports_nothing_that_needs_rpc() -> None:
    script = """
import sys
import tensorplay.distributed.optim
print([name for name in sys.modules if name.endswith(("remote.calls", "remote.endpoints"))])
"""
    run = subprocess.run(  # noqa: S603  # our own interpreter, our own statements
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert run.stdout.strip() == "[]"


def _forms() -> None:
    def generated(params: list[Any]) -> Iterator[Any]:
        yield from params

    placed = Placed({"owner1": [0, 1], "owner2": [2]})
    params = placed.params()
    for optimizer in (
        DistributedOptimizer(torch.optim.SGD, params, 0.5),
        DistributedOptimizer(torch.optim.SGD, generated(params), lr=0.5),
        DistributedOptimizer(optimizer_class=torch.optim.SGD, params_rref=params, lr=0.5),
        DistributedOptimizer(torch.optim.SGD, [{"params": generated(params), "lr": 0.5}]),
        DistributedOptimizer(torch.optim.SGD, ({"params": p, "lr": 0.5} for p in params)),
    ):
        assert isinstance(optimizer, DistributedOptimizer)
        assert isinstance(optimizer, torch.optim.Optimizer)
        held = [rref for group in optimizer.param_groups for rref in group["params"]]
        assert held == params
        assert {group["lr"] for group in optimizer.param_groups} == {0.5}
        assert len(optimizer.remote_optimizers) == 2
        assert "parameters: 2 on owner1, 1 on owner2" in repr(optimizer)


def test_every_form_over_rrefs(workers: Workers) -> None:
    workers.train(_forms)


def _refusals() -> None:
    placed = Placed({"owner1": [0, 1], "owner2": [2]})
    params = placed.params()
    build = DistributedOptimizer
    with pytest.raises(ValueError, match="empty parameter list"):
        build(torch.optim.SGD, [])
    with pytest.raises(ValueError, match="group 1 has no parameters"):
        build(torch.optim.SGD, [{"params": params}, {"params": []}])
    with pytest.raises(TypeError, match="parameter 1 of group 0 is a Parameter, not an RRef"):
        build(torch.optim.SGD, [params[0], MODEL.weight])
    with pytest.raises(TypeError, match="must be a dict with the key 'params'"):
        build(torch.optim.SGD, [{"params": params}, params[0]])
    with pytest.raises(TypeError, match="put the RRef into a list"):
        build(torch.optim.SGD, params[0])
    with pytest.raises(ValueError, match="clip_grad_norm must be a positive number, got -1"):
        build(torch.optim.SGD, params, clip_grad_norm=-1)
    with pytest.raises(
        TypeError, match="parameter 0 of group 0 refers to a Model, not to a tensor"
    ):
        build(torch.optim.SGD, [placed.models["owner1"]])
    with pytest.raises(ValueError, match=r"(?s)owner1.*parameter 0 .* parameter 3 .*same tensor"):
        build(torch.optim.SGD, [*params, Placed.params(placed)[0]])
    with pytest.raises(ValueError, match=r"(?s)owner1, owner2.*Invalid learning rate"):
        build(torch.optim.SGD, params, lr=-1.0)
    with pytest.raises(ValueError, match="LBFGS can't be spread over several workers"):
        build(torch.optim.LBFGS, params)
    with pytest.raises(TypeError, match="state_dict"):
        __import__("copy").deepcopy(build(torch.optim.SGD, params))
    optimizer = build(torch.optim.SGD, params)
    with pytest.raises(RuntimeError, match="12345 is not the id of a distributed autograd context"):
        optimizer.step(12345)


def test_wrong_input_is_refused(workers: Workers) -> None:
    workers.train(_refusals)
