"""Averaging a model's parameters: a flat all-reduce of the same bytes, torch's averager, and ours.

The candidates take turns in an order drawn anew for each round; a figure is the median over rounds
of the slowest rank's time, and a ratio is the median of each round's ratio to the reference. Each has
parameters of its own. Every step of the averagers averages. Processor time is that of all ranks
together; on a machine that does other work too it varies less than time.
"""

import argparse
import random
import resource
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.step.models import MODELS
from tensorplay.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

REFERENCE = "flat all-reduce in place"
SEED = 20


def main(argv: list[str]) -> None:
    """Runs the benchmark on ``--nproc`` gloo processes of this machine and prints a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks averaging",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["gpt", "many"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=3)
    arguments = parser.parse_args(argv)
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    mp.spawn(_measure, (arguments, store.port), nprocs=arguments.nproc)


def _measure(rank: int, arguments: argparse.Namespace, port: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=arguments.nproc)
    for name in arguments.models:
        candidates = _candidates(name)
        seconds, processor = _take_turns(candidates, arguments.rounds, arguments.warm_up)
        if rank == 0:
            _report(name, candidates, seconds, processor, arguments.nproc)
    dist.barrier()
    dist.destroy_process_group()


def _parameters(name: str) -> list[torch.nn.Parameter]:
    parameters = list(MODELS[name].build().parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros(()).expand_as(parameter)  # torch averages only what has one
    return parameters


def _candidates(name: str) -> dict[str, Callable[[], object]]:
    """One average each; the reference comes first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a period of 1
        ours = PeriodicModelAverager(1)
        from torch.distributed.algorithms.model_averaging.averagers import (
            PeriodicModelAverager as TorchAverager,
        )

        theirs = TorchAverager(1)
    ours_parameters, theirs_parameters = _parameters(name), _parameters(name)
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in ours_parameters])
    return {
        REFERENCE: lambda: dist.all_reduce(flat),
        "torch's averager": lambda: theirs.average_parameters(theirs_parameters),
        "tensorplay's averager": lambda: ours.average_parameters(ours_parameters),
    }


def _take_turns(
    candidates: dict[str, Callable[[], object]], num_rounds: int, warm_up: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """By candidate, one per round: the largest time over ranks, and processor time of all, seconds."""
    order = random.Random(SEED)  # noqa: S311 - the same on every rank, nothing secret
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    processor: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(warm_up + num_rounds):
        for name in order.sample(list(candidates), len(candidates)):
            dist.barrier()
            used, start = _processor_seconds(), time.perf_counter()
            candidates[name]()
            taken = torch.tensor(time.perf_counter() - start)
            dist.barrier()  # what its threads do when the others wait counts too
            spent = torch.tensor(_processor_seconds() - used)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            dist.all_reduce(spent)
            if turn >= warm_up:
                seconds[name].append(taken.item())
                processor[name].append(spent.item())
    return seconds, processor


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _report(
    name: str,
    candidates: dict[str, Callable[[], object]],
    seconds: dict[str, list[float]],
    processor: dict[str, list[float]],
    num_ranks: int,
) -> None:
    parameters = _parameters(name)
    millions = sum(parameter.numel() for parameter in parameters) / 1e6
    print(f"\n{name}: {millions:.1f} M elements in {len(parameters)} tensors, {num_ranks} ranks")
    for what, figures in (("time", seconds), ("processor time", processor)):
        print(f"  {what:<28}{'ms':>8}{'to the flat all-reduce':>26}{'to torch':>12}")
        for candidate in candidates:
            ratios = []
            for reference in (REFERENCE, "torch's averager"):
                pairs = zip(figures[candidate], figures[reference], strict=True)
                ratios.append(statistics.median(own / other for own, other in pairs))
            ms = statistics.median(figures[candidate]) * 1e3
            print(f"  {candidate:<28}{ms:>8.1f}{ratios[0]:>26.2f}{ratios[1]:>12.2f}", flush=True)
