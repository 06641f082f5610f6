"""What each rank does: builds the candidates, compares them, counts their traffic, times them."""

import contextlib
import copy
import functools
import gc
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import random
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from benchmarks.step.candidates import Candidate, Trainer, select
from benchmarks.step.models import MODELS, Batch, BenchmarkModel
from benchmarks.step.traffic import Traffic, count_traffic

PHASES = ("forward", "backward", "clip", "step", "total")
MAX_NORM = 1.0
CHECKED_STEPS = 3
COUNTED_STEPS = 2
SEED = 20
COLLECTIVE_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class Task:
    """One process group's work: candidates of one model that are alive together.

    Attributes:
        candidates: their names, each with its reference.
        steps: timed steps of each.
        warm_up: steps of each before these.
        clipping: whether those that can clip do.
        in_a_row: steps of one candidate before the next has its turn. What a step leaves under way
            for the next one is awaited at the end of the turn, and counts.
    """

    model: str
    candidates: tuple[str, ...]
    world_size: int
    steps: int
    warm_up: int
    clipping: bool
    in_a_row: int = 1


@dataclass(frozen=True)
class Measurement:
    """One candidate's results in one process group.

    Attributes:
        difference: relative difference of all parameters from the reference's after some steps, in
            the 2-norm, largest over ranks; 0.0 only if all are equal bit for bit; ``None`` if one clips and
            the other doesn't, so that they needn't be equal.
        state_nbytes: optimizer state of each rank.
        traffic: what each rank sends in a step.
        samples: seconds of each phase in each turn, per step: the largest over ranks.
    """

    candidate: str
    reference: str
    difference: float | None
    state_nbytes: list[int]
    traffic: list[Traffic]
    samples: dict[str, list[float]]


def run_rank(rank: int, task: Task, scratch: str) -> None:
    """The whole of one rank; rank 0 leaves the measurements in ``scratch``."""
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    torch.set_num_threads(1)
    tqdm.set_lock(threading.RLock())  # its own needs a semaphore, which outlives a killed rank
    # torch's hook compiles functional optimizers, which say on every use that they are deprecated
    # and switch filters off to be heard; fairscale calls what torch has renamed.
    warnings.showwarning = lambda *_args, **_kwargs: None
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(Path(scratch, "store")), task.world_size),
        rank=rank,
        world_size=task.world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )
    measurements = measure(task)
    if rank == 0:
        payload = [asdict(measurement) for measurement in measurements]
        Path(scratch, "measurements.json").write_text(json.dumps(payload), encoding="utf-8")
    dist.destroy_process_group()


def _end_with_launcher() -> None:
    """Ends this process when the one that asked for it has ended, however that was."""
    launcher = multiprocessing.parent_process()
    if launcher is not None:
        multiprocessing.connection.wait([launcher.sentinel])
        os._exit(1)


def read_measurements(scratch: str) -> list[Measurement]:
    """What :func:`run_rank` left in ``scratch``."""
    payload = json.loads(Path(scratch, "measurements.json").read_text(encoding="utf-8"))
    return [
        Measurement(**{**entry, "traffic": [Traffic(**rank) for rank in entry["traffic"]]})
        for entry in payload
    ]


def measure(task: Task) -> list[Measurement]:
    """Everything about the task's candidates; every rank must call it."""
    model = MODELS[task.model]
    candidates = [
        candidate
        for candidate in select(task.candidates, clipping=task.clipping)
        if candidate.name in task.candidates
    ]
    batches = BatchSource(model)
    trainers = build_trainers(model, candidates)
    loops = {
        candidate.name: StepLoop(trainers[candidate.name], task.clipping and candidate.clips)
        for candidate in candidates
    }
    progress = tqdm(
        total=(task.warm_up + task.steps) * len(candidates),
        desc=model.name,
        unit="step",
        disable=None if dist.get_rank() == 0 else True,
        leave=False,
    )
    with progress:
        differences = compare(candidates, loops, batches)
        report_agreement(model, candidates, differences)
        batch = batches.draw(0)
        traffic = {
            name: count_traffic(functools.partial(loop.run, batch), COUNTED_STEPS)
            for name, loop in loops.items()
        }
        samples = take_turns(loops, batches, task, progress)
    return [
        Measurement(
            candidate=candidate.name,
            reference=candidate.reference,
            difference=differences[candidate.name],
            state_nbytes=_from_all_ranks(trainers[candidate.name].state_nbytes()),
            traffic=_from_all_ranks(traffic[candidate.name]),
            samples=samples[candidate.name],
        )
        for candidate in candidates
    ]


class BatchSource:
    """This rank's batch of any turn: the same for every candidate."""

    def __init__(self, model: BenchmarkModel) -> None:
        self._model = model

    def draw(self, turn: int) -> Batch:
        """The batch of a turn, drawn afresh."""
        seed = (SEED + turn) * dist.get_world_size() + dist.get_rank()
        return self._model.batch(torch.Generator().manual_seed(seed))


