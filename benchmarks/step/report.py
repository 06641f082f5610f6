"""The table on the terminal, the same as markdown, and the plot."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from benchmarks.step.candidates import FLOOR, KERNEL_TOLERANCE, NORM_TOLERANCE, REFERENCE
from benchmarks.step.measurement import CHECKED_STEPS, PHASES
from benchmarks.step.models import MODELS
from benchmarks.step.results import Conditions, ModelResults, Row
from benchmarks.step.traffic import HOW

# Okabe and Ito's palette, which colour-blind readers can tell apart.
COLOURS = {
    "DDP": "#999999",
    "torch": "#E69F00",
    "fairscale": "#56B4E9",
    "DeepSpeed": "#D55E00",
    "Megatron": "#0072B2",
    "tensorplay": "#009E73",
}
OTHER_COLOUR = "#CC79A7"
HEADER = (
    "candidate",
    *(f"{phase} ms" for phase in PHASES),
    "ratio",
    "p10-p90",
    "overhead / floor",
    "state MB",
    "sent MB",
    "sent / params",
    "in memory MB",
    "collectives",
    "parameters",
)


def format_terminal(result: ModelResults) -> str:
    """The table of a model with its columns aligned."""
    lines = [HEADER, *(_cells(row, result) for row in result.rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    text = [
        "  ".join(
            cell.ljust(width) if column in {0, len(HEADER) - 1} else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join([_title(result), text[0], "-" * len(text[0]), *text[1:]])


def format_markdown(conditions: Conditions, results: Sequence[ModelResults], plot: str) -> str:
    """All tables, with what they mean and where they were measured."""
    parts = ["# Step time", f"![ratios]({plot})"]
    for result in results:
        parts.append(f"## {_title(result)}")
        rule = ["---", *["---:"] * (len(HEADER) - 2), "---"]
        lines = [HEADER, rule, *(_cells(row, result) for row in result.rows)]
        parts.append("\n".join("| " + " | ".join(line) + " |" for line in lines))
    return "\n\n".join([*parts, *explain(conditions)]) + "\n"


def explain(conditions: Conditions) -> list[str]:
    """What the columns mean, and where they were measured; one paragraph each."""
    settings, machine = conditions.settings, conditions.machine
    clipping = (
        f"gradients clipped to norm {settings['max_norm']:g}" if settings["clip"] else "no clipping"
    )
    method = (
        f"{settings['nproc']} ranks of one thread each on gloo, float32, AdamW (fused kernel unless "
        f"stated), {clipping}; median of {settings['steps']} steps after {settings['warm_up']} for "
        "warming up, all candidates of a model alive in one process group (or in several, each with "
        "its own DDP, if memory is short) and taking turns in random order, a barrier before each "
        "turn; each time is the largest over ranks, so the phases need not add up to the total. "
        "Step includes freeing the gradients."
    )
    ratio = (
        "Ratio: median over rounds of the total over that of DDP in the same round and process "
        "group. † No clipping, and the ratio is to DDP without clipping. Ratios that differ by less "
        "than the spread, or by less than 10 %, are a tie."
    )
    floor = (
        "Overhead / floor: the total without local forward and backward, over the same of the floor: "
        "what sending and receiving the gradients and parameters once and AdamW on 1/W of them take, "
        "flat and without clipping."
    )
    parameters = (
        f"Parameters: how they compare with the reference's after {CHECKED_STEPS} steps from the "
        f"same start; the relative difference of all together in the 2-norm, of which "
        f"{KERNEL_TOLERANCE:g} is allowed between kernels, {NORM_TOLERANCE:g} where the norm that clips "
        "is computed more accurately than torch's (which is off by 1e-4 on the first model)."
    )
    place = f"{machine['cpu']}, {machine['cores']} cores, load {machine['load before']} before; "
    versions = ", ".join(f"{name} {version}" for name, version in conditions.versions.items())
    return [
        method,
        ratio,
        floor,
        f"State: bytes of optimizer state, largest over ranks. {HOW}",
        parameters,
        f"{place}{versions}.",
    ]


def _title(result: ModelResults) -> str:
    size = result.size
    return (
        f"{result.model}: {size.numel / 1e6:.1f} M parameters in {size.num_tensors:,} tensors "
        f"({MODELS[result.model].summary})"
    )


def _is_marked(row: Row) -> bool:
    return row.candidate.reference != REFERENCE


def _cells(row: Row, result: ModelResults) -> list[str]:
    label = row.candidate.label + (" †" if _is_marked(row) else "")
    if row.milliseconds is None or row.ratio is None:
        return [label, *[""] * (len(HEADER) - 2), "not installed"]
    sent, size = row.sent_nbytes, result.size.nbytes
    return [
        label,
        *(f"{row.milliseconds[phase]:.1f}" for phase in PHASES),
        f"{row.ratio.median:.2f}",
        f"{row.ratio.low:.2f}-{row.ratio.high:.2f}",
        _overhead(row, result),
        f"{row.state_nbytes / 1e6:.1f}",
        "n/a" if sent is None else f"{sent / 1e6:.1f}",
        "n/a" if sent is None else f"{sent / size:.2f}",
        f"{row.in_memory_nbytes / 1e6:.1f}",
        f"{row.num_collectives:g}",
        row.verdict,
    ]


def _overhead(row: Row, result: ModelResults) -> str:
    """What a step takes beyond local forward and backward, over what the floor takes beyond them."""
    floor = next((each.milliseconds for each in result.rows if each.candidate.name == FLOOR), None)
    if floor is None or row.milliseconds is None:
        return "n/a"
    local = floor["forward"] + floor["backward"]
    return f"{(row.milliseconds['total'] - local) / (floor['total'] - local):.1f}"


def plot(path: Path, conditions: Conditions, results: Sequence[ModelResults]) -> None:
    """Draws the ratio of each candidate, one panel per model."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = max(len(result.rows) for result in results)
    figure, panels = plt.subplots(
        1,
        len(results),
        figsize=(3.2 + 3.4 * len(results), 1.6 + 0.36 * rows),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axes, result in zip(panels[0], results, strict=True):
        for place, row in enumerate(result.rows):
            if row.ratio is None:
                axes.text(0.03, place, "not installed", va="center", fontsize=8, color="#555555")
                continue
            ratio = row.ratio
            axes.barh(
                place,
                ratio.median,
                xerr=[[ratio.median - ratio.low], [ratio.high - ratio.median]],
                color=COLOURS.get(row.candidate.family, OTHER_COLOUR),
                hatch="" if row.candidate.clips else "//",
                edgecolor="white",
                ecolor="#333333",
                capsize=2,
            )
            axes.text(0.03, place, f"{ratio.median:.2f}", va="center", fontsize=8)
        axes.axvline(1.0, color="black", linestyle="--", linewidth=1)
        axes.set_title(
            f"{result.model}\n{result.size.numel / 1e6:.1f} M in {result.size.num_tensors:,} tensors",
            fontsize=10,
        )
        axes.set_xlabel("step time / DDP + fused AdamW")
        axes.set_xlim(left=0)
        axes.spines[["top", "right"]].set_visible(False)
    labels = [row.candidate.label + (" †" if _is_marked(row) else "") for row in results[0].rows]
    panels[0][0].set_yticks(range(len(labels)), labels)
    panels[0][0].invert_yaxis()
    settings = conditions.settings
    note = (
        f"Median of {settings['steps']} steps, whiskers from the 10th to the 90th percentile; "
        f"{settings['nproc']} ranks on gloo. Hatched: no clipping; † to DDP without clipping."
    )
    figure.supxlabel(textwrap.fill(note, int(14 * figure.get_figwidth())), fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)
