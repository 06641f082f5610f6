"""What is known about a run once it is over."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RunRecord:
    """What one run did, the same on every rank.

    Args:
        mode: ``"replicated"``, ``"sharded"`` or ``"in-backward"``.
        device: ``"cpu"`` or ``"cuda"``.
        first_step: Steps taken before it, by the run it resumed.
        losses: Mean loss of the global batch at each step, before that step's update.
        state_nbytes: Optimizer state on the rank that holds most; measured.
        peak_memory_nbytes: Peak memory of the process that needed most; measured.
        gradient_nbytes: Most bytes of gradients alive at once in the first backward, on the rank that
            had most; measured.
        steps_per_second: Without the first step, which allocates; measured.
        sent_nbytes: Bytes sent in one step, mean over ranks; computed.
        shards: Who holds which share of the state, one text per optimizer.
    """

    mode: str
    device: str
    first_step: int
    losses: list[float]
    state_nbytes: int
    peak_memory_nbytes: int
    gradient_nbytes: int
    steps_per_second: float
    sent_nbytes: float
    shards: list[str]
