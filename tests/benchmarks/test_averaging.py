"""The benchmark of averages runs end to end; no time is looked at."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_candidate_is_in_the_table() -> None:
    command = [sys.executable, "-m", "benchmarks", "averaging"]
    options = ["--models=tiny", "--rounds=2", "--warm-up=1"]
    finished = subprocess.run(  # noqa: S603 - our own interpreter, our own module
        [*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert "tiny: 0.1 M elements in 8 tensors, 2 ranks" in finished.stdout
    for candidate in ("flat all-reduce in place", "torch's averager", "tensorplay's averager"):
        assert candidate in finished.stdout
