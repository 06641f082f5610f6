"""The page about the step inside backward: every code block runs."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.launch import run_ranks
from tests.reference.ddp import batch, make_net
from tests.reference.training import require_equal, values_of

PAGE = Path(__file__).parents[1] / "docs" / "in_backward.md"


def blocks() -> list[tuple[str, str]]:
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def side(code: str, other: str) -> str:
    """One side of a diff."""
    return "\n".join(line[1:] for line in code.splitlines() if not line.startswith(other))


def names() -> dict[str, Any]:
    inputs, targets = batch(0)
    return {
        "torch": torch,
        "dist": dist,
        "DistributedDataParallel": DistributedDataParallel,
        "net": make_net(),
        "loss_fn": nn.functional.mse_loss,
        "inputs": inputs,
        "targets": targets,
        "batches": [batch(step) for step in range(3)],
    }


def _run_page() -> None:
    (diff, loop), *rest = blocks()
    assert (diff, [language for language, _ in rest]) == ("diff", ["python"] * 5)
    before, after = names(), names()
    exec(side(loop, "+"), before)  # noqa: S102 - the test
    exec(side(loop, "-"), after)  # noqa: S102 - the test
    require_equal(values_of(before["net"].parameters()), values_of(after["net"].parameters()))
    for position, (_, code) in enumerate(rest):
        values = values_of(after["net"].parameters())
        if position >= 2:  # a section of its own
            after = {**names(), "apply_optimizer_in_backward": after["apply_optimizer_in_backward"]}
            values = values_of(after["net"].parameters())
        exec(code, after)  # noqa: S102 - the test
        assert not any(map(torch.equal, values, after["net"].parameters()))
        assert [p for p in after["net"].parameters() if p.grad is not None] == []


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_block_runs_and_updates(world_size: int) -> None:
    run_ranks(world_size, _run_page)


def test_the_readme_leads_to_the_page() -> None:
    assert "(docs/in_backward.md)" in (PAGE.parents[1] / "README.md").read_text(encoding="utf-8")
