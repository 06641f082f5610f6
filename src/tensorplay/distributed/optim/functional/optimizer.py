"""The object that `as_functional_optim` returns: an optimizer that is handed its gradients."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tensorplay.distributed.optim.functional.rules import rule_of


class FunctionalOptimizer:
    """Steps parameters with gradients passed as arguments; ``.grad`` is neither read nor written.

    The steps are those of the optimizer class, bit for bit, made by the same kernels. What
    ``torch.distributed.optim`` has for this differs in that its defaults aren't the class's, values
    aren't checked, ``step_param`` is missing for five algorithms of eight, and each construction
    warns.

    Args:
        params: The parameters of the first group; may be empty, for ``step_param`` or for parameters
            that are put into ``param_group["params"]`` later.
        optimizer_class: A class for which there is a rule, or a subclass of one.
        *args: Passed to the class after ``params``.
        **kwargs: Passed to the class.

    Attributes:
        defaults: The options, with the class's names and defaults. Read at every step: a new
            ``defaults["lr"]`` counts at once.
        param_groups: Dicts of ``"params"`` and of those options in which the group differs from
            ``defaults``. Read at every step.
        state: By parameter, the dict of tensors that the class would keep. Made at the parameter's
            first step.

    Raises:
        ValueError: There is no rule for the class, it overrides ``step``, or it refuses an option.
    """

    def __init__(
        self, params: Sequence[Tensor], optimizer_class: type[Optimizer], *args: Any, **kwargs: Any
    ) -> None:
        self._rule = rule_of(optimizer_class)
        # The class itself knows its defaults, and what it refuses.
        eager = optimizer_class([torch.zeros(())], *args, **kwargs)
        self.defaults: dict[str, Any] = dict(eager.defaults)
        self.param_groups: list[dict[str, Any]] = [{"params": list(params)}]
        self.state: dict[Tensor, dict[str, Any]] = {}

    @property
    def param_group(self) -> dict[str, Any]:
        """The first parameter group, torch's only one."""
        return self.param_groups[0]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters with options of its own; the dict is copied.

        Args:
            param_group: ``"params"`` and any of the options in ``defaults``.

        Raises:
            ValueError: An option is unknown or refused, or a parameter is in a group already.
        """
        group = {**param_group, "params": list(param_group["params"])}
        unknown = group.keys() - self.defaults.keys() - {"params"}
        if unknown:
            raise ValueError(
                f"unknown option {', '.join(map(repr, sorted(unknown)))}; the options are "
                f"{', '.join(self.defaults)}"
            )
        options = {**self.defaults, **group}
        takes = inspect.signature(self._rule.optimizer_class.__init__).parameters
        self._rule.optimizer_class(
            [torch.zeros(())], **{name: options[name] for name in takes if name in self.defaults}
        )
        present = {id(param) for other in self.param_groups for param in other["params"]}
        if any(id(param) in present for param in group["params"]):
            raise ValueError("some parameters appear in more than one parameter group")
        self.param_groups.append(group)

    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """Steps every parameter that has a gradient.

        Args:
            gradients: For each parameter, over all groups in order, its gradient; ``None`` leaves
                the parameter and its state as they are.

        Raises:
            ValueError: The number of gradients isn't that of the parameters.
            RuntimeError: A gradient is sparse and the algorithm doesn't take such.
        """
        groups = self.param_groups
        num_params = sum(len(group["params"]) for group in groups)
        if num_params != len(gradients):
            raise ValueError(
                "the gradients passed in does not equal to the size of the parameters!"
                f"Params length: {num_params}. Gradients length: {len(gradients)}"
            )
        remaining = iter(gradients)
        for group in groups:
            params, grads = [], []
            for param in group["params"]:
                grad = next(remaining)
                if grad is not None:
                    params.append(param)
                    grads.append(grad)
            self._step_group(group, params, grads)

    def step_param(self, param: Tensor, grad: Tensor | None) -> None:
        """Steps one parameter, with the options of its group; of the first, if it is in none.

        Args:
            param: The parameter. It needs to be in no group.
            grad: Its gradient; ``None`` does nothing.

        Raises:
            RuntimeError: The gradient is sparse and the algorithm doesn't take such.
        """
        if grad is not None:
            self._step_group(self._group_of(param), [param], [grad])

    def _group_of(self, param: Tensor) -> dict[str, Any]:
        for group in self.param_groups[1:]:
            if any(param is other for other in group["params"]):
                return group
        return self.param_groups[0]

    def _step_group(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        if not params:
            return
        rule = self._rule
        options = {**self.defaults, **group}
        arguments = rule.kernel_options(options)
        has_sparse = any(grad.is_sparse for grad in grads)
        if has_sparse and not rule.takes_sparse:
            raise RuntimeError(f"{rule.optimizer_class.__name__} does not support sparse gradients")
        if "has_sparse_grad" in rule.option_names:
            arguments["has_sparse_grad"] = has_sparse
        if "has_complex" in rule.option_names:
            arguments["has_complex"] = any(map(torch.is_complex, params))

        states = [self.state.get(param) or self._new_state(param, options) for param in params]
        # The kernel of SGD makes its own buffers and puts them into the list.
        columns = [
            [state.get(buffer) for state in states] if rule.uses(buffer, options) else []
            for buffer in rule.buffers
        ]
        steps = [[state["step"] for state in states]] if rule.counts_steps else []
        with torch.set_grad_enabled(options["differentiable"]):
            rule.kernel(params, grads, *columns, *steps, **arguments)
        if not rule.counts_steps:
            for buffer, column in zip(rule.buffers, columns, strict=True):
                for state, tensor in zip(states, column, strict=False):
                    state[buffer] = tensor

    def _new_state(self, param: Tensor, options: dict[str, Any]) -> dict[str, Any]:
        rule = self._rule
        state: dict[str, Any] = {}
        if options.get("fused") and not param.is_floating_point():
            raise RuntimeError(
                "`fused=True` requires all the params to be floating point Tensors, but one is "
                f"{param.dtype}"
            )
        if rule.counts_steps:
            on_device = options.get("fused") or options.get("capturable")
            is_double = not options.get("fused") and torch.get_default_dtype() == torch.float64
            state["step"] = torch.zeros(
                (),
                dtype=torch.float64 if is_double else torch.float32,
                device=param.device if on_device else "cpu",
            )
            for buffer in rule.buffers:
                if rule.uses(buffer, options):
                    first = float(options.get(rule.first_values.get(buffer, ""), 0))
                    value = complex(first, first) if param.is_complex() else first
                    state[buffer] = torch.full_like(param, value, requires_grad=False)
        self.state[param] = state
        return state
