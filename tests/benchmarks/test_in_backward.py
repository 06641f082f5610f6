"""The benchmark of the step inside backward runs end to end; no time is looked at."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_candidate_is_in_the_table() -> None:
    command = [sys.executable, "-m", "benchmarks", "in_backward", "--rounds=1", "--models=tiny"]
    finished = subprocess.run(  # noqa: S603 - our own interpreter, our own module
        command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert finished.returncode == 0, finished.stderr
    for row in ("tiny: 8 tensors", "ordinary loop", "apply_optimizer_in_backward", "torch's own"):
        assert row in finished.stdout
