"""When a gradient is final: this process's own gradients, as they accumulate during backward.

Note [Final gradients]
    Autograd calls a parameter's hook when all uses of the parameter *in one graph* have been
    differentiated. Reentrant activation checkpointing runs a backward of its own inside the
    backward: the hooks of its segment fire there, and will fire again if another segment, or the
    graph outside, uses the parameter too. So:

    * In the outermost backward, a gradient is final when its hook fires.
    * Inside a nested one it is final only when the outermost ends. So is that of a parameter which
      was used without a graph, as a checkpointed segment uses it, as far as somebody has said so
      (:meth:`LocalGradients.postpone`).
    * A parameter that has been stepped and gets another gradient in the same backward raises: by
      then nothing can be right any more.

    The end of the outermost is found from the inside: when a nested one ends, the node that started
    it, which belongs to the backward around it, is asked to report there.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from tensorplay.distributed.optim._core.nested_backward import is_nested

BUCKET_NBYTES = 4 << 20
"""Parameters are stepped together when they have this size; a larger one is stepped at once."""


class Consumer(Protocol):
    """Who steps. All calls come from within backward."""

    is_accumulating: bool
    """Gradients are kept; nothing may be passed on."""

    def step_bucket(self, parameters: list[torch.Tensor]) -> None:
        """Steps parameters whose ``.grad`` is final; the caller frees that afterwards."""

    def end_backward(self) -> None:
        """All buckets of this backward have been passed."""


class LocalGradients:
    """Collects parameters whose gradients are final, and passes them on in buckets.

    Args:
        find_consumer: returns who steps, or ``None`` when nobody is left.
    """

    def __init__(self, find_consumer: Callable[[], Consumer | None]) -> None:
        # Autograd's hooks hide from the garbage collector what they hold: not the parameters, then.
        self._find_consumer = find_consumer
        self._lock = threading.RLock()  # hooks fire in one thread per device
        # All by id, which is quicker to hash than a tensor.
        self._ready: dict[int, torch.Tensor] = {}
        self._ready_nbytes = 0
        self._late: dict[int, torch.Tensor] = {}
        self._kept: dict[int, torch.Tensor] = {}
        self._postponed: set[int] = set()
        self._stepped: set[int] = set()
        self._nested_by_task: dict[int, bool] = {}
        self._task = -1
        self._is_nested = False
        self._last_stepped: torch.Tensor | None = None
        self._hooks: dict[int, RemovableHandle] = {}

    def watch(self, parameters: Sequence[torch.Tensor]) -> None:
        """Also receives the gradients of ``parameters``; frozen ones, once they are thawed."""
        for parameter in parameters:
            requires_grad = parameter.requires_grad
            parameter.requires_grad_(True)  # a frozen one refuses hooks, and keeps those it has
            hook = parameter.register_post_accumulate_grad_hook(self.receive)  # type: ignore[no-untyped-call] # torch leaves it untyped
            parameter.requires_grad_(requires_grad)
            self._hooks[id(parameter)] = hook

    def unwatch(self, parameters: Sequence[torch.Tensor]) -> None:
        """Receives the gradients of ``parameters`` no longer."""
        for parameter in parameters:
            hook = self._hooks.pop(id(parameter), None)
            if hook is not None:
                hook.remove()
            self._kept.pop(id(parameter), None)

    def replace(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """``new`` takes the place of ``old``."""
        self.unwatch([old])
        self.watch([new])

    def begin_forward(self) -> None:
        """Nothing to do."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Nothing is sent anyway; the consumer says that it is accumulating."""
        return nullcontext()

    def receive(self, parameter: torch.Tensor) -> None:
        """The hook: a graph has added its part to ``parameter.grad``."""
        key = id(parameter)
        with self._lock:
            consumer = self._find_consumer()
            if consumer is None:
                return
            if consumer.is_accumulating:
                self._kept[key] = parameter
                return
            task = torch._C._current_graph_task_id()  # noqa: SLF001 - torch has no public name for it
            if task != self._task:
                self._enter(task)
            if key in self._stepped:
                self._refuse_second_gradient(parameter)
            if self._is_nested or key in self._late or key in self._postponed:
                self._late[key] = parameter
                self._ready.pop(key, None)
                return
            self._kept.pop(key, None)
            self._ready[key] = parameter
            self._ready_nbytes += parameter.nbytes
            if self._ready_nbytes >= BUCKET_NBYTES:
                self._pass_on()

    def postpone(self, parameter: torch.Tensor) -> None:
        """The next backward keeps the gradient of ``parameter`` until it ends."""
        self._postponed.add(id(parameter))

    def has_kept(self) -> bool:
        """Whether gradients are left from an earlier backward."""
        return any(parameter.grad is not None for parameter in self._kept.values())

    def _enter(self, task: int) -> None:
        """A hook fires in another backward than the one before."""
        if task not in self._nested_by_task:
            nested = is_nested()
            if self._nested_by_task and not nested and task > max(self._nested_by_task):
                self._abandon()
            self._nested_by_task[task] = nested
            call_at_end(self._end)
        self._task, self._is_nested = task, self._nested_by_task[task]

    def _abandon(self) -> None:
        """The last backward raised. Its gradients wait for the next one, as in the plain loop."""
        consumer = self._find_consumer()
        if consumer is not None:
            consumer.end_backward()
        self._kept |= self._ready | self._late
        self._reset()

    def _reset(self) -> None:
        self._ready, self._late, self._ready_nbytes = {}, {}, 0
        self._stepped.clear()
        self._nested_by_task.clear()
        self._task = -1

    def _pass_on(self) -> None:
        bucket = list(self._ready.values())
        self._stepped.update(self._ready)
        self._ready, self._ready_nbytes = {}, 0
        self._step(bucket)

    def _step(self, bucket: list[torch.Tensor]) -> None:
        consumer = self._find_consumer()
        bucket = [parameter for parameter in bucket if parameter.grad is not None]
        if consumer is None or not bucket:
            return
        consumer.step_bucket(bucket)
        for parameter in bucket:
            parameter.grad = None
        self._last_stepped = bucket[-1]

    def _end(self) -> None:
        """A backward ends: this one's nested part, or all of it."""
        node: torch.autograd.graph.Node | None = torch._C._current_autograd_node()  # noqa: SLF001 - torch has no public name for it
        if node is not None:
            node.register_hook(lambda *_: call_at_end(self._end))
            return
        with self._lock:
            if not self._nested_by_task:
                return
            rest = list({**self._kept, **self._late, **self._ready}.values())
            self._kept = {}
            self._reset()
            self._postponed.clear()
            self._step_in_buckets(rest)
            last, self._last_stepped = self._last_stepped, None
            if last is not None and dist.is_available() and dist.is_initialized():
                # After what others do at the end of backward: DDP writes to the gradients then.
                call_at_end(lambda: _refuse_restored(last))
            consumer = self._find_consumer()
            if consumer is not None:
                # After the buckets that others pass on when this backward ends.
                call_at_end(consumer.end_backward)

    def _step_in_buckets(self, parameters: list[torch.Tensor]) -> None:
        bucket: list[torch.Tensor] = []
        nbytes = 0
        for parameter in parameters:
            bucket.append(parameter)
            nbytes += parameter.nbytes
            if nbytes >= BUCKET_NBYTES:
                self._step(bucket)
                bucket, nbytes = [], 0
        if bucket:
            self._step(bucket)

    def _refuse_second_gradient(self, parameter: torch.Tensor) -> None:
        raise RuntimeError(
            f"a parameter of shape {tuple(parameter.shape)} has been updated in this backward and now "
            "gets another gradient, from reentrant checkpointing of a part of the model (or from "
            "FSDP2, of a module that runs twice). Pass module= to apply_optimizer_in_backward, so "
            "that a parameter of a checkpointed part is updated when backward ends; or use "
            "checkpoint(..., use_reentrant=False)"
        )


def _refuse_restored(parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        raise RuntimeError(
            "DistributedDataParallel averages the gradients of parameters that have just been "
            "updated with this rank's own gradients. Pass module= to apply_optimizer_in_backward: "
            "the DistributedDataParallel module, or the one inside it"
        )


def call_at_end(function: Callable[[], None]) -> None:
    """Has ``function`` called when the backward that is under way in this thread has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(function)  # noqa: SLF001 - torch has no public name for it
