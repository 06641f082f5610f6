"""One table of the update rules: what each algorithm keeps, its options, its formula, its kernel.

A :class:`Rule` says everything about an algorithm once. Two things are made from it: the in-place
step, which is torch's own kernel (`functions.py`, `optimizer.py`), and the pure pair ``init`` and
``update`` here, which computes the same out of place with operations that ``torch.func`` and
``torch.compile`` see through. To add an algorithm, add a formula and an entry to the table.

Note [What the pure form computes]
    * The formulas are those of ``torch.optim``'s documentation, and the papers it cites.
    * The square root has derivative 0 at 0, where the true one is infinite: an element whose
      gradients were all zero is not moved, and derivatives through it are finite. Where rounding
      makes RMSprop's centered variance negative, it counts as zero; torch's result is NaN there.
    * ``1 - beta**t`` is computed as ``-expm1(t * log(beta))``: in float32 the first form loses five
      of seven digits for beta = 0.999.
    * Complex parameters are pairs of real ones, as in torch. 16-bit ones are computed in float32 and
      rounded once per step, as torch's fused kernels do; its loops round after each operation.
    * No value of a tensor decides which operations run. So whatever differs in the first step is
      chosen by ``where``, and an option given as a tensor counts as switched on.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adadelta import adadelta
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.adamax import adamax
from torch.optim.adamw import adamw
from torch.optim.rmsprop import rmsprop
from torch.optim.rprop import rprop
from torch.optim.sgd import sgd
from torch.utils import _pytree as pytree

Options = Mapping[str, Any]
State = dict[str, Any]
"""By the name of the buffer, a tree of tensors in the structure of the parameters."""

Buffers = dict[str, Tensor]
Formula = Callable[[Tensor, Tensor, Buffers, Tensor, Options], tuple[Tensor, Buffers]]
"""``(param, grad, buffers, t, options) -> (param, buffers)``, all real; ``t`` is 1 in the first step."""

_PAIRS = {
    "betas": ("beta1", "beta2"),
    "etas": ("etaminus", "etaplus"),
    "step_sizes": ("step_size_min", "step_size_max"),
}
_KERNEL_CHOICES = ("foreach", "fused", "capturable", "differentiable")


@dataclass(frozen=True, eq=False, repr=False)
class Rule:
    """An algorithm.

    Args:
        name: torch's name of the function, such as ``"adam"``.
        optimizer_class: The class in ``torch.optim``, whose options, defaults and checks apply.
        kernel: torch's function that makes a step in place.
        formula: The same for one tensor, out of place.
        buffers: What is kept for each parameter, in the order of the kernel's arguments, with the
            option that asks for it; ``None``: always.
        first_values: The option that gives a buffer's value before the first step, where not zero.
        counts_steps: Whether the kernel takes a list of step counters.
        takes_sparse: Whether the kernel takes sparse gradients.
        fixed: Options that the class doesn't have, with their values.
    """

    name: str
    optimizer_class: type[Optimizer]
    kernel: Callable[..., None]
    formula: Formula
    buffers: Mapping[str, str | None]
    first_values: Mapping[str, str] = field(default_factory=dict)
    counts_steps: bool = True
    takes_sparse: bool = False
    fixed: Options = field(default_factory=dict)

    defaults: Options = field(init=False)
    """The class's options and their defaults, without those that choose a kernel."""
    list_names: tuple[str, ...] = field(init=False)
    """The names of the kernel's lists: parameters, gradients, buffers, and step counters if any."""
    option_names: tuple[str, ...] = field(init=False)
    """The names of the kernel's other parameters."""
    _valid: set[Any] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        constructor = inspect.signature(self.optimizer_class.__init__).parameters
        defaults = {
            name: parameter.default
            for name, parameter in constructor.items()
            if parameter.default is not parameter.empty and name not in _KERNEL_CHOICES
        }
        object.__setattr__(self, "defaults", defaults)
        names = tuple(inspect.signature(self.kernel).parameters)
        num_lists = 2 + len(self.buffers) + self.counts_steps
        object.__setattr__(self, "list_names", names[:num_lists])
        object.__setattr__(self, "option_names", names[num_lists:])

    def __reduce__(self) -> tuple[Callable[[str], "Rule"], tuple[str]]:
        return find_rule, (self.name,)

    def __repr__(self) -> str:
        return f"<rule of {self.name}>"

    # What the in-place and the pure form share

    def uses(self, buffer: str, options: Options) -> bool:
        """Whether these options need ``buffer``."""
        option = self.buffers[buffer]
        return option is None or _is_on(options[option])

    def kernel_options(self, options: Options) -> dict[str, Any]:
        """The options by the names that the kernel gives them, without those it doesn't take."""
        unpacked = unpack_pairs(options)
        return {name: unpacked[name] for name in self.option_names if name in unpacked}

    # The pure form

    def init(self, params: Any, **hyper: Any) -> State:
        """The state before the first step, for ``update``.

        Args:
            params: A tensor, or any nesting of lists, tuples and dicts of tensors.
            **hyper: The options that ``update`` will get. Only those matter that ask for a buffer
                (``amsgrad``, ``momentum``, ``centered``): without them, ``update`` adds the buffer
                at its first call, and the structure of the state changes there.

        Returns:
            A dict: for each buffer by torch's name, and for ``"step"`` (float32, shape ``()``), a
            tree in the structure of ``params``. Buffers have the shape, dtype and device of their
            parameter and are zero; what must not start at zero is set in the first update.

        Raises:
            TypeError: An option that the algorithm doesn't have.
            ValueError: A value that the class in ``torch.optim`` refuses.
        """
        options = self._check(hyper)
        used = [buffer for buffer in self.buffers if self.uses(buffer, options)]
        return {
            "step": pytree.tree_map(new_step, params),
            **{buffer: pytree.tree_map(new_buffer, params) for buffer in used},
        }

    def update(self, grads: Any, state: State, params: Any, **hyper: Any) -> tuple[Any, State]:
        """One step, out of place: nothing that is passed in changes.

        Can be vmapped, differentiated and compiled; see Note [What the pure form computes]. It
        records what autograd asks for: pass detached tensors, or call it under ``torch.no_grad()``,
        where no derivative through the update is wanted.

        Args:
            grads: Dense gradients in the structure of ``params``. A parameter whose gradient is
                ``None`` stays as it is, with its state, as in ``torch.optim``.
            state: From ``init`` or the last update.
            params: A tensor, or any nesting of lists, tuples and dicts of tensors.
            **hyper: Options of the class in ``torch.optim``, with its names and defaults. Numbers
                may be tensors of shape ``()``; their values are not checked.

        Returns:
            The new parameters and the new state, in the structures and dtypes of the old.

        Raises:
            TypeError: An option that the algorithm doesn't have.
            ValueError: A value that the class refuses, a tensor option with dimensions, or trees of
                different structures.
        """
        options = unpack_pairs(self._check(hyper))
        leaves, structure = pytree.tree_flatten(params)
        columns = {key: _flatten_like(structure, tree, key) for key, tree in state.items()}
        for buffer in self.buffers:
            if buffer not in columns and self.uses(buffer, options):
                columns[buffer] = [new_buffer(leaf) for leaf in leaves]
        new_leaves: list[Any] = []
        new_rows: list[Buffers] = []
        for i, (param, grad) in enumerate(
            zip(leaves, _flatten_like(structure, grads, "grads"), strict=True)
        ):
            row = {key: column[i] for key, column in columns.items()}
            new_param = param
            if grad is not None:
                step = row.pop("step")
                for buffer, option in self.first_values.items():
                    row[buffer] = _where_first(step, options[option], row[buffer])
                new_param, row = self.apply(param, grad, row, step, options)
                row["step"] = step + 1
            new_leaves.append(new_param)
            new_rows.append(row)
        new_state = {
            key: pytree.tree_unflatten([row[key] for row in new_rows], structure) for key in columns
        }
        return pytree.tree_unflatten(new_leaves, structure), new_state

    def apply(
        self, param: Tensor, grad: Tensor, buffers: Buffers, step: Tensor, options: Options
    ) -> tuple[Tensor, Buffers]:
        """One step of one parameter, out of place.

        Args:
            param: The parameter.
            grad: Its gradient, dense.
            buffers: At least those in use; the others are handed through.
            step: The number of steps before this one, shape ``()``.
            options: By the kernel's names, ``decoupled_weight_decay`` included where it is an
                option of the kernel.

        Returns:
            The new parameter and the new buffers.
        """
        p, g = _to_real(param), _to_real(grad)
        t = step.to(torch.float64 if p.dtype == torch.float64 else torch.float32) + 1
        if options.get("maximize"):
            g = -g
        decay = options.get("weight_decay", 0)
        if _is_on(decay):
            if self.fixed.get("decoupled_weight_decay") or options.get("decoupled_weight_decay"):
                p = p * (1 - options["lr"] * decay)
            else:
                g = g + decay * p
        used = {key: _to_real(buffers[key]) for key in self.buffers if self.uses(key, options)}
        p, new = self.formula(p, g, used, t, options)
        kept = {key: _from_real(tensor, buffers[key]) for key, tensor in new.items()}
        return _from_real(p, param), {**buffers, **kept}

    def _check(self, hyper: Options) -> dict[str, Any]:
        """All options, once the class in ``torch.optim`` has approved of the numbers among them."""
        for name, value in hyper.items():
            if any(isinstance(part, Tensor) and part.dim() for part in _parts(value)):
                # It would broadcast: a learning rate per member belongs under vmap.
                raise ValueError(f"{name!r} must be a number or a tensor of shape ()")
            if name not in self.defaults:
                raise TypeError(
                    f"{name!r} is no option of the pure form of {self.name}; these are: "
                    f"{', '.join(self.defaults)}"
                )
        if not torch.compiler.is_compiling():
            numbers = {name: value for name, value in hyper.items() if not _has_tensor(value)}
            key = repr(numbers)
            if key not in self._valid:
                self.optimizer_class([torch.zeros(())], **numbers)
                if len(self._valid) >= 1024:  # a schedule makes a new learning rate every step
                    self._valid.clear()
                self._valid.add(key)
        return {**self.defaults, **hyper}


