"""The oracle: gradients summed in rank order, then the plain optimizer on one process."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tensorplay.distributed.optim.zero import sharding_plan
from tests.reference.data_parallel import Twins, make_parameters, squares
from tests.reference.optimizers import OPTIMIZERS
from tests.reference.training import make_matrices, make_model

Run = Callable[..., list[Any]]
MODES = pytest.mark.parametrize("resident", [False, True], ids=["own storage", "bucket view"])

LARGE = (400, 400)
"""640 KB: its gradient is sent from its own memory."""

NAMES = ("SGD momentum", "AdamW fused", "KeepsCounters")


def make_small_and_large() -> nn.ParameterList:
    parameters = make_parameters((3, 4), LARGE, (17,), (), (0, 4), (2, 3), LARGE, (5, 3, 2))
    parameters.append(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    parameters.append(torch.randn(64, 64, 6, 6).to(memory_format=torch.channels_last))
    parameters.append(torch.randn(7, 9).t())
    return parameters


def _several_optimizers(resident: bool) -> None:
    for name in NAMES:
        twins = Twins(make_small_and_large, *OPTIMIZERS[name], parameters_as_bucket_view=resident)
        twins.train(squares, steps=2, what=name)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@MODES
def test_small_and_large_parameters(run: Run, world_size: int, resident: bool) -> None:
    run(world_size, _several_optimizers, resident)


def _every_optimizer(resident: bool) -> None:
    for name, (optimizer_class, options) in OPTIMIZERS.items():
        twins = Twins(make_model, optimizer_class, options, parameters_as_bucket_view=resident)
        twins.train(squares, what=name)


@MODES
def test_every_optimizer(run: Run, resident: bool) -> None:
    run(2, _every_optimizer, resident)


def _matrix_wise(resident: bool) -> None:
    def make() -> nn.ParameterList:
        return nn.ParameterList([*make_matrices(), torch.randn(2048, 64)])

    for optimizer_class in (torch.optim.Muon, torch.optim.Adafactor):
        options = {"lr": 0.1, "weight_decay": 0.1}
        Twins(make, optimizer_class, options, parameters_as_bucket_view=resident).train(squares)


@MODES
def test_matrix_wise_optimizers(run: Run, resident: bool) -> None:
    run(3, _matrix_wise, resident)


DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.float16)


def _mixed_dtypes(resident: bool) -> None:
    def make() -> nn.ParameterList:
        shapes = [((600, 500), (5, 3), (11,))[number % 3] for number in range(9)]
        return make_parameters(
            *((*shape, DTYPES[number % 5]) for number, shape in enumerate(shapes))
        )

    for name in ("Adam", "SGD momentum"):
        twins = Twins(make, *OPTIMIZERS[name], parameters_as_bucket_view=resident)
        twins.train(squares, what=name)


@pytest.mark.parametrize("world_size", [2, 3])
@MODES
def test_mixed_dtypes(run: Run, world_size: int, resident: bool) -> None:
    run(world_size, _mixed_dtypes, resident)


def _groups(resident: bool) -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        parameters = list(model.parameters())
        return [
            {"params": parameters[4:], "lr": 0.3},
            {"params": parameters[:1], "betas": (0.5, 0.6)},
            {"params": parameters[1:4], "weight_decay": 0.5},
        ]

    twins = Twins(make_small_and_large, params_of=groups, parameters_as_bucket_view=resident)
    for step in range(3):
        twins.train(lambda _, step=step: squares(step), steps=1)
        for optimizer in (twins.plain, twins.sharded):
            optimizer.param_groups[0]["lr"] *= 0.5
            optimizer.param_groups[1]["betas"] = (0.1 * step, 0.9)


@MODES
def test_several_groups(run: Run, resident: bool) -> None:
    run(2, _groups, resident)


def _more_ranks_than_parameters(resident: bool) -> None:
    for shapes in ([LARGE], [(3,)], [(3,), (4, 5)]):
        for name in ("AdamW fused", "NeedsAParameter", "KeepsCounters"):
            twins = Twins(
                lambda shapes=shapes: make_parameters(*shapes),
                *OPTIMIZERS[name],
                parameters_as_bucket_view=resident,
            )
            twins.train(squares, what=name)


@MODES
def test_more_ranks_than_parameters(run: Run, resident: bool) -> None:
    run(3, _more_ranks_than_parameters, resident)


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


def _tied(resident: bool) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return _TiedNet()

    def passes_of(step: int) -> Callable[[nn.Module, int], None]:
        def passes(model: nn.Module, rank: int) -> None:
            generator = torch.Generator().manual_seed(100 * step + rank)
            tokens = torch.randint(11, (7,), generator=generator)
            nn.functional.cross_entropy(model(tokens), tokens.flip(0)).backward()

        return passes

    Twins(make, parameters_as_bucket_view=resident).train(passes_of)


@MODES
def test_tied_weights(run: Run, resident: bool) -> None:
    run(2, _tied, resident)


def _strange_memory(resident: bool) -> None:
    def make() -> nn.ParameterList:
        torch.manual_seed(0)
        arena = torch.randn(40)
        return nn.ParameterList(
            [
                nn.Parameter(arena[:12].view(3, 4)),
                nn.Parameter(arena[12:30]),
                nn.Parameter(torch.randn(6, 5, 2)[..., 0]),
                nn.Parameter(torch.randn(400, 400, 2)[..., 1]),
                nn.Parameter(torch.randn(4)),
            ]
        )

    Twins(make, parameters_as_bucket_view=resident).train(squares)


@MODES
def test_parameters_with_gaps_and_in_a_storage_that_they_share(run: Run, resident: bool) -> None:
    run(2, _strange_memory, resident)


def _many_buckets(resident: bool) -> None:
    sizes = [(300,), (10,), (250,), (9000,), (7,), (100,), (400,), (600,), (600,), (20,)]
    with (
        mock.patch.object(sharding_plan, "CAPACITY_BYTES", 4000),
        mock.patch.object(sharding_plan, "ALONE_BYTES", 3000),
        mock.patch("tensorplay.distributed.optim.zero.gradients.CAPACITY_BYTES", 4000),
    ):
        twins = Twins(lambda: make_parameters(*sizes), parameters_as_bucket_view=resident)
        twins.train(squares)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@MODES
def test_many_buckets_and_exchanges_in_rounds(run: Run, world_size: int, resident: bool) -> None:
    run(world_size, _many_buckets, resident)


def _on_subgroup(resident: bool) -> None:
    group = dist.new_group([3, 1])
    if dist.get_rank() in (1, 3):
        twins = Twins(make_small_and_large, group=group, parameters_as_bucket_view=resident)
        twins.train(squares)


@MODES
def test_on_a_subgroup_whose_ranks_differ_from_the_global_ones(run: Run, resident: bool) -> None:
    run(4, _on_subgroup, resident)


def _low_precision_sum(dtype: torch.dtype) -> list[float]:
    """Terms that cancel: right only if summed in float32, in rank order, and rounded once."""
    results = []
    for numel in (1, 300_000):
        twins = Twins(lambda numel=numel: make_parameters((numel,), dtype=dtype))
        factor = (256.0, 1.0, -256.0)[twins.rank]
        (next(twins.model.parameters()) * factor).sum().backward()
        full = twins.sharded.full_grad(next(twins.model.parameters()))
        assert full is not None
        assert full.dtype == dtype
        assert torch.equal(full, full[:1].expand(numel))
        results.append(full[0].item())
    return results


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_summed_in_float32(run: Run, dtype: torch.dtype) -> None:
    third = (torch.tensor(1.0) / 3).to(dtype).item()
    assert run(3, _low_precision_sum, dtype) == [[third, third]] * 3
