"""One step of remote parameters: DistributedOptimizer over RRefs against torch's, interleaved.

Two processes on this machine, a trainer and an owner, one thread each. A step is timed on the
trainer, from the call to its return, over and over with the gradients of one autograd context. Each
candidate has parameters of its own.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
from torch import Tensor
from torch.distributed import rpc

from tensorplay.distributed.optim import DistributedOptimizer

CASES = {"3 x 3": (1, (3, 3), 100), "1 M": (1, (1000, 1000), 10), "8 x 1 M": (8, (1000, 1000), 3)}
OPTIMIZERS = {"AdamW": (torch.optim.AdamW, {"lr": 1e-6}), "SGD": (torch.optim.SGD, {"lr": 1e-6})}


def make_parameters(count: int, shape: tuple[int, ...]) -> list[Tensor]:
    return [torch.rand(shape).requires_grad_() for _ in range(count)]


def get_parameter(held: Any, index: int) -> Tensor:
    return held.local_value()[index]


def compute_loss(held: Any) -> Tensor:
    return torch.stack([(p * torch.rand_like(p)).sum() for p in held.local_value()]).sum()


def candidates(
    count: int, shape: tuple[int, ...], optimizer: str, context_id: int
) -> dict[str, Callable[[], None]]:
    """Steps that each have their gradients in the context; torch's comes first."""
    from torch.distributed.optim import DistributedOptimizer as TorchsOptimizer

    optimizer_class, options = OPTIMIZERS[optimizer]
    chosen: dict[str, tuple[Any, dict[str, Any]]] = {
        "torch": (TorchsOptimizer, {}),
        "tensorplay": (DistributedOptimizer, {}),
        "tensorplay, fused=True": (DistributedOptimizer, {"fused": True}),
        "tensorplay, fused=False": (DistributedOptimizer, {"fused": False}),
        "tensorplay, clip_grad_norm": (DistributedOptimizer, {"clip_grad_norm": 1.0}),
        "tensorplay, atomic": (DistributedOptimizer, {"atomic": True}),
    }
    steps, losses = {}, []
    for name, (distributed_class, more) in chosen.items():
        held = rpc.remote("owner", make_parameters, (count, shape))
        rrefs = [rpc.remote("owner", get_parameter, (held, index)) for index in range(count)]
        built = distributed_class(optimizer_class, rrefs, **options, **more)
        losses.append(rpc.rpc_sync("owner", compute_loss, (held,)))
        steps[name] = lambda built=built: built.step(context_id)
    dist_autograd.backward(context_id, losses)  # once: a context takes no second backward
    return steps


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Milliseconds per step, by case and candidate, one for each round."""
    results: dict[str, dict[str, list[float]]] = {}
    for optimizer in OPTIMIZERS:
        for case in arguments.cases:
            count, shape, steps_per_round = CASES[case]
            with dist_autograd.context() as context_id:
                steps = candidates(count, shape, optimizer, context_id)
                times = results[f"{optimizer}, {case}"] = {name: [] for name in steps}
                for number in range(arguments.rounds + 2):
                    for name, step in steps.items():
                        start = time.perf_counter()
                        for _ in range(steps_per_round):
                            step()
                        if number >= 2:  # the first rounds warm up
                            elapsed = time.perf_counter() - start
                            times[name].append(elapsed / steps_per_round * 1e3)
    return results


def work(name: str, rank: int, folder: str, arguments: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")  # torch's class uses what torch has deprecated
    os.environ["TP_SOCKET_IFADDR"] = "127.0.0.1"
    torch.set_num_threads(1)
    rpc.init_rpc(
        name,
        rank=rank,
        world_size=2,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/store"),
    )
    if name == "trainer":
        Path(folder, "results.json").write_text(json.dumps(measure(arguments)), encoding="utf-8")
    rpc.shutdown()


def report(results: dict[str, dict[str, list[float]]]) -> None:
    print(f"{'':<32} {'ms':>8} {'/ torch':>8}   (medians; the ratio's is over rounds)")
    for case, times in results.items():
        print(case)
        base = times["torch"]
        for name, values in times.items():
            ratio = statistics.median(v / b for v, b in zip(values, base, strict=True))
            print(f"  {name:<30} {statistics.median(values):>8.3f} {ratio:>8.2f}")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks remote", description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="turns of each candidate")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    arguments = parser.parse_args(argv)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=work, args=(name, rank, folder, arguments), daemon=True)
            for rank, name in enumerate(("trainer", "owner"))
        ]
        for process in processes:
            process.start()
        processes[0].join()
        if processes[0].exitcode:
            processes[1].kill()  # it would wait for the trainer
            raise SystemExit("the trainer failed; see above")
        processes[1].join()
        report(json.loads(Path(folder, "results.json").read_text(encoding="utf-8")))
