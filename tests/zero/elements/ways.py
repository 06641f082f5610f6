"""The ways in which flat slices are stepped, and tests of other modes repeated in them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tensorplay.distributed.optim import ZeroRedundancyOptimizer

ELEMENTS: dict[str, Any] = {"partition": "elements"}
DURING: dict[str, Any] = {**ELEMENTS, "overlap_with_backward": True}
FLAT: dict[str, Any] = {"flat_step": True}
WAYS = pytest.mark.parametrize("way", [ELEMENTS, FLAT], ids=["elements", "flat parameters"])
SOURCES = pytest.mark.parametrize("reduces", [False, True], ids=["averaged elsewhere", "reduced"])


@contextmanager
def by_default(**arguments: Any) -> Iterator[None]:
    """Inside, optimizers are made with these arguments unless others are given."""
    defaults = ZeroRedundancyOptimizer.__init__.__kwdefaults__
    before = dict(defaults)
    defaults.update(arguments)
    try:
        yield
    finally:
        defaults.update(before)


def in_another_way(arguments: dict[str, Any], function: Callable[..., Any], *args: Any) -> Any:
    """Calls a test's function, whose optimizers then step flat slices of any class."""
    with by_default(elementwise=True, **arguments):
        return function(*args)
