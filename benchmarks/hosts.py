"""Times a training step of ranks on several hosts with a slow link: network namespaces, on Linux as root.

Every rank gets a namespace of its own with one virtual interface on a common bridge. A token bucket
at each end limits what the rank sends and, at the bridge, what it receives, so that the link is as
fast in both directions together as a full-duplex one. All else is the benchmark ``step``.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmarks.step.candidates import select
from benchmarks.step.measurement import Measurement, Task, read_measurements, run_rank
from benchmarks.step.report import explain, format_terminal
from benchmarks.step.results import Conditions, ModelResults

CANDIDATES = (
    "ddp",
    "torch-zero-view",
    "zero-shard",
    "zero-elements",
    "zero-backward",
    "zero-both",
    "data-parallel",
    "data-parallel-backward",
)
PREFIX = f"tp{os.getpid() % 10000}"
INTERFACE = "host0"
WARM_UP = 1


def main(argv: list[str]) -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks hosts", description=__doc__)
    parser.add_argument("--models", nargs="+", default=["gpt"])
    parser.add_argument("--candidates", nargs="+", default=list(CANDIDATES), metavar="NAME")
    parser.add_argument("--nproc", type=int, default=2, help="hosts with one rank each")
    parser.add_argument("--mbit", type=int, default=1000, help="of each link, in Mbit/s")
    parser.add_argument("--steps", type=int, default=6, help="turns of each candidate")
    parser.add_argument("--in-a-row", type=int, default=3, help="steps of each turn")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.rank is not None:
        run_rank(options.rank, _task_of(options.models[0], options), options.scratch)
        return
    if os.geteuid() != 0:
        sys.exit("network namespaces need root: run this as root, or with sudo")
    conditions = Conditions.of({**vars(options), "warm_up": WARM_UP, "clip": True})
    chosen = select(options.candidates, clipping=True)
    with hosts(options.nproc, options.mbit):
        for model in options.models:
            measurements = _run(model, options)
            results = ModelResults.of(model, [measurements], chosen, {})
            print(f"\n{format_terminal(results)}", flush=True)
    print(
        f"\n{options.nproc} hosts, {options.mbit} Mbit/s each way. A turn is {options.in_a_row} steps "
        "in a row, of which the mean counts; what the last one leaves under way is awaited in it.",
        *explain(conditions),
        sep="\n",
    )


def _task_of(model: str, options: argparse.Namespace) -> Task:
    names = tuple(each.name for each in select(options.candidates, clipping=True))
    return Task(
        model,
        names,
        options.nproc,
        options.steps,
        warm_up=WARM_UP,
        clipping=True,
        in_a_row=options.in_a_row,
    )


def _run(model: str, options: argparse.Namespace) -> list[Measurement]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE}
    with tempfile.TemporaryDirectory(prefix="benchmark-hosts-") as scratch:
        ranks = [
            subprocess.Popen(  # noqa: S603 - our own arguments
                [
                    *(
                        "ip",
                        "netns",
                        "exec",
                        f"{PREFIX}-{rank}",
                        sys.executable,
                        "-m",
                        "benchmarks",
                    ),
                    *("hosts", "--rank", str(rank), "--scratch", scratch, "--models", model),
                    *("--nproc", str(options.nproc), "--steps", str(options.steps)),
                    *("--in-a-row", str(options.in_a_row)),
                    *("--candidates", *options.candidates),
                ],
                env=environment,
            )
            for rank in range(options.nproc)
        ]
        try:
            codes = [rank.wait() for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(codes):
            sys.exit(f"ranks ended with {codes}")
        return read_measurements(scratch)


@contextmanager
def hosts(count: int, mbit: int) -> Iterator[None]:
    """Namespaces ``PREFIX-0`` ... on a bridge of their own, each with one interface."""
    bridge = f"{PREFIX}br"
    _ip("link", "add", bridge, "type", "bridge")
    try:
        _ip("link", "set", bridge, "up")
        for rank in range(count):
            name, outer = f"{PREFIX}-{rank}", f"{PREFIX}v{rank}"
            _ip("netns", "add", name)
            _ip("link", "add", outer, "type", "veth", "peer", "name", INTERFACE, "netns", name)
            _ip("link", "set", outer, "master", bridge, "up")
            _ip("-n", name, "addr", "add", f"10.213.0.{rank + 1}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", "dev", INTERFACE, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            _limit(["tc", "qdisc"], outer, mbit)
            _limit(["tc", "-n", name, "qdisc"], INTERFACE, mbit)
        yield
    finally:
        for rank in range(count):
            _run_tool("ip", "netns", "del", f"{PREFIX}-{rank}", check=False)
        _run_tool("ip", "link", "del", bridge, check=False)


def _limit(command: Sequence[str], device: str, mbit: int) -> None:
    shape = ["rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms"]
    _run_tool(*command, "add", "dev", device, "root", "tbf", *shape)


def _ip(*arguments: str) -> None:
    _run_tool("ip", *arguments)


def _run_tool(*command: str, check: bool = True) -> None:
    subprocess.run(command, check=check)  # noqa: S603 - our own arguments
