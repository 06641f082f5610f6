"""Starting the ranks through torchrun, joining their group, and leaving none of them behind."""

import contextlib
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType

import torch
import torch.distributed as dist
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's prctl


class RankError(Exception):
    """A rank failed; what it had to say is on the terminal already."""


class Interrupted(SignalException):
    """The user, or the system, wants this program to end."""

    def __init__(self, received: signal.Signals) -> None:
        # torchrun passes ``sigval`` on to the ranks. SIGTERM ends them at once and without a
        # word at any moment, during imports too; SIGINT would have each print a traceback.
        super().__init__(f"received {received.name}", signal.SIGTERM)
        self.received = received


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Inside, Ctrl-C and SIGTERM raise `Interrupted`, once; later ones don't disturb the end."""

    def interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        for watched in (signal.SIGINT, signal.SIGTERM):
            signal.signal(watched, signal.SIG_IGN)
        raise Interrupted(signal.Signals(number))

    before = {
        watched: signal.signal(watched, interrupt) for watched in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for watched, handler in before.items():
            signal.signal(watched, handler)


def run_ranks(module: str, arguments: Sequence[str], num_processes: int) -> None:
    """Runs ``python -m module *arguments`` on that many ranks of this machine, and waits.

    Raises:
        RankError: a rank failed; the others have been ended.
    """
    # One thread each by default; torchrun would set the same, with a warning.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if sys.platform == "linux":  # the loopback works even where the host's name doesn't resolve
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    request = torchrun.parse_args(  # type: ignore[no-untyped-call] # torch leaves it untyped
        [
            "--standalone",
            "--local-addr=localhost",
            f"--nproc-per-node={num_processes}",
            "--signals-to-handle=SIGHUP,SIGQUIT",  # the other two are ours
            "--module",
            module,
        ]
    )
    # Not parsed with the rest: torchrun takes our --nproc for an abbreviation of its own option.
    request.training_script_args = list(arguments)
    logging.disable(logging.ERROR)  # its account of a failure is long and names no cause
    try:
        torchrun.run(request)  # type: ignore[no-untyped-call] # torch leaves it untyped
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        raise RankError(f"rank {rank} failed (exit code {first.exitcode})") from error
    finally:
        logging.disable(logging.NOTSET)


@contextlib.contextmanager
def process_group(launcher_pid: int | None) -> Iterator[torch.device]:
    """Joins the group that torchrun describes in the environment; yields this rank's device.

    NCCL where every process of this machine has a GPU to itself, else gloo on the CPU.

    Args:
        launcher_pid: The process that started this one, if it was `run_ranks`.
    """
    _end_with_parent(launcher_pid)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the launcher speaks for all
    device = choose_device(int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["LOCAL_RANK"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # Two runs can only be compared bit by bit if each of them is reproducible.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def choose_device(local_world_size: int, local_rank: int = 0) -> torch.device:
    """Returns the GPU of a rank if there is one for each rank of this machine, else the CPU."""
    if torch.cuda.device_count() >= local_world_size and dist.is_nccl_available():
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def _end_with_parent(launcher_pid: int | None) -> None:
    """Has Linux kill this rank when its launcher dies, were it by SIGKILL."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if launcher_pid is not None and os.getppid() != launcher_pid:
        sys.exit(1)  # it died before the line above
