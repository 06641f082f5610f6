"""``functional_adam`` and its siblings: one step as a function of lists of tensors.

All eight are made from the table in `rules.py` by one factory.

Note [One name for a function and its module]
    Published code imports a function from a module of its own name::

        from tensorplay.distributed.optim import functional_adam
        from tensorplay.distributed.optim.functional_adam import functional_adam

    With a file ``functional_adam.py``, importing it would replace the package's attribute, the
    function, by the module: the first form would give a function or a module, depending on what
    was imported before. So there is no file. `_publish` puts a module object into ``sys.modules``;
    an import statement finds it there once it has imported the package, and what is found there
    importlib doesn't bind to the package. ``import ...optim.functional_adam as m`` reads the
    attribute of the package all the same, so ``m`` is the function; it has itself as an attribute,
    and ``m.functional_adam`` is the function in this form as well.
"""

import inspect
import sys
import textwrap
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from tensorplay.distributed.optim.functional.rules import (
    RULES,
    Buffers,
    Rule,
    State,
    new_buffer,
    new_step,
)

_PACKAGE = __name__.rpartition(".functional")[0]


class FunctionalUpdate(Protocol):
    """The type of ``functional_adam`` and its siblings: a function with a pure pair.

    The call has torch's signature, lists of tensors by position, so the pure form can't be the call
    as well. It hangs on the function, so that an algorithm is one name to import and to pass on.
    """

    __name__: str

    def __call__(self, *lists: Any, inplace: bool = True, **options: Any) -> Any:
        """One step, in place or not; ``help(functional_adam)`` says more."""

    @property
    def init(self) -> Callable[..., State]:
        """`Rule.init`."""

    @property
    def update(self) -> Callable[..., tuple[Any, State]]:
        """`Rule.update`."""


_DOCUMENTATION = """One step of {title}, from lists of tensors: parameters, gradients, state.

The signature is that of ``torch.optim.{name}.{name}``, whose kernels make the step: the result is
that of ``torch.optim.{title}`` with the same ``foreach`` and ``fused``, bit for bit. Three things
differ: options have the defaults of ``torch.optim.{title}``; ``has_complex`` is found out where it
isn't given; and autograd records nothing, unless ``differentiable`` is true.

``{function}.init`` and ``{function}.update`` are the pure form: trees in, trees out, for
``torch.func`` and ``torch.compile``::

    state = {function}.init(params)
    params, state = {function}.update(grads, state, params, lr=1e-2)

Args:
    lists: {lists}: one entry per parameter.
        State has the shape and dtype of the parameter, step counters have shape ``()``. All but the
        gradients are written to. A list that the options don't need may be empty.
    options: {options}: as in ``torch.optim.{title}``.
    inplace: False leaves all arguments as they are and returns new tensors, which autograd follows.
        The formula is that of the pure form; what chooses a kernel (``foreach``, ``fused``,
        ``capturable``, ``grad_scale``, ``found_inf``) is refused.

Returns:
    ``None``; with ``inplace=False``, new lists of parameters and state, in the order of the
    arguments.

Raises:
    TypeError: A list is missing, or an option is unknown.
    ValueError: ``inplace=False`` with an option that chooses a kernel.
"""
_KERNEL_ONLY = ("foreach", "fused", "capturable", "grad_scale", "found_inf")


