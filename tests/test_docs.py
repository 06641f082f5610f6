"""The migration page: every code block runs, on gloo, and moves what it says it moves."""

import os
import re
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tests.launch import run_ranks
from tests.reference.ddp import batch, make_net, train
from tests.reference.training import require_equal, values_of

PAGE = Path(__file__).parents[1] / "docs" / "migration.md"
README = PAGE.parents[1] / "README.md"

TORCH, PLAIN, OVERLAPPED, TO_OWNERS, WITHOUT_DDP, PARTITION, FAIRSCALE, LOADING = (
    "From torch's class",
    "From the plain optimizer",
    "Overlapped with DDP",
    "Under DDP, reduced to owners",
    "Without DDP",
    "Which partition",
    "From fairscale's `OSS`",
    "Loading a checkpoint",
)


class Block(NamedTuple):
    section: str
    language: str
    code: str

    def before(self) -> str:
        """What stands there before the change; all of a block that is no diff."""
        return self._without("+") if self.language == "diff" else self.code

    def after(self) -> str:
        return self._without("-") if self.language == "diff" else self.code

    def _without(self, sign: str) -> str:
        lines = self.code.splitlines()
        return "\n".join(line[1:] for line in lines if not line.startswith(sign))


def blocks() -> Iterator[Block]:
    for section in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        title, text = section.split("\n", 1)
        for language, code in re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            yield Block(title, language, code)


def block(section: str, having: str) -> Block:
    """The only block of a section that contains ``having``."""
    (found,) = (b for b in blocks() if b.section == section and having in b.code)
    return found


CONSTRUCTION, SAVING, LOAD = "optimizer = ", "torch.save(state", 'torch.load("checkpoint.pt"'


def test_the_tests_below_run_every_block() -> None:
    run = {block(s, what) for s in (TORCH, PLAIN, FAIRSCALE) for what in (CONSTRUCTION, SAVING)}
    run |= {block(TORCH, "Join"), block(FAIRSCALE, "clip_grad_norm_")}
    run |= {block(OVERLAPPED, CONSTRUCTION), block(TO_OWNERS, CONSTRUCTION)}
    run |= {block(TO_OWNERS, "clip_grad_norm_")}
    run |= {block(WITHOUT_DDP, CONSTRUCTION), block(WITHOUT_DDP, "full_grad")}
    run |= {block(PARTITION, CONSTRUCTION), block(PARTITION, "groups = ")}
    run |= {block(LOADING, LOAD), block(LOADING, "detach_copy")}
    assert set(blocks()) == run


def test_links_lead_somewhere() -> None:
    text = PAGE.read_text(encoding="utf-8")
    titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
    assert set(re.findall(r"\]\(#(.*?)\)", text)) <= anchors
    assert "(docs/migration.md)" in README.read_text(encoding="utf-8")


class Script:
    """What a user's script holds."""

    def __init__(self, construction: str, seed: int = 0) -> None:
        net = make_net()
        if seed:
            for parameter in net.parameters():
                nn.init.normal_(parameter)
        self.names: dict[str, Any] = {
            "torch": torch,
            "dist": dist,
            "DistributedDataParallel": DistributedDataParallel,
            "net": net,
            "loss_fn": nn.functional.mse_loss,
            "batches": [batch(step) for step in range(2 + dist.get_rank())],
        }
        self.run(construction)

    def run(self, code: str) -> None:
        exec(code, self.names)  # noqa: S102 - the test

    def train(self, first: int) -> None:
        train(self.names["model"], self.names["optimizer"], steps=2, first=first)

    def values(self) -> list[torch.Tensor]:
        return values_of(self.names["net"].parameters())


def _there_and_back(section: str) -> None:
    warnings.simplefilter("ignore")  # torch's class and fairscale use what torch has deprecated
    construction, saving = block(section, CONSTRUCTION), block(section, SAVING)
    load = block(LOADING, LOAD)
    old = Script(construction.before())
    assert not isinstance(old.names["optimizer"], ZeroRedundancyOptimizer)
    old.train(0)
    old.run(saving.before())
    dist.barrier()
    resumed = Script(construction.before(), seed=1)
    new = Script(construction.after(), seed=2)
    assert isinstance(new.names["optimizer"], ZeroRedundancyOptimizer)
    for script in (resumed, new):
        script.run(load.code)
        script.train(2)
    require_equal(resumed.values(), new.values(), "there: ")
    new.run(saving.after())
    dist.barrier()
    resumed = Script(construction.after(), seed=3)
    again = Script(construction.before(), seed=4)
    for script in (resumed, again):
        script.run(load.code)
        script.train(4)
    require_equal(resumed.values(), again.values(), "and back: ")
    if dist.get_world_size() == 2:  # of more, DDP sums in another order in its first iteration
        old.train(2)
        old.train(4)
        require_equal(old.values(), again.values(), "as if never saved: ")


def _in_directory(path: str, function: Any, *args: Any) -> Any:
    os.chdir(path)
    return function(*args)


def run_in_scratch(world_size: int, function: Any, *args: Any) -> list[Any]:
    with tempfile.TemporaryDirectory() as path:
        return run_ranks(world_size, _in_directory, path, function, *args)


