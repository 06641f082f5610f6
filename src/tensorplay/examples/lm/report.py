"""What a reader gets: a table on the terminal, a plot, and all numbers in a file."""

import json
import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tensorplay import __version__
from tensorplay.examples.lm.model import ByteGPT
from tensorplay.examples.lm.options import Options
from tensorplay.examples.lm.record import RunRecord
from tensorplay.examples.lm.text import Text

LOSS_TOLERANCE = 1e-6


def introduce(options: Options, text: Text, device: torch.device) -> str:
    """Returns what is about to happen."""
    config = options.config
    with torch.device("meta"):
        numel = sum(parameter.numel() for parameter in ByteGPT(config.model).parameters())
    where = "one GPU each, NCCL" if device.type == "cuda" else "CPU, gloo"
    how = f"optimizer state {' then '.join(options.modes)}"
    if options.config.in_backward:
        how = "updates after and then inside backward"
    return (
        f"A GPT of {numel / 1e6:.1f} M parameters learns {text.name} "
        f"({text.tokens.numel() / 1e6:.1f} MB), byte by byte.\n"
        f"{_processes(options)} ({where}), {config.optimizer}, "
        f"{options.steps} steps of {config.batch} x {config.context} bytes, "
        f"{how}.\n"
        "Each start takes a few seconds."
    )


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        label: What the numbers are.
        source: ``"measured"`` or ``"computed"``.
        values: By mode.
        unit: Of the values.
    """

    label: str
    source: str
    values: dict[str, float]
    unit: str


def _processes(options: Options) -> str:
    return "1 process" if options.world_size == 1 else f"{options.world_size} processes"


def tabulate(records: Sequence[RunRecord]) -> list[Row]:
    """Returns the comparison as values."""
    device = records[0].device
    memory = "peak GPU memory per process" if device == "cuda" else "peak memory per process"
    rows: list[tuple[str, str, Callable[[RunRecord], float], str]] = [
        ("final loss", "measured", lambda record: record.losses[-1], ""),
        ("optimizer state per process", "measured", lambda record: record.state_nbytes, "bytes"),
        ("gradients alive per process", "measured", lambda record: record.gradient_nbytes, "bytes"),
        (memory, "measured", lambda record: record.peak_memory_nbytes, "bytes"),
        ("steps per second", "measured", lambda record: record.steps_per_second, ""),
        ("sent per process and step", "computed", lambda record: record.sent_nbytes, "bytes"),
    ]
    return [
        Row(label, source, {record.mode: value(record) for record in records}, unit)
        for label, source, value, unit in rows
    ]


def format_table(rows: Sequence[Row]) -> str:
    """Returns the table as text; with two columns, the ratio of the second to the first."""
    modes = list(rows[0].values)
    compared = len(modes) == 2
    lines = [
        f"{'':40}" + "".join(f"{mode:>14}" for mode in modes) + ("     ratio" if compared else "")
    ]
    lines.append("-" * len(lines[0]))
    for row in rows:
        line = f"{row.label:<29}{row.source:<11}"
        line += "".join(f"{_format(row, row.values[mode]):>14}" for mode in modes)
        if compared:
            first, second = row.values.values()
            line += f"{_ratio(row, first, second):>10}"
        lines.append(line)
    return "\n".join(lines)


def _ratio(row: Row, first: float, second: float) -> str:
    if "loss" in row.label:
        return "equal" if abs(first - second) <= LOSS_TOLERANCE else "DIFFERENT"
    return f"{second / first:.2f}" if first else "-"


def _format(row: Row, value: float) -> str:
    if row.unit == "bytes":
        return f"{value / 1e6:.1f} MB"
    return f"{value:.6f}" if "loss" in row.label else f"{value:.2f}"


def largest_loss_difference(records: Sequence[RunRecord]) -> float:
    """Returns the largest difference between the runs at any step; 0 for a single run."""
    losses = torch.tensor([record.losses for record in records], dtype=torch.float64)
    return (losses.amax(0) - losses.amin(0)).max().item()


def judge(records: Sequence[RunRecord]) -> tuple[bool, str]:
    """Returns whether the runs learned the same, and the sentence that says so."""
    if not all(math.isfinite(loss) for record in records for loss in record.losses):
        return False, "NOTHING LEARNED: the loss is not finite; try a smaller --lr."
    if len(records) == 1:
        return True, f"One run, {records[0].mode}; --mode both compares."
    difference = largest_loss_difference(records)
    if difference <= LOSS_TOLERANCE:
        how = "exactly" if difference == 0 else f"within {difference:.0e}"
        return True, f"Same training: the two losses agree {how} at every step."
    return False, (
        f"NOT THE SAME TRAINING: the losses differ by up to {difference:.1e}, more than "
        f"{LOSS_TOLERANCE:.0e}. This is a bug; please report it with the numbers below."
    )


def explain(records: Sequence[RunRecord], *, one_process: bool) -> str:
    """Returns how to read the table.

    Args:
        records: What it shows.
        one_process: Whether a rank made all runs in one process.
    """
    on_cpu = records[0].device == "cpu"
    memory = "what is resident, torch's own code included" if on_cpu else "what torch allocated"
    gather = ", and when sharded the gather of the parameters" if records[-1].shards else ""
    lines = [
        "Final loss: of the last step's batch, before its update.",
        f"State and memory: of the process that needs most; memory is {memory}.",
        f"Gradients: most at once in the first backward; {_whose_gradients(records)}.",
        f"Sent: from the sizes; the ring all-reduce of the gradients{gather}.",
    ]
    if on_cpu and one_process and len(records) > 1:
        lines.append("Both runs shared a process: the second's memory holds what the first left.")
    return "\n".join(lines)


def _whose_gradients(records: Sequence[RunRecord]) -> str:
    if records[-1].mode == "in-backward" and records[-1].sent_nbytes == 0:
        return "inside backward, each is freed as soon as it has been used"
    return "DDP keeps all of them in its buckets"


def write_numbers(
    path: Path, options: Options, text: Text, records: Sequence[RunRecord], rows: Sequence[Row]
) -> None:
    """Writes configuration, versions, losses and table as JSON."""
    numbers: dict[str, Any] = {
        "config": asdict(options.config)
        | {"steps": options.steps, "world_size": options.world_size, "text": text.name},
        "versions": {
            "tensorplay": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
        },
        "runs": {record.mode: asdict(record) for record in records},
        "largest_loss_difference": largest_loss_difference(records),
        "table": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(numbers, indent=2) + "\n")


def plot(path: Path, options: Options, text: Text, records: Sequence[RunRecord]) -> None:
    """Draws loss against steps, and the optimizer state per process beside it."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    styles: dict[str, dict[str, Any]] = {
        "replicated": {"color": "#f2a65a", "linewidth": 5, "solid_capstyle": "round"},
        "sharded": {"color": "#1f3b57", "linewidth": 1.6},
        "in-backward": {"color": "#1f3b57", "linewidth": 1.6},
    }
    figure, (curves, bars) = plt.subplots(
        1, 2, figsize=(10, 4.8), width_ratios=[3, 1], layout="constrained"
    )
    config = options.config
    figure.suptitle(
        f"Byte-level GPT on {text.name}\n"
        f"{config.optimizer}, {_processes(options)}, {config.batch} x {config.context} "
        "bytes per step"
    )
    for record in records:
        steps = range(record.first_step + 1, record.first_step + len(record.losses) + 1)
        curves.plot(
            steps,
            record.losses,
            label="updated inside backward"
            if record.mode == "in-backward"
            else f"optimizer state {record.mode}",
            marker="o" if len(record.losses) == 1 else None,
            **styles[record.mode],
        )
    curves.set_title("loss of each step's batch" if len(records) == 1 else "the same loss ...")
    curves.set_xlabel("step")
    curves.set_ylabel("loss (nats per byte)")
    curves.grid(alpha=0.3)
    curves.legend(frameon=False)

    drawn = bars.bar(
        [record.mode for record in records],
        [record.state_nbytes / 1e6 for record in records],
        color=[styles[record.mode]["color"] for record in records],
        width=0.6,
    )
    bars.bar_label(drawn, fmt="%.1f MB", padding=2)
    less = min(record.state_nbytes for record in records) < records[0].state_nbytes
    bars.set_title("... with less state" if less else "optimizer state")
    bars.set_ylabel("optimizer state per process (MB)")
    bars.margins(x=0.2, y=0.12)
    for axes in (curves, bars):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
