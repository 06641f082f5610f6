"""Values keep their types through JSON; what can't travel is refused with its path."""

import enum
import json
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tensorplay.distributed.optim._core import tagged_json

DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn]
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.sampled_from(DTYPES)
    | st.sampled_from([torch.device("cpu"), torch.device("cuda", 1), torch.device("meta")])
    | st.lists(st.integers(0, 9)).map(torch.Size)
)
KEYS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


def nested(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(KEYS, inner, max_size=3)
            | st.dictionaries(st.tuples(st.integers(), st.text()), inner, max_size=2)
        ),
        max_leaves=8,
    )


def same(left: Any, right: Any) -> bool:
    """Equal, of equal types, and with equal bits where they are floating point."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return math.isnan(left) == math.isnan(right) and left.hex() == right.hex()
    if isinstance(left, complex):
        return same(left.real, right.real) and same(left.imag, right.imag)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return same(list(left.items()), list(right.items()))
    return bool(left == right)


def through_json(value: Any) -> Any:
    tensors: list[torch.Tensor] = []
    return tagged_json.decode(json.loads(json.dumps(tagged_json.encode(value, tensors))), tensors)


@given(nested(LEAVES))
def test_values_come_back_with_their_types(value: Any) -> None:
    assert same(through_json(value), value)


@pytest.mark.parametrize(
    "value",
    [
        math.inf,
        -math.inf,
        math.nan,
        -0.0,
        5e-324,
        {1: "int", "1": "str", None: "none"},
        {"$": "float"},
    ],
    ids=repr,
)
def test_awkward_values_come_back(value: Any) -> None:
    assert same(through_json(value), value)


def test_tensors_are_taken_out_in_the_order_in_which_they_are_met() -> None:
    first, second, third = torch.zeros(1), torch.ones(2), torch.ones(())
    taken: list[torch.Tensor] = []
    encoded = tagged_json.encode({"a": first, "b": [1, (second, third)]}, taken)
    assert [tensor.data_ptr() for tensor in taken] == [
        tensor.data_ptr() for tensor in (first, second, third)
    ]
    others = [torch.tensor(position) for position in range(3)]
    decoded = tagged_json.decode(encoded, others)
    assert decoded["a"] is others[0]
    assert decoded["b"] == [1, (others[1], others[2])]


def test_tensors_are_taken_out_detached() -> None:
    taken: list[torch.Tensor] = []
    tagged_json.encode(torch.nn.Parameter(torch.zeros(1)), taken)
    assert not taken[0].requires_grad


def test_tensors_are_appended_after_those_that_were_there() -> None:
    taken = [torch.zeros(1)]
    encoded = tagged_json.encode(torch.ones(1), taken)
    assert tagged_json.decode(encoded, taken) is taken[1]


class Subclass(torch.Tensor):
    pass


class Colour(enum.IntEnum):
    RED = 1
    BLUE = 2


class Pair(NamedTuple):
    left: int
    right: int


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (object(), "builtins.object"),
        ({1, 2}, "builtins.set"),
        (len, "builtins.builtin_function_or_method"),
        (Colour.RED, "Colour"),
        (Pair(1, 2), "Pair"),
        (torch.Generator(), "torch._C.Generator"),
        (torch.zeros(2).as_subclass(Subclass), "Subclass"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_plain_is_refused_with_its_path_and_type(value: Any, kind: str) -> None:
    where = re.escape("the state of parameter 3['rows'][1]")
    with pytest.raises(TypeError, match=f"^{where} is a .*{kind}"):
        tagged_json.encode({"rows": [0, value]}, [], "the state of parameter 3")


def test_a_key_that_is_not_plain_is_refused_with_its_path() -> None:
    with pytest.raises(TypeError, match=r"^a key of value\['a'\] is a builtins\.object"):
        tagged_json.encode({"a": {object(): 1}}, [])


def test_sparse_tensors_are_refused_with_their_path() -> None:
    with pytest.raises(TypeError, match=r"^value\[0\] .*sparse_coo"):
        tagged_json.encode([torch.eye(2).to_sparse()], [])


def test_tensors_without_values_are_refused_with_their_path() -> None:
    with pytest.raises(TypeError, match=r"^value\[0\] .*meta"):
        tagged_json.encode([torch.zeros(2, device="meta")], [])


@pytest.mark.parametrize("lazy", [torch.conj, lambda t: torch.conj(t).imag], ids=["conj", "neg"])
def test_lazily_conjugated_tensors_are_taken_out_with_their_values(
    lazy: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    tensor = lazy(torch.tensor([1 + 2j, 3 - 4j]))
    assert tensor.is_conj() or tensor.is_neg()
    taken: list[torch.Tensor] = []
    tagged_json.encode(tensor, taken)
    assert not taken[0].is_conj()
    assert not taken[0].is_neg()
    assert torch.equal(taken[0], tensor)


def test_an_unknown_tag_asks_for_the_same_version() -> None:
    with pytest.raises(ValueError, match=r"unknown tag 'pickle'.*same version"):
        tagged_json.decode({"$": "pickle", "data": ""})


@given(nested(LEAVES))
def test_descriptions_of_equal_values_are_equal(value: Any) -> None:
    assert tagged_json.describe(value) == tagged_json.describe(through_json(value))


def test_the_description_of_a_dict_does_not_depend_on_its_order() -> None:
    one, other = {"a": 1, 2: [3.0]}, {2: [3.0], "a": 1}
    assert tagged_json.describe(one) == tagged_json.describe(other)


def test_descriptions_of_objects_carry_no_address() -> None:
    one, other = tagged_json.describe([object(), len]), tagged_json.describe([object(), len])
    assert one == other
    assert "0x" not in json.dumps(one)


def test_descriptions_of_small_tensors_carry_their_values() -> None:
    assert tagged_json.describe(torch.tensor(0.1)) != tagged_json.describe(torch.tensor(0.2))
    assert tagged_json.describe(torch.tensor(0.1)) == tagged_json.describe(torch.tensor(0.1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_tensors_of_every_dtype_can_be_described(dtype: torch.dtype) -> None:
    json.dumps(tagged_json.describe(torch.ones(2).to(dtype)))


class Rate(float):
    """Like ``numpy.float64``: a float by inheritance, not by type."""


@pytest.mark.parametrize(
    ("one", "other"),
    [(Rate(0.1), Rate(0.2)), (Colour.RED, Colour.BLUE), (b"a", b"b")],
    ids=["float subclass", "enum", "bytes"],
)
def test_descriptions_of_other_numbers_carry_their_values(one: Any, other: Any) -> None:
    assert tagged_json.describe(one) == tagged_json.describe(one)
    assert tagged_json.describe(one) != tagged_json.describe(other)