def unpack_pairs(options: Options) -> dict[str, Any]:
    """The options with ``betas`` as ``beta1`` and ``beta2``, and so on, as the kernels take them."""
    unpacked = dict(options)
    for pair, names in _PAIRS.items():
        if pair in unpacked:
            unpacked.update(zip(names, unpacked.pop(pair), strict=True))
    return unpacked


def new_step(param: Tensor) -> Tensor:
    """The pure form's step counter before the first step: float32, shape ``()``."""
    return torch.zeros((), dtype=torch.float32, device=param.device)


def new_buffer(param: Tensor) -> Tensor:
    """Zeros of the shape, strides, dtype and device of ``param``."""
    return torch.zeros_like(param, requires_grad=False)


def _flatten_like(structure: pytree.TreeSpec, tree: Any, name: str) -> list[Any]:
    try:
        return structure.flatten_up_to(tree)
    except ValueError as error:
        raise ValueError(f"{name} must have the structure of params: {error}") from error


def _is_on(option: Any) -> bool:
    return isinstance(option, Tensor) or bool(option)


def _parts(option: Any) -> Sequence[Any]:
    return option if isinstance(option, (list, tuple)) else (option,)


def _has_tensor(option: Any) -> bool:
    return any(isinstance(part, Tensor) for part in _parts(option))


