"""The parameter server example, with few steps."""

import subprocess
import sys

import pytest

pytest.importorskip("sklearn")


def test_two_trainers_teach_the_servers_network() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "tensorplay.examples.parameter_server", "--steps=40"],
        check=False,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert finished.returncode == 0, finished.stderr
    accuracy = finished.stdout.rpartition("held-out accuracy: ")[2].strip()
    assert float(accuracy.rstrip("%")) > 80
