"""``as_functional_optim``: what torch's promises, and what the classes do."""

import copy
import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tensorplay.distributed.optim import as_functional_optim, register_functional_optim
from tensorplay.distributed.optim.functional import registry
from tests.functional.variants import (
    CLASSES,
    Variant,
    clone,
    equal,
    make_grads,
    make_params,
    mathematical_variants,
    step_eagerly,
)

TORCHS_MESSAGES = """
import json, torch, warnings
from torch.distributed.optim import as_functional_optim

def message(name):
    cls = getattr(torch.optim, name, name)
    try:
        as_functional_optim(cls, lr=0.1).step([torch.ones(1)])
    except Exception as error:
        return str(error).splitlines()[-1]

print(json.dumps({name: message(name) for name in NAMES}))
"""
UNSUPPORTED = ("LBFGS", "NAdam", "no class")


@pytest.fixture(scope="module")
def torchs_messages() -> dict[str, str]:
    """What torch's say to a gradient too many or a class they don't have, in a process apart.

    Importing torch's package here would change what the other tests of this process see.
    """
    names = [*(known.__name__ for known in CLASSES.values()), *UNSUPPORTED]
    finished = subprocess.run(  # noqa: S603 - our own interpreter, our own program
        [sys.executable, "-W", "ignore", "-c", f"NAMES = {names}\n{TORCHS_MESSAGES}"],
        capture_output=True,
        text=True,
        check=True,
    )
    messages: dict[str, str] = json.loads(finished.stdout)
    return messages


@pytest.fixture(autouse=True)
def _clean_registry() -> Iterator[None]:
    before = dict(registry._registered)
    yield
    registry._registered.clear()
    registry._registered.update(before)


# One parameter at a time


@pytest.mark.parametrize("variant", mathematical_variants(), ids=str)
def test_step_param_steps_as_torch(variant: Variant) -> None:
    params, grads = make_params(), make_grads(5)
    expected, _ = step_eagerly(variant, params, grads)
    optimizer = as_functional_optim(variant.optimizer_class, **variant.options)
    for of_step in grads:
        for param, grad in zip(params, of_step, strict=True):
            optimizer.step_param(param, grad)
    assert equal(params, expected)


@pytest.mark.parametrize("name", CLASSES)
def test_step_param_without_gradient_does_nothing(name: str) -> None:
    param = torch.ones(2)
    optimizer = as_functional_optim(CLASSES[name])
    optimizer.step_param(param, None)
    assert param.tolist() == [1, 1]
    assert optimizer.state == {}


def test_a_parameter_that_requires_a_gradient_is_stepped() -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = as_functional_optim(torch.optim.SGD, lr=1.0)
    optimizer.step_param(param, torch.ones(2))
    assert param.tolist() == [-1, -1]
    assert param.grad is None


# All parameters


@pytest.mark.parametrize("name", CLASSES)
def test_a_gradient_of_none_skips_its_parameter(name: str) -> None:
    params, grads = make_params(), make_grads(3)
    with_gaps: list[list[Tensor | None]] = [list(of_step) for of_step in grads]
    with_gaps[0][1] = with_gaps[1][0] = None
    with_gaps[2] = [None] * len(params)
    expected = clone(params)
    theirs = CLASSES[name](expected)
    optimizer = as_functional_optim(CLASSES[name])
    optimizer.param_group["params"] = params
    for of_step in with_gaps:
        for param, grad in zip(expected, of_step, strict=True):
            param.grad = grad
        theirs.step()
        optimizer.step(of_step)
    assert equal(params, expected)


@pytest.mark.parametrize("name", CLASSES)
def test_the_wrong_number_of_gradients_is_told_in_torchs_words(
    torchs_messages: dict[str, str], name: str
) -> None:
    with pytest.raises(ValueError, match="the gradients passed in does not equal") as caught:
        as_functional_optim(CLASSES[name]).step([torch.ones(1)])
    theirs = torchs_messages[CLASSES[name].__name__]  # TorchScript puts a class before it
    assert theirs.removeprefix("builtins.ValueError: ") == str(caught.value)


