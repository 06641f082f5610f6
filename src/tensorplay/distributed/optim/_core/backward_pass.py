"""Notices when a backward pass begins to produce gradients of some parameters, and when it ends.

Note [Outermost backward]
    Autograd runs a callback at the end of the graph task in which it was queued. Reentrant
    activation checkpointing runs a backward inside a backward, as a task of its own, and a
    parameter that several checkpointed segments use gets a gradient in each of them. So the end of
    an inner task isn't the end: then a hook on the node that runs it leads to the next outer task,
    until there is no such node.

Note [Aborted backward]
    An exception in backward ends a task without its callbacks. They hold a token, which dies with
    the task: a pass whose token is dead was aborted.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

call_at_end: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback  # noqa: SLF001 - torch has no public name for it
)
"""Has autograd call a function at the end of the running graph task, after those queued before."""


class BackwardObserver(Protocol):
    """What a :class:`BackwardPass` tells; all in the thread that runs the task in question."""

    def begin(self) -> None:
        """Before the first gradient of a pass is accumulated."""

    def receive_sparse(self, index: int) -> None:
        """Before a parameter's first gradient of a pass is accumulated, if that is sparse."""

    def end(self) -> None:
        """When the outermost ``backward()`` is about to return."""

    def abandon(self) -> None:
        """Later, when it turns out that the last pass was aborted by an exception."""


_watchers = WeakIdKeyDictionary()
"""The watcher of each parameter."""


class _Token:
    """Lives as long as the callbacks of a pass."""


class BackwardPass:
    """Hooks on parameters that tell an observer where backward passes begin and end.

    Passes that only compute gradients without accumulating them (``torch.autograd.grad``) aren't
    noticed.

    A parameter has one watcher: who watches it next takes all parameters of the former over, so
    that an optimizer built anew doesn't reduce beside its predecessor.

    Args:
        observer: is told as long as it exists; this doesn't keep it alive.
    """

    def __init__(self, observer: BackwardObserver) -> None:
        self._observer = weakref.ref(observer)
        self.was_replaced = False
        """Whether another watcher has taken over, so that nothing is noticed here any more."""
        self._token: weakref.ref[_Token] | None = None
        self.armed_tasks: set[int] = set()
        """Graph tasks whose end we shall hear of."""
        self._handles: list[RemovableHandle] = []
        self._num_parameters = 0
        self.num_begun = 0
        """How many passes have begun, the aborted ones included."""
        self.fired: list[int] = []
        """Indices of the parameters that got gradients in this pass, or the last; maybe twice."""
        self.layouts: dict[int, torch.layout] = {}
        """Those of gradients in this pass, or the last, that weren't dense, by parameter."""

    def watch(self, parameters: Sequence[torch.Tensor]) -> None:
        """Adds parameters, which get the next indices; frozen ones are watched once thawed."""
        for parameter in parameters:
            former = _watchers[parameter]() if parameter in _watchers else None
            if former is not None and former is not self:
                former.was_replaced = True
                former.remove()
            _watchers[parameter] = weakref.ref(self)
            hook = _hook_of(self, self._num_parameters, parameter)
            self._num_parameters += 1
            if parameter.is_floating_point() or parameter.is_complex():  # others get no gradients
                self._handles.append(_register(parameter, parameter.register_hook, hook))

    def notify_ready(
        self, parameters: Sequence[torch.Tensor], ready: Callable[[int], None]
    ) -> None:
        """Calls ``ready(position)`` whenever a parameter's gradient has been accumulated."""
        for position, parameter in enumerate(parameters):

            def hook(_: torch.Tensor, position: int = position) -> None:
                ready(position)

            if parameter.is_floating_point() or parameter.is_complex():
                register = parameter.register_post_accumulate_grad_hook
                self._handles.append(_register(parameter, register, hook))

    @property
    def is_open(self) -> bool:
        """Whether a pass has begun that hasn't ended or been aborted."""
        return self._token is not None and self._token() is not None

    def settle_aborted(self) -> bool:
        """Tells the observer of a pass that was aborted; returns whether there was one."""
        if self._token is None or self._token() is not None:
            return False
        self._close()
        if (observer := self._observer()) is not None:
            observer.abandon()
        return True

    def remove(self) -> None:
        """Takes all hooks off again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def arm(self, task: int, parameter: torch.Tensor) -> bool:
        """Makes the end of this task known to us; false if it accumulates no gradients."""
        if not _accumulates(parameter):
            return False
        self.settle_aborted()
        token = self._token() if self._token is not None else None
        if token is None:
            token = _Token()
            self._token = weakref.ref(token)
            self.fired.clear()
            self.layouts.clear()
            self.num_begun += 1
            self._queue_end(task, token)
            if (observer := self._observer()) is not None:
                observer.begin()
        else:
            self._queue_end(task, token)
        return True

    def receive_sparse(self, index: int) -> None:
        """Tells the observer that a parameter's first gradient is sparse."""
        if (observer := self._observer()) is not None:
            observer.receive_sparse(index)

    def _queue_end(self, task: int, token: _Token) -> None:
        self.armed_tasks.add(task)
        call_at_end(functools.partial(self._task_ended, task, token))

    def _task_ended(self, task: int, token: _Token) -> None:
        self.armed_tasks.discard(task)
        if self._token is None or self._token() is not token:
            return
        outer: Any = torch._C._current_autograd_node()  # noqa: SLF001 - torch has no public name for it
        if outer is None:
            self._close()
            if (observer := self._observer()) is not None:
                observer.end()
            return

        def climb(_inputs: Any, _outputs: Any) -> None:
            handle.remove()
            outer_task = torch._C._current_graph_task_id()  # noqa: SLF001 - torch has no public name for it
            if outer_task not in self.armed_tasks:
                self._queue_end(outer_task, token)

        handle = outer.register_hook(climb)

    def _close(self) -> None:
        self._token = None
        self.armed_tasks.clear()


def _hook_of(
    backward_pass: BackwardPass, index: int, parameter: torch.Tensor
) -> Callable[[torch.Tensor | None], None]:
    """A tensor hook, which autograd calls before it accumulates; it doesn't keep the pass alive."""
    reference = weakref.ref(backward_pass)
    armed_tasks, fired = backward_pass.armed_tasks, backward_pass.fired
    layouts = backward_pass.layouts
    current_task = torch._C._current_graph_task_id  # noqa: SLF001 - torch has no public name for it

    def hook(gradient: torch.Tensor | None) -> None:
        if gradient is None:  # a function may return none
            return
        task = current_task()
        if task not in armed_tasks:
            observer = reference()
            if observer is None or not observer.arm(task, parameter):
                return
        if gradient.layout is not torch.strided:
            layouts[index] = gradient.layout
            watcher = reference()
            if watcher is not None and index not in fired:
                watcher.receive_sparse(index)
        fired.append(index)

    return hook


def _register(
    parameter: torch.Tensor, register: Callable[[Any], RemovableHandle], hook: Callable[..., None]
) -> RemovableHandle:
    """Registers a hook also on a frozen parameter, which refuses it; there it stays."""
    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        return register(hook)
    finally:
        if frozen:
            parameter.requires_grad_(False)


def _accumulates(parameter: torch.Tensor) -> bool:
    """Whether the running graph task will add to the parameter's ``.grad``."""
    with torch.enable_grad():
        node = get_gradient_edge(parameter).node
    try:
        return bool(torch._C._will_engine_execute_node(node))  # noqa: SLF001 - torch has no public name for it
    except RuntimeError:  # torch.autograd.grad, which only captures
        return False
