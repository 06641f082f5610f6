"""Gradients in one buffer: which are there after a pass, without a hook for each."""

import itertools

import pytest
import torch
from torch import nn

from tensorplay.distributed.optim._core.bucket_layout import layout_buckets
from tensorplay.distributed.optim._core.gradient_buckets import PackedGradients
from tensorplay.distributed.optim._core.parameter_spec import describe_parameters
from tensorplay.distributed.optim._core.ranks import GroupRank


def pack(count: int, *, keep: bool) -> tuple[list[nn.Parameter], PackedGradients]:
    parameters = [nn.Parameter(torch.ones(2, 3)) for _ in range(count)]
    specs = describe_parameters(parameters)
    (layout,) = layout_buckets(specs, [GroupRank(0)] * count, 1, 10**6)
    return parameters, PackedGradients(layout, specs, parameters, keep=keep)


def had_by(parameters: list[nn.Parameter]) -> list[list[float] | None]:
    return [None if p.grad is None else p.grad.view(-1).tolist() for p in parameters]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_unused_parameters_have_no_gradient_and_others_that_are_zero_keep_them(
    keep: bool, create_graph: bool
) -> None:
    parameters, bucket = pack(3, keep=keep)
    used, with_zeros, unused = parameters
    for _ in range(2):
        bucket.arm_()
        (used * 2 + with_zeros * 0).sum().backward(create_graph=create_graph)
        bucket.disarm_()
        assert had_by([used, with_zeros, unused]) == [[2.0] * 6, [0.0] * 6, None]
        for parameter in parameters:
            parameter.grad = None
        bucket.release()


@pytest.mark.parametrize("first", list(itertools.product([False, True], repeat=3)))
def test_gradients_add_up_over_passes(first: tuple[bool, ...]) -> None:
    parameters, bucket = pack(3, keep=True)
    bucket.arm_()
    for parameter, is_used in zip(parameters, first, strict=True):
        if is_used:
            parameter.sum().backward()
    bucket.disarm_()
    assert had_by(parameters) == [[1.0] * 6 if is_used else None for is_used in first]
    bucket.arm_()
    parameters[0].sum().backward()
    bucket.disarm_()
    expected = [1.0 + first[0], *(float(is_used) or None for is_used in first[1:])]
    assert had_by(parameters) == [None if each is None else [each] * 6 for each in expected]


def test_a_gradient_that_is_taken_back_is_not_there() -> None:
    (parameter, other), bucket = pack(2, keep=True)
    bucket.arm_()
    bucket.retract_(0)
    (parameter + other).sum().backward()
    bucket.disarm_()
    flat = bucket.local()
    assert had_by([parameter, other]) == [[1.0] * 6] * 2
    assert parameter.grad is not None
    assert parameter.grad.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr()
    assert torch.equal(flat[:6], torch.ones(6))
