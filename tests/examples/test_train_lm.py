"""The demonstration as a user runs it: its command line in fresh processes, with a tiny model."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tensorplay.examples.lm.checkpoint import Checkpoint, write_checkpoint
from tensorplay.examples.lm.model import ByteGPT
from tensorplay.examples.lm.options import MODES, parse_options
from tensorplay.examples.lm.record import RunRecord
from tensorplay.examples.lm.report import format_table, judge, tabulate
from tensorplay.examples.lm.text import (
    cut_windows,
    partition_batch,
    read_text,
    sample_positions,
)
from tensorplay.examples.train_lm import main

COMMAND = [sys.executable, "-m", "tensorplay.examples.train_lm"]
TINY = ["--layers=2", "--width=32", "--heads=2", "--context=16", "--batch=7"]


def run(*arguments: object, command: Sequence[str] = COMMAND) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 - our own program
        [*command, *map(str, arguments)], capture_output=True, text=True, timeout=100, check=False
    )


def losses(folder: Path, mode: str) -> list[float]:
    numbers: dict[str, Any] = json.loads((folder / "numbers.json").read_text())
    result: list[float] = numbers["runs"][mode]["losses"]
    return result


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{number} and {number * number}; " for number in range(500)))
    return path


# --- whole runs -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """Six steps on two processes, replicated and sharded, saved at the end."""

    done: subprocess.CompletedProcess[str]
    folder: Path
    checkpoint: Path


@pytest.fixture(scope="module")
def compared(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    folder = tmp_path_factory.mktemp("compared")
    checkpoint = folder / "new" / "model.pt"
    options = ["--steps=6", "--nproc=2", "--out", folder, "--save", checkpoint]
    done = run(*TINY, "--text", text, *options)
    assert done.returncode == 0, done.stderr
    return Comparison(done, folder, checkpoint)


def plain_losses(path: Path, num_steps: int) -> list[float]:
    """The same training as anyone would write it: one process, the whole batch, plain AdamW."""
    options, _ = parse_options(TINY, world_size=None)
    config = options.config
    tokens = read_text(path, config.context).tokens
    torch.manual_seed(config.seed)
    model = ByteGPT(config.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95))
    result = []
    for step in range(num_steps):
        optimizer.param_groups[0]["lr"] = config.lr * min(1.0, (step + 1) / 10)
        positions = sample_positions(len(tokens), config.context, config.batch, config.seed, step)
        inputs, targets = cut_windows(tokens, positions, config.context)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        result.append(loss.item())
    return result


def test_the_table_compares_equal_losses_and_half_the_state(
    compared: Comparison, text: Path
) -> None:
    table = compared.done.stdout
    assert "replicated       sharded     ratio" in table
    assert "equal" in table
    for label in ("final loss", "optimizer state", "peak memory", "steps per second", "sent per"):
        assert label in table
    replicated, sharded = (losses(compared.folder, mode) for mode in MODES["both"])
    assert sharded == pytest.approx(replicated, abs=1e-6)
    assert sharded == pytest.approx(plain_losses(text, 6), abs=1e-5)
    runs = json.loads((compared.folder / "numbers.json").read_text())["runs"]
    ratio = runs["sharded"]["state_nbytes"] / runs["replicated"]["state_nbytes"]
    assert 0.5 <= ratio < 0.75


def test_plot_and_numbers_lie_where_the_last_lines_say(compared: Comparison) -> None:
    folder = compared.folder
    plot, numbers = (line.split()[-1] for line in compared.done.stdout.splitlines()[-2:])
    assert (plot, numbers) == (str(folder / "loss.png"), str(folder / "numbers.json"))
    assert Path(plot).read_bytes().startswith(b"\x89PNG")
    content = json.loads(Path(numbers).read_text())
    assert content["config"]["world_size"] == 2
    assert content["versions"]["torch"] == torch.__version__


def test_nothing_but_progress_clutters_the_terminal(compared: Comparison) -> None:
    lines = compared.done.stderr.replace("\r", "\n").splitlines()
    assert [line for line in lines if line.strip() and "step" not in line] == []


LAUNCHED = [*COMMAND, "--nproc=1"]
UNDER_TORCHRUN = [
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"),
    *("-m", "tensorplay.examples.train_lm"),
]


@pytest.mark.parametrize(
    ("command", "mode"), [(LAUNCHED, "replicated"), (UNDER_TORCHRUN, "sharded")]
)
def test_a_run_goes_on_with_the_same_losses_on_other_world_sizes(
    compared: Comparison, text: Path, tmp_path: Path, command: list[str], mode: str
) -> None:
    options = ["--steps=9", "--mode", mode, "--out", tmp_path, "--text", text]
    done = run(*options, "--resume", compared.checkpoint, command=command)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path, mode) == pytest.approx(plain_losses(text, 9)[6:], abs=1e-5)


@pytest.mark.parametrize(("nproc", "largest_share"), [(1, 0.6), (2, 1.0)])
def test_updates_inside_backward_learn_the_same_with_fewer_gradients(
    text: Path, tmp_path: Path, nproc: int, largest_share: float
) -> None:
    options = ["--in-backward", "--layers=4", "--width=256", "--steps=2", f"--nproc={nproc}"]
    arguments = ["--context=8", "--batch=2", "--text", text, "--out", tmp_path]
    done = run(*options, "--heads=4", *arguments)
    assert done.returncode == 0, done.stderr
    assert "the two losses agree exactly" in done.stdout
    assert "gradients alive per process" in done.stdout
    runs = json.loads((tmp_path / "numbers.json").read_text())["runs"]
    replicated, inside = (runs[mode]["gradient_nbytes"] for mode in ("replicated", "in-backward"))
    assert replicated >= 12_000_000
    assert inside <= largest_share * replicated


def test_the_checkpoint_holds_the_plain_optimizers_state(compared: Comparison) -> None:
    assert [path.name for path in compared.checkpoint.parent.iterdir()] == ["model.pt"]
    (content,) = torch.load(compared.checkpoint, weights_only=True).values()
    assert content["step"] == 6
    (state,) = content["optimizers"]
    assert list(state["state"]) == list(range(len(content["model"])))
    torch.optim.AdamW(
        [torch.nn.Parameter(value) for value in content["model"].values()]
    ).load_state_dict(state)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_no_process_and_one_line(
    text: Path, tmp_path: Path, number: signal.Signals
) -> None:
    process = subprocess.Popen(  # noqa: S603 - our own program
        [*COMMAND, *TINY, "--text", str(text), "--steps=1000000", "--out", str(tmp_path)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        # SIGINT while they train, SIGTERM while they still import.
        wait_for(tmp_path, num_processes=3)
        if number == signal.SIGINT:
            assert process.stderr is not None
            shown = ""
            while "loss=" not in shown:
                shown += process.stderr.read(1)
        process.send_signal(number)
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    wait_for(tmp_path, num_processes=0)
    assert process.returncode == 128 + number
    assert errors.splitlines()[-1] == (
        f"train_lm: received {number.name}; all processes have ended"
    )
    assert "Traceback" not in errors


def wait_for(marker: Path, num_processes: int) -> None:
    """Waits until that many processes have ``marker`` on their command line."""
    deadline = time.monotonic() + 30
    while (found := count_processes(marker)) != num_processes:
        assert time.monotonic() < deadline, f"{found} processes, not {num_processes}"
        time.sleep(0.05)


def count_processes(marker: Path) -> int:
    count = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            count += os.fsencode(marker) in path.read_bytes()
    return count


# --- wrong input ------------------------------------------------------------------------------


def complaint(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Returns the one line that the program ends with."""
    assert main([*map(str, arguments)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("train_lm: error: ")
    assert output.err.count("\n") == 1
    return output.err


@pytest.fixture
def checkpoint(tmp_path: Path, text: Path) -> Path:
    path = tmp_path / "checkpoint.pt"
    options, _ = parse_options(TINY, world_size=None)
    digest = read_text(text, context=16).digest
    write_checkpoint(path, Checkpoint(5, vars(options.config), digest, {}, []))
    return path


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--text=missing.txt"], "cannot read --text missing.txt (No such file"),
        (["--resume=missing.pt"], "no checkpoint at --resume missing.pt"),
        (["--save=/"], "--save / is a folder"),
        (["--batch=2", "--nproc=3"], "--batch 2 leaves some of the 3 processes without work"),
        (["--width=30", "--heads=4"], "--width 30 is not a multiple of --heads 4"),
        (["--optimizer=lion"], "invalid choice: 'lion'"),
        (["--in-backward", "--mode=sharded"], "--mode sharded with --in-backward"),
        (["--steps=0"], "'0' is not a whole number from 1 up"),
        (["--lr=nan"], "--lr nan is not a positive number"),
        (["--out=/dev/null/runs"], "cannot write to the folder /dev/null/runs"),
    ],
)
def test_wrong_input_gets_one_line_with_the_value(
    capsys: pytest.CaptureFixture[str], arguments: Sequence[str], expected: str
) -> None:
    assert expected in complaint(capsys, *arguments)


def test_a_text_shorter_than_a_window_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "short").write_text("short")
    assert "5 bytes, fewer than" in complaint(capsys, "--text", tmp_path / "short")


