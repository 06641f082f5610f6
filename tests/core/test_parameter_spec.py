"""What a plan knows of a parameter: its strides, and what it shares memory with."""

from collections.abc import Sequence
from itertools import permutations

import pytest
import torch
from torch.nn import Parameter

from tensorplay.distributed.optim._core.parameter_spec import (
    ParameterSpec,
    describe_parameters,
    is_dense,
)


def spec_of(tensor: torch.Tensor) -> ParameterSpec:
    (spec,) = describe_parameters([tensor])
    return spec


def units(parameters: Sequence[torch.Tensor]) -> list[int]:
    return [spec.memory_unit for spec in describe_parameters(parameters)]


def test_metadata_is_that_of_the_parameter() -> None:
    spec = spec_of(Parameter(torch.zeros(2, 3, dtype=torch.bfloat16)))
    assert (spec.shape, spec.dtype, spec.device) == ((2, 3), torch.bfloat16, torch.device("cpu"))
    assert (spec.index, spec.numel, spec.nbytes, spec.trainable) == (0, 6, 12, True)


def test_a_frozen_parameter_is_not_trainable() -> None:
    assert not spec_of(Parameter(torch.zeros(2), requires_grad=False)).trainable


def test_indices_count_the_parameters() -> None:
    specs = describe_parameters([torch.zeros(1), torch.zeros(2), torch.zeros(3)])
    assert [spec.index for spec in specs] == [0, 1, 2]


def test_channels_last_strides_are_kept() -> None:
    tensor = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert spec_of(tensor).stride == (60, 1, 15, 3)


def test_transposed_strides_are_kept() -> None:
    assert spec_of(torch.zeros(2, 3).t()).stride == (1, 3)


def test_an_axis_of_one_element_may_have_any_stride() -> None:
    tensor = torch.zeros(6).as_strided((1, 3), (100, 1))
    assert is_dense(tensor)
    assert spec_of(tensor).stride == (100, 1)


def test_an_expanded_parameter_travels_contiguously() -> None:
    assert spec_of(torch.zeros(3, 1).expand(3, 4)).stride == (4, 1)


def test_a_parameter_with_gaps_travels_contiguously() -> None:
    assert spec_of(torch.zeros(4, 6)[:, :3]).stride == (3, 1)


def test_a_scalar_has_one_element_and_no_strides() -> None:
    spec = spec_of(torch.zeros(()))
    assert (spec.shape, spec.stride, spec.numel) == ((), (), 1)


def test_a_parameter_without_elements_has_no_bytes() -> None:
    spec = spec_of(torch.zeros(0, 3))
    assert (spec.shape, spec.stride, spec.nbytes) == ((0, 3), (3, 1), 0)


@pytest.mark.parametrize(
    ("shape", "stride", "dense"),
    [
        ((2, 3), (3, 1), True),
        ((2, 3), (1, 2), True),
        ((2, 3), (4, 1), False),
        ((2, 3), (0, 1), False),
        ((3, 3), (1, 1), False),
        ((3,), (2,), False),
        ((1,), (2,), True),
        ((), (), True),
    ],
)
def test_dense_means_every_element_once_and_no_gap(
    shape: tuple[int, ...], stride: tuple[int, ...], dense: bool
) -> None:
    assert is_dense(torch.zeros(100).as_strided(shape, stride)) is dense


@pytest.mark.parametrize("order", list(permutations(range(4))), ids=str)
def test_parameters_that_overlap_share_the_lowest_index_in_any_order(
    order: tuple[int, ...],
) -> None:
    base = torch.zeros(30)
    chain = [base[0:10], base[5:20], base[19:30], torch.zeros(5)]
    overlapping = [position for position, which in enumerate(order) if which != 3]
    expected = [
        min(overlapping) if which != 3 else position for position, which in enumerate(order)
    ]
    assert units([chain[which] for which in order]) == expected


def test_a_parameter_inside_another_shares_its_unit() -> None:
    base = torch.zeros(4, 4)
    assert units([base[1], torch.zeros(1), base]) == [0, 1, 0]


def test_two_views_of_the_same_elements_share_a_unit() -> None:
    base = torch.zeros(4, 4)
    assert units([base, base.t(), base.view(-1)]) == [0, 0, 0]


def test_disjoint_views_of_one_storage_are_units_of_their_own() -> None:
    base = torch.zeros(10)
    specs = describe_parameters([base[5:], base[:5]])
    assert [spec.memory_unit for spec in specs] == [0, 1]
    assert [spec.owns_storage for spec in specs] == [False, False]


def test_interleaved_columns_stay_together() -> None:
    base = torch.zeros(4, 4)
    assert units([base[:, :2], base[:, 2:]]) == [0, 0]


def test_a_parameter_that_fills_its_storage_owns_it() -> None:
    assert spec_of(torch.zeros(2, 3).t()).owns_storage


def test_a_part_of_a_storage_does_not_own_it_even_alone() -> None:
    base = torch.zeros(10)
    assert not spec_of(base[:5]).owns_storage
    assert not spec_of(base[5:]).owns_storage


def test_two_parameters_on_one_storage_do_not_own_it() -> None:
    base = torch.zeros(10)
    assert [spec.owns_storage for spec in describe_parameters([base, base.view(2, 5)])] == [
        False,
        False,
    ]


def test_parameters_without_elements_share_nothing() -> None:
    assert units([torch.zeros(0), torch.zeros(0, 2), torch.zeros(1)]) == [0, 1, 2]


def test_the_reads_of_tied_modules_are_one_parameter() -> None:
    embedding, head = torch.nn.Embedding(4, 2), torch.nn.Linear(2, 4, bias=False)
    head.weight = embedding.weight
    tied = list(dict.fromkeys([*embedding.parameters(), *head.parameters()]))
    assert units(tied) == [0]
    assert describe_parameters(tied)[0].owns_storage
