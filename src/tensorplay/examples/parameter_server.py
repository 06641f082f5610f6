"""Trains one network, which lives on a server, from two trainers at once, by RPC.

``python -m tensorplay.examples.parameter_server``; see ``--help``. Each trainer has half of the
images. It sends a batch to the server, gets the network's outputs, and lets its
``DistributedOptimizer`` step the parameters where they are.
"""

import argparse
import importlib
import multiprocessing
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import autograd, rpc
from torch.distributed.nn.api.remote_module import RemoteModule

from tensorplay.distributed.optim import DistributedOptimizer
from tensorplay.examples.digits import NUM_CLASSES, NUM_PIXELS, Digits, load_digits

NUM_TRAINERS = 2
WIDTH = 64

_lock = threading.Lock()
_networks: list[nn.Module] = []


def shared_network() -> nn.Module:
    """The one network of the process in which this is called: the server."""
    with _lock:
        if not _networks:
            _networks.append(
                nn.Sequential(
                    nn.Linear(NUM_PIXELS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, NUM_CLASSES)
                )
            )
        return _networks[0]


def join_workers(name: str, rank: int, store: str) -> None:
    """Makes this process one of the server's and the trainers' group."""
    os.environ.setdefault("TP_SOCKET_IFADDR", "127.0.0.1")
    torch.set_num_threads(1)  # with tensors this small, threads mostly wait for each other
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's RPC uses what torch has deprecated
        rpc.init_rpc(  # type: ignore[no-untyped-call]  # torch doesn't annotate it
            name,
            rank=rank,
            world_size=1 + NUM_TRAINERS,
            rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}"),
        )


def train(index: int, store: str, x: Tensor, y: Tensor, options: argparse.Namespace) -> None:
    """What one trainer does.

    Args:
        index: which one it is.
        store: the file in which the workers find each other.
        x: its images, (images, 64).
        y: what they show, (images,).
        options: the program's.
    """
    join_workers(f"trainer{index}", 1 + index, store)
    try:
        run_steps(index, x, y, options)
    finally:
        rpc.shutdown()  # waits for all others


def run_steps(index: int, x: Tensor, y: Tensor, options: argparse.Namespace) -> None:
    """Trains, and shows the progress of the first trainer."""
    from tqdm import tqdm

    network = RemoteModule.init_from_module_rref("server", rpc.remote("server", shared_network))
    optimizer = DistributedOptimizer(torch.optim.Adam, network.remote_parameters(), lr=options.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    generator = torch.Generator().manual_seed(options.seed + index)
    bar = tqdm(range(options.steps), desc="trainer 0", disable=None if index == 0 else True)
    for _ in bar:
        chosen = torch.randint(len(y), (options.batch,), generator=generator)
        with autograd.context() as context_id:
            loss = F.cross_entropy(network.forward(x[chosen]), y[chosen])
            autograd.backward(context_id, [loss])  # type: ignore[attr-defined]  # re-exported implicitly
            optimizer.step(context_id)
        scheduler.step()
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)


def measure_accuracy(network: nn.Module, digits: Digits) -> float:
    """The share of held-out images that the network recognises."""
    with torch.no_grad():
        predicted = network(digits.held_out_x).argmax(-1)
    return float((predicted == digits.held_out_y).float().mean())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tensorplay.examples.parameter_server",
        description="Train a network that lives on a server from two trainers at once, by RPC.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=300, help="steps of each trainer")
    parser.add_argument("--batch", type=int, default=64, help="images per step")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)

    digits = load_digits(options.seed)
    torch.manual_seed(options.seed)
    network = shared_network()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        trainers = [
            context.Process(
                target=train,
                args=(
                    index,
                    store,
                    digits.x[index::NUM_TRAINERS].clone(),
                    digits.y[index::NUM_TRAINERS].clone(),
                    options,
                ),
                daemon=True,
            )
            for index in range(NUM_TRAINERS)
        ]
        for trainer in trainers:
            trainer.start()
        join_workers("server", 0, store)
        rpc.shutdown()  # serves until the trainers have finished
        for trainer in trainers:
            trainer.join()
    if any(trainer.exitcode for trainer in trainers):
        print("a trainer has failed; see above", file=sys.stderr)
        return 1
    print(f"held-out accuracy: {measure_accuracy(network, digits):.1%}")
    return 0


if __name__ == "__main__":
    # RPC finds functions by their module's name, and `__main__` is another module in each process.
    sys.exit(importlib.import_module("tensorplay.examples.parameter_server").main())
