"""The figures of a run, as the table and the plot show them and as they are saved."""

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.step.candidates import Candidate
from benchmarks.step.measurement import MAX_NORM, PHASES, Measurement, judge
from benchmarks.step.models import MODELS

PACKAGES = ("tensorplay", "torch", "numpy", "fairscale", "deepspeed", "megatron-core")


@dataclass(frozen=True)
class Ratio:
    """Step time over the reference's, round by round: median, 10th and 90th percentile."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, own: Sequence[float], reference: Sequence[float]) -> "Ratio":
        """The ratio of two candidates' totals in the same rounds."""
        ratios = [mine / theirs for mine, theirs in zip(own, reference, strict=True)]
        deciles = statistics.quantiles(ratios, n=10, method="inclusive") if ratios[1:] else ratios
        return cls(statistics.median(ratios), deciles[0], deciles[-1])


@dataclass(frozen=True)
class Row:
    """A line of the table; ``missing`` says why there are no figures.

    Attributes:
        milliseconds: median of each phase.
        ratio: to the reference, in the same process group.
        state_nbytes: largest over ranks.
        sent_nbytes: per step, mean over ranks; ``None`` where it can't be counted.
        in_memory_nbytes: of it, through memory of the host.
        num_collectives: per step, largest over ranks.
        verdict: how the parameters compare with the reference's.
        agrees: whether that's what they should.
    """

    candidate: Candidate
    missing: str | None = None
    milliseconds: dict[str, float] | None = None
    ratio: Ratio | None = None
    state_nbytes: int = 0
    sent_nbytes: float | None = None
    in_memory_nbytes: float = 0
    num_collectives: float = 0
    verdict: str = ""
    agrees: bool = True


@dataclass(frozen=True)
class ModelSize:
    """How large a model is."""

    numel: int
    num_tensors: int
    nbytes: int

    @classmethod
    def of(cls, name: str) -> "ModelSize":
        """The size of a model, which is built without memory."""
        with torch.device("meta"):
            parameters: list[nn.Parameter] = list(MODELS[name].build().parameters())
        return cls(
            sum(parameter.numel() for parameter in parameters),
            len(parameters),
            sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        )


@dataclass(frozen=True)
class ModelResults:
    """All that is known about one model.

    Attributes:
        groups: the measurements of each process group. Only those of one group compare.
        rows: one per candidate asked for, in the order of the table.
    """

    model: str
    size: ModelSize
    groups: list[list[Measurement]]
    rows: list[Row]

    @classmethod
    def of(
        cls,
        model: str,
        groups: list[list[Measurement]],
        candidates: Sequence[Candidate],
        missing: dict[str, str],
    ) -> "ModelResults":
        """Summarises the groups; ``missing`` has the reasons why candidates have no figures."""
        rows = [
            Row(candidate, missing=missing[candidate.name])
            if candidate.name in missing
            else _summarise(candidate, groups)
            for candidate in candidates
        ]
        return cls(model, ModelSize.of(model), groups, rows)


def _summarise(candidate: Candidate, groups: Sequence[Sequence[Measurement]]) -> Row:
    """The first group that has the candidate speaks for it: a reference may be in several."""
    by_name = next(
        named
        for named in ({measured.candidate: measured for measured in group} for group in groups)
        if candidate.name in named
    )
    own = by_name[candidate.name]
    sent = [rank.sent_nbytes for rank in own.traffic if rank.sent_nbytes is not None]
    verdict, agrees = judge(candidate, own.difference)
    return Row(
        candidate,
        milliseconds={phase: 1e3 * statistics.median(own.samples[phase]) for phase in PHASES},
        ratio=Ratio.of(own.samples["total"], by_name[own.reference].samples["total"]),
        state_nbytes=max(own.state_nbytes),
        sent_nbytes=statistics.fmean(sent) if sent else None,
        in_memory_nbytes=statistics.fmean(rank.in_memory_nbytes for rank in own.traffic),
        num_collectives=max(sum(rank.operations.values()) for rank in own.traffic),
        verdict=verdict,
        agrees=agrees,
    )


@dataclass(frozen=True)
class Conditions:
    """What the figures depend on besides the code."""

    settings: dict[str, Any]
    machine: dict[str, Any]
    versions: dict[str, str]

    @classmethod
    def of(cls, settings: dict[str, Any]) -> "Conditions":
        """Those of this run, to be asked before it loads the machine."""
        load = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None
        return cls(
            {**settings, "max_norm": MAX_NORM},
            {"cpu": _cpu_name(), "cores": os.cpu_count(), "load before": load},
            {"python": platform.python_version(), **_versions()},
        )


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    versions = {
        distribution.name: distribution.version
        for package in PACKAGES
        for distribution in metadata.distributions(name=package)
    }
    return {package: versions.get(package, "not installed") for package in PACKAGES}


def to_json(conditions: Conditions, results: Sequence[ModelResults]) -> dict[str, Any]:
    """All figures and samples, as plain data."""
    return {
        **asdict(conditions),
        "models": {
            result.model: {
                "size": asdict(result.size),
                "summary": MODELS[result.model].summary,
                "candidates": {row.candidate.name: _row_to_json(row) for row in result.rows},
                "process groups": [
                    [asdict(measurement) for measurement in group] for group in result.groups
                ],
            }
            for result in results
        },
    }


def _row_to_json(row: Row) -> dict[str, Any]:
    fields = {key: value for key, value in vars(row).items() if key != "candidate"}
    return {
        "label": row.candidate.label,
        "reference": row.candidate.reference,
        **fields,
        "ratio": None if row.ratio is None else asdict(row.ratio),
    }
