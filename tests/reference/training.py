"""The plain thing to compare with: models, gradients that depend on the step only, one process."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn


def make_model(seed: int = 0) -> nn.Sequential:
    """Nine tensors of uneven sizes, among them a convolution in channels_last and a scalar."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last),
        nn.Flatten(),
        nn.Linear(7, 31),
        nn.LayerNorm(31),
        nn.Linear(31, 2, bias=False),
    )
    model.register_parameter("scale", nn.Parameter(torch.tensor(0.5)))
    model.register_parameter("nothing", nn.Parameter(torch.empty(0, 4)))
    return model


def make_matrices(seed: int = 0, count: int = 5) -> nn.ParameterList:
    """Only 2-D parameters, as Muon wants them."""
    torch.manual_seed(seed)
    return nn.ParameterList(torch.randn(3 + 2 * i, 4 + i) for i in range(count))


def set_gradients(
    parameters: Iterable[torch.Tensor], step: int, *, without: Sequence[int] = ()
) -> None:
    """The averaged gradients of a step: the same for every rank and for the one process."""
    generator = torch.Generator().manual_seed(1000 + step)
    for index, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.grad = (
            None
            if index in without
            else torch.empty_like(parameter).copy_(gradient)  # in the parameter's strides
        )


def set_sparse_gradients(parameters: Iterable[torch.Tensor], step: int) -> None:
    """Gradients of an embedding of which a few rows were looked up."""
    generator = torch.Generator().manual_seed(1000 + step)
    for parameter in parameters:
        rows = torch.randperm(parameter.shape[0], generator=generator)[:2].sort().values
        values = torch.randn(2, *parameter.shape[1:], generator=generator)
        parameter.grad = torch.sparse_coo_tensor(
            rows[None], values, parameter.shape, check_invariants=True
        ).coalesce()


def first_difference(
    expected: Any, actual: Any, path: str = "", *, strides: bool = False
) -> str | None:
    """Where two nests of tensors, containers and numbers are not bitwise equal, or ``None``.

    All NaNs count as equal; strides count if ``strides``.
    """
    if isinstance(expected, torch.Tensor):
        if not isinstance(actual, torch.Tensor):
            return f"{path}: a tensor became {actual!r}"
        facts = [(t.dtype, t.shape, t.device, t.layout) for t in (expected, actual)]
        if facts[0] != facts[1]:
            return f"{path}: {facts[0]} became {facts[1]}"
        if expected.layout != torch.strided:
            parts = [[t._indices(), t._values()] for t in (expected, actual)]
            return first_difference(*parts, path, strides=strides)
        if strides and expected.stride() != actual.stride():
            return f"{path}: strides {expected.stride()} became {actual.stride()}"
        return _first_different_element(expected, actual, path)
    if type(expected) is not type(actual):
        return f"{path}: {expected!r} became {actual!r}"
    if isinstance(expected, dict):
        if list(expected) != list(actual):
            return f"{path}: keys {list(expected)} became {list(actual)}"
        pairs = [(expected[key], actual[key], f"{path}[{key!r}]") for key in expected]
    elif isinstance(expected, (list, tuple)):
        if len(expected) != len(actual):
            return f"{path}: {len(expected)} items became {len(actual)}"
        pairs = [
            (e, a, f"{path}[{i}]") for i, (e, a) in enumerate(zip(expected, actual, strict=True))
        ]
    else:
        return None if expected == actual else f"{path}: {expected!r} became {actual!r}"
    return next((d for pair in pairs if (d := first_difference(*pair, strides=strides))), None)


def _first_different_element(expected: torch.Tensor, actual: torch.Tensor, path: str) -> str | None:
    if expected.is_complex():
        expected, actual = (
            torch.view_as_real(expected.resolve_conj()),
            torch.view_as_real(actual.resolve_conj()),
        )
    same = (expected == actual) & (expected.signbit() == actual.signbit())
    if expected.is_floating_point():
        same |= expected.isnan() & actual.isnan()
    if same.all():
        return None
    first = tuple((~same).nonzero()[0].tolist())
    count = same.numel() - int(same.sum())
    return (
        f"{path}: {count} of {same.numel()} elements differ, the first at {first}: "
        f"{expected[first].item()!r} became {actual[first].item()!r}"
    )


def require_equal(expected: Any, actual: Any, what: str = "") -> None:
    """Asserts bitwise equality, and says where it fails first."""
    difference = first_difference(expected, actual)
    assert difference is None, f"{what}{difference}"


ROUNDING = {
    torch.float64: 1e-13,
    torch.complex128: 1e-13,
    torch.bfloat16: 2e-2,
    torch.float16: 2e-3,
}
"""How far kernels may differ that treat a vector's middle and its end alike up to rounding."""


def require_close(expected: Any, actual: Any, what: str = "", factor: float = 1.0) -> None:
    """Asserts that :func:`difference_beyond_rounding` finds none."""
    difference = difference_beyond_rounding(expected, actual, what, factor=factor)
    assert difference is None, difference


def difference_beyond_rounding(
    expected: Any, actual: Any, what: str = "", *, factor: float = 1.0, least_scale: float = 0.0
) -> str | None:
    """Where two nests differ by more than rounding (1e-6 in float32), or in containers or strides.

    Args:
        expected: a nest of tensors, containers and numbers.
        actual: another.
        what: how the message calls it.
        factor: by how much more it may differ, after several steps.
        least_scale: numbers that tensors were computed from may have been as large as this.
    """

    def rounded(one: Any, other: Any) -> Any:
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
            return one
        if one.shape != other.shape or one.dtype != other.dtype or not one.numel():
            return one
        near = factor * ROUNDING.get(one.dtype, 1e-6)
        scale = max(least_scale, one.abs().nan_to_num(0, 0, 0).max().item())
        if torch.allclose(one, other, rtol=near, atol=near * scale, equal_nan=True):
            return other.detach() if one.stride() == other.stride() else one
        return one

    return first_difference(_map_pairs(rounded, expected, actual), actual, what, strides=True)


def _map_pairs(function: Any, one: Any, other: Any) -> Any:
    """``one`` with each leaf replaced by ``function(leaf, its counterpart)``, where there is one."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {
            key: _map_pairs(function, value, other[key]) if key in other else value
            for key, value in one.items()
        }
    if type(one) in (list, tuple) and type(one) is type(other) and len(one) == len(other):
        return type(one)(_map_pairs(function, *pair) for pair in zip(one, other, strict=True))
    return function(one, other)


def values_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Detached copies."""
    return [parameter.detach().clone() for parameter in parameters]
