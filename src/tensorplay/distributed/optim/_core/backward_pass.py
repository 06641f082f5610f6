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

Note [Thousands of hooks]
    A hook runs between two small operations of backward, when nothing of it is in the cache. So it
    does nothing but see that a pass is open, and looks at a gradient's layout only until one of its
    parameter was dense. A sparse one that comes later is found by who looks at ``.grad``, unless it
    was added to a dense one.
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
        self.tokens: list[Callable[[], _Token | None]] = [_no_token]
        """Gets the token of the running pass; the only element is replaced by each pass."""
        self._armed_tasks: set[int] = set()
        self._handles: list[RemovableHandle] = []
        self._num_parameters = 0
        self.num_begun = 0
        """How many passes have begun, the aborted ones included."""
        self.unknown: set[int] = set()
        """Indices of the parameters that have had no dense gradient yet."""
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
            self.unknown.add(self._num_parameters)
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
        return self.tokens[0]() is not None

    def settle_aborted(self) -> bool:
        """Tells the observer of a pass that was aborted; returns whether there was one."""
        if self.tokens[0] is _no_token or self.is_open:
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

    def open(self, parameter: torch.Tensor) -> bool:
        """Begins a pass in the running task; false if that accumulates no gradients."""
        if not _accumulates(parameter):
            return False
        self.settle_aborted()
        token = _Token()
        self.tokens[0] = weakref.ref(token)
        self.layouts.clear()
        self.num_begun += 1
        self._queue_end(torch._C._current_graph_task_id(), token)  # noqa: SLF001 - torch has no public name for it
        if (observer := self._observer()) is not None:
            observer.begin()
        return True

    def see_layout(self, index: int, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Tells the observer of a sparse gradient; see Note [Thousands of hooks]."""
        if gradient.layout is torch.strided:
            self.unknown.discard(index)
        elif index not in self.layouts and _accumulates(parameter):
            self.layouts[index] = gradient.layout
            if (observer := self._observer()) is not None:
                observer.receive_sparse(index)

    def _queue_end(self, task: int, token: _Token) -> None:
        self._armed_tasks.add(task)
        call_at_end(functools.partial(self._task_ended, task, token))

    def _task_ended(self, task: int, token: _Token) -> None:
        self._armed_tasks.discard(task)
        if self.tokens[0]() is not token:
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
            if outer_task not in self._armed_tasks:
                self._queue_end(outer_task, token)

        handle = outer.register_hook(climb)

    def _close(self) -> None:
        self.tokens[0] = _no_token
        self._armed_tasks.clear()


def _hook_of(
    backward_pass: BackwardPass, index: int, parameter: torch.Tensor
) -> Callable[[torch.Tensor | None], None]:
    """A tensor hook, which autograd calls before it accumulates; it doesn't keep the pass alive."""
    reference = weakref.ref(backward_pass)
    tokens, unknown = backward_pass.tokens, backward_pass.unknown

    def hook(gradient: torch.Tensor | None) -> None:
        if tokens[0]() is None:
            watcher = reference()
            # A function may return no gradient.
            if gradient is None or watcher is None or not watcher.open(parameter):
                return
        if unknown and index in unknown and gradient is not None:
            watcher = reference()
            if watcher is not None:
                watcher.see_layout(index, parameter, gradient)

    return hook


def _no_token() -> None:
    """There is no pass."""


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
