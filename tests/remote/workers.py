"""Four processes with RPC: two that own parameters, two that train; and models without surprises.

A model's loss is linear in its parameters, so their gradients in each step are known tensors: the
oracle on one process is a plain optimizer that is given these.
"""

import os
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import Tensor
from torch.distributed import rpc

from tests.launch import RankError, RankPool

NAMES = ("trainer0", "owner1", "owner2", "trainer3")
OWNERS = NAMES[1:3]
SHAPES = ((3, 3), (5,), (2, 4), (), (7, 1), (0, 2))


def init_rpc(rank: int, names: Sequence[str], path: str, timeout_s: float = 30.0) -> None:
    """Makes this process one of the workers ``names``, which meet in the file ``path``."""
    os.environ["TP_SOCKET_IFADDR"] = "127.0.0.1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch uses what torch has deprecated
        rpc.init_rpc(
            names[rank],
            rank=rank,
            world_size=len(names),
            rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
                init_method=f"file://{path}", rpc_timeout=timeout_s
            ),
        )


class Workers:
    """A pool of ranks that know each other by RPC."""

    def __init__(
        self, folder: Path, names: Sequence[str] = NAMES, rpc_timeout_s: float = 30.0
    ) -> None:
        self._pool = RankPool(len(names))
        self._folder = folder
        self._names = names
        self._rpc_timeout_s = rpc_timeout_s
        self._num_starts = 0

    def train(
        self, function: Callable[..., Any], *args: Any, ranks: Sequence[int] = (0,)
    ) -> list[Any]:
        """What ``function(*args)`` returned on the trainers ``ranks``; the others are called by RPC."""
        path = str(self._folder / f"store{self._num_starts}")
        job = (path, self._names, self._rpc_timeout_s, ranks, function, args)
        try:
            results = self._pool.run(_take_part, *job, timeout_s=60.0)
        except RankError:  # the pool has ended its processes, and starts others
            self._num_starts += 1
            raise
        return [results[rank] for rank in ranks]

    def close(self) -> None:
        self._pool.close()


def _take_part(
    path: str,
    names: Sequence[str],
    rpc_timeout_s: float,
    ranks: Sequence[int],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    rank = dist.get_rank()
    if not rpc.api._is_current_rpc_agent_set():
        init_rpc(rank, names, path, rpc_timeout_s)
    return function(*args) if rank in ranks else None


def gradient(index: int, step: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + index)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)


def make_params(
    indices: Iterable[int], frozen: Sequence[int] = (), dtype: torch.dtype = torch.float32
) -> dict[int, Tensor]:
    params = {}
    for index in indices:
        generator = torch.Generator().manual_seed(index)
        values = torch.randn(SHAPES[index % len(SHAPES)], generator=generator, dtype=dtype)
        params[index] = values.requires_grad_(index not in frozen)
    return params


class Model:
    """Lives on an owner."""

    def __init__(self, indices: Iterable[int], *args: Any) -> None:
        self.params = make_params(indices, *args)

    def get(self, index: int) -> Tensor:
        return self.params[index]

    def values(self) -> dict[int, Tensor]:
        return {index: p.detach().clone() for index, p in self.params.items()}

    def loss(self, step: int, used: Sequence[int] | None) -> Tensor:
        terms = [
            (p * gradient(index, step, p.shape, p.dtype)).sum()
            for index, p in self.params.items()
            if used is None or index in used
        ]
        return torch.stack(terms).sum() if terms else torch.zeros(())

    def set_grads(self, value: float) -> None:
        for p in self.params.values():
            p.grad = torch.full_like(p, value)

    def grads(self) -> list[float | None]:
        return [None if p.grad is None else p.grad.mean().item() for p in self.params.values()]


def _call(rref: Any, method: str, *args: Any) -> Any:
    return getattr(rref.local_value(), method)(*args)


def call(rref: Any, method: str, *args: Any) -> Any:
    """The result of a method of a remote object."""
    return rpc.rpc_sync(rref.owner(), _call, (rref, method, *args))


class Placed:
    """Parameters placed on owners, seen from a trainer."""

    def __init__(self, placement: dict[str, Sequence[int]], *args: Any) -> None:
        self.models = {
            name: rpc.remote(name, Model, (list(indices), *args))
            for name, indices in placement.items()
        }
        self.rrefs = {
            index: rpc.remote(name, _call, (self.models[name], "get", index))
            for name, indices in placement.items()
            for index in indices
        }

    def params(self, *indices: int) -> list[Any]:
        """RRefs, in the order of ``indices``, or all."""
        return [self.rrefs[index] for index in indices or sorted(self.rrefs)]

    def backward(self, context_id: int, step: int, used: Sequence[int] | None = None) -> None:
        losses = [
            call(model, "loss", step, used)
            for name, model in self.models.items()
            if used is None or any(self.rrefs[index].owner_name() == name for index in used)
        ]
        losses = [loss for loss in losses if loss.requires_grad]
        dist_autograd.backward(context_id, losses)

    def train(
        self, optimizer: Any, steps: Iterable[int], used: Sequence[int] | None = None
    ) -> None:
        for step in steps:
            with dist_autograd.context() as context_id:
                self.backward(context_id, step, used)
                optimizer.step(context_id)

    def values(self) -> list[Tensor]:
        values: dict[int, Tensor] = {}
        for model in self.models.values():
            values |= call(model, "values")
        return [values[index] for index in sorted(values)]


class Plain:
    """The same parameters in one process, with a plain optimizer."""

    def __init__(self, optimizer_class: Any, num_params: int, *args: Any, **kwargs: Any) -> None:
        self.params = make_params(range(num_params), *args)
        self.optimizer = optimizer_class(list(self.params.values()), **kwargs)

    def train(self, steps: Iterable[int], used: Sequence[int] | None = None) -> None:
        for step in steps:
            for index, p in self.params.items():
                p.grad = None
                if p.requires_grad and (used is None or index in used):
                    p.grad = gradient(index, step, p.shape, p.dtype)
            self.optimizer.step()

    def values(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.params.values()]


def run_threads(*functions: Callable[[], Any]) -> list[BaseException]:
    """Runs functions at once and returns what they raised."""
    errors: list[BaseException] = []

    def guarded(function: Callable[[], Any]) -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors
