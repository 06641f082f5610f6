"""What went wrong on other workers, and the one error that says so here."""

import traceback
from collections.abc import Mapping
from dataclasses import dataclass

_KINDS: tuple[type[Exception], ...] = (
    NotImplementedError,
    ValueError,
    TypeError,
    RuntimeError,
)
"""Errors that travel as what they are; all others as ``RuntimeError``, with their name in the text."""


@dataclass(frozen=True)
class Failure:
    """An exception on its way to another worker: text only, since its class may not exist there.

    Attributes:
        kind: the name of the nearest class in ``_KINDS``.
        text: the original traceback, or what is known instead.
        answered: whether the worker itself said so; false if nobody knows what it has done.
    """

    kind: str
    text: str
    answered: bool = True

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """Takes an exception that has been caught on the worker where it was raised."""
        kind = next((kind for kind in _KINDS if isinstance(error, kind)), RuntimeError)
        return cls(kind.__name__, "".join(traceback.format_exception(error)).rstrip())

    @classmethod
    def no_answer(cls, error: Exception) -> "Failure":
        """Takes what RPC raised instead of an answer."""
        return cls("RuntimeError", f"it gave no answer: {error}", answered=False)


def combine(call: str, failures: Mapping[str, Failure], num_asked: int, state: str) -> Exception:
    """One error that names every worker that failed.

    Args:
        call: the method the user called.
        failures: what happened, by worker.
        num_asked: the number of workers that had a part in the call.
        state: what holds now on all workers.

    Returns:
        An exception of the kind that all failures have in common, else a ``RuntimeError``.
    """
    kinds = {failure.kind for failure in failures.values()}
    name = kinds.pop() if len(kinds) == 1 else "RuntimeError"
    kind = next(kind for kind in _KINDS if kind.__name__ == name)
    summary = (
        f"{call} failed on {len(failures)} of {num_asked} workers ({', '.join(failures)}); {state}"
    )
    reports = (f"--- {worker}: {failure.text}" for worker, failure in failures.items())
    return kind("\n".join([summary, *reports]))
