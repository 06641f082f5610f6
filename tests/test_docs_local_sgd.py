"""The page about post-local SGD: every code block runs, on two hosts of two ranks."""

import os
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tensorplay.distributed.optim import PostLocalSGDOptimizer
from tests.launch import run_ranks
from tests.reference.ddp import batch, make_net
from tests.reference.training import require_equal, values_of

PAGE = Path(__file__).parents[1] / "docs" / "local_sgd.md"
RECIPE, EXTRAS, LEVELS, SHARDED, SAVE, LOAD, ONE_FILE, UNEVEN = range(8)


def blocks() -> list[str]:
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


class Script:
    """What a user's script holds, on one rank."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {
            "torch": torch,
            "dist": dist,
            "DistributedDataParallel": DistributedDataParallel,
            "net": nn.Sequential(make_net(), nn.BatchNorm1d(3)),
            "loss_fn": nn.functional.mse_loss,
            "batches": [batch(step) for step in range(9)],
        }

    def run(self, number: int) -> None:
        exec(blocks()[number], self.names)  # noqa: S102 - the test

    def train(self, steps: range) -> None:
        model, optimizer = self.names["model"], self.names["optimizer"]
        for step in steps:
            inputs, targets = batch(step)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()

    def values(self) -> list[torch.Tensor]:
        return values_of(self.names["net"].state_dict().values())

    def equal_ranks(self) -> list[int]:
        """The ranks that hold this rank's parameters."""
        own = [value.tolist() for value in values_of(self.names["net"].parameters())]
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, own)
        return [rank for rank, values in enumerate(gathered) if values == own]


def _recipe() -> list[int]:
    script = Script()
    script.run(RECIPE)  # steps 4 and 7 average, step 8 doesn't
    optimizer = script.names["optimizer"]
    assert isinstance(optimizer, PostLocalSGDOptimizer)
    assert (optimizer.averager.step, script.names["hook_state"].iter) == (9, 4)
    return script.equal_ranks()


def test_the_recipe_synchronises_hosts_between_averages_and_all_at_one() -> None:
    assert run_ranks(4, _recipe) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def _variants(path: str) -> None:
    os.chdir(path)
    for variant in (None, EXTRAS, SHARDED):
        script, resumed = Script(), Script()
        for each in (script, resumed):
            each.run(RECIPE)
            if variant is not None:
                each.run(variant)
        if variant == SHARDED:
            for rank in range(2):
                script.names["optimizer"].optim.consolidate_state_dict(to=rank)
                if dist.get_rank(script.names["subgroup"]) == rank:
                    script.run(SAVE)
        else:
            script.train(range(9, 11))
            script.run(SAVE)
        resumed.run(LOAD)
        script.train(range(11, 17))
        resumed.train(range(11, 17))
        require_equal(script.values(), resumed.values(), f"variant {variant}: ")
        if variant == SHARDED:
            script.names["optimizer"].optim.consolidate_state_dict(to=0)
        script.run(ONE_FILE)
        assert script.equal_ranks() == [0, 1, 2, 3]


def test_saving_and_resuming_goes_on_bitwise() -> None:
    with tempfile.TemporaryDirectory() as path:
        run_ranks(4, _variants, path)


def _levels() -> list[int]:
    script = Script()
    script.run(RECIPE)
    script.run(LEVELS)
    local = torch.optim.SGD(script.names["model"].parameters(), lr=0.1)
    script.names["optimizer"] = PostLocalSGDOptimizer(local, script.names["averager"])
    script.train(range(5))
    return script.equal_ranks()


def test_several_levels() -> None:
    assert run_ranks(4, _levels) == [[0, 1, 2, 3]] * 4


def _uneven() -> list[int]:
    script = Script()
    script.run(RECIPE)
    script.names["batches"] = script.names["batches"][: 3 + dist.get_rank()]
    script.run(UNEVEN)
    assert script.names["optimizer"].averager.step == 15
    return script.equal_ranks()


def test_uneven_inputs() -> None:
    assert run_ranks(4, _uneven) == [[0, 1, 2, 3]] * 4


def test_links_lead_somewhere() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert len(blocks()) == UNEVEN + 1
    titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
    assert set(re.findall(r"\]\(#(.*?)\)", text)) == anchors
    readme = (PAGE.parents[1] / "README.md").read_text(encoding="utf-8")
    assert "(docs/local_sgd.md)" in readme
