"""When to average: pure functions of the step, the same on every rank."""

from collections.abc import Sequence


def is_due(step: int, period: int, warmup_steps: int) -> bool:
    """Whether step number ``step``, counted from 0, ends with an average.

    It does in the first step after the warm-up and in every ``period``-th one from there.
    """
    return step >= warmup_steps and (step - warmup_steps) % period == 0


def due_level(
    step: int, periods: Sequence[int], warmup_steps: int, *, relative_to_warmup: bool
) -> int | None:
    """The level of a hierarchy that averages in step number ``step``, or ``None``.

    It is the one with the longest period that divides the step, since higher levels contain lower
    ones.

    Args:
        step: counted from 0.
        periods: of the levels, ascending.
        warmup_steps: how many first steps end without an average.
        relative_to_warmup: divide the number of steps since the warm-up, not since the beginning.
    """
    if step < warmup_steps:
        return None
    counted = step - warmup_steps if relative_to_warmup else step
    due = [level for level, period in enumerate(periods) if counted % period == 0]
    return due[-1] if due else None