def _to_real(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.float() if tensor.dtype in {torch.bfloat16, torch.float16} else tensor


def _from_real(tensor: Tensor, like: Tensor) -> Tensor:
    if like.is_complex():
        return torch.view_as_complex(tensor.contiguous()).to(like.dtype)
    return tensor.to(like.dtype)


def _where_first(step: Tensor, value: Any, buffer: Tensor) -> Tensor:
    filled = torch.ones_like(buffer)
    if buffer.is_complex():
        filled = torch.complex(filled.real, filled.real)
    return torch.where(step == 0, (filled * value).to(buffer.dtype), buffer)


# The formulas


def _safe_sqrt(x: Tensor) -> Tensor:
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1).sqrt(), 0)


def _bias_correction(beta: Any, t: Tensor) -> Tensor:
    """``1 - beta**t``; see Note [What the pure form computes]."""
    if isinstance(beta, Tensor):
        return -torch.expm1(t * beta.to(t.dtype).log())
    return -torch.expm1(t * (math.log(beta) if beta > 0 else -math.inf))


def _adam(p: Tensor, g: Tensor, s: Buffers, t: Tensor, o: Options) -> tuple[Tensor, Buffers]:
    """Kingma and Ba, 2015; ``amsgrad``: Reddi et al., 2018; AdamW: Loshchilov and Hutter, 2019."""
    mean = torch.lerp(s["exp_avg"], g, _weight(1 - o["beta1"], g))
    square = o["beta2"] * s["exp_avg_sq"] + (1 - o["beta2"]) * (g * g)
    new = {"exp_avg": mean, "exp_avg_sq": square}
    if "max_exp_avg_sq" in s:
        square = new["max_exp_avg_sq"] = torch.maximum(s["max_exp_avg_sq"], square)
    root = _safe_sqrt(square) / _bias_correction(o["beta2"], t).sqrt()
    return p - o["lr"] / _bias_correction(o["beta1"], t) * mean / (root + o["eps"]), new


