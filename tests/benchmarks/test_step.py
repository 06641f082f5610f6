"""The step benchmark runs end to end on a tiny model; no time is looked at."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
WORLD_SIZE = 2
CANDIDATES = ("ddp", "torch-zero-overlap", "zero", "zero-hook", "zero-overlap", "zero-view")
SHOWN = {*CANDIDATES, "ddp-unclipped"}  # with the reference of the overlap


class Run:
    """What one run printed and wrote."""

    def __init__(self, out: Path) -> None:
        command = [sys.executable, "-m", "benchmarks", "step", "--models", "tiny"]
        command += ["--candidates", *CANDIDATES, "--steps", "3", "--warm-up", "1"]
        command += ["--nproc", str(WORLD_SIZE), "--out", str(out)]
        finished = subprocess.run(  # noqa: S603 - our own interpreter, our own module
            command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
        )
        assert finished.returncode == 0, finished.stdout + finished.stderr
        self.printed = finished.stdout
        self.complaints = finished.stderr
        self.markdown = (out / "step.md").read_text()
        self.plot = (out / "step.png").read_bytes()
        self.json = json.loads((out / "step.json").read_text())

    @property
    def candidates(self) -> dict[str, Any]:
        return self.json["models"]["tiny"]["candidates"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("results"))


def test_table_is_printed_and_written_with_a_line_per_candidate(run: Run) -> None:
    assert set(run.candidates) == SHOWN
    for figures in run.candidates.values():
        assert figures["label"] in run.printed
        assert f"| {figures['label']}" in run.markdown


def test_nothing_is_complained_about(run: Run) -> None:
    assert run.complaints == ""


def test_json_has_all_samples_of_all_phases(run: Run) -> None:
    (group,) = run.json["models"]["tiny"]["process groups"]
    for measurement in group:
        assert list(measurement["samples"]) == ["forward", "backward", "clip", "step", "total"]
        assert {len(seconds) for seconds in measurement["samples"].values()} == {3}


def test_plot_is_a_png(run: Run) -> None:
    assert run.plot.startswith(b"\x89PNG")


def test_candidates_compute_the_same(run: Run) -> None:
    assert all(figures["agrees"] for figures in run.candidates.values())


def test_ddp_sends_what_a_ring_all_reduce_must(run: Run) -> None:
    nbytes = run.json["models"]["tiny"]["size"]["nbytes"]
    in_theory = 2 * (WORLD_SIZE - 1) / WORLD_SIZE * nbytes
    assert run.candidates["ddp"]["sent_nbytes"] == pytest.approx(in_theory, rel=0.03)
    assert run.candidates["ddp"]["num_collectives"] == 1


def test_sharding_halves_the_state(run: Run) -> None:
    halved = run.candidates["ddp"]["state_nbytes"] / WORLD_SIZE
    assert run.candidates["zero"]["state_nbytes"] == pytest.approx(halved, rel=0.01)


def test_benchmarks_are_listed_with_what_they_measure() -> None:
    listing = subprocess.run(
        [sys.executable, "-m", "benchmarks"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert re.search(r"step +Times a training step", listing)
