"""Ranks agree, or all of them learn what differs and where."""

from collections.abc import Callable
from typing import Any

import pytest

from tensorplay.distributed.optim._core import tagged_json
from tensorplay.distributed.optim._core.agreement import (
    Agreement,
    PeerError,
    RankDisagreementError,
)
from tests.fakes import FakeCommunicator, run_fake_ranks


def settle(
    world_size: int,
    arguments: Callable[[int], dict[str, Any]],
    global_ranks: list[int] | None = None,
) -> list[Any]:
    """What ``settle(**arguments(rank))`` returned or raised on each rank."""

    def run(communicator: FakeCommunicator) -> Any:
        agreement = Agreement(communicator, "Sharded")
        try:
            return agreement.settle(**arguments(communicator.members.group_rank))
        except Exception as error:  # noqa: BLE001 - it is the result
            return error

    return run_fake_ranks(world_size, run, global_ranks=global_ranks)


def disagree(
    world_size: int,
    description: Callable[[int], Any],
    global_ranks: list[int] | None = None,
) -> str:
    """The message of the disagreement, which every rank must raise alike."""
    raised = settle(
        world_size, lambda rank: {"call": "step", "description": description(rank)}, global_ranks
    )
    assert [type(error) for error in raised] == [RankDisagreementError] * world_size
    (message,) = {str(error) for error in raised}
    return message


def test_agreement_returns_the_largest_flag() -> None:
    assert settle(3, lambda rank: {"call": "step", "flag": [1, 5, 2][rank]}) == [5, 5, 5]


def test_agreement_costs_one_reduction_of_six_integers() -> None:
    def run(communicator: FakeCommunicator) -> tuple[dict[str, int], int]:
        Agreement(communicator, "Sharded").settle("step", {"lr": list(range(100))})
        return dict(communicator.calls), sum(message.nbytes for message in communicator.sent)

    assert run_fake_ranks(2, run) == [({"max_": 1}, 48)] * 2


def test_one_rank_agrees_with_itself() -> None:
    assert settle(1, lambda _rank: {"call": "step", "description": {"a": 1}, "flag": 3}) == [3]


def test_the_order_of_keys_does_not_matter() -> None:
    descriptions = [{"a": 1, "b": 2}, {"b": 2, "a": 1}]
    assert settle(2, lambda rank: {"call": "step", "description": descriptions[rank]}) == [0, 0]


def test_a_difference_names_path_values_and_ranks() -> None:
    rates = [0.1, 0.2, 0.1]
    message = disagree(
        3, lambda rank: {"param_groups": [{"lr": tagged_json.describe(rates[rank])}]}
    )
    assert (
        "in Sharded.step: param_groups[0].lr is 0.1 on rank 0, rank 2 but 0.2 on rank 1" in message
    )


def test_a_difference_inside_a_named_parameter_carries_the_name() -> None:
    message = disagree(
        2, lambda rank: {"parameters": [{"name": "layer.weight", "shape": [4, 2 + rank]}]}
    )
    assert "parameters[0] ('layer.weight').shape[1] is 2 on rank 0 but 3 on rank 1" in message


def test_a_parameter_without_a_name_is_called_by_its_path() -> None:
    message = disagree(2, lambda rank: {"parameters": [{"name": None, "shape": [rank]}]})
    assert "parameters[0].shape[0] is 0 on rank 0 but 1 on rank 1" in message


def test_different_names_are_the_difference() -> None:
    message = disagree(2, lambda rank: {"parameters": [{"name": "ab"[rank]}]})
    assert "parameters[0].name is 'a' on rank 0 but 'b' on rank 1" in message


def test_a_key_that_a_rank_lacks_is_absent_there() -> None:
    message = disagree(2, lambda rank: {"options": {"lr": 1} | ({"nesterov": 2} if rank else {})})
    assert "options.nesterov is absent on rank 0 but 2 on rank 1" in message


def test_an_item_that_a_rank_lacks_is_absent_there() -> None:
    message = disagree(2, lambda rank: {"parameters": [7] * (1 + rank)})
    assert "parameters[1] is absent on rank 0 but 7 on rank 1" in message