def test_groups_have_options_of_their_own() -> None:
    a, b = torch.zeros(1), torch.zeros(1)
    optimizer = as_functional_optim(torch.optim.SGD, lr=1.0)
    optimizer.param_group["params"].append(a)
    optimizer.add_param_group({"params": [b], "lr": 2.0})
    optimizer.step([torch.ones(1), torch.ones(1)])
    optimizer.step_param(b, torch.ones(1))
    assert (a.item(), b.item()) == (-1, -4)


@pytest.mark.parametrize("name", CLASSES)
def test_groups_step_as_torchs(name: str) -> None:
    params, grads = make_params(), make_grads(5)
    expected = clone(params)
    theirs = CLASSES[name]([{"params": expected[:2]}, {"params": expected[2:], "lr": 0.3}])
    optimizer = as_functional_optim(CLASSES[name])
    optimizer.param_group["params"].extend(params[:2])
    optimizer.add_param_group({"params": params[2:], "lr": 0.3})
    for of_step in grads:
        for param, grad in zip(expected, of_step, strict=True):
            param.grad = grad
        theirs.step()
        optimizer.step(of_step)
    assert equal(params, expected)


def test_a_group_with_an_unknown_option_is_refused() -> None:
    optimizer = as_functional_optim(torch.optim.Adam)
    with pytest.raises(ValueError, match="unknown option 'momentum'; the options are lr, betas"):
        optimizer.add_param_group({"params": [], "momentum": 0.9})


def test_a_group_with_an_invalid_value_is_refused() -> None:
    optimizer = as_functional_optim(torch.optim.AdamW)
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        optimizer.add_param_group({"params": [], "lr": -1})


def test_a_parameter_in_two_groups_is_refused() -> None:
    param = torch.zeros(1)
    optimizer = as_functional_optim(torch.optim.SGD)
    optimizer.add_param_group({"params": [param]})
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [param]})


# Options


@pytest.mark.parametrize("name", CLASSES)
def test_defaults_are_the_classes(name: str) -> None:
    eager = CLASSES[name]([torch.zeros(1)])
    assert as_functional_optim(CLASSES[name]).defaults == eager.defaults


def test_options_may_be_given_by_position() -> None:
    assert as_functional_optim(torch.optim.SGD, 0.5, 0.9).defaults["momentum"] == 0.9


def test_a_changed_default_counts_at_the_next_step() -> None:
    param = torch.zeros(1)
    optimizer = as_functional_optim(torch.optim.SGD, lr=1.0)
    optimizer.step_param(param, torch.ones(1))
    optimizer.defaults["lr"] = 3.0
    optimizer.step_param(param, torch.ones(1))
    assert param.item() == -4


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adadelta", {"rho": 2}),
        ("adagrad", {"lr_decay": -1}),
        ("adam", {"lr": -1}),
        ("adamw", {"betas": (0.9, 1.0)}),
        ("adamax", {"eps": -1}),
        ("rmsprop", {"momentum": -1}),
        ("rprop", {"etas": (2.0, 1.0)}),
        ("sgd", {"nesterov": True}),
        ("sgd", {"lr": torch.ones(2)}),
    ],
)
def test_what_the_class_refuses_is_refused_in_its_words(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"nvalid|Nesterov|1-element") as theirs:
        CLASSES[name]([torch.zeros(1)], **options)
    with pytest.raises(ValueError, match=r"nvalid|Nesterov|1-element") as ours:
        as_functional_optim(CLASSES[name], **options)
    assert str(ours.value) == str(theirs.value)


def test_an_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="momentum"):
        as_functional_optim(torch.optim.Adam, momentum=0.9)


@pytest.mark.parametrize("name", ["adadelta", "adam", "adamw", "adamax", "rmsprop", "rprop"])
def test_sparse_gradients_are_refused_where_torch_refuses_them(name: str) -> None:
    optimizer = as_functional_optim(CLASSES[name])
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optimizer.step_param(torch.zeros(2), torch.ones(2).to_sparse())


