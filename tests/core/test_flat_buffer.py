"""Memory of buckets: values and strides survive the way in and out."""

from collections.abc import Callable, Sequence

import pytest
import torch

from tensorplay.distributed.optim._core.bucket_layout import BucketLayout, layout_buckets
from tensorplay.distributed.optim._core.flat_buffer import (
    FlatBuffer,
    KeptStorages,
    ParameterHome,
)
from tensorplay.distributed.optim._core.parameter_spec import ParameterSpec, describe_parameters
from tensorplay.distributed.optim._core.ranks import GroupRank

TENSORS = {
    "contiguous": torch.arange(6.0).view(2, 3),
    "channels_last": torch.arange(120.0)
    .view(2, 3, 4, 5)
    .contiguous(memory_format=torch.channels_last),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "gaps": torch.arange(24.0).view(4, 6)[:, 1:3],
    "scalar": torch.tensor(7.0),
    "axis of one": torch.arange(3.0).as_strided((1, 3), (100, 1)),
    "complex": torch.tensor([1 + 2j, 3 - 4j]),
    "bool": torch.tensor([True, False, True]),
    "bfloat16": torch.arange(5.0).bfloat16(),
}


def plan(
    tensors: Sequence[torch.Tensor], owners: Sequence[int] | None = None
) -> tuple[BucketLayout, tuple[ParameterSpec, ...]]:
    specs = describe_parameters(tensors)
    ranks = [GroupRank(owner) for owner in owners or [0] * len(tensors)]
    (layout,) = layout_buckets(specs, ranks, 2, 10**6)
    return layout, specs


@pytest.mark.parametrize("name", TENSORS)
def test_what_was_packed_is_unpacked_again(name: str) -> None:
    tensor = TENSORS[name]
    layout, specs = plan([tensor])
    buffer = FlatBuffer(layout, specs)
    buffer.pack_([tensor], layout.slots)
    arrived = torch.zeros_like(tensor)
    buffer.unpack_([arrived], layout.slots)
    assert torch.equal(arrived, tensor)


@pytest.mark.parametrize("name", ["contiguous", "channels_last", "transposed", "axis of one"])
def test_a_view_has_the_strides_of_its_parameter(name: str) -> None:
    layout, specs = plan([TENSORS[name]])
    assert FlatBuffer(layout, specs).view(layout.slots[0]).stride() == TENSORS[name].stride()


def test_dense_parameters_are_packed_in_the_order_of_their_memory() -> None:
    tensor = torch.arange(6.0).view(3, 2).t()
    layout, specs = plan([tensor])
    buffer = FlatBuffer(layout, specs)
    buffer.pack_([tensor], layout.slots)
    assert buffer.flat[:6].tolist() == [0, 1, 2, 3, 4, 5]


def test_only_the_given_slots_are_packed() -> None:
    tensors = [torch.ones(4), torch.ones(4)]
    layout, specs = plan(tensors, owners=[0, 1])
    buffer = FlatBuffer(layout, specs)
    buffer.pack_(tensors, layout.slots_of(GroupRank(1)))
    assert buffer.flat.tolist() == [0] * 4 + [1] * 4


def test_no_slots_are_nothing_to_do() -> None:
    layout, specs = plan([torch.ones(4)])
    buffer = FlatBuffer(layout, specs)
    buffer.pack_([], ())
    buffer.unpack_([], ())
    assert not buffer.flat.any()


def test_a_buffer_uses_the_storage_that_it_is_given() -> None:
    storage = torch.zeros(100)[10:]
    layout, specs = plan([torch.ones(2, 3)])
    buffer = FlatBuffer(layout, specs, storage)
    buffer.pack_([torch.ones(2, 3)], layout.slots)
    assert buffer.flat.data_ptr() == storage.data_ptr()
    assert storage.sum() == 6
    assert buffer.view(layout.slots[0]).data_ptr() == storage.data_ptr()


def test_parameters_that_require_gradients_are_unpacked_in_place() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    layout, specs = plan([parameter])
    buffer = FlatBuffer(layout, specs)
    buffer.flat.fill_(3)
    buffer.unpack_([parameter], layout.slots)
    assert parameter.tolist() == [3] * 4


def make_home() -> tuple[ParameterHome, list[torch.nn.Parameter]]:
    parameters = [
        torch.nn.Parameter(torch.arange(6.0).view(2, 3)),
        torch.nn.Parameter(TENSORS["channels_last"].clone()),
        torch.nn.Parameter(torch.tensor(7.0)),
    ]
    layout, specs = plan(parameters, owners=[1, 0, 1])
    return ParameterHome(layout, specs, parameters), parameters


def test_moving_in_changes_neither_values_nor_strides() -> None:
    _home, parameters = make_home()
    for parameter, original in zip(
        parameters,
        [TENSORS["contiguous"], TENSORS["channels_last"], torch.tensor(7.0)],
        strict=True,
    ):
        assert torch.equal(parameter, original)
        assert parameter.stride() == original.stride()


def test_residents_are_views_of_the_bucket() -> None:
    home, parameters = make_home()
    home.flat.fill_(5)
    assert all((parameter == 5).all() for parameter in parameters)


def test_padding_of_a_home_is_zero() -> None:
    home, _parameters = make_home()
    used = torch.zeros(home.layout.numel, dtype=torch.bool)
    for slot in home.layout.slots:
        used[slot.offset : slot.offset + slot.numel] = True
    assert not home.flat[~used].any()


def test_nobody_strays_while_values_change_in_place() -> None:
    home, parameters = make_home()
    with torch.no_grad():
        parameters[0].copy_(torch.zeros(2, 3))
        parameters[1].mul_(2)
    assert home.strayed() is None


def test_a_parameter_whose_storage_was_replaced_has_strayed() -> None:
    home, parameters = make_home()
    parameters[2].data = torch.tensor(7.0)
    strayed = home.strayed()
    assert strayed is not None
    assert strayed.parameter == 2


def test_a_parameter_that_was_rebound_with_other_strides_has_strayed() -> None:
    parameter = torch.nn.Parameter(torch.arange(9.0).view(3, 3))
    layout, specs = plan([parameter])
    home = ParameterHome(layout, specs, [parameter])
    parameter.data = parameter.data.t()
    assert home.strayed() == layout.slots[0]


def test_a_parameter_whose_data_was_rebound_is_brought_back_with_its_new_values() -> None:
    parameter = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    place = parameter.data
    storages = KeptStorages([parameter])
    parameter.data = (place + 1).t().contiguous().t()
    assert storages.restore_() is None
    assert parameter.is_set_to(place)
    assert parameter.tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize("change", [torch.Tensor.double, torch.flatten, lambda data: data[:1]])
def test_a_parameter_that_no_longer_fits_gets_its_old_values_back(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    parameter = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    place = parameter.data
    storages = KeptStorages([parameter])
    parameter.data = change(place)
    assert storages.restore_() is parameter
    assert parameter.is_set_to(place)
