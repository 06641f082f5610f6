"""The mean: exact where values are equal, right in every type, block by block."""

import pytest
import torch

from tensorplay.distributed.optim._core import mean as module
from tensorplay.distributed.optim._core.mean import mean_

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.complex64, torch.float8_e4m3fn),
)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_NUMEL", 1000)


@pytest.mark.parametrize("count", range(1, 18))
def test_equal_values_stay_exactly_as_they_are(count: int) -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (5000,), dtype=torch.int32)
    value = bits.view(torch.float32)  # every exponent, infinities among them
    value[value.isnan()] = -0.0
    value[::100] = torch.inf
    value[1::100] = -torch.inf
    values = [value.clone() for _ in range(count)]
    mean_(values, values[count // 2])
    assert torch.equal(values[count // 2].view(torch.int32), value.view(torch.int32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("place", [0, -1, None])
def test_the_mean_in_every_type_and_at_every_place(
    dtype: torch.dtype, count: int, place: int | None
) -> None:
    values = [torch.randn(2500).to(dtype) for _ in range(count)]
    wide = torch.complex128 if dtype.is_complex else torch.float64
    expected = torch.stack([value.to(wide) for value in values]).mean(0).to(dtype)
    out = torch.empty_like(values[0]) if place is None else values[place]
    mean_(values, out)
    unit = torch.finfo(dtype).eps  # what is half-way may be rounded to either side
    torch.testing.assert_close(out.to(wide), expected.to(wide), rtol=unit, atol=2 * unit)


def test_infinities_give_what_their_sum_gives() -> None:
    inf = torch.inf
    values = [
        torch.tensor([inf, inf, 1.0, -inf, 2.0, torch.nan]),
        torch.tensor([inf, 1.0, -inf, inf, 4.0, 1.0]),
        torch.tensor([inf, inf, 1.0, 0.0, 6.0, inf]),
    ]
    mean_(values, values[0])
    assert values[0].tolist()[:3] == [inf, inf, -inf]
    assert values[0][3].isnan()
    assert values[0][4] == 4.0
    assert values[0][5].isnan()


def test_a_mean_of_huge_values_does_not_overflow() -> None:
    values = [torch.full((4,), 3e38), torch.full((4,), 2e38)]
    mean_(values, values[1])
    torch.testing.assert_close(values[1], torch.full((4,), 2.5e38))
