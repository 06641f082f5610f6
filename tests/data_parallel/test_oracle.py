"""The oracle: gradients summed in rank order, then the plain optimizer on one process."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tensorplay.distributed.optim import DistributedOptimizer
from tensorplay.distributed.optim.data_parallel import gradients, reduction_plan
from tests.data_parallel.twins import LARGE, Twins, make_small_and_large
from tests.reference.data_parallel import make_parameters, squares
from tests.reference.optimizers import OPTIMIZERS
from tests.reference.training import make_matrices, make_model, values_of

Run = Callable[..., list[Any]]


def _several_optimizers() -> None:
    for name in ("SGD momentum", "AdamW fused", "KeepsCounters"):
        Twins(make_small_and_large, *OPTIMIZERS[name]).train(squares, steps=2, what=name)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_small_and_large_parameters(run: Run, world_size: int) -> None:
    run(world_size, _several_optimizers)


def _every_optimizer() -> None:
    for name, (optimizer_class, options) in OPTIMIZERS.items():
        Twins(make_model, optimizer_class, options).train(squares, what=name)


def test_every_optimizer(run: Run) -> None:
    run(2, _every_optimizer)


def _matrix_wise() -> None:
    for optimizer_class in (torch.optim.Muon, torch.optim.Adafactor):
        Twins(make_matrices, optimizer_class, {"lr": 0.1, "weight_decay": 0.1}).train(squares)


def test_matrix_wise_optimizers(run: Run) -> None:
    run(3, _matrix_wise)


DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.float16)


def _mixed_dtypes() -> None:
    def make() -> nn.ParameterList:
        shapes = [((600, 500), (5, 3), (11,))[number % 3] for number in range(9)]
        return make_parameters(
            *((*shape, DTYPES[number % 5]) for number, shape in enumerate(shapes))
        )

    Twins(make, *OPTIMIZERS["Adam"]).train(squares)


@pytest.mark.parametrize("world_size", [2, 3])
def test_mixed_dtypes(run: Run, world_size: int) -> None:
    run(world_size, _mixed_dtypes)


def _groups() -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        parameters = list(model.parameters())
        return [
            {"params": iter(parameters[4:]), "lr": 0.3},
            {"params": parameters[0], "betas": (0.5, 0.6)},
            {"params": parameters[1:4], "weight_decay": 0.5},
        ]

    twins = Twins(make_small_and_large, params_of=groups)
    for step in range(3):
        twins.train(lambda _, step=step: squares(step), steps=1)
        for optimizer in (twins.plain, twins.ours):
            optimizer.param_groups[0]["lr"] *= 0.5
            optimizer.param_groups[1]["betas"] = (0.1 * step, 0.9)


def test_several_groups(run: Run) -> None:
    run(2, _groups)


def _more_ranks_than_elements() -> None:
    for shapes in ([LARGE], [(1,)], [(3,), (4, 5)]):
        Twins(lambda shapes=shapes: make_parameters(*shapes)).train(squares)


def test_more_ranks_than_elements(run: Run) -> None:
    run(3, _more_ranks_than_elements)


def _unused(step: int) -> Callable[[int], set[int]]:
    """Some on some ranks, some on none, large and small; in some steps only."""
    return lambda rank: {1, 2} | ({0, 6, 9} if (step + rank) % 2 else {5})


def _unused_parameters() -> None:
    twins = Twins(make_small_and_large)
    twins.train(lambda step: squares(step, without=_unused(step)))
    twins.train(squares)


@pytest.mark.parametrize("world_size", [2, 3])
def test_parameters_unused_on_some_or_all_ranks(run: Run, world_size: int) -> None:
    run(world_size, _unused_parameters)


def _frozen() -> None:
    twins = Twins(make_small_and_large)
    for step in range(4):
        for model in (twins.plain_model, twins.model):
            for number, parameter in enumerate(model.parameters()):
                parameter.requires_grad_(step % 2 == 0 or number % 3 > 0)
        twins.train(lambda _, step=step: squares(step), steps=1)


def test_frozen_and_thawed(run: Run) -> None:
    run(2, _frozen)


class _TiedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(torch.tanh(self.middle(self.embedding(tokens))))
        return logits


def _tied() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return _TiedNet()

    def passes_of(step: int) -> Callable[[nn.Module, int], None]:
        def passes(model: nn.Module, rank: int) -> None:
            generator = torch.Generator().manual_seed(100 * step + rank)
            tokens = torch.randint(11, (7,), generator=generator)
            nn.functional.cross_entropy(model(tokens), tokens.flip(0)).backward()

        return passes

    Twins(make).train(passes_of)


def test_tied_weights(run: Run) -> None:
    run(2, _tied)


def _many_buckets() -> None:
    sizes = [(300,), (10,), (250,), (9000,), (7,), (100,), (400,), (600,), (600,), (20,)]
    with (
        mock.patch.object(reduction_plan, "CAPACITY_BYTES", 4000),
        mock.patch.object(reduction_plan, "ALONE_BYTES", 3000),
        mock.patch.object(gradients, "CAPACITY_BYTES", 4000),
    ):
        twins = Twins(lambda: make_parameters(*sizes))
        twins.train(squares)
        for step in range(3):  # averages and new gradients add up
            twins.backward(squares(10 + step))
        twins.require_same_gradients()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_many_buckets_and_exchanges_in_rounds(run: Run, world_size: int) -> None:
    run(world_size, _many_buckets)


def _on_subgroup() -> None:
    group = dist.new_group([3, 1])
    if dist.get_rank() in (1, 3):
        Twins(make_small_and_large, group=group).train(squares)


def test_on_a_subgroup_whose_ranks_differ_from_the_global_ones(run: Run) -> None:
    run(4, _on_subgroup)


def _sum() -> None:
    twins = Twins(make_small_and_large, torch.optim.SGD, {"lr": 0.5}, op="sum")
    for group in twins.plain.param_groups:
        group["lr"] *= twins.world_size
    for step in range(2):
        twins.zero_grad()
        twins.backward(squares(step))
        twins.step()
        for plain, ours in zip(
            values_of(twins.plain_model.parameters()),
            values_of(twins.model.parameters()),
            strict=True,
        ):
            torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)


def test_sums(run: Run) -> None:
    run(2, _sum)


def _predivided(factor: float) -> None:
    twins = Twins(make_small_and_large, gradient_predivide_factor=factor)
    twins.backward(squares(0))
    if factor == 2.0:
        twins.require_same_gradients()
    for plain, ours in zip(twins.plain_model.parameters(), twins.model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, plain.grad)


@pytest.mark.parametrize("factor", [2.0, 3.0])
def test_predivided_averages(run: Run, factor: float) -> None:
    run(3, _predivided, factor)


def _compressed(compression: str) -> list[Any]:
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[compression]
    twins = Twins(make_small_and_large, compression=compression)
    twins.zero_grad()
    twins.backward(squares(0))
    for plain, ours in zip(twins.plain_model.parameters(), twins.model.parameters(), strict=True):
        assert ours.grad.dtype == torch.float32
        assert torch.equal(ours.grad, ours.grad.to(dtype).float())
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(ours.grad, plain.grad, rtol=2 * eps, atol=4 * eps)
    twins.ours.step()
    assert twins.ours.check_replicas() is None
    return values_of(twins.model.parameters())


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_compressed_gradients_are_rounded_and_the_same_everywhere(
    run: Run, compression: str
) -> None:
    first, *others = run(3, _compressed, compression)
    for values in others:
        assert all(map(torch.equal, first, values))


def _low_precision_sum(dtype: torch.dtype) -> list[float]:
    """Terms that cancel: right only if summed in float32, in rank order, and rounded once."""
    results = []
    for numel in (1, 300_000):
        twins = Twins(lambda numel=numel: make_parameters((numel,), dtype=dtype))
        factor = (256.0, 1.0, -256.0)[twins.rank]
        (next(twins.model.parameters()) * factor).sum().backward()
        gradient = next(twins.model.parameters()).grad
        assert torch.equal(gradient, gradient[:1].expand(numel))
        results.append(gradient[0].item())
    return results


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_summed_in_float32(run: Run, dtype: torch.dtype) -> None:
    third = (torch.tensor(1.0) / 3).to(dtype).item()
    assert run(3, _low_precision_sum, dtype) == [[third, third]] * 3


def _different_starts() -> None:
    model = make_model(seed=dist.get_rank())
    expected = values_of(make_model(seed=0).parameters())
    DistributedOptimizer(optim=torch.optim.SGD, params=model.parameters(), lr=0.1)
    assert all(map(torch.equal, expected, values_of(model.parameters())))


def test_parameters_start_as_rank_0s(run: Run) -> None:
    run(2, _different_starts)