def test_a_file_that_is_no_checkpoint_is_refused(
    capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path
) -> None:
    assert "is not a checkpoint" in complaint(capsys, "--resume", text)
    torch.save({"a": torch.zeros(3)}, tmp_path / "other.pt")
    assert "is not a checkpoint" in complaint(capsys, "--resume", tmp_path / "other.pt")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--optimizer=sgd"], "--optimizer sgd differs from the run in"),
        (["--width=64"], "--width 64 differs from the run in"),
        (["--steps=5"], "--steps 5, but the run in"),
        (["--steps=9"], "learned another text"),
    ],
)
def test_another_run_than_the_saved_one_is_refused(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, arguments: list[str], expected: str
) -> None:
    assert expected in complaint(capsys, "--resume", checkpoint, *arguments)


def test_a_resumed_run_takes_its_options_from_the_checkpoint(checkpoint: Path) -> None:
    options, found = parse_options(["--resume", str(checkpoint)], world_size=None)
    assert found is not None
    assert vars(options.config) == found.config
    assert options.config.width == 32


def test_nproc_that_contradicts_torchrun_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "--nproc 2 under torchrun, which started 4" in complaint(capsys, "--nproc=2")


def test_only_the_first_rank_complains(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(["--text=missing.txt"]) == 2
    assert capsys.readouterr() == ("", "")


# --- parts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_the_shares_of_a_batch_cover_it_in_order_and_evenly(world_size: int) -> None:
    batch = list(range(7))
    shares = [batch[partition_batch(7, world_size, rank)] for rank in range(world_size)]
    assert [item for share in shares for item in share] == batch
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_positions_depend_on_seed_and_step_alone() -> None:
    first = sample_positions(1000, context=10, batch=50, seed=1, step=3)
    assert first == sample_positions(1000, context=10, batch=50, seed=1, step=3)
    assert first != sample_positions(1000, context=10, batch=50, seed=1, step=4)
    assert first != sample_positions(1000, context=10, batch=50, seed=2, step=3)
    assert sample_positions(11, context=10, batch=50, seed=0, step=0) == [0] * 50


def test_targets_are_the_bytes_that_follow() -> None:
    inputs, targets = cut_windows(torch.arange(20, dtype=torch.uint8), [0, 16], context=3)
    assert inputs.tolist() == [[0, 1, 2], [16, 17, 18]]
    assert targets.tolist() == [[1, 2, 3], [17, 18, 19]]


def test_the_default_text_is_python_source_of_bounded_size() -> None:
    text = read_text(None, context=128)
    assert 1_000_000 < len(text.tokens) <= 8_000_000
    assert b"\nimport " in bytes(text.tokens[:100_000].tolist())


def record(mode: str, *, final_loss: float = 1.0, state_nbytes: int = 8_000_000) -> RunRecord:
    return RunRecord(
        mode=mode,
        device="cpu",
        first_step=0,
        losses=[2.0, final_loss],
        state_nbytes=state_nbytes,
        peak_memory_nbytes=300_000_000,
        gradient_nbytes=4_000_000,
        steps_per_second=2.0,
        sent_nbytes=0.0,
        shards=[],
    )


def test_losses_that_differ_are_called_a_bug() -> None:
    same, verdict = judge([record("replicated"), record("sharded", final_loss=1.00001)])
    assert not same
    assert verdict.startswith("NOT THE SAME TRAINING: the losses differ by up to 1.0e-05")


def test_a_loss_that_is_not_finite_fails() -> None:
    same, verdict = judge([record("sharded", final_loss=float("nan"))])
    assert not same
    assert "try a smaller --lr" in verdict


def test_the_table_shows_the_ratio_of_the_columns() -> None:
    table = format_table(tabulate([record("replicated"), record("sharded", state_nbytes=10**6)]))
    (line,) = (line for line in table.splitlines() if line.startswith("optimizer state"))
    assert line.split()[-6:] == ["measured", "8.0", "MB", "1.0", "MB", "0.12"]


def test_a_single_run_has_no_ratio() -> None:
    table = format_table(tabulate([record("sharded")]))
    assert "ratio" not in table
    assert "replicated" not in table
