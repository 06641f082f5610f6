"""The page about local parameters: its code runs, top to bottom, on two ranks and on one."""

import re
from pathlib import Path

import pytest
import torch

from tests.launch import run_ranks

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "data_parallel.md"


def _run() -> str:
    torch.manual_seed(0)
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {}
    exec("\n".join(blocks), names)  # noqa: S102 - the test
    return repr(names["optimizer"])


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_code_runs(world_size: int) -> None:
    for rank, shown in enumerate(run_ranks(world_size, _run)):
        assert shown.startswith(f"DistributedOptimizer on rank {rank} of {world_size}: AdamW")


def test_the_readme_leads_there() -> None:
    assert "(docs/data_parallel.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