@pytest.mark.parametrize("name", ["adagrad", "sgd"])
def test_sparse_gradients_are_taken_where_torch_takes_them(name: str) -> None:
    param, expected = torch.ones(3), torch.ones(3)
    sparse = torch.tensor([0.0, 2.0, 0.0]).to_sparse()
    expected.grad = sparse
    with torch.sparse.check_sparse_tensor_invariants(False):
        as_functional_optim(CLASSES[name], lr=0.1).step_param(param, sparse)
        CLASSES[name]([expected], lr=0.1).step()
    assert torch.equal(param, expected)


def test_fused_refuses_complex_parameters() -> None:
    optimizer = as_functional_optim(torch.optim.Adam, fused=True)
    param = torch.zeros(1, dtype=torch.complex64)
    with pytest.raises(RuntimeError, match="`fused=True` requires all the params to be floating"):
        optimizer.step_param(param, param)


def test_steps_are_counted_in_the_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        param = torch.zeros(1)
        optimizer = as_functional_optim(torch.optim.Adam)
        optimizer.step_param(param, param)
        assert optimizer.state[param]["step"].dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_it_can_be_copied(copied: Any) -> None:
    optimizer = as_functional_optim(torch.optim.Adam, lr=0.1)
    optimizer.param_group["params"].append(torch.ones(2))
    optimizer.step([torch.ones(2)])
    twin = copied(optimizer)
    for each in (optimizer, twin):
        each.step([torch.ones(2)])
    assert equal(twin.param_group["params"], optimizer.param_group["params"])


# Classes


class _Slower(torch.optim.AdamW):
    def __init__(self, params: Any, lr: float = 1e-5) -> None:
        super().__init__(params, lr, weight_decay=0.5)


class _Otherwise(torch.optim.Adam):
    def step(self, closure: Any = None) -> None:  # type: ignore[override] # the base class leaves it untyped or wider
        raise NotImplementedError


def test_a_subclass_steps_with_its_own_defaults() -> None:
    params, grads = make_params(), make_grads(3)
    _Slower([torch.zeros(1)])  # torch may wrap its `step`
    expected = clone(params)
    theirs = _Slower(expected)
    optimizer = as_functional_optim(_Slower)
    optimizer.param_group["params"] = params
    for of_step in grads:
        for param, grad in zip(expected, of_step, strict=True):
            param.grad = grad
        theirs.step()
        optimizer.step(of_step)
    assert optimizer.defaults == theirs.defaults
    assert equal(params, expected)


def test_a_subclass_with_a_step_of_its_own_is_refused() -> None:
    with pytest.raises(ValueError, match=r"_Otherwise'> overrides 'step' of Adam.*register"):
        as_functional_optim(_Otherwise)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_unsupported_class_is_told_what_is_supported(
    torchs_messages: dict[str, str], name: str
) -> None:
    with pytest.raises(ValueError, match="Adadelta, Adagrad, Adam, AdamW, Adamax, RMS") as caught:
        as_functional_optim(getattr(torch.optim, name, name))
    assert str(caught.value).startswith(torchs_messages[name])


class _Registered:
    def __init__(self, params: list[Tensor], lr: float, _allow_empty_param_list: bool) -> None:
        self.arguments = (params, lr, _allow_empty_param_list)


@pytest.mark.parametrize("key", ["mine", _Otherwise])
def test_a_registered_key_makes_its_class(key: Any) -> None:
    register_functional_optim(key, _Registered)
    made = as_functional_optim(key, 0.5)
    assert type(made) is _Registered
    assert made.arguments == ([], 0.5, True)


def test_registered_keys_are_named_as_supported() -> None:
    register_functional_optim("mine", _Registered)
    with pytest.raises(ValueError, match="'mine'"):
        as_functional_optim("yours")


@pytest.mark.parametrize("key", ["mine", torch.optim.Adam])
def test_what_is_known_already_stays_and_the_user_is_told(key: Any) -> None:
    register_functional_optim("mine", _Registered)
    register_functional_optim("mine", _Registered)
    with pytest.warns(UserWarning, match="has a functional counterpart already"):
        register_functional_optim(key, object)
    assert type(as_functional_optim(key, lr=0.5)) is not object