def test_members_are_named_by_both_ranks_where_these_differ() -> None:
    message = disagree(2, lambda rank: {"lr": rank}, global_ranks=[3, 1])
    assert "0 on rank 0 (global rank 3) but 1 on rank 1" in message


def test_many_ranks_with_one_value_are_abbreviated() -> None:
    message = disagree(8, lambda rank: {"lr": int(rank == 7)})
    assert "0 on rank 0, rank 1, rank 2, rank 3 and 3 more but 1 on rank 7" in message


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ((True, 1), ("True", "1")),
        (([0, False], [0, 0]), ("False", "0")),
        ((None, "None"), ("None", "'None'")),
        (({}, []), ("{}", "[]")),
    ],
    ids=["bool and int", "inside a list", "None and str", "dict and list"],
)
def test_values_that_only_look_equal_differ(values: Any, shown: tuple[str, ...]) -> None:
    message = disagree(2, lambda rank: {"options": {"amsgrad": values[rank]}})
    assert "options.amsgrad" in message
    assert all(each in message for each in shown)


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        (((0.9, 0.999), (0.9, 0.99)), "(0.9, 0.999) on rank 0 but (0.9, 0.99) on rank 1"),
        (({"a": 0.5}, {"a": 0.25}), "{'a': 0.5} on rank 0 but {'a': 0.25} on rank 1"),
        ((1 + 2j, 1 - 2j), "(1+2j) on rank 0 but (1-2j) on rank 1"),
        ((float("nan"), 0.0), "nan on rank 0 but 0.0 on rank 1"),
    ],
    ids=["tuple", "dict", "complex", "nan"],
)
def test_tagged_values_read_like_python(values: tuple[Any, Any], shown: str) -> None:
    assert shown in disagree(2, lambda rank: {"option": tagged_json.describe(values[rank])})


def test_objects_of_different_types_are_called_by_these() -> None:
    values = (object(), len)
    message = disagree(2, lambda rank: {"option": tagged_json.describe(values[rank])})
    assert "a builtins.object on rank 0 but a builtins.builtin_function_or_method" in message


def test_nan_agrees_with_nan() -> None:
    described = tagged_json.describe(float("nan"))
    assert settle(2, lambda _rank: {"call": "step", "description": {"lr": described}}) == [0, 0]


def test_an_error_is_raised_itself_where_it_was_met_and_named_elsewhere() -> None:
    problem = ValueError("no such option")
    raised = settle(3, lambda rank: {"call": "step", "error": problem if rank == 1 else None})
    assert raised[1] is problem
    for other in (raised[0], raised[2]):
        assert type(other) is PeerError
        assert str(other) == (
            "Sharded.step failed on another rank, and was given up here. "
            "rank 1: ValueError: no such option"
        )


def test_errors_on_all_ranks_are_each_their_own() -> None:
    problems = [ValueError("zero"), TypeError("one")]
    assert settle(2, lambda rank: {"call": "step", "error": problems[rank]}) == problems


def test_an_error_goes_before_a_difference() -> None:
    raised = settle(
        2,
        lambda rank: {
            "call": "step",
            "description": {"lr": rank},
            "error": ValueError("x") if rank else None,
        },
    )
    assert [type(error) for error in raised] == [PeerError, ValueError]


def test_different_calls_are_named_on_every_rank() -> None:
    raised = settle(2, lambda rank: {"call": ["step", "load_state_dict"][rank]})
    assert {type(error) for error in raised} == {RankDisagreementError}
    for error in raised:
        assert "Sharded is 'step' on rank 0 but 'load_state_dict' on rank 1" in str(error)


def test_ranks_can_settle_again_after_a_disagreement() -> None:
    def run(communicator: FakeCommunicator) -> int:
        agreement = Agreement(communicator, "Sharded")
        with pytest.raises(RankDisagreementError):
            agreement.settle("step", {"lr": communicator.members.group_rank})
        return agreement.settle("step", {"lr": 1}, flag=1)

    assert run_fake_ranks(2, run) == [1, 1]
