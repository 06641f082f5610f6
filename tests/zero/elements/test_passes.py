"""What holds of whole parameters holds of slices: the same backward passes, joins and resumptions."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from tensorplay.distributed.optim._core import gradient_reducer
from tests.zero import test_join
from tests.zero.elements.ways import DURING, ELEMENTS, FLAT, in_another_way
from tests.zero.gradients import (
    test_aborted,
    test_clipping,
    test_consolidation,
    test_grad_scaler,
    test_oracle,
    test_passes,
)

Run = Callable[..., list[Any]]

Case = tuple[int, Callable[..., Any], tuple[Any, ...]]
"""The number of ranks, a test's function, and its arguments."""

IN_ELEMENTS: list[Case] = [
    (1, test_passes._unused, (False,)),
    (2, test_passes._unused, (False,)),
    (3, test_passes._unused, (True,)),
    (2, test_passes._none_from_a_function, (False,)),
    (2, test_passes._used_twice, ("reentrant", False)),
    (2, test_passes._used_twice, ("not reentrant", False)),
    (3, test_passes._two_backwards, (False,)),
    (2, test_passes._two_losses, (False,)),
    (2, test_passes._accumulated, (False, True)),
    (3, test_passes._accumulated, (False, False)),
    (2, test_passes._no_sync_after_a_reduction, (False,)),
    (2, test_passes._no_sync_is_restored, ()),
    (2, test_passes._discarded, ("optimizer",)),
    (2, test_passes._discarded, ("model",)),
    (3, test_passes._other_order, ()),
    (2, test_passes._retain_graph, (False,)),
    (2, test_passes._create_graph, (False,)),
    (2, test_passes._autograd_grad, (False,)),
    (2, test_passes._inputs_given, (False,)),
    (3, test_passes._frozen_and_thawed, (False,)),
    (2, test_passes._integers, ()),
    (2, test_passes._added_group, (False,)),
    (2, test_passes._assigned, (False,)),
    (3, test_passes._set_to_zero, (False,)),
    (2, test_passes._zeroed_by_the_model, (False,)),
    (2, test_passes._kept_gradients, ()),
    (3, test_passes._closures, (False,)),
    (2, test_passes._schedulers, ("one cycle",)),
    (2, test_passes._schedulers, ("plateau",)),
    (2, test_passes._user_hooks, ()),
    (2, test_passes._two_optimizers, ()),
    (2, test_passes._one_loss_of_two_optimizers, ()),
    (2, test_aborted._all_alike, ("optimizer", True)),
    (2, test_aborted._swallowed, ("backward",)),
    (2, test_aborted._swallowed, ("step",)),
    (2, test_aborted._in_the_closure, ()),
    (1, test_oracle._several_optimizers, (False,)),
    (2, test_oracle._several_optimizers, (False,)),
    (3, test_oracle._several_optimizers, (True,)),
    (2, test_oracle._mixed_dtypes, (False,)),
    (3, test_oracle._mixed_dtypes, (False,)),
    (2, test_oracle._groups, (False,)),
    (3, test_oracle._more_ranks_than_parameters, (False,)),
    (2, test_oracle._tied, (False,)),
    (2, test_oracle._strange_memory, (False,)),
    (1, test_oracle._many_buckets, (False,)),
    (2, test_oracle._many_buckets, (False,)),
    (3, test_oracle._many_buckets, (False,)),
    (4, test_oracle._on_subgroup, (False,)),
    (3, test_clipping._clipped, (1.0, 0.1)),
    (3, test_clipping._clipped, (2.0, 0.1)),
    (3, test_clipping._clipped, (float("inf"), 0.1)),
    (2, test_clipping._nothing_to_clip, ()),
    (2, test_clipping._averaged_elsewhere, ()),
    (4, test_clipping._on_subgroup, ()),
    (2, test_clipping._full_grad_is_a_copy, ()),
    (2, test_clipping._after_no_sync, ()),
    (2, test_grad_scaler._scaled, (test_grad_scaler.make_net, False)),
    (3, test_grad_scaler._scaled, (test_grad_scaler.make_tiny, True)),
    (3, test_grad_scaler._clipped, (test_grad_scaler.make_net,)),
    (2, test_grad_scaler._spoiled_while_accumulating, (True,)),
    (2, test_consolidation._between_backward_and_step, ()),
    (2, test_join._train_joined, (False, "model first", True)),
    (3, test_join._train_joined, (False, "optimizer first", True)),
    (4, test_join._train_joined, (False, "torch's, model first", True)),
    (2, test_join._train_joined, (False, "model first", False)),
    (3, test_join._train_joined_with_sharded_gradients, (True, True)),
    (4, test_join._train_joined_with_sharded_gradients, (True, False)),
]

