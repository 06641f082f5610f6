"""What other workers call here through RPC; importing this needs a torch that has it.

Note [Doors]
~~~~~~~~~~~~
RPC can call a Python function, with pickled arguments, or a scripted one. The first takes anything,
and spends a third of a millisecond on threads that queue for the interpreter at both ends. The
second takes numbers and text, and needs the interpreter once. So what carries little goes through
scripted doors: a step by its numbers, other calls pickled into text; and everything that carries
tensors or RRefs goes through the other. Behind all is ``answer``.

Note [Threads that are known]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
RPC's threads aren't Python's. For each call through a scripted door the interpreter makes its record
of the thread anew, maps memory for its stack, and throws both away: a tenth of a short step's time.
So the first call on a thread takes a reference to the record that nobody gives back. There is one for
each of RPC's threads (16, if nothing else is asked for), and they go when the process ends.
"""

import ctypes
import itertools
import pickle
import secrets
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.distributed import rpc
from torch.futures import Future

from tensorplay.distributed.optim.remote.failures import Failure
from tensorplay.distributed.optim.remote.owner import LocalOptimizer
from tensorplay.distributed.optim.remote.turns import BusyError, Turn, Turns


class Busy:
    """The answer to a change that must wait for another trainer's turn to end."""


_turns = Turns()
# From anywhere: a worker that was restarted under its old name must not know a key from before.
_keys = itertools.count(secrets.randbits(62))
_keys_lock = threading.Lock()
# An RRef on the trainer keeps each alive.
_optimizers: WeakValueDictionary[int, LocalOptimizer] = WeakValueDictionary()


def _create(
    optimizer_class: Callable[..., Any],
    groups: Sequence[dict[str, Any]],
    names: Sequence[Sequence[str]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    whole: bool,  # by position, as all that travels
) -> tuple[int, Any, Any]:
    tensors = [_dereference(group) for group in groups]
    optimizer = LocalOptimizer(optimizer_class, tensors, names, args, kwargs, whole=whole)
    with _keys_lock:
        key = next(_keys)
    _optimizers[key] = optimizer
    return key, rpc.RRef(optimizer), optimizer.describe()


def _dereference(group: dict[str, Any]) -> dict[str, Any]:
    return {**group, "params": [rref.local_value() for rref in group["params"]]}


def _step(key: int, context_id: int, scale: float | None, changes: Any) -> Any:
    with _turns.alone():
        return _find(key).step(context_id, scale, changes, undoable=False)[0] or None


def _squared_norm(key: int, context_id: int) -> float:
    return _find(key).squared_norm(context_id)


def _zero_grad(key: int, set_to_none: bool) -> None:  # by position, as all that travels
    with _turns.undisturbed():
        _find(key).zero_grad(set_to_none=set_to_none)


def _state_dict(key: int) -> dict[str, Any]:
    with _turns.undisturbed():
        return _find(key).state_dict()


def _prepare(token: str, key: int, change: str, arguments: tuple[Any, ...]) -> Any:
    """Makes a change that the turn's end keeps or undoes."""
    with _turns.during(token) as turn:
        optimizer = _find(key)
        result: Any
        if change == "step":
            result, turn.undo = optimizer.step(*arguments, undoable=True)
        elif change == "load_state_dict":
            result, turn.undo = optimizer.load_state_dict(*arguments)
        else:
            group, names = arguments
            result, turn.undo = optimizer.add_param_group(_dereference(group), names)
        return result


def _end_turn(token: str, keep: bool) -> None:  # by position, as all that travels
    _turns.end(token, keep=keep)


def _find(key: int) -> LocalOptimizer:
    optimizer = _optimizers.get(key)
    if optimizer is None:
        raise RuntimeError(
            "the local optimizer is gone; was this worker restarted? Build a new optimizer"
        )
    return optimizer


_ACTIONS: dict[str, Callable[..., Any]] = {
    "create": _create,
    "step": _step,
    "squared_norm": _squared_norm,
    "zero_grad": _zero_grad,
    "state_dict": _state_dict,
    "prepare": _prepare,
    "end_turn": _end_turn,
}


def answer(action: str, arguments: tuple[Any, ...]) -> Any:
    """Acts; what goes wrong is the answer, since an exception would lose its class on the way."""
    try:
        return _ACTIONS[action](*arguments)
    except BusyError:
        return Busy()
    except BaseException as error:  # noqa: BLE001 - the trainer raises it, SystemExit too
        return Failure.of(error)


@rpc.functions.async_execution  # type: ignore[untyped-decorator]  # torch doesn't annotate it
def take_turn(token: str, lease_s: float) -> Future[None]:
    """Answers when the turn has come, without occupying a thread until then."""
    granted: Future[None] = Future()
    _turns.take(Turn(token, lease_s, lambda: granted.set_result(None)))
    return granted


def encode(value: Any) -> str:
    """Anything that pickle takes, as text for the scripted door; ``None`` is short."""
    return "" if value is None else pickle.dumps(value).decode("latin-1")


def decode(text: str) -> Any:
    """What ``encode`` was given."""
    return pickle.loads(text.encode("latin-1")) if text else None  # noqa: S301  # as RPC does with all it gets


_thread = threading.local()


def _keep_thread() -> None:
    """See Note [Threads that are known]."""
    if not hasattr(_thread, "is_kept"):
        _thread.is_kept = True
        if ctypes.pythonapi.PyGILState_Check():  # so that this only counts a reference
            ctypes.pythonapi.PyGILState_Ensure()


@torch.jit.ignore  # type: ignore[untyped-decorator]  # torch doesn't annotate it
def _answer_text(request: str) -> str:
    _keep_thread()
    action, arguments = decode(request)
    return encode(answer(action, arguments))


@torch.jit.ignore  # type: ignore[untyped-decorator]  # torch doesn't annotate it
def _answer_step(key: int, context_id: int) -> str:
    _keep_thread()
    return encode(answer("step", (key, context_id, None, {})))


def answer_text(request: str) -> str:
    """``answer`` for the scripted door."""
    answered: str = _answer_text(request)
    return answered


def answer_step(key: int, context_id: int) -> str:
    """The same for a step with nothing but its numbers."""
    answered: str = _answer_step(key, context_id)
    return answered


if sys.version_info < (3, 14):  # torch doesn't script later ones: there all doors are Python's
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scripting is deprecated, and RPC has nothing in its place
        answer_text = torch.jit.script(answer_text)
        answer_step = torch.jit.script(answer_step)
