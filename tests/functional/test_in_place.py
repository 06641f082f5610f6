"""In place: ``torch.optim``'s result, bit for bit, from lists and through the object."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tensorplay.distributed import optim
from tensorplay.distributed.optim import as_functional_optim
from tests.functional.variants import (
    CLASSES,
    HAVE_FUSED,
    Variant,
    clone,
    equal,
    kernels_of,
    make_grads,
    make_params,
    mathematical_variants,
    step_eagerly,
)

WITH_KERNELS = [
    Variant(variant.name, {**variant.options, **kernel})
    for variant in mathematical_variants()
    for kernel in kernels_of(variant.name)
]
DTYPES = (torch.float64, torch.bfloat16, torch.float16, torch.complex64)
WITH_DTYPES = [
    (Variant(name, kernel), dtype)
    for name in CLASSES
    for dtype in DTYPES
    for kernel in kernels_of(name)
    if not (kernel.get("fused") and dtype.is_complex)
]


def step_functionally(
    variant: Variant, params: list[Tensor], grads: list[list[Tensor]], **more: Any
) -> tuple[list[Tensor], Any]:
    params = clone(params)
    optimizer = as_functional_optim(variant.optimizer_class, **variant.options, **more)
    optimizer.param_group["params"] = params
    for of_step in grads:
        optimizer.step(clone(of_step))
    return params, optimizer


def assert_same_states(params: list[Tensor], ours: Any, theirs_params: Any, theirs: Any) -> None:
    for param, other in zip(params, theirs_params, strict=True):
        expected = theirs.state[other]
        assert ours.state[param].keys() == expected.keys()
        assert equal(list(ours.state[param].values()), [expected[key] for key in ours.state[param]])


@pytest.mark.parametrize("variant", WITH_KERNELS, ids=str)
def test_the_object_steps_as_torch(variant: Variant) -> None:
    params, grads = make_params(), make_grads()
    expected, theirs = step_eagerly(variant, params, grads)
    ours, optimizer = step_functionally(variant, params, grads)
    assert equal(ours, expected)
    assert_same_states(ours, optimizer, expected, theirs)


@pytest.mark.parametrize(("variant", "dtype"), WITH_DTYPES, ids=str)
def test_the_object_steps_as_torch_in_other_dtypes(variant: Variant, dtype: torch.dtype) -> None:
    params, grads = make_params(dtype), make_grads(dtype=dtype)
    if dtype is torch.float16:
        variant = Variant(variant.name, {**variant.options, **_without_overflow(variant.name)})
    assert equal(
        step_functionally(variant, params, grads)[0], step_eagerly(variant, params, grads)[0]
    )


def _without_overflow(name: str) -> dict[str, Any]:
    return {} if name in {"sgd", "rprop"} else {"eps": 1e-4}


@pytest.mark.parametrize("name", CLASSES)
def test_the_object_takes_a_learning_rate_tensor(name: str) -> None:
    params, grads = make_params(), make_grads()
    variant = Variant(name, {"fused": True} if name in HAVE_FUSED else {})
    lr = torch.tensor(0.02)
    assert equal(
        step_functionally(variant, params, grads, lr=lr)[0],
        step_eagerly(variant, params, grads, lr=lr)[0],
    )


def lists_of(variant: Variant, params: list[Tensor]) -> list[list[Any]]:
    """The state that torch's functions of lists begin with."""
    on = variant.options
    lr = on.get("lr", 0.01)
    start = on.get("initial_accumulator_value", 0)
    zeros = [torch.zeros_like(param) for param in params]
    nothing: list[Any] = []
    steps = [torch.zeros(()) for _ in params]
    lists: dict[str, list[list[Any]]] = {
        "adadelta": [zeros, clone(zeros), steps],
        "adagrad": [[zero + start for zero in zeros], steps],
        "adam": [zeros, clone(zeros), clone(zeros) if on.get("amsgrad") else nothing, steps],
        "adamax": [zeros, clone(zeros), steps],
        "rmsprop": [
            zeros,
            clone(zeros) if on.get("centered") else nothing,
            clone(zeros) if on.get("momentum") else nothing,
            steps,
        ],
        "rprop": [zeros, [zero + lr for zero in zeros], steps],
        "sgd": [[None] * len(params)],
    }
    return lists["adam" if variant.name == "adamw" else variant.name]


def options_of_function(variant: Variant) -> dict[str, Any]:
    options = dict(variant.options)
    options.pop("initial_accumulator_value", None)
    if variant.name == "rprop":
        options.pop("lr", None)
    for pair, names in (
        ("betas", ("beta1", "beta2")),
        ("etas", ("etaminus", "etaplus")),
        ("step_sizes", ("step_size_min", "step_size_max")),
    ):
        if pair in options:
            options.update(zip(names, options.pop(pair), strict=True))
    return options


@pytest.mark.parametrize("variant", WITH_KERNELS, ids=str)
def test_the_function_steps_as_torch(variant: Variant) -> None:
    params, grads = make_params(), make_grads()
    expected, _ = step_eagerly(variant, params, grads)
    function = getattr(optim, f"functional_{variant.name}")
    lists = lists_of(variant, params)
    for of_step in grads:
        assert function(params, clone(of_step), *lists, **options_of_function(variant)) is None
    assert equal(params, expected)


@pytest.mark.parametrize("variant", mathematical_variants(), ids=str)
def test_the_function_steps_out_of_place(variant: Variant) -> None:
    params, grads = make_params(torch.float64), make_grads(10, torch.float64)
    expected, _ = step_eagerly(variant, params, grads)
    function = getattr(optim, f"functional_{variant.name}")
    lists = lists_of(variant, params)
    before = clone(params)
    result = params
    for of_step in grads:
        result, *lists = function(
            result, of_step, *lists, inplace=False, **options_of_function(variant)
        )
    assert equal(params, before)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


def test_the_function_finds_out_about_complex_parameters() -> None:
    params, grads = make_params(torch.complex64), make_grads(3, torch.complex64)
    variant = Variant("adam", {"foreach": True})
    expected, _ = step_eagerly(variant, params, grads)
    lists = lists_of(variant, params)
    for of_step in grads:
        optim.functional_adam(params, clone(of_step), *lists, foreach=True)
    assert equal(params, expected)


def test_the_function_takes_torchs_arguments_by_position_and_by_name() -> None:
    params, (grads,) = make_params(), make_grads(1)
    expected, _ = step_eagerly(Variant("sgd", {"foreach": True}), params, [grads])
    by_name = clone(params)
    optim.functional_sgd(params, grads, [None] * len(params), False, True)
    optim.functional_sgd(
        params=by_name, d_p_list=grads, momentum_buffer_list=[None] * len(params), foreach=True
    )
    assert equal(params, expected)
    assert equal(by_name, expected)


def test_the_function_steps_parameters_that_require_gradients() -> None:
    param = torch.zeros(2, requires_grad=True)
    optim.functional_sgd([param], [torch.ones(2)], [None], lr=1.0)
    assert param.tolist() == [-1, -1]
    assert param.is_leaf


@pytest.mark.parametrize("option", ["fused", "foreach", "capturable", "grad_scale"])
def test_out_of_place_refuses_what_chooses_a_kernel(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option}.*choose a kernel"):
        optim.functional_adam([], [], [], [], [], [], inplace=False, **{option: True})


def test_a_missing_list_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="exp_avgs"):
        optim.functional_adam([], [])


def test_an_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="learning_rate"):
        optim.functional_adam([], [], [], [], [], [], learning_rate=1)
