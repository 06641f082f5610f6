"""Starts one process per rank and sees that none outlives the benchmark."""

import os
import tempfile

import torch.multiprocessing as mp

from benchmarks.step.measurement import Measurement, Task, read_measurements, run_rank

GRACE_S = 3.0


def run_task(task: Task) -> list[Measurement]:
    """Runs a task in processes of its own.

    Raises:
        torch.multiprocessing.ProcessException: if a rank failed; all have ended then.
    """
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", KINETO_LOG_LEVEL="99")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Ranks fork from a server that has imported torch already, which takes seconds.
    mp.get_context("forkserver").set_forkserver_preload([run_rank.__module__])
    with tempfile.TemporaryDirectory(prefix="benchmark-step-") as scratch:
        # What `finally` can't guard ends by itself: daemons at our exit, and ranks that find us gone.
        context = mp.start_processes(
            run_rank,
            (task, scratch),
            task.world_size,
            join=False,
            daemon=True,
            start_method="forkserver",
        )
        try:
            while not context.join(grace_period=GRACE_S):
                pass
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return read_measurements(scratch)
