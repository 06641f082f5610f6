"""Ranks that stay for all tests that ask for them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.launch import RankPool


@pytest.fixture(scope="session")
def run() -> Iterator[Callable[..., list[Any]]]:
    """``run(world_size, function, *args)``, as ``run_ranks``."""
    pools: dict[int, RankPool] = {}

    def run_pooled(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        if world_size not in pools:
            pools[world_size] = RankPool(world_size)
        return pools[world_size].run(function, *args)

    yield run_pooled
    for pool in pools.values():
        pool.close()
