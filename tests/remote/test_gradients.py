"""Gradients come from the context and go nowhere: ``.grad`` and the context stay as they are."""

import math

import pytest
import torch
import torch.distributed.autograd as dist_autograd
from torch import nn
from torch.distributed import rpc
from torch.distributed.nn import RemoteModule

from tensorplay.distributed.optim import DistributedOptimizer
from tests.reference.training import require_equal
from tests.remote.workers import OWNERS, Placed, Plain, Workers, call, gradient, make_params

PLACEMENT = {"owner1": [0, 3], "owner2": [1, 2]}


def _grad_is_left_alone() -> None:
    placed = Placed(PLACEMENT)
    call(placed.models["owner1"], "set_grads", 7.0)
    optimizer = DistributedOptimizer(torch.optim.Adam, placed.params(), lr=0.1)
    plain = Plain(torch.optim.Adam, 4, lr=0.1, fused=True)
    placed.train(optimizer, range(2))
    plain.train(range(2))
    require_equal(plain.values(), placed.values())
    assert call(placed.models["owner1"], "grads") == [7.0, 7.0]
    assert call(placed.models["owner2"], "grads") == [None, None]
    optimizer.zero_grad(set_to_none=False)
    assert call(placed.models["owner1"], "grads") == [0.0, 0.0]
    optimizer.zero_grad()
    assert call(placed.models["owner1"], "grads") == [None, None]


def test_grad_is_neither_read_nor_changed(workers: Workers) -> None:
    workers.train(_grad_is_left_alone)


def _no_part() -> None:
    placed = Placed(PLACEMENT)
    optimizer = DistributedOptimizer(torch.optim.SGD, placed.params(), lr=0.1)
    plain = Plain(torch.optim.SGD, 4, lr=0.1, fused=True)
    placed.train(optimizer, range(1), used=[1])
    plain.train(range(1), used=[1])
    require_equal(plain.values(), placed.values())


def test_a_worker_without_a_part_in_the_context_stays_as_it_is(workers: Workers) -> None:
    workers.train(_no_part)