@pytest.mark.parametrize("section", [TORCH, PLAIN])
@pytest.mark.parametrize("world_size", [2, 3])
def test_training_goes_on_bitwise_there_and_back(section: str, world_size: int) -> None:
    run_in_scratch(world_size, _there_and_back, section)


def test_training_goes_on_bitwise_from_fairscale_and_back() -> None:
    pytest.importorskip("fairscale", reason="fairscale comes with requirements/bench.txt only")
    run_in_scratch(2, _there_and_back, FAIRSCALE)


def _a_dict_as_fairscale_makes_it() -> None:
    plain = Script(block(PLAIN, CONSTRUCTION).before())
    plain.train(0)
    optimizer, net = plain.names["optimizer"], plain.names["net"]
    parameters = list(net.parameters())
    saved = {
        "state": {index: dict(optimizer.state[p]) for index, p in enumerate(parameters)},
        "param_groups": [
            {**optimizer.param_groups[0], "params": list(range(len(parameters)))},
        ],
    }
    new = Script(block(FAIRSCALE, CONSTRUCTION).after(), seed=1)
    new.names["net"].load_state_dict(net.state_dict())
    new.names["optimizer"].load_state_dict(saved)
    plain.train(2)
    new.train(2)
    require_equal(plain.values(), new.values())


def test_the_format_of_fairscale_without_fairscale() -> None:
    run_ranks(2, _a_dict_as_fairscale_makes_it)


def _uneven_inputs() -> None:
    script = Script(block(TORCH, CONSTRUCTION).after())
    script.run(block(TORCH, "Join").code)
    before = values_of(make_net().parameters())
    assert not any(map(torch.equal, before, script.values()))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, [value.tolist() for value in script.values()])
    assert gathered[0] == gathered[1]


def test_join_on_uneven_inputs() -> None:
    run_ranks(2, _uneven_inputs)


def _clipping() -> None:
    script = Script(block(FAIRSCALE, CONSTRUCTION).after())
    script.names["net"][0].weight.grad = torch.ones_like(script.names["net"][0].weight)
    script.run(block(FAIRSCALE, "clip_grad_norm_").code)
    assert script.names["net"][0].weight.grad.norm() == pytest.approx(1.0, abs=1e-5)


def test_clipping() -> None:
    run_ranks(2, _clipping)


def _overlapped() -> None:
    usual = Script(block(OVERLAPPED, CONSTRUCTION).before())
    overlapped = Script(block(OVERLAPPED, CONSTRUCTION).after())
    usual.train(0)
    overlapped.train(0)
    require_equal(usual.values(), overlapped.values())


def test_overlapped_with_ddp() -> None:
    run_ranks(2, _overlapped)


def _to_owners() -> None:
    usual = Script(block(TO_OWNERS, CONSTRUCTION).before())
    hooked = Script(block(TO_OWNERS, CONSTRUCTION).after())
    usual.train(0)
    hooked.train(0)
    require_equal(usual.values(), hooked.values())
    clipping = block(TO_OWNERS, "clip_grad_norm_")
    usual.run(clipping.before())
    hooked.run(clipping.after())
    usual.train(2)
    hooked.train(2)
    require_equal(usual.values(), hooked.values())


def test_reduced_to_owners() -> None:
    run_ranks(2, _to_owners)


def _without_ddp() -> None:
    plain = Script(block(WITHOUT_DDP, CONSTRUCTION).before())
    new = Script(block(WITHOUT_DDP, CONSTRUCTION).after())
    plain.train(0)
    new.train(0)
    require_equal(plain.values(), new.values())
    gradients = block(WITHOUT_DDP, "full_grad")
    plain.run(gradients.before())
    new.run(gradients.after())
    torch.testing.assert_close(new.names["gradient"], plain.names["gradient"])


def test_without_ddp() -> None:
    run_ranks(2, _without_ddp)


def _which_partition(of_groups: bool) -> None:
    construction = block(PARTITION, CONSTRUCTION)
    model = "model = DistributedDataParallel(net)\n"
    imports = "from tensorplay.distributed.optim import ZeroRedundancyOptimizer\n"
    plain = Script(model + imports + construction.before())
    code = construction.after()
    if of_groups:
        code = block(PARTITION, "groups = ").code + code.replace("model.parameters()", "groups")
    new = Script(model + imports + code)
    plain.train(0)
    new.train(0)
    for expected, actual in zip(plain.values(), new.values(), strict=True):
        torch.testing.assert_close(actual, expected)
    assert of_groups or new.names["optimizer"].sharding_report().load_ratio < 1.05
    state = new.names["optimizer"].state
    assert any(each["exp_avg"].ndim == 1 for each in state.values())


@pytest.mark.parametrize("of_groups", [False, True])
def test_which_partition(of_groups: bool) -> None:
    run_ranks(2, _which_partition, of_groups)


def _part_of_the_model() -> None:
    script = Script(
        block(TORCH, CONSTRUCTION)
        .after()
        .replace("lr=1e-3", "lr=1e-3, parameters_as_bucket_view=True")
    )
    if dist.get_rank() == 0:
        script.run(block(LOADING, "detach_copy").code)
        loaded = torch.load("head.pt", weights_only=True)
        assert sorted(loaded) == ["bias", "weight"]
        assert loaded["bias"].untyped_storage().nbytes() == 3 * 4


def test_a_part_of_the_model() -> None:
    run_in_scratch(2, _part_of_the_model)