def _sgd(p: Tensor, g: Tensor, s: Buffers, t: Tensor, o: Options) -> tuple[Tensor, Buffers]:
    """Sutskever et al., 2013, with torch's order of learning rate and momentum."""
    if "momentum_buffer" not in s:
        return p - o["lr"] * g, {}
    followed = o["momentum"] * s["momentum_buffer"] + (1 - o["dampening"]) * g
    velocity = torch.where(t == 1, g, followed)
    direction = g + o["momentum"] * velocity if o["nesterov"] else velocity
    return p - o["lr"] * direction, {"momentum_buffer": velocity}


def _rmsprop(p: Tensor, g: Tensor, s: Buffers, _t: Tensor, o: Options) -> tuple[Tensor, Buffers]:
    """Hinton's lecture notes; ``centered``: Graves, 2013."""
    square = o["alpha"] * s["square_avg"] + (1 - o["alpha"]) * (g * g)
    new = {"square_avg": square}
    variance = square
    if "grad_avg" in s:
        mean = new["grad_avg"] = torch.lerp(s["grad_avg"], g, _weight(1 - o["alpha"], g))
        variance = square - mean * mean
    direction = g / (_safe_sqrt(variance) + o["eps"])
    if "momentum_buffer" in s:
        direction = new["momentum_buffer"] = o["momentum"] * s["momentum_buffer"] + direction
    return p - o["lr"] * direction, new


def _adagrad(p: Tensor, g: Tensor, s: Buffers, t: Tensor, o: Options) -> tuple[Tensor, Buffers]:
    """Duchi et al., 2011."""
    total = s["sum"] + g * g
    lr = o["lr"] / (1 + (t - 1) * o["lr_decay"])
    return p - lr * g / (_safe_sqrt(total) + o["eps"]), {"sum": total}


def _adadelta(p: Tensor, g: Tensor, s: Buffers, _t: Tensor, o: Options) -> tuple[Tensor, Buffers]:
    """Zeiler, 2012."""
    square = o["rho"] * s["square_avg"] + (1 - o["rho"]) * (g * g)
    delta = _safe_sqrt(s["acc_delta"] + o["eps"]) / _safe_sqrt(square + o["eps"]) * g
    acc_delta = o["rho"] * s["acc_delta"] + (1 - o["rho"]) * (delta * delta)
    return p - o["lr"] * delta, {"square_avg": square, "acc_delta": acc_delta}


def _adamax(p: Tensor, g: Tensor, s: Buffers, t: Tensor, o: Options) -> tuple[Tensor, Buffers]:
    """Kingma and Ba, 2015, section 7.1."""
    mean = torch.lerp(s["exp_avg"], g, _weight(1 - o["beta1"], g))
    norm = torch.maximum(o["beta2"] * s["exp_inf"], g.abs() + o["eps"])
    lr = o["lr"] / _bias_correction(o["beta1"], t)
    return p - lr * mean / norm, {"exp_avg": mean, "exp_inf": norm}


