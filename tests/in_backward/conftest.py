"""Buckets small enough that a tiny model has several, and one that never fills."""

from collections.abc import Iterator

import pytest
import torch

from tensorplay.distributed.optim.in_backward import local_gradients


@pytest.fixture(autouse=True, params=[100, 1 << 20], ids=["small buckets", "one bucket"])
def bucket_nbytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(local_gradients, "BUCKET_NBYTES", request.param)
    return int(request.param)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
