"""Counts what really leaves a process: bytes by the kernel, operations by torch's profiler.

Bytes are the payload that the kernel sent over this process's TCP connections (``TCP_INFO``), less
what it sent twice; so they include what C++ code sends, and nothing of other processes. What goes
through memory that ranks of a host share is counted apart, by those who write it. Operations
are the dispatcher's ``c10d::*`` operators on all threads, which C++ code also goes through; a
receive counts as part of its send.
"""

import os
import socket
import struct
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from tensorplay.distributed.optim._core.collectives import num_bytes_through_memory

# Offsets in bytes in Linux's `struct tcp_info`, since Linux 4.19.
_BYTES_SENT, _BYTES_RETRANSMITTED, _INFO_SIZE = 200, 208, 216
_RECEIVES = frozenset({"c10d::recv_", "c10d::recv_any_source_"})

HOW = (
    "Sent: payload that the kernel sent over each process's own TCP connections (TCP_INFO), and what "
    "went through memory that the ranks of a host share, in steps without timing, mean over ranks; "
    "in memory: the latter alone. Collectives: c10d operators that torch's profiler saw on all "
    "threads in the same steps, largest over ranks; a send and its receive count once, and what "
    "goes through memory not at all."
)


@dataclass(frozen=True)
class Traffic:
    """What one rank does in a step, on average over some steps.

    Attributes:
        sent_nbytes: payload bytes; ``None`` where the kernel doesn't count them.
        in_memory_nbytes: those of them that went through memory of the host.
        operations: how often each ``c10d`` operator was called.
    """

    sent_nbytes: float | None
    in_memory_nbytes: float
    operations: dict[str, float]


def count_traffic(run: Callable[[], object], times: int) -> Traffic:
    """Runs ``run`` some times, counting; every rank must call it, with nothing else in flight."""
    empty = _sent_while(lambda: None)
    threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # noqa: SLF001 - torch has no public name for it
    with profile(activities=[ProfilerActivity.CPU], experimental_config=threads) as profiler:

        def run_all() -> None:
            for _ in range(times):
                run()

        written_before = num_bytes_through_memory()
        sent = _sent_while(run_all)
        written = num_bytes_through_memory() - written_before
    # Not `profiler.events()`, which takes minutes to build its tree of a model of many tensors.
    names = (event.name() for event in profiler.profiler.kineto_results.events())
    calls = Counter(name for name in names if _is_counted(name))
    calls["c10d::barrier"] -= 2  # those of `_sent_while`
    return Traffic(
        None if sent is None or empty is None else (sent - empty + written) / times,
        written / times,
        {name: number / times for name, number in sorted(calls.items()) if number},
    )


def _is_counted(name: str) -> bool:
    return name.startswith("c10d::") and name not in _RECEIVES


def _sent_while(run: Callable[[], object]) -> int | None:
    """Bytes sent by ``run`` and by the barrier behind it, which lets all of them leave."""
    dist.barrier()
    before = _sent_nbytes()
    run()
    dist.barrier()
    after = _sent_nbytes()
    return None if before is None or after is None else after - before


def _sent_nbytes() -> int | None:
    """Payload bytes that this process has sent over all its open TCP connections."""
    if sys.platform != "linux":
        return None
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            duplicate = os.dup(int(name))
        except OSError:  # the descriptor by which the folder was listed
            continue
        if not os.readlink(f"/proc/self/fd/{duplicate}").startswith("socket:"):
            os.close(duplicate)
            continue
        with socket.socket(fileno=duplicate) as connection:
            if connection.type != socket.SOCK_STREAM or connection.family == socket.AF_UNIX:
                continue
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 512)
        if len(info) < _INFO_SIZE:
            return None
        (sent,) = struct.unpack_from("=Q", info, _BYTES_SENT)
        (retransmitted,) = struct.unpack_from("=Q", info, _BYTES_RETRANSMITTED)
        total += sent - retransmitted
    return total
