"""Plans of a training run: plain values that travel to the ranks and print as what they are.

Numbers that choose among things (a group, a parameter, a rank) are taken modulo how many there are,
so that a plan stays valid when hypothesis takes parts of it away.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from tensorplay.distributed.optim.zero.elementwise import NOT_ELEMENTWISE
from tests.reference.optimizers import KeepsCounters, NeedsAParameter

MEMBERS = ((0,), (0, 1), (1, 3), (0, 1, 2), (0, 1, 2, 3), (2,), (1, 2, 3))
"""The process groups of a run, by global ranks."""

ALL_RANKS = (0, 1, 2, 3)


@dataclass(frozen=True)
class TensorOption:
    """An option that is a tensor of no axes."""

    value: float


@dataclass(frozen=True)
class ParameterPlan:
    """One parameter.

    ``memory`` is "contiguous", "channels_last" or "transposed" (where the shape allows it), "gaps"
    (every second element of its storage), "slice" (of a storage shared with the other slices), or
    "inside" (the memory of parameter number ``other``, or its first half; dtype and shape follow).
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    memory: str = "contiguous"
    trainable: bool = True
    other: int = 0


@dataclass(frozen=True)
class GroupPlan:
    """A param group; if ``repeats``, its first parameter also stands at its end.

    ``partition`` is its own choice, if it has one.
    """

    parameters: tuple[ParameterPlan, ...]
    options: tuple[tuple[str, Any], ...] = ()
    repeats: bool = False
    partition: str | None = None


@dataclass(frozen=True)
class Way:
    """How the sharded optimizer divides the work, and who averages the gradients."""

    partition: str = "parameters"
    flat_step: bool = False
    shard_gradients: bool = False
    overlap: bool = False


@dataclass(frozen=True)
class Step:
    """A step with new gradients, except where ``without`` has a bit and for frozen parameters.

    Those have none, or what they had if ``keep``.
    """

    seed: int
    without: int = 0
    keep: bool = False
    scale: float = 1.0
    closure: bool = False


@dataclass(frozen=True)
class SetOption:
    """What a training loop changes in a group; ``in_place`` if it is a tensor."""

    group: int
    name: str
    value: Any
    in_place: bool = False


@dataclass(frozen=True)
class AdvanceSchedule:
    """The learning-rate scheduler steps."""


@dataclass(frozen=True)
class AddGroup:
    """``add_param_group``; the scheduler is made anew."""

    group: GroupPlan


@dataclass(frozen=True)
class Freeze:
    """``requires_grad_(False)`` for one that is trainable; the gradient may stay, and torch goes on using it."""

    parameter: int
    keep_gradient: bool = False


@dataclass(frozen=True)
class Thaw:
    """``requires_grad_(True)`` for one that is frozen."""

    parameter: int


@dataclass(frozen=True)
class ZeroGrad:
    """``zero_grad``."""

    set_to_none: bool = True


@dataclass(frozen=True)
class Save:
    """Consolidates to a rank of the group, which compares; if ``keep``, all get it for ``Load``."""

    to: int = 0
    keep: bool = False
    release: bool = False


@dataclass(frozen=True)
class Load:
    """Loads what was kept into the optimizer that is there, if it still fits."""


@dataclass(frozen=True)
class Resume:
    """Saves through a file and goes on with new parameters and a new optimizer, on other ranks."""

    members: tuple[int, ...]
    to: int = 0
    resident: bool = False
    through_plain: bool = False
    values_last: bool = False
    named: bool = False
    way: Way = Way()


Event = (
    Step | SetOption | AdvanceSchedule | AddGroup | Freeze | Thaw | ZeroGrad | Save | Load | Resume
)


