"""Times a training step under DDP, torch's and other libraries' sharded optimizers, and ours."""

import argparse
import json
import sys
from pathlib import Path

RESULTS = Path(__file__).parent.parent / "results"
# Parameters, gradients, DDP's buckets, two moments and staging, in units of the parameters.
MEMORY_PER_CANDIDATE = 6.5
SHARE_OF_MEMORY = 0.7


def main(argv: list[str]) -> None:
    """Measures, prints the tables and writes them with all samples and a plot to a folder."""
    try:
        _measure_and_report(argv)
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; all processes have ended")


def _measure_and_report(argv: list[str]) -> None:
    from benchmarks.step.candidates import select, split
    from benchmarks.step.measurement import Task
    from benchmarks.step.processes import run_task
    from benchmarks.step.report import explain, format_markdown, format_terminal, plot
    from benchmarks.step.results import Conditions, ModelResults, ModelSize, to_json

    options = _parse(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = select(options.candidates, clipping=options.clip)
    missing = {
        candidate.name: why for candidate in chosen if (why := candidate.why_missing()) is not None
    }
    for name, why in missing.items():
        print(f"{name} is not installed: {why}")
    conditions = Conditions.of(
        {
            key: getattr(options, key)
            for key in ("models", "candidates", "nproc", "steps", "warm_up", "clip")
        }
    )
    results = []
    for model in options.models:
        present = [candidate for candidate in chosen if candidate.name not in missing]
        at_most = options.together or _how_many_fit(ModelSize.of(model).nbytes, options.nproc)
        groups = [
            run_task(
                Task(
                    model=model,
                    candidates=tuple(candidate.name for candidate in group),
                    world_size=options.nproc,
                    steps=options.steps,
                    warm_up=options.warm_up,
                    clipping=options.clip,
                )
            )
            for group in split(present, at_most)
        ]
        results.append(ModelResults.of(model, groups, chosen, missing))
        print(f"\n{format_terminal(results[-1])}", flush=True)
    print("", *explain(conditions), sep="\n")
    (options.out / "step.json").write_text(
        json.dumps(to_json(conditions, results), indent=1) + "\n", encoding="utf-8"
    )
    (options.out / "step.md").write_text(
        format_markdown(conditions, results, "step.png"), encoding="utf-8"
    )
    plot(options.out / "step.png", conditions, results)
    print(f"\nWritten to {options.out}: step.md, step.json, step.png")
    if not all(row.agrees for result in results for row in result.rows):
        sys.exit("some candidates' parameters differ from the reference's: see DIFFERS above")


def _parse(argv: list[str]) -> argparse.Namespace:
    from benchmarks.step.candidates import CANDIDATES
    from benchmarks.step.models import DEFAULT_MODELS, MODELS

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks step",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(DEFAULT_MODELS))
    parser.add_argument(
        "--candidates",
        nargs="+",
        choices=CANDIDATES,
        default=list(CANDIDATES),
        metavar="NAME",
        help=f"of {', '.join(CANDIDATES)}; the references they need are added",
    )
    parser.add_argument("--steps", type=_positive, default=50, help="timed steps of each candidate")
    parser.add_argument("--warm-up", type=_positive, default=5, help="steps before these")
    parser.add_argument("--nproc", type=_positive, default=2, help="ranks")
    parser.add_argument(
        "--no-clip", dest="clip", action="store_false", help="train without gradient clipping"
    )
    parser.add_argument(
        "--together",
        type=_positive,
        help="how many candidates may be alive together; by default as many as fit into memory",
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="where to write the results")
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def _how_many_fit(nbytes: int, world_size: int) -> int:
    """How many candidates of a model of ``nbytes`` fit into the memory that is free now."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return sys.maxsize
    available_kb = next(
        int(line.split()[1])
        for line in meminfo.read_text(encoding="utf-8").splitlines()
        if line.startswith("MemAvailable:")
    )
    each = MEMORY_PER_CANDIDATE * nbytes * world_size
    return max(1, int(SHARE_OF_MEMORY * available_kb * 1024 / each))
