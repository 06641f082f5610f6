"""The benchmark of functional steps runs end to end; no time is looked at."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_candidate_is_in_a_table() -> None:
    command = [sys.executable, "-m", "benchmarks", "functional", "--rounds=1", "--tensors=small"]
    finished = subprocess.run(  # noqa: S603 - our own interpreter, our own module
        command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert "small: 200 tensors" in finished.stdout
    assert "as_functional_optim, fused" in finished.stdout
    assert "vmap" in finished.stdout