DURING_BACKWARD: list[Case] = [
    (3, test_passes._unused, (True,)),
    (2, test_passes._used_twice, ("reentrant", False)),
    (3, test_passes._two_backwards, (False,)),
    (3, test_passes._accumulated, (False, False)),
    (2, test_passes._no_sync_after_a_reduction, (False,)),
    (2, test_passes._discarded, ("model",)),
    (3, test_passes._other_order, ()),
    (2, test_passes._create_graph, (False,)),
    (3, test_passes._frozen_and_thawed, (False,)),
    (2, test_passes._added_group, (False,)),
    (2, test_passes._assigned, (False,)),
    (3, test_passes._set_to_zero, (False,)),
    (3, test_passes._closures, (False,)),
    (2, test_passes._two_optimizers, ()),
    (2, test_passes._one_loss_of_two_optimizers, ()),
    (2, test_aborted._swallowed, ("step",)),
    (2, test_oracle._mixed_dtypes, (False,)),
    (3, test_oracle._mixed_dtypes, (False,)),
    (2, test_oracle._many_buckets, (False,)),
    (3, test_oracle._many_buckets, (False,)),
    (4, test_oracle._on_subgroup, (False,)),
    (3, test_join._train_joined_with_sharded_gradients, (True, True)),
    (4, test_join._train_joined_with_sharded_gradients, (True, False)),
]

IN_FLAT_PARAMETERS: list[Case] = [
    (3, test_passes._unused, (True,)),
    (3, test_passes._two_backwards, (False,)),
    (3, test_passes._accumulated, (False, False)),
    (2, test_passes._no_sync_after_a_reduction, (False,)),
    (2, test_passes._create_graph, (False,)),
    (3, test_passes._frozen_and_thawed, (False,)),
    (2, test_passes._added_group, (False,)),
    (2, test_passes._assigned, (False,)),
    (3, test_passes._set_to_zero, (False,)),
    (2, test_passes._kept_gradients, ()),
    (3, test_passes._closures, (False,)),
    (2, test_oracle._several_optimizers, (False,)),
    (3, test_oracle._several_optimizers, (True,)),
    (2, test_oracle._mixed_dtypes, (False,)),
    (3, test_oracle._mixed_dtypes, (False,)),
    (2, test_oracle._groups, (False,)),
    (3, test_oracle._more_ranks_than_parameters, (False,)),
    (2, test_oracle._tied, (False,)),
    (2, test_oracle._strange_memory, (False,)),
    (2, test_oracle._many_buckets, (False,)),
    (3, test_oracle._many_buckets, (False,)),
    (4, test_oracle._on_subgroup, (False,)),
    (3, test_clipping._clipped, (2.0, 0.1)),
    (2, test_clipping._averaged_elsewhere, ()),
    (4, test_clipping._on_subgroup, ()),
    (2, test_clipping._after_no_sync, ()),
    (2, test_grad_scaler._scaled, (test_grad_scaler.make_net, False)),
    (2, test_consolidation._between_backward_and_step, ()),
    (2, test_join._train_joined, (False, "model first", True)),
    (3, test_join._train_joined_with_sharded_gradients, (True, True)),
]


def _named(*groups: tuple[str, dict[str, Any], list[Case]]) -> list[Any]:
    return [
        pytest.param(way, *case, id=f"{name}-{case[0]}-{case[1].__name__.strip('_')}-{number}")
        for name, way, cases in groups
        for number, case in enumerate(cases)
    ]


@pytest.mark.parametrize(
    ("way", "world_size", "function", "args"),
    _named(
        ("elements", ELEMENTS, IN_ELEMENTS),
        ("during backward", DURING, DURING_BACKWARD),
        ("flat parameters", FLAT, IN_FLAT_PARAMETERS),
    ),
)
def test_as_with_whole_parameters(
    run: Run,
    way: dict[str, Any],
    world_size: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    run(world_size, in_another_way, way, function, *args)


KEEPING: list[Case] = [
    case
    for case in IN_ELEMENTS
    if case[1].__module__ in (test_passes.__name__, test_oracle.__name__)
]


def _keeping(function: Callable[..., Any], *args: Any) -> Any:
    """Large slices keep the memory of their averages, however small they are."""
    with (
        mock.patch.object(gradient_reducer, "LEAST_KEPT_BYTES", 1),
        mock.patch.object(gradient_reducer, "NUM_KEPT", 1000),
    ):
        return in_another_way(ELEMENTS, function, *args)


@pytest.mark.parametrize(("world_size", "function", "args"), KEEPING)
def test_memory_of_slices_that_is_kept(
    run: Run, world_size: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    run(world_size, _keeping, function, *args)