def _clip(max_norm: float, atomic: bool) -> None:
    placed = Placed(PLACEMENT)
    optimizer = DistributedOptimizer(
        torch.optim.SGD, placed.params(), lr=1.0, clip_grad_norm=max_norm, atomic=atomic
    )
    plain = Plain(torch.optim.SGD, 4, lr=1.0)
    for step in range(2):
        with dist_autograd.context() as context_id:
            placed.backward(context_id, step)
            optimizer.step(context_id)
            optimizer.step(context_id)  # the context's gradients are still the whole ones
        for index, p in plain.params.items():
            p.grad = gradient(index, step, p.shape, p.dtype)
        nn.utils.clip_grad_norm_(plain.params.values(), max_norm)
        plain.optimizer.step()
        plain.optimizer.step()
    for expected, actual in zip(plain.values(), placed.values(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("max_norm", "atomic"), [(0.5, False), (0.5, True), (1e6, False)])
def test_clipping_equals_that_of_one_process(
    workers: Workers, max_norm: float, atomic: bool
) -> None:
    workers.train(_clip, max_norm, atomic)


def _clip_of_dtype(dtype: torch.dtype) -> None:
    placed = Placed({"owner1": [0, 5], "owner2": [1, 3]}, (), dtype)  # 5 is empty, 3 a scalar
    optimizer = DistributedOptimizer(
        torch.optim.SGD, placed.params(), lr=1.0, clip_grad_norm=0.5, fused=False
    )
    params = {i: p for i, p in make_params(range(6), (), dtype).items() if i in {0, 1, 3, 5}}
    plain = torch.optim.SGD(params.values(), lr=1.0)
    placed.train(optimizer, range(2))
    for step in range(2):
        for index, p in params.items():
            p.grad = gradient(index, step, p.shape, p.dtype)
        nn.utils.clip_grad_norm_(params.values(), 0.5)
        plain.step()
    for expected, actual in zip(params.values(), placed.values(), strict=True):
        torch.testing.assert_close(actual, expected.detach())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_clipping_in_other_dtypes_and_of_empty_parameters(
    workers: Workers, dtype: torch.dtype
) -> None:
    workers.train(_clip_of_dtype, dtype)


def _size(size: float) -> None:
    placed = Placed({"owner1": [3], "owner2": [9]}, (), torch.float64)  # scalars
    optimizer = DistributedOptimizer(torch.optim.SGD, placed.params(), lr=1.0, clip_grad_norm=1.0)
    params = [p.requires_grad_() for p in placed.values()]
    with dist_autograd.context() as context_id:
        losses = [
            call(placed.models[name], "loss", 0, None)
            * (size / gradient(i, 0, (), torch.float64).item())
            for name, i in zip(OWNERS, (3, 9), strict=True)
        ]
        dist_autograd.backward(context_id, losses)
        optimizer.step(context_id)
    for p in params:
        p.grad = torch.tensor(size, dtype=torch.float64)
    nn.utils.clip_grad_norm_(params, 1.0)
    torch.optim.SGD(params, lr=1.0).step()
    for expected, actual in zip(params, placed.values(), strict=True):
        torch.testing.assert_close(actual, expected.detach())


@pytest.mark.parametrize(
    "size",
    [1e-200, 1e100, 1.3e154, 1e200],
    ids=["tiny", "huge", "the sum of squares overflows", "a square overflows"],
)
def test_clipping_tiny_and_huge_gradients(workers: Workers, size: float) -> None:
    workers.train(_size, size)


def _an_infinite_norm() -> None:
    placed = Placed({"owner1": [0], "owner2": [1]})
    optimizer = DistributedOptimizer(torch.optim.SGD, placed.params(), lr=1.0, clip_grad_norm=1.0)
    with dist_autograd.context() as context_id:
        loss = call(placed.models["owner1"], "loss", 0, None)
        dist_autograd.backward(
            context_id, [loss * math.inf, call(placed.models["owner2"], "loss", 0, None)]
        )
        before = placed.values()
        optimizer.step(context_id)
    infinite, finite = placed.values()
    assert infinite.isnan().all()  # inf * 0, as clip_grad_norm_ has it
    require_equal(before[1], finite)


def test_clipping_by_an_infinite_norm_is_torchs(workers: Workers) -> None:
    workers.train(_an_infinite_norm)


def make_embedding() -> nn.Parameter:
    torch.manual_seed(0)
    return nn.Embedding(5, 3, sparse=True).weight


def look_up(weight: rpc.RRef, rows: list[int]) -> torch.Tensor:
    return nn.functional.embedding(torch.tensor(rows), weight.local_value(), sparse=True).sum()


def _sparse(clip_grad_norm: float | None) -> None:
    weight = rpc.remote("owner1", make_embedding)
    optimizer = DistributedOptimizer(
        torch.optim.SGD, [weight], lr=0.1, clip_grad_norm=clip_grad_norm
    )
    local = make_embedding()
    plain = torch.optim.SGD([local], lr=0.1)
    for rows in ([0, 2, 2], [4]):
        with dist_autograd.context() as context_id:
            loss = rpc.rpc_sync("owner1", look_up, (weight, rows))
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        plain.zero_grad()
        nn.functional.embedding(torch.tensor(rows), local, sparse=True).sum().backward()
        if clip_grad_norm is not None:
            assert local.grad is not None
            norm = local.grad.coalesce().values().norm()
            local.grad = local.grad * min(1.0, clip_grad_norm / (norm.item() + 1e-6))
        plain.step()
    torch.testing.assert_close(weight.to_here(), local.data)


@pytest.mark.parametrize("clip_grad_norm", [None, 0.5])
def test_sparse_gradients(workers: Workers, clip_grad_norm: float | None) -> None:
    workers.train(_sparse, clip_grad_norm)


def _remote_module() -> None:
    torch.manual_seed(0)
    layers = [RemoteModule(f"{name}/cpu", nn.Linear, (4, 4)) for name in OWNERS]
    rrefs = [rref for layer in layers for rref in layer.remote_parameters()]
    local = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        for p, rref in zip(local.parameters(), rrefs, strict=True):
            p.copy_(rref.to_here())
    optimizer = DistributedOptimizer(torch.optim.AdamW, rrefs, lr=0.1)
    plain = torch.optim.AdamW(local.parameters(), lr=0.1, fused=True)
    for step in range(3):
        x = gradient(0, step, (2, 4), torch.float32)
        with dist_autograd.context() as context_id:
            loss = layers[1].forward(layers[0].forward(x)).square().sum()
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        plain.zero_grad()
        local(x).square().sum().backward()
        plain.step()
    for p, rref in zip(local.parameters(), rrefs, strict=True):
        torch.testing.assert_close(rref.to_here(), p.data)


def test_remote_modules(workers: Workers) -> None:
    workers.train(_remote_module)
