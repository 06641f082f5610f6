"""``import tensorplay`` against ``import torch``, each in fresh processes, one after the other."""

import argparse
import statistics
import subprocess
import sys

STATEMENTS = ("import torch", "import tensorplay")
DEFAULT_ROUNDS = 11


def seconds_to_run(statement: str) -> float:
    timed = (
        f"import time; start = time.perf_counter(); {statement}; print(time.perf_counter() - start)"
    )
    result = subprocess.run(  # noqa: S603  # our own interpreter, our own statements
        [sys.executable, "-c", timed], check=True, capture_output=True, text=True
    )
    return float(result.stdout)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks import_time", description=__doc__)
    parser.add_argument("--rounds", type=int, default=DEFAULT_ROUNDS)
    rounds = parser.parse_args(argv).rounds
    for statement in STATEMENTS:
        seconds_to_run(statement)  # fills the file cache and writes the byte code
    seconds: dict[str, list[float]] = {statement: [] for statement in STATEMENTS}
    for round_number in range(rounds):
        # Whichever comes second may find a warmer machine: take turns.
        for statement in STATEMENTS if round_number % 2 == 0 else reversed(STATEMENTS):
            seconds[statement].append(seconds_to_run(statement))
    print(f"{'statement':<20}{'median s':>10}{'min s':>10}{'max s':>10}   ({rounds} rounds)")
    for statement, samples in seconds.items():
        print(
            f"{statement:<20}{statistics.median(samples):>10.3f}"
            f"{min(samples):>10.3f}{max(samples):>10.3f}"
        )
    torch_median, own_median = (statistics.median(seconds[s]) for s in STATEMENTS)
    print(f"ratio of the medians: {own_median / torch_median:.3f}")
