"""Tells a backward that runs inside another one, as reentrant activation checkpointing has it."""

import sys
import threading
from types import FrameType

import torch

_ENGINE = torch.autograd.graph._engine_run_backward.__code__  # noqa: SLF001 - torch has no public name for it


def is_nested() -> bool:
    """Whether the backward whose hook has called is run by another backward.

    Then two calls of autograd's engine are under way in this thread, or one in a thread of the
    engine's own. It looks through the stack, so ask once per graph task.
    """
    num_calls = 0
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - public by its documentation
    while frame is not None:
        num_calls += frame.f_code is _ENGINE
        frame = frame.f_back
    # The engine has threads of its own, one per GPU, where no call of it began.
    is_own_thread = isinstance(threading.current_thread(), threading._DummyThread)  # noqa: SLF001 - how Python marks threads it didn't start
    return num_calls > (0 if is_own_thread else 1)
