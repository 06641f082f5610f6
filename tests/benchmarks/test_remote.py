"""The benchmark of remote steps runs, and compares with torch's class."""

import pytest

from benchmarks import remote


def test_it_compares_with_torchs_class(capfd: pytest.CaptureFixture[str]) -> None:
    remote.main(["--rounds=1", "--cases", "3 x 3", "--optimizers", "SGD"])
    lines = capfd.readouterr().out.splitlines()
    assert "SGD, 3 x 3" in lines
    ratios = {line[:32].strip(): float(line.split()[-1]) for line in lines[1:] if line[0] == " "}
    assert ratios.pop("torch") == 1.0
    assert len(ratios) == 5
    assert all(ratio > 0 for ratio in ratios.values())
