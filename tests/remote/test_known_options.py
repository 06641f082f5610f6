"""Which options of a group are news to its owners."""

from typing import Any

import pytest
import torch

from tensorplay.distributed.optim.remote.known_options import KnownOptions


def known(options: dict[str, Any]) -> tuple[KnownOptions, dict[str, Any]]:
    """What owners have, and the trainer's group, which has just been looked at."""
    them = KnownOptions()
    them.take(options)
    group = {"params": [object()], **options}
    assert them.news(group) == {}
    return them, group


def test_what_is_assigned_is_news_until_the_owners_have_it() -> None:
    them, group = known({"lr": 0.1, "betas": (0.9, 0.99), "fused": None})
    group["lr"], group["betas"] = 0.2, (0.8, 0.99)
    for _ in range(2):
        assert them.news(group) == {"lr": 0.2, "betas": (0.8, 0.99)}
    them.take({"lr": 0.2, "betas": (0.8, 0.99)})
    assert them.news(group) == {}
    group["new"] = 3
    assert them.news(group) == {"new": 3}


def test_what_is_equal_but_of_another_type_is_news() -> None:
    them, group = known({"lr": 1, "maximize": False})
    group["lr"], group["maximize"] = 1.0, 0
    assert list(map(type, them.news(group).values())) == [float, int]


def test_an_equal_object_is_none() -> None:
    them, group = known({"betas": (0.9, 0.99), "lr": 12345.5})
    group["betas"], group["lr"] = tuple([0.9, 0.99]), float("12345.5")  # noqa: C409 - not the constant
    assert them.news(group) == {}


@pytest.mark.parametrize(
    "value", [torch.tensor(0.1), [1, 2], {"a": 1}, ([1, 2],)], ids=["tensor", "list", "dict", "in"]
)
def test_what_changes_in_place_is_news(value: Any) -> None:
    them, group = known({"lr": 0.1, "option": value})
    inner = value[0] if isinstance(value, tuple) else value
    if isinstance(inner, torch.Tensor):
        inner.add_(1)
    elif isinstance(inner, list):
        inner.append(3)
    else:
        inner["b"] = 2
    news = them.news(group)
    assert list(news) == ["option"]
    assert news["option"] is not value
    assert str(news["option"]) == str(value)


def test_tensors_inside_of_something() -> None:
    inner = torch.ones(2)
    them, group = known({"lr": 0.1, "option": [1, {"a": (inner,)}]})
    assert them.news(group) == {}
    inner.add_(1)
    assert str(them.news(group)) == str({"option": [1, {"a": (inner,)}]})
    group["option"] = [1, {"a": (torch.ones(2), 3)}]
    assert list(them.news(group)) == ["option"]
    group["option"] = [1, {"a": (torch.ones(2),)}]
    assert them.news(group) == {}


class Array:
    """Compares as arrays do, element by element."""

    __hash__ = None  # type: ignore[assignment]  # an array has none

    def __eq__(self, other: object) -> Any:
        return torch.tensor([True, True])


def test_what_can_t_be_compared_is_news() -> None:
    them, group = known({"lr": 0.1})
    group["weights"] = Array()
    them.take({"weights": Array()})
    assert list(them.news(group)) == ["weights"]


def test_a_key_that_took_another_ones_place_and_value() -> None:
    them, group = known({"lr": 0.1, "eps": None})
    del group["eps"]
    group["epsilon"] = None
    assert them.news(group) == {"epsilon": None}


def test_what_was_forgotten_is_all_news() -> None:
    them, group = known({"lr": 0.1, "fused": None})
    them.forget()
    assert them.news(group) == {"lr": 0.1, "fused": None}


def test_parameters_and_their_names_are_none() -> None:
    them, group = known({"lr": 0.1})
    group["params"], group["param_names"] = [object()], ["weight"]
    assert them.news(group) == {}