def _rprop(p: Tensor, g: Tensor, s: Buffers, _t: Tensor, o: Options) -> tuple[Tensor, Buffers]:
    """Riedmiller and Braun, 1993, without going back by the last step."""
    agreement = g * s["prev"]
    turned = agreement < 0
    size = s["step_size"]
    size = torch.where(turned, size * o["etaminus"], size)
    size = torch.where(agreement > 0, size * o["etaplus"], size)
    # Twice, because one of the bounds may be a tensor and the other a number.
    size = size.clamp(min=o["step_size_min"]).clamp(max=o["step_size_max"])
    g = torch.where(turned, 0, g)
    return p - size * g.sign(), {"prev": g, "step_size": size}


def _weight(value: Any, like: Tensor) -> Any:
    """``torch.lerp`` takes weights of its own dtype only."""
    return value.to(like.dtype) if isinstance(value, Tensor) else value


_ADAM_BUFFERS = {"exp_avg": None, "exp_avg_sq": None, "max_exp_avg_sq": "amsgrad"}

RULES = {
    rule.name: rule
    for rule in (
        Rule(
            "adadelta",
            torch.optim.Adadelta,
            adadelta,
            _adadelta,
            {"square_avg": None, "acc_delta": None},
        ),
        Rule(
            "adagrad",
            torch.optim.Adagrad,
            adagrad,
            _adagrad,
            {"sum": None},
            first_values={"sum": "initial_accumulator_value"},
            takes_sparse=True,
        ),
        Rule("adam", torch.optim.Adam, adam, _adam, _ADAM_BUFFERS),
        Rule(
            "adamw",
            torch.optim.AdamW,
            adamw,
            _adam,
            _ADAM_BUFFERS,
            fixed={"decoupled_weight_decay": True},
        ),
        Rule("adamax", torch.optim.Adamax, adamax, _adamax, {"exp_avg": None, "exp_inf": None}),
        Rule(
            "rmsprop",
            torch.optim.RMSprop,
            rmsprop,
            _rmsprop,
            {"square_avg": None, "grad_avg": "centered", "momentum_buffer": "momentum"},
        ),
        Rule(
            "rprop",
            torch.optim.Rprop,
            rprop,
            _rprop,
            {"prev": None, "step_size": None},
            first_values={"step_size": "lr"},
        ),
        Rule(
            "sgd",
            torch.optim.SGD,
            sgd,
            _sgd,
            {"momentum_buffer": "momentum"},
            counts_steps=False,
            takes_sparse=True,
        ),
    )
}

CLASSES: dict[Any, Rule] = {rule.optimizer_class: rule for rule in RULES.values()}


def find_rule(name: str) -> Rule:
    """The rule called ``name``."""
    return RULES[name]


def rule_of(optimizer_class: Any, also_supported: Iterable[Any] = ()) -> Rule:
    """The rule of a class in ``torch.optim`` or of a subclass that only changes its options.

    Args:
        optimizer_class: What the user asks for.
        also_supported: What the error message is to name besides the classes of the table.

    Raises:
        ValueError: There is none, or the class makes its step in a way of its own.
    """
    for base in getattr(optimizer_class, "__mro__", ()):
        if base in CLASSES:
            for method in ("step", "_init_group"):
                # torch wraps `step` in each class that is instantiated.
                own, torchs = (inspect.unwrap(getattr(c, method)) for c in (optimizer_class, base))
                if own is not torchs:
                    raise ValueError(
                        f"Optimizer {optimizer_class} overrides {method!r} of {base.__name__}, so its "
                        "functional counterpart is not that of the base; register one with "
                        "register_functional_optim"
                    )
            return CLASSES[base]
    names = [*(known.__name__ for known in CLASSES), *map(repr, also_supported)]
    raise ValueError(
        f"Optimizer {optimizer_class} does not have a functional counterpart! "
        f"These have: {', '.join(names)}, and subclasses"
    )