def _make(name: str) -> FunctionalUpdate:
    rule = RULES[name]
    kernel, num_lists = rule.kernel, len(rule.list_names)
    finds_complex = "has_complex" in rule.option_names
    signature = _signature(rule)
    defaults = {
        parameter.name: parameter.default
        for parameter in signature.parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name != "inplace"
    }

    def function(*lists: Any, inplace: bool = True, **options: Any) -> Any:
        if len(lists) != num_lists:  # torch's signature lets lists have names, and options none
            bound = signature.bind(*lists, **options).arguments
            lists = tuple(bound.pop(name) for name in rule.list_names)
            options = bound
        options = {**defaults, **options}
        if finds_complex and not options.get("has_complex"):
            options["has_complex"] = any(map(torch.is_complex, lists[0]))
        if not inplace:
            return _step_out_of_place(rule, lists, options)
        if options.get("differentiable"):
            return kernel(*lists, **options)
        with torch.no_grad():
            return kernel(*lists, **options)

    function.__name__ = function.__qualname__ = f"functional_{name}"
    function.__doc__ = _DOCUMENTATION.format(
        name=name,
        title=rule.optimizer_class.__name__,
        function=function.__name__,
        lists=_enumerate(rule.list_names),
        options=_enumerate(rule.option_names),
    )
    # What `inspect` reads, the pure pair, and the function itself: see the Note.
    vars(function).update(
        {
            "__signature__": signature,
            "init": rule.init,
            "update": rule.update,
            function.__name__: function,
        }
    )
    return _publish(cast("FunctionalUpdate", function))


def _enumerate(names: Sequence[str]) -> str:
    return textwrap.fill(", ".join(names), width=80).replace("\n", "\n        ")


def _signature(rule: Rule) -> inspect.Signature:
    """The kernel's signature, with the class's defaults and ``inplace``."""
    class_defaults = rule.kernel_options(rule.defaults)
    parameters = [
        parameter.replace(default=class_defaults[parameter.name])
        if parameter.kind is parameter.KEYWORD_ONLY
        else parameter
        for parameter in inspect.signature(rule.kernel).parameters.values()
    ]
    inplace = inspect.Parameter(
        "inplace", inspect.Parameter.KEYWORD_ONLY, default=True, annotation=bool
    )
    return inspect.Signature([*parameters, inplace])


def _step_out_of_place(
    rule: Rule, lists: Sequence[Sequence[Any]], options: dict[str, Any]
) -> tuple[list[Any], ...]:
    chosen = [name for name in _KERNEL_ONLY if options.get(name)]
    if chosen:
        raise ValueError(
            f"{', '.join(chosen)}: such options choose a kernel that works in place; leave them out "
            "with inplace=False"
        )
    params, grads, *kept = lists
    new_params: list[Tensor] = []
    new_kept: list[list[Any]] = [[] for _ in kept]
    for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
        # A list may be empty where the options don't need the buffer.
        row = dict(
            zip(rule.buffers, (column[i] if column else None for column in kept), strict=False)
        )
        buffers: Buffers = {
            key: new_buffer(param) if tensor is None else tensor
            for key, tensor in row.items()
            if tensor is not None or rule.uses(key, options)
        }
        if rule.counts_steps:
            step = kept[-1][i]
        else:  # that is SGD, which only asks whether this is the first step
            step = new_step(param) + (row["momentum_buffer"] is not None)
        new_param, buffers = rule.apply(param, grad, buffers, step, options)
        new_params.append(new_param)
        for column, new_column, key in zip(kept, new_kept, [*rule.buffers, "step"], strict=False):
            if key == "step":
                new_column.append(step + 1)
            elif column or key in buffers:
                new_column.append(buffers.get(key))
    return new_params, *new_kept


def _publish(function: FunctionalUpdate) -> FunctionalUpdate:
    """See Note [One name for a function and its module]."""
    name = f"{_PACKAGE}.{function.__name__}"
    module = sys.modules[name] = ModuleType(name, function.__doc__)
    module.__spec__ = ModuleSpec(name, loader=None, origin=__file__)
    module.__package__ = _PACKAGE
    vars(module).update({function.__name__: function, "__all__": [function.__name__]})
    return function


functional_adadelta = _make("adadelta")
functional_adagrad = _make("adagrad")
functional_adam = _make("adam")
functional_adamax = _make("adamax")
functional_adamw = _make("adamw")
functional_rmsprop = _make("rmsprop")
functional_rprop = _make("rprop")
functional_sgd = _make("sgd")
