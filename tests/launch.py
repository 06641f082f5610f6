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

COLLECTIVE_TIMEOUT_S = 30.0
GRACE_AFTER_FIRST_FAILURE_S = 3.0

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


def _collect(
    readers: dict[Connection, int], timeout_s: float
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
            rank = waiting.pop(reader)  # type: ignore[arg-type]
            try:
                ok, payload = pickle.loads(reader.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                ok, payload = False, "the process died without a word"
            if ok:
                results[rank] = payload
            else:
                if not failures:
                    deadline = min(deadline, time.monotonic() + GRACE_AFTER_FIRST_FAILURE_S)
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
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    with Path(scratch, f"stacks-{rank}").open("w") as stacks:
        faulthandler.dump_traceback_later(timeout_s, file=stacks)
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(str(Path(scratch, "store")), world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=collective_timeout_s),
            )
            result = (True, function(*args))
        except BaseException:  # noqa: BLE001 - whatever it was, the parent must hear of it
            result = (False, traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
    with contextlib.suppress(BrokenPipeError):
        writer.send_bytes(pickle.dumps(result))
    if result[0]:
        dist.destroy_process_group()
    os._exit(0)  # a failed rank must not wait for peers in destructors