@dataclass(frozen=True)
class Plan:
    """A training run; after its events the state is consolidated once more.

    ``capacity`` bounds buckets and, for consolidation, messages, in bytes.
    """

    optimizer: str
    options: tuple[tuple[str, Any], ...]
    groups: tuple[GroupPlan, ...]
    events: tuple[Event, ...]
    members: tuple[int, ...]
    resident: bool = False
    named: bool = False
    schedule: str | None = None
    capacity: int | None = None
    way: Way = Way()

    @property
    def is_flat(self) -> bool:
        """Whether flat slices may be stepped, so that results are equal up to rounding."""
        ways = [self.way, *(event.way for event in self.events if isinstance(event, Resume))]
        groups = [
            *self.groups,
            *(event.group for event in self.events if isinstance(event, AddGroup)),
        ]
        return any(way.flat_step or way.partition == "elements" for way in ways) or any(
            group.partition == "elements" for group in groups
        )


# The optimizers

REAL = ("float32", "float64", "bfloat16", "float16")
ANY = (*REAL, "complex64")
ANY_MEMORY = ("contiguous", "channels_last", "transposed", "gaps", "slice", "inside")
DENSE_MEMORY = ("contiguous", "channels_last", "transposed", "slice", "inside")
ANY_SHAPE = ((3, 2), (7,), (), (1,), (0, 4), (2, 3, 2, 2), (4, 1), (33,), (2, 1, 3))
MATRIX_SHAPE = ((3, 2), (4, 1), (5, 7), (1, 1), (2, 9))


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer class, and what it may get.

    Attributes:
        optimizer_class: the class.
        choices: values for each option; the first is the simplest.
        constant: options that are always the same, and of no group's own.
        grows: whether the plain one survives ``add_param_group``.
        skips: whether the plain one survives that some parameters have no gradient.
        repeats: whether it matters to a repeated parameter what else there is.
    """

    optimizer_class: type[Optimizer]
    choices: dict[str, tuple[Any, ...]]
    constant: dict[str, Any] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ANY
    shapes: tuple[tuple[int, ...], ...] = ANY_SHAPE
    memories: tuple[str, ...] = ANY_MEMORY
    grows: bool = True
    skips: bool = True
    repeats: bool = True
    sparse: bool = False
    takes_closure: bool = True

    @property
    def is_elementwise(self) -> bool:
        """Whether it may step flat slices."""
        return not self.sparse and self.optimizer_class.__name__ not in NOT_ELEMENTWISE


_LR = (0.1, 0.5, 1e-3)
_LR_OR_TENSOR = (*_LR, TensorOption(0.1))
_DECAY = (0.0, 0.1)
_FLAG = (False, True)
_BETAS = ((0.9, 0.999), (0.5, 0.6), (0.0, 0.9))
_COMMON = {"lr": _LR, "weight_decay": _DECAY, "maximize": _FLAG}
_ADAM = {**_COMMON, "betas": _BETAS, "amsgrad": _FLAG, "eps": (1e-8, 1e-3)}
_SGD = {**_COMMON, "momentum": (0.0, 0.9), "dampening": (0.0, 0.5)}
_SPARSE = {"dtypes": ("float32", "float64"), "shapes": MATRIX_SHAPE, "sparse": True}
_FUSED: dict[str, Any] = {"constant": {"fused": True}, "dtypes": REAL, "memories": DENSE_MEMORY}
_FOREACH: dict[str, Any] = {"constant": {"foreach": True}}
_LOOP: dict[str, Any] = {"constant": {"foreach": False}}


def _kind(optimizer_class: type[Optimizer], *choices: Any, **facts: Any) -> OptimizerKind:
    options = {key: values for each in choices for key, values in each.items()}
    return OptimizerKind(optimizer_class, options, **facts)


_TENSOR_LR = {"lr": _LR_OR_TENSOR}

KINDS: dict[str, OptimizerKind] = {
    "SGD": _kind(torch.optim.SGD, _SGD, _TENSOR_LR),
    "SGD nesterov": _kind(
        torch.optim.SGD,
        {**_COMMON, "momentum": (0.9, 0.5)},
        constant={"momentum": 0.9, "nesterov": True},
    ),
    # In which order it updates the momentum of a repeated parameter depends on the other parameters.
    "SGD foreach": _kind(torch.optim.SGD, _SGD, **_FOREACH, repeats=False),
    # On the CPU of torch 2.13 it fails if only some parameters have momentum already, and its
    # momentum in half precision is wrong from the second step on and differs from run to run.
    "SGD fused": _kind(
        torch.optim.SGD,
        _SGD,
        _TENSOR_LR,
        **{**_FUSED, "dtypes": ("float32", "float64")},
        skips=False,
    ),
    "SGD sparse": _kind(torch.optim.SGD, {"lr": _LR, "maximize": _FLAG}, **_SPARSE),
    "Adam": _kind(torch.optim.Adam, _ADAM, _TENSOR_LR, {"decoupled_weight_decay": _FLAG}),
    "Adam foreach": _kind(torch.optim.Adam, _ADAM, **_FOREACH),
    "Adam fused": _kind(torch.optim.Adam, _ADAM, _TENSOR_LR, **_FUSED),
    "AdamW": _kind(torch.optim.AdamW, _ADAM, _TENSOR_LR),
    "AdamW loop": _kind(torch.optim.AdamW, _ADAM, **_LOOP),
    "AdamW fused": _kind(torch.optim.AdamW, _ADAM, _TENSOR_LR, **_FUSED),
    "RMSprop": _kind(
        torch.optim.RMSprop,
        {**_COMMON, **_TENSOR_LR, "alpha": (0.9, 0.5), "momentum": (0.0, 0.5), "centered": _FLAG},
    ),
    "RMSprop foreach": _kind(
        torch.optim.RMSprop, {**_COMMON, "momentum": (0.0, 0.5), "centered": _FLAG}, **_FOREACH
    ),
    "Adagrad": _kind(
        torch.optim.Adagrad,
        {**_COMMON, "lr_decay": (0.0, 0.1), "initial_accumulator_value": (0.0, 0.1)},
    ),
    "Adagrad fused": _kind(torch.optim.Adagrad, {**_COMMON, "lr_decay": (0.0, 0.1)}, **_FUSED),
    "Adagrad sparse": _kind(torch.optim.Adagrad, {"lr": _LR}, **_SPARSE),
    "Adadelta": _kind(torch.optim.Adadelta, {**_COMMON, "rho": (0.9, 0.5)}, _TENSOR_LR),
    "Adamax": _kind(torch.optim.Adamax, {**_COMMON, "betas": _BETAS}),
    "NAdam": _kind(
        torch.optim.NAdam,
        {**_COMMON, "betas": _BETAS, "momentum_decay": (4e-3, 0.1)},
        {"decoupled_weight_decay": _FLAG},
    ),
    "RAdam": _kind(
        torch.optim.RAdam, {**_COMMON, "betas": _BETAS, "decoupled_weight_decay": _FLAG}
    ),
    "Rprop": _kind(
        torch.optim.Rprop, {"lr": _LR, "maximize": _FLAG, "etas": ((0.5, 1.2), (0.9, 1.1))}
    ),
    "ASGD": _kind(torch.optim.ASGD, {**_COMMON, "t0": (1e6, 1.0), "lambd": (1e-4, 0.1)}),
    # Its default eps is that of the first parameter's dtype, for the whole group.
    "Adafactor": _kind(
        torch.optim.Adafactor,
        {**_COMMON, "d": (1.0, 2.0)},
        constant={"eps": (1e-3, 1e-3)},
        dtypes=REAL,
        shapes=MATRIX_SHAPE,
    ),
    "Muon": _kind(
        torch.optim.Muon,
        {"lr": _LR, "weight_decay": _DECAY, "momentum": (0.9, 0.5), "nesterov": _FLAG},
        dtypes=REAL,
        shapes=MATRIX_SHAPE,
    ),
    "SparseAdam": _kind(
        torch.optim.SparseAdam, {"lr": _LR, "betas": _BETAS, "maximize": _FLAG}, **_SPARSE
    ),
    "NeedsAParameter": _kind(NeedsAParameter, {"lr": _LR}, grows=False, takes_closure=False),
    "KeepsCounters": _kind(KeepsCounters, {"lr": _LR}),
}
