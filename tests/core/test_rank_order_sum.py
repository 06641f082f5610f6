"""The mean in rank order: also across chunks, and where the result overwrites a contribution."""

import math

import pytest
import torch

from tensorplay.distributed.optim._core.rank_order_sum import CHUNK_NUMEL, average_
from tests.reference.data_parallel import average
from tests.reference.training import require_equal

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
SIZES = (1, CHUNK_NUMEL - 1, CHUNK_NUMEL, CHUNK_NUMEL + 1, 2 * CHUNK_NUMEL + 3)


def make_contributions(count: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    kind = torch.complex64 if dtype.is_complex else torch.float32
    return [torch.randn(numel, generator=generator, dtype=kind).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_chunks_do_not_show(dtype: torch.dtype, count: int) -> None:
    for numel in SIZES:
        contributions = make_contributions(count, numel, dtype)
        expected = average(contributions)
        destination = torch.empty(numel, dtype=dtype)
        before = [each.clone() for each in contributions]
        assert average_(destination, contributions, count).isfinite()
        require_equal(expected, destination, f"{numel} elements")
        require_equal(before[1:], contributions[1:], "all but the first, which is scratch")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_result_may_overwrite_any_contribution(dtype: torch.dtype, count: int) -> None:
    for place in range(count):
        contributions = make_contributions(count, CHUNK_NUMEL + 5, dtype)
        expected = average(contributions)
        average_(contributions[place], contributions, count)
        require_equal(expected, contributions[place], f"contribution {place}")


def test_contributions_in_part_of_a_larger_memory() -> None:
    memory = torch.arange(30.0)
    parts = [memory[0:10], memory[10:20], memory[20:30]]
    average_(parts[1], parts, 3)
    assert torch.equal(memory[10:20], torch.arange(10.0, 20.0))
    assert torch.equal(memory[20:], torch.arange(20.0, 30.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_the_scalar_is_finite_only_if_all_elements_are(dtype: torch.dtype, value: float) -> None:
    for place in (0, CHUNK_NUMEL, CHUNK_NUMEL + 4):
        contributions = make_contributions(2, CHUNK_NUMEL + 5, dtype)
        contributions[1][place] = value
        destination = torch.empty_like(contributions[0])
        assert not average_(destination, contributions, 2).isfinite()


def test_values_whose_squares_overflow_are_finite() -> None:
    destination = torch.empty(4)
    assert average_(destination, [torch.full((4,), 3e30)], 1).isfinite()
    assert average_(destination, [torch.full((4,), -3e30)] * 2, 2).isfinite()


def test_a_sum_that_overflows_is_not_finite() -> None:
    half = torch.full((4,), 60000.0, dtype=torch.float16)
    assert average_(torch.empty_like(half), [half, half], 2).isfinite(), "float32 holds the sum"
    assert not average_(torch.empty_like(half), [half, half], 1).isfinite()
