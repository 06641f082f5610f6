"""Runs a function on several gloo ranks of this machine and brings back what each returned.

Processes come from a fork server that has already imported torch, so a launch costs about a tenth
of a second. A rank that fails or hangs ends all of them, and the error says which rank was first.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tensorplay.distributed.optim._core.host_peers import VARIABLE

COLLECTIVE_TIMEOUT_S = 30.0
GRACE_AFTER_FIRST_FAILURE_S = 3.0
POOL_GRACE_AFTER_FIRST_FAILURE_S = 0.3
POOLS_WITHOUT_MEMORY = frozenset({3})
"""World sizes whose pooled ranks share no memory, as if each were on a host of its own."""

_context = multiprocessing.get_context("forkserver")
# torch._dynamo: the first optimizer built in a process imports it, which takes seconds.
_context.set_forkserver_preload(
    ["torch", "torch.distributed", "torch._dynamo", "tests.launch", "tensorplay.distributed.optim"]
)


class RankError(AssertionError):
    """At least one rank raised, died or did not finish."""


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    collective_timeout_s: float = COLLECTIVE_TIMEOUT_S,
) -> list[Any]:
    """Returns ``[function(*args) on rank 0, ...]``; ``function`` must be importable (module level).

    Inside, the default process group is a gloo group of ``world_size`` ranks, warnings are errors
    and torch runs on one thread.
    """
    with tempfile.TemporaryDirectory() as scratch:
        readers: dict[Connection, int] = {}
        processes = []
        for rank in range(world_size):
            reader, writer = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_rank_main,
                args=(function, args, rank, world_size, scratch, writer),
                kwargs={"timeout_s": timeout_s, "collective_timeout_s": collective_timeout_s},
                daemon=True,
            )
            process.start()
            writer.close()
            readers[reader] = rank
            processes.append(process)
        try:
            results, failures = _collect(readers, timeout_s)
        finally:
            for process in processes:
                process.join(timeout=0.5 if process.is_alive() else None)
                if process.is_alive():
                    process.kill()
                    process.join()
        if failures:
            raise RankError(_describe(failures, results, world_size, Path(scratch)))
        return [results[rank] for rank in range(world_size)]


class RankPool:
    """Ranks that stay, for tests of very many short examples: a run costs less than a millisecond.

    Used as :func:`run_ranks`, also by what it runs. Whatever a run leaves behind in a process is
    there for the next one. If a rank fails or hangs, all are ended; the next run starts new ones.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._processes: list[Any] = []
        self._connections: dict[Connection, int] = {}
        self._scratch = tempfile.TemporaryDirectory()

    def close(self) -> None:
        """Ends the ranks."""
        self._end()
        self._scratch.cleanup()

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 30.0) -> list[Any]:
        """Returns ``[function(*args) on rank 0, ...]``, or raises :class:`RankError`."""
        if not self._processes:
            self._start()
        job = pickle.dumps((function, args, timeout_s))
        results, failures = {}, {0: "interrupted"}
        try:
            for connection in self._connections:
                connection.send_bytes(job)
            results, failures = _collect(
                self._connections, timeout_s, POOL_GRACE_AFTER_FIRST_FAILURE_S
            )
        finally:
            if failures:
                self._end()
        if failures:
            scratch = Path(self._scratch.name)
            raise RankError(_describe(failures, results, self._world_size, scratch))
        return [results[rank] for rank in range(self._world_size)]

    def _start(self) -> None:
        scratch = self._scratch.name
        Path(scratch, "store").unlink(missing_ok=True)
        for rank in range(self._world_size):
            connection, theirs = _context.Pipe()
            process = _context.Process(
                target=_pooled_rank_main,
                args=(rank, self._world_size, scratch, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._connections[connection] = rank
            self._processes.append(process)

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        for connection in self._connections:
            connection.close()
        self._processes.clear()
        self._connections.clear()


def _collect(
    readers: dict[Connection, int],
    timeout_s: float,
    grace_s: float = GRACE_AFTER_FIRST_FAILURE_S,
) -> tuple[dict[int, Any], dict[int, str]]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting = dict(readers)
    deadline = time.monotonic() + timeout_s + 1.0
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for reader in ready:
            rank = waiting.pop(reader)  # type: ignore[arg-type] # the test passes what the types don't allow, or a wrapper
            try:
                ok, payload = pickle.loads(reader.recv_bytes())  # type: ignore[union-attr] # mypy takes it for any attribute of a module
            except EOFError:
                ok, payload = False, "the process died without a word"
            if ok:
                results[rank] = payload
            else:
                if not failures:
                    deadline = min(deadline, time.monotonic() + grace_s)
                failures[rank] = payload
    for rank in waiting.values():
        failures[rank] = "did not finish in time"
    return results, failures


def _describe(
    failures: dict[int, str], results: dict[int, Any], world_size: int, scratch: Path
) -> str:
    finished = sorted(results)
    lines = [f"{len(failures)} of {world_size} ranks failed (in this order); {finished} finished."]
    for rank, message in failures.items():
        lines.append(f"--- rank {rank}: {message}")
        stacks = scratch / f"stacks-{rank}"
        if stacks.exists() and stacks.stat().st_size:
            lines.append(stacks.read_text())
    return "\n".join(lines)


def _rank_main(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    scratch: str,
    writer: Connection,
    *,
    timeout_s: float,
    collective_timeout_s: float,
) -> None:
    with Path(scratch, f"stacks-{rank}").open("w") as stacks:
        faulthandler.dump_traceback_later(timeout_s, file=stacks)
        result = _attempt(_join_group, (rank, world_size, scratch, collective_timeout_s))
        if result[0]:
            result = _attempt(function, args)
        faulthandler.cancel_dump_traceback_later()
    with contextlib.suppress(BrokenPipeError):
        writer.send_bytes(pickle.dumps(result))
    if result[0]:
        dist.destroy_process_group()
    os._exit(0)  # a failed rank must not wait for peers in destructors


def _pooled_rank_main(rank: int, world_size: int, scratch: str, connection: Connection) -> None:
    if world_size in POOLS_WITHOUT_MEMORY:
        os.environ[VARIABLE] = "0"
    joined = _attempt(_join_group, (rank, world_size, scratch, COLLECTIVE_TIMEOUT_S))
    with contextlib.suppress(BrokenPipeError, EOFError, ConnectionResetError):
        while True:
            function, args, timeout_s = pickle.loads(connection.recv_bytes())
            with Path(scratch, f"stacks-{rank}").open("w") as stacks:
                faulthandler.dump_traceback_later(timeout_s, file=stacks)
                result = _attempt(function, args) if joined[0] else joined
                faulthandler.cancel_dump_traceback_later()
            connection.send_bytes(pickle.dumps(result))
    os._exit(0)


def _join_group(rank: int, world_size: int, scratch: str, timeout_s: float) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(Path(scratch, "store")), world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    dist.barrier()  # a rank that ends before the others have connected would fail them


def _attempt(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return True, function(*args)
    except BaseException:  # noqa: BLE001 - whatever it was, the parent must hear of it
        return False, traceback.format_exc()