class StepLoop:
    """Steps one trainer and takes the time of each phase."""

    def __init__(self, trainer: Trainer, clipping: bool) -> None:
        self.trainer = trainer
        self.clipping = clipping

    def run_in_a_row(self, batch: Batch, count: int) -> list[float]:
        """Some steps; seconds of each of ``PHASES`` on this rank, their mean."""
        taken = [self.run(batch, is_last=number == count - 1) for number in range(count)]
        return [sum(phase) / count for phase in zip(*taken, strict=True)]

    def run(self, batch: Batch, *, is_last: bool = True) -> list[float]:
        """One step.

        Args:
            batch: the input.
            is_last: whether to wait for what is still under way.

        Returns:
            Seconds of each of ``PHASES`` on this rank.
        """
        start = time.perf_counter()
        loss = self.trainer.forward(batch)
        forward = time.perf_counter()
        self.trainer.backward(loss)
        backward = time.perf_counter()
        if self.clipping:
            self.trainer.clip_(MAX_NORM)
        clip = time.perf_counter()
        self.trainer.step_()
        if is_last:
            self.trainer.finish()
        end = time.perf_counter()
        return [forward - start, backward - forward, clip - backward, end - clip, end - start]


def build_trainers(model: BenchmarkModel, candidates: Sequence[Candidate]) -> dict[str, Trainer]:
    """All candidates, from the same initial parameters on every rank."""
    torch.manual_seed(SEED)
    module = model.build()
    return {candidate.name: candidate.build(copy.deepcopy(module)) for candidate in candidates}


def compare(
    candidates: Sequence[Candidate], loops: dict[str, StepLoop], batches: BatchSource
) -> dict[str, float | None]:
    """Takes some steps with each candidate and compares its parameters with its reference's.

    Returns:
        By candidate the relative difference, largest over ranks; 0.0 only if all parameters are
        equal bit for bit; ``None`` where one of the two clips and the other doesn't, or it doesn't
        train.
    """
    for candidate in candidates:
        loop = loops[candidate.name]
        for _ in range(candidate.inert_steps):
            loop.run(batches.draw(0))
        for turn in range(CHECKED_STEPS):
            loop.run(batches.draw(turn))
    differences: dict[str, float | None] = {}
    for candidate in candidates:
        own, reference = loops[candidate.name], loops[candidate.reference]
        differences[candidate.name] = (
            max(_from_all_ranks(_relative_difference(own.trainer, reference.trainer)))
            if own.clipping == reference.clipping and candidate.trains
            else None
        )
    return differences


def report_agreement(
    model: BenchmarkModel, candidates: Sequence[Candidate], differences: dict[str, float | None]
) -> None:
    """Says on rank 0, before anything is timed, whether all candidates compute the same."""
    if dist.get_rank() != 0:
        return
    verdicts = [
        f"{candidate.name}: {judge(candidate, differences[candidate.name])[0]}"
        for candidate in candidates
    ]
    tqdm.write(
        f"{model.name}: parameters after {CHECKED_STEPS} steps, compared with the reference's: "
        + "; ".join(verdicts)
    )


def judge(candidate: Candidate, difference: float | None) -> tuple[str, bool]:
    """How the parameters compare with the reference's, and whether that's as it should be."""
    if not candidate.trains:
        return "-", True
    if difference is None or candidate.name == candidate.reference:
        return "reference", True
    if difference == 0.0:
        return "bit for bit", True
    if candidate.is_exact or difference > candidate.tolerance:
        return f"DIFFERS: {difference:.1e}", False
    return f"within {difference:.1e}", True


def _relative_difference(trainer: Trainer, reference: Trainer) -> float:
    """The 2-norm of the difference over that of the reference, over all parameters together.

    Not tensor by tensor: the gradient of an attention's key bias is nothing but rounding, of which
    AdamW makes whole steps, so that two kernels differ there by 3e-5 and rightly so.
    """
    pairs = list(zip(trainer.full_parameters(), reference.full_parameters(), strict=True))
    if all(torch.equal(own, other) for own, other in pairs):
        return 0.0
    difference = _norm([own - other for own, other in pairs])
    relative = difference / _norm([other for _, other in pairs])
    return relative if math.isfinite(relative) else math.inf  # a NaN must not pass for agreement


def _norm(tensors: Sequence[torch.Tensor]) -> float:
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64).item() for tensor in tensors]
    return math.hypot(*norms)


def take_turns(
    loops: dict[str, StepLoop], batches: BatchSource, task: Task, progress: "tqdm[Any]"
) -> dict[str, dict[str, list[float]]]:
    """Steps all candidates in rounds, in an order drawn anew for each round.

    Returns:
        Seconds by candidate and phase, one per timed round: the largest over ranks.
    """
    order = random.Random(SEED)  # noqa: S311 - the same on every rank, nothing secret
    names = list(loops)
    seconds = torch.zeros(len(names), task.steps, len(PHASES), dtype=torch.float64)
    gc.collect()
    with _frozen_garbage():
        for turn in range(-task.warm_up, task.steps):
            batch = batches.draw(CHECKED_STEPS + task.warm_up + turn)
            for index in order.sample(range(len(names)), len(names)):
                dist.barrier()
                taken = loops[names[index]].run_in_a_row(batch, task.in_a_row)
                if turn >= 0:
                    seconds[index, turn] = torch.tensor(taken, dtype=torch.float64)
                progress.set_postfix_str(names[index], refresh=False)
                progress.update()
    dist.barrier()
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return {
        name: dict(zip(PHASES, seconds[index].T.tolist(), strict=True))
        for index, name in enumerate(names)
    }


@contextlib.contextmanager
def _frozen_garbage() -> Iterator[None]:
    """Keeps the collector away from what is alive already: its pauses would hit one candidate."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _from_all_ranks(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
