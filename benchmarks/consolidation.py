"""Consolidating optimizer state on one rank, against a raw send of the same bytes and torch's own."""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tensorplay.distributed.optim import ZeroRedundancyOptimizer


def main(argv: list[str]) -> None:
    """Runs the benchmark on ``--nproc`` gloo processes of this machine and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks consolidation", description=__doc__)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--mb", type=float, default=134.0, help="total Adam state (10^6 bytes)")
    parser.add_argument("--tensors", type=int, default=200, help="number of parameters")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--torch", action="store_true", help="also measure torch's (slow)")
    arguments = parser.parse_args(argv)
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    mp.spawn(_measure, (arguments, store.port), nprocs=arguments.nproc)


def _measure(rank: int, arguments: argparse.Namespace, port: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=arguments.nproc,
        timeout=timedelta(minutes=10),
    )
    numel = int(arguments.mb * 1e6 / 8 / arguments.tensors)
    parameters = [torch.nn.Parameter(torch.randn(numel)) for _ in range(arguments.tensors)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    ours = ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=1e-3)
    ours.step()
    candidates: dict[str, Callable[[], None]] = {
        "raw send of one tensor": _raw_send(rank, ours, arguments.nproc),
        "tensorplay": lambda: ours.consolidate_state_dict(to=0),
    }
    if arguments.torch:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
        theirs = TorchZero(parameters, torch.optim.AdamW, lr=1e-3)
        theirs.step()
        candidates["torch"] = lambda: theirs.consolidate_state_dict(to=0)
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(arguments.rounds):
        for name, run in candidates.items():
            ours.release_consolidated_state_dict()
            dist.barrier()
            start = time.perf_counter()
            run()
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
    if rank == 0:
        reference = statistics.median(seconds["raw send of one tensor"])
        print(f"{arguments.mb:.0f} MB of state in {2 * arguments.tensors} tensors, ", end="")
        print(f"{arguments.nproc} ranks, median of {arguments.rounds}")
        for name, times in seconds.items():
            median = statistics.median(times)
            spread = f"{min(times) * 1e3:.0f}-{max(times) * 1e3:.0f}"
            print(f"{name:<24}{median * 1e3:>9.1f} ms  ({spread})  ratio {median / reference:.2f}")
    dist.barrier()
    dist.destroy_process_group()


def _raw_send(rank: int, optimizer: ZeroRedundancyOptimizer, num_ranks: int) -> Callable[[], None]:
    """Everybody sends as many bytes as its state has to rank 0, which receives into fresh memory.

    Rank 0 also copies as many bytes as its own state has, since a consolidated state includes them.
    """
    own = sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values())
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(num_ranks)]
    dist.all_gather(sizes, torch.tensor([own]))
    payload = torch.ones(own, dtype=torch.uint8)

    def run() -> None:
        if rank:
            dist.send(payload, 0)
            return
        payload.clone()
        for source in range(1, num_ranks):
            dist.recv(torch.empty(int(sizes[source].item()), dtype=torch.uint8), source)

    return run
