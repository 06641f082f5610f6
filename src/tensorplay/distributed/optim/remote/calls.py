"""The only place that issues RPCs: launches all, waits for all, and sorts answers from failures.

Importing this needs a torch that has RPC.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.distributed.autograd as dist_autograd
from torch.distributed import rpc
from torch.distributed.rpc.api import get_rpc_timeout  # type: ignore[attr-defined]  # re-exported implicitly

from tensorplay.distributed.optim.remote import endpoints
from tensorplay.distributed.optim.remote.failures import Failure

DEFAULT_LEASE_S = 60.0
"""How long a turn may last where RPC has no time-out."""

_SMALL = {"step", "squared_norm", "zero_grad", "end_turn"}
"""What carries a few numbers at most."""


class Owner(Protocol):
    """Where a local optimizer is."""

    key: int
    info: Any
    """The worker's, by which RPC knows it sooner than by its name."""


@dataclass
class Outcome:
    """What came of asking several workers, by worker.

    Attributes:
        answers: of those that did what was asked.
        failures: of those that didn't, or gave no answer.
        busy: those where it is another trainer's turn.
    """

    answers: dict[str, Any] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)
    busy: list[str] = field(default_factory=list)


def require_context(context_id: int) -> None:
    """Raises if ``context_id`` isn't a distributed autograd context of this worker."""
    try:
        dist_autograd._is_valid_context(context_id)  # type: ignore[attr-defined]  # noqa: SLF001 - torch has no public name for it
    except (RuntimeError, TypeError) as error:
        raise type(error)(
            f"{context_id!r} is not the id of a distributed autograd context that is open on this "
            "worker; call backward and step inside "
            "`with torch.distributed.autograd.context() as context_id:`"
        ) from error


def ask(requests: Mapping[str, tuple[Any, ...]]) -> Outcome:
    """Asks each worker for an action of ``endpoints``, all at once.

    Args:
        requests: by worker, the action's name and its arguments.
    """
    calls: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    for worker, (action, *arguments) in requests.items():
        request = (action, tuple(arguments))
        if action in _SMALL or (action == "prepare" and arguments[2] == "step"):
            calls[worker] = endpoints.answer_text, (endpoints.encode(request),)
        else:
            calls[worker] = endpoints.answer, request
    return _sort(_launch_and_wait(calls))


def step(owners: Iterable[tuple[str, Owner]], context_id: int) -> Outcome | None:
    """Asks each worker for a step with nothing but its numbers.

    Args:
        owners: by worker, what finds the local optimizer there.
        context_id: of the autograd context with the gradients.

    Returns:
        ``None`` if all have stepped and have nothing to tell.
    """
    results: dict[str, Any] = {}
    for worker, owner in owners:
        _launch_(results, worker, owner.info, endpoints.answer_step, (owner.key, context_id))
    _wait_(results)
    return _sort(results) if any(results.values()) else None


def take_turns(workers: Iterable[str], token: str) -> Outcome:
    """Takes a turn on one worker after the other, up to the first failure; see Note [Turns]."""
    lease_s = get_rpc_timeout() or DEFAULT_LEASE_S
    taken = Outcome()
    for worker in sorted(workers):
        outcome = _sort(_launch_and_wait({worker: (endpoints.take_turn, (token, lease_s))}))
        taken.answers |= outcome.answers
        taken.failures |= outcome.failures
        if taken.failures:
            break
    return taken


def _launch_and_wait(calls: Mapping[str, tuple[Any, tuple[Any, ...]]]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for worker, (function, arguments) in calls.items():
        _launch_(results, worker, worker, function, arguments)
    _wait_(results)
    return results


def _launch_(
    results: dict[str, Any], worker: str, info: Any, function: Any, arguments: tuple[Any, ...]
) -> None:
    try:
        results[worker] = rpc.rpc_async(info, function, arguments)
    except RuntimeError as error:  # it is known to be gone, the others are not
        results[worker] = Failure.no_answer(error)


def _wait_(results: dict[str, Any]) -> None:
    """Puts answers, or failures, in the place of futures."""
    for worker, future in results.items():
        if not isinstance(future, Failure):
            try:
                results[worker] = future.wait()
            except Exception as error:  # noqa: BLE001 - whatever RPC raises in the place of an answer
                results[worker] = Failure.no_answer(error)


def _sort(results: Mapping[str, Any]) -> Outcome:
    outcome = Outcome()
    for worker, result in results.items():
        value = endpoints.decode(result) if isinstance(result, str) else result
        if isinstance(value, Failure):
            outcome.failures[worker] = value
        elif isinstance(value, endpoints.Busy):
            outcome.busy.append(worker)
        else:
            outcome.answers[worker] = value
    return outcome
