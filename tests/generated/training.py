"""Carries out a plan on one rank, sharded and with the plain optimizer, and compares throughout."""

import contextlib
import copy
import functools
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.optim import Optimizer, lr_scheduler

from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tensorplay.distributed.optim.zero import checkpoint, sharding_plan
from tests.generated.plan import (
    ALL_RANKS,
    KINDS,
    MEMBERS,
    AddGroup,
    AdvanceSchedule,
    Event,
    Freeze,
    GroupPlan,
    Load,
    OptimizerKind,
    ParameterPlan,
    Plan,
    Resume,
    Save,
    SetOption,
    Step,
    TensorOption,
    Thaw,
    Way,
    ZeroGrad,
)
from tests.reference.data_parallel import unsigned_zeros
from tests.reference.training import difference_beyond_rounding, first_difference

Build = Callable[..., Optimizer]

EXPECTED_WARNINGS = (
    "optimizer contains a parameter group with duplicate parameters",
    "Detected call of",  # of a scheduler before the optimizer's first step
    "Sparse invariant checks are implicitly disabled",
)

_process_groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
_verdict_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}


def carry_out(plan: Plan) -> str | None:
    """Runs ``plan``; every rank of a pool must call it.

    Returns:
        On ranks that saw a difference: after which event, on which rank, and where it is first. All
        ranks stop after that event. What raises an exception isn't caught.
    """
    if not _process_groups:
        for members in MEMBERS:
            group = None if members == ALL_RANKS else dist.new_group(list(members))
            _process_groups[members] = group
            _verdict_groups[members] = dist.new_group(list(members))
    ranks = plan.members
    if any(isinstance(event, Resume) for event in plan.events):
        ranks = ALL_RANKS  # what was saved is handed to all
    if dist.get_rank() not in ranks:
        return None
    with warnings.catch_warnings(), _capacities(plan.capacity):
        for message in EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        return _Run(plan, _verdict_groups[ranks]).carry_out()


class Model:
    """The parameters of a plan. Two models of one plan have equal values, strides and ties."""

    def __init__(self) -> None:
        self.parameters: list[torch.nn.Parameter] = []
        self._arenas: dict[str, torch.Tensor] = {}
        self._arena_ends: dict[str, int] = {}

    def add(self, group: GroupPlan) -> list[torch.nn.Parameter]:
        """Makes the parameters of a group."""
        added = []
        for plan in group.parameters:
            values = self._memory(plan)
            if plan.memory != "inside" or not self.parameters:
                generator = torch.Generator().manual_seed(len(self.parameters))
                values.copy_(torch.randn(values.shape, generator=generator))
            added.append(torch.nn.Parameter(values, requires_grad=plan.trainable))
            self.parameters.append(added[-1])
        return added

    def _memory(self, plan: ParameterPlan) -> torch.Tensor:
        dtype = getattr(torch, plan.dtype)
        empty = torch.empty(plan.shape, dtype=dtype)
        match plan.memory:
            case "channels_last" if len(plan.shape) == 4:
                return empty.to(memory_format=torch.channels_last)
            case "transposed":
                backwards = tuple(reversed(range(empty.ndim)))
                return empty.permute(backwards).contiguous().permute(backwards)
            case "gaps":
                return torch.empty((*plan.shape, 2), dtype=dtype)[..., 0]
            case "slice":
                arena = self._arenas.setdefault(plan.dtype, torch.empty(4096, dtype=dtype))
                start = self._arena_ends.get(plan.dtype, 0)
                self._arena_ends[plan.dtype] = start + empty.numel()
                return arena[start : start + empty.numel()].view(plan.shape)
            case "inside" if self.parameters:
                other = self.parameters[plan.other % len(self.parameters)].detach()
                halves = plan.shape != other.shape and other.is_contiguous() and other.ndim > 0
                return other[: max(1, len(other) // 2)] if halves else other
        return empty

    @torch.no_grad()
    def copy_values_(self, values: Sequence[torch.Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.copy_(value)


class Trainee:
    """A model, its optimizer and its scheduler, made as ``build`` makes optimizers.

    If it ``reduces``, its gradients come from backward passes, and are averaged by the optimizer. If
    it ``chooses``, groups say how they are divided.
    """

    def __init__(
        self,
        plan: Plan,
        groups: Sequence[GroupPlan],
        build: Build,
        model: Model,
        *,
        named: bool,
        reduces: bool = False,
        chooses: bool = False,
    ) -> None:
        self.kind = KINDS[plan.optimizer]
        self.reduces = reduces
        self._chooses = chooses
        self.model = model
        self._schedule = plan.schedule
        options = {**self.kind.constant, **_options(plan.options)}
        self.optimizer = build(
            self._param_groups(groups, named=named), self.kind.optimizer_class, **options
        )
        self.scheduler = self._make_scheduler()

    def _param_groups(self, groups: Sequence[GroupPlan], *, named: bool) -> list[dict[str, Any]]:
        made = []
        parameters = iter(self.model.parameters)
        for number, group in enumerate(groups):
            members = [next(parameters) for _ in group.parameters]
            made.append(self._param_group(group, members, f"group{number}" if named else None))
        return made

    def _param_group(
        self, group: GroupPlan, members: list[torch.nn.Parameter], name: str | None
    ) -> dict[str, Any]:
        members = [*members, *members[:1]] if group.repeats else members
        names = [f"{name}.{place}" for place in range(len(members))]
        params = members if name is None else list(zip(names, members, strict=True))
        made = {**_options(group.options), "params": params}
        if self._chooses and group.partition is not None:
            made["partition"] = group.partition
        return made

    def _make_scheduler(self) -> Any:
        match self._schedule:
            case "exponential":
                return lr_scheduler.ExponentialLR(self.optimizer, 0.5)
            case "step":
                return lr_scheduler.StepLR(self.optimizer, 2, 0.1)
            case "lambda":
                return lr_scheduler.LambdaLR(self.optimizer, lambda epoch: 1 / (1 + epoch))
            case "warm restarts":
                return lr_scheduler.CosineAnnealingWarmRestarts(self.optimizer, 3)
            case "one cycle":
                cycles = {"momentum", "betas"} & set(self.optimizer.defaults)
                return lr_scheduler.OneCycleLR(
                    self.optimizer,
                    0.3,
                    total_steps=60,
                    cycle_momentum=bool(cycles) and not self.kind.sparse,
                )
        return None

    def go_on_from(self, state: dict[str, Any], scheduler: Any) -> None:
        """Loads the optimizer's state and that of another scheduler."""
        self.optimizer.load_state_dict(state)
        if self.scheduler is not None:
            self.scheduler.load_state_dict(copy.deepcopy(scheduler.state_dict()))

    def meet(self, event: Event) -> None:
        """What an event means to a training loop."""
        groups = self.optimizer.param_groups
        match event:
            case Step():
                self._step(event)
            case SetOption():
                group = groups[event.group % len(groups)]
                current = group.get(event.name)
                value = _option(event.value)
                if isinstance(current, torch.Tensor) and event.in_place:
                    current.fill_(value)
                else:
                    group[event.name] = value
            case AdvanceSchedule():
                if self.scheduler is not None:
                    self.scheduler.step()
            case AddGroup():
                name = f"group{len(groups)}" if "param_names" in groups[0] else None
                members = self.model.add(event.group)
                self.optimizer.add_param_group(self._param_group(event.group, members, name))
                self.scheduler = self._make_scheduler()
            case Freeze():
                for parameter in _one_of(self._where_required(True), event.parameter):
                    parameter.requires_grad_(False)
                    parameter.grad = parameter.grad if event.keep_gradient else None
            case Thaw():
                for parameter in _one_of(self._where_required(False), event.parameter):
                    parameter.requires_grad_(True)
            case ZeroGrad():
                self.optimizer.zero_grad(event.set_to_none)

    def _where_required(self, required: bool) -> list[torch.nn.Parameter]:
        return [p for p in self.model.parameters if p.requires_grad == required]

    def _step(self, event: Step) -> None:
        def set_gradients() -> float:
            by_backward = self.reduces and (event.closure or event.seed % 3 > 0)
            _set_gradients(self.model.parameters, event, self.kind, by_backward=by_backward)
            return 2.5

        if event.closure:
            assert self.optimizer.step(set_gradients) == 2.5
        else:
            set_gradients()
            self.optimizer.step()


class _Run:
    """A plan being carried out on this rank, which may be outside of the present group."""

    def __init__(self, plan: Plan, verdict_group: dist.ProcessGroup) -> None:
        self._verdict_group = verdict_group
        self._plan = plan
        self._groups = list(plan.groups)
        self._members = plan.members
        self._what_now = "the beginning"
        self._differences: list[str] = []
        self._kept: dict[str, Any] | None = None
        self._plain_kept: dict[str, Any] | None = None
        self._snapshots: list[tuple[str, Any, Any]] = []
        self._largest_so_far = 0.0
        self._looks = False
        ways = [plan.way, *(each.way for each in plan.events if isinstance(each, Resume))]
        self.has_reduced = any(way.shard_gradients for way in ways)
        self.plain = self._make_plain(self._make_model(), named=plan.named)
        self.sharded: Trainee | None = None
        if dist.get_rank() in self._members:
            self.sharded = self._make_sharded(
                self._make_model(), named=plan.named, resident=plan.resident, way=plan.way
            )

    def carry_out(self) -> str | None:
        for number, event in enumerate([None, *self._plan.events, Save(len(self._plan.events))]):
            self._differences.clear()
            self._looks = isinstance(event, Step) and event.seed % 4 == 0
            if event is not None:
                self._what_now = f"event {number - 1}, {event}"
                try:
                    self._carry_out(event)
                except Exception as error:
                    raise RuntimeError(self._where()) from error
            self._compare()
            different = torch.tensor([len(self._differences)])
            dist.all_reduce(different, group=self._verdict_group)
            if different:
                return next(iter(self._differences), None)
        return None

    def _carry_out(self, event: Event) -> None:
        match event:
            case Save():
                self._save(event)
            case Load():
                self._load()
            case Resume():
                self._resume(event)
            case _:
                self.plain.meet(event)
                if self.sharded:
                    self.sharded.meet(event)
                if isinstance(event, AddGroup):
                    self._groups.append(event.group)

    # Making

    def _make_plain(self, model: Model, *, named: bool) -> Trainee:
        def build(groups: Any, optimizer_class: type[Optimizer], **options: Any) -> Optimizer:
            return optimizer_class(groups, **options)

        return Trainee(self._plan, self._groups, build, model, named=named)

    def _make_sharded(self, model: Model, *, named: bool, resident: bool, way: Way) -> Trainee:
        def build(groups: Any, optimizer_class: type[Optimizer], **options: Any) -> Optimizer:
            return ZeroRedundancyOptimizer(
                groups,
                optimizer_class,
                _process_groups[self._members],
                parameters_as_bucket_view=resident,
                partition=way.partition,
                flat_step=way.flat_step,
                shard_gradients=way.shard_gradients,
                overlap_with_backward=way.overlap if way.shard_gradients else None,
                elementwise=True,
                **options,
            )

        return Trainee(
            self._plan,
            self._groups,
            build,
            model,
            named=named,
            reduces=way.shard_gradients,
            chooses=True,
        )

    def _make_model(self) -> Model:
        model = Model()
        for group in self._groups:
            model.add(group)
        return model

    # Saving and loading

    def _save(self, event: Save) -> None:
        if event.keep:
            self._plain_kept = copy.deepcopy(self.plain.optimizer.state_dict())
        if self.sharded is None:
            return
        saved = self._consolidate(event.to)
        if event.keep:
            self._kept = self._hand_out(saved, event.to, _process_groups[self._members])
            self._watch("the dict that was kept for loading", self._kept)
        if event.release:
            self._zero().release_consolidated_state_dict()

    def _load(self) -> None:
        num_groups = len(self.plain.optimizer.param_groups)
        if self._plain_kept is None or len(self._plain_kept["param_groups"]) != num_groups:
            return
        self.plain.optimizer.load_state_dict(copy.deepcopy(self._plain_kept))  # it would alias
        if self.sharded:
            assert self._kept is not None
            self.sharded.optimizer.load_state_dict(self._kept)

    def _resume(self, event: Resume) -> None:
        saved = None
        if self.sharded:
            state = self._consolidate(event.to)
            saved = {
                "optimizer": state,
                "values": [p.detach().clone() for p in self.sharded.model.parameters],
                "trainable": [p.requires_grad for p in self.sharded.model.parameters],
            }
        saved = self._hand_out(saved, event.to, None)
        self._kept = self._plain_kept = None
        before = self.plain
        expected = {
            "optimizer": copy.deepcopy(before.optimizer.state_dict()),
            "values": [p.detach().clone() for p in before.model.parameters],
            "trainable": [p.requires_grad for p in before.model.parameters],
        }
        self._members = event.members
        self.plain = self._resumed(event, expected, before.scheduler, self._make_plain)
        self.sharded = None
        if dist.get_rank() in self._members:
            self._watch("the dict that was loaded", saved["optimizer"])
            self.sharded = self._resumed(
                event,
                saved,
                before.scheduler,
                functools.partial(self._make_sharded, resident=event.resident, way=event.way),
            )

    def _resumed(
        self, event: Resume, saved: dict[str, Any], scheduler: Any, make: Callable[..., Any]
    ) -> Trainee:
        if event.through_plain:
            between = self._make_plain(self._make_model(), named=event.named)
            between.optimizer.load_state_dict(saved["optimizer"])
            saved = {**saved, "optimizer": between.optimizer.state_dict()}
        model = self._make_model()
        for parameter, trainable in zip(model.parameters, saved["trainable"], strict=True):
            parameter.requires_grad_(trainable)
        if not event.values_last:
            model.copy_values_(saved["values"])
        trainee: Trainee = make(model, named=event.named)
        trainee.model.copy_values_(saved["values"])
        trainee.go_on_from(saved["optimizer"], scheduler)
        return trainee

    def _zero(self) -> ZeroRedundancyOptimizer:
        assert self.sharded is not None
        assert isinstance(self.sharded.optimizer, ZeroRedundancyOptimizer)
        return self.sharded.optimizer

    def _target(self, to: int) -> int:
        """Global rank of a target."""
        return self._members[to % len(self._members)]

    def _consolidate(self, to: int) -> dict[str, Any] | None:
        self._zero().consolidate_state_dict(to=to % len(self._members))
        if dist.get_rank() != self._target(to):
            return None
        state = self._zero().state_dict()
        groups = [dict(sorted(group.items())) for group in state["param_groups"]]
        expected = _in_order(self.plain.optimizer.state_dict())
        self._expect(expected["param_groups"], groups, "param_groups of the state dict")
        self._expect_trained(expected, {**state, "param_groups": groups}, "state dict")
        self._watch("an earlier consolidated dict", state)
        return state

    def _hand_out(self, saved: Any, to: int, group: dist.ProcessGroup | None) -> Any:
        """Brings what the target has to all ranks of ``group``, as a file would."""
        target = self._target(to)
        content: list[Any] = [None]
        if dist.get_rank() == target:
            file = io.BytesIO()
            torch.save(saved, file)
            content = [file.getvalue()]
        dist.broadcast_object_list(content, src=target, group=group)
        return torch.load(io.BytesIO(content[0]), weights_only=True)

    # Comparing

    def _watch(self, what: str, state: dict[str, Any]) -> None:
        """From now on ``state`` must not change."""
        self._snapshots.append((what, state, copy.deepcopy(state)))

    def _compare(self) -> None:
        if self.sharded:
            ours, plains = self.sharded, self.plain
            parameters = zip(plains.model.parameters, ours.model.parameters, strict=True)
            for number, (expected, actual) in enumerate(parameters):
                what = f"parameter {number}"
                self._expect_trained(expected.detach(), actual.detach(), what)
                self._compare_gradients(expected, actual, f"the gradient of {what}")
            self._expect(
                _without_params(plains.optimizer), _without_params(ours.optimizer), "param_groups"
            )
            self._expect(plains.optimizer.defaults, ours.optimizer.defaults, "defaults")
            owned = {key for key in ours.optimizer.state if isinstance(key, torch.Tensor)}
            strange = len(owned - set(ours.model.parameters))
            self._expect(0, strange, "the number of states without a parameter")
        for what, state, before in self._snapshots:
            self._expect(before, state, what)

    def _compare_gradients(self, expected: torch.Tensor, actual: torch.Tensor, what: str) -> None:
        assert self.sharded is not None
        if not self.sharded.reduces:
            self._expect(expected.grad, actual.grad, what)
            return
        self._expect(expected.grad is None, actual.grad is None, f"whether there is {what}")
        if self._looks:
            full = self._zero().full_grad(actual)
            self._expect(unsigned_zeros(expected.grad), unsigned_zeros(full), what)

    def _expect_trained(self, expected: Any, actual: Any, what: str) -> None:
        """Bitwise, but for the sign of zeros where gradients are averaged, or slices' rounding."""
        if self._plan.is_flat:
            difference = difference_beyond_rounding(
                expected, actual, what, factor=1e4, least_scale=self._largest()
            )
            if difference:
                self._differences.append(f"{self._where()}: {difference}")
            return
        if self.has_reduced:
            expected, actual = unsigned_zeros(expected), unsigned_zeros(actual)
        self._expect(expected, actual, what)

    def _largest(self) -> float:
        """The largest parameter or gradient so far: differences may have come from its last digits."""
        for parameter in self.plain.model.parameters:
            for tensor in (parameter.detach(), parameter.grad):
                if tensor is not None and tensor.numel():
                    size = tensor.detach().abs().nan_to_num(0, 0, 0).max().item()
                    self._largest_so_far = max(self._largest_so_far, size)
        return self._largest_so_far

    def _expect(self, expected: Any, actual: Any, what: str) -> None:
        difference = first_difference(expected, actual, what, strides=True)
        if difference:
            self._differences.append(f"{self._where()}: {difference}")

    def _where(self) -> str:
        return f"at {self._what_now}, rank {dist.get_rank()} of {self._members}"


def _set_gradients(
    parameters: Sequence[torch.Tensor],
    event: Step,
    kind: OptimizerKind,
    *,
    by_backward: bool = False,
) -> None:
    losses = []
    generator = torch.Generator().manual_seed(event.seed)
    for number, parameter in enumerate(parameters):
        dense = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        dense = torch.empty_like(parameter).copy_(dense * event.scale)  # in the same strides
        _shorten_(dense.detach())
        if event.without >> number % 8 & 1 or not parameter.requires_grad:
            if not event.keep:
                parameter.grad = None
        elif kind.sparse:
            rows = torch.randperm(len(dense), generator=generator)[:2].sort().values
            parameter.grad = torch.sparse_coo_tensor(
                rows[None], dense[rows], dense.shape, check_invariants=True
            ).coalesce()
        elif by_backward:
            parameter.grad = None
            losses.append((parameter * dense.detach().conj()).real.double().sum())
        else:
            parameter.grad = dense.detach()
    if losses:
        torch.stack(losses).sum().backward()


def _shorten_(tensor: torch.Tensor) -> None:
    """Clears the last bits, so that a few equal gradients have an exact sum, and the same mean."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if real.dtype in (torch.float32, torch.float64):
        real.view(torch.int32 if real.dtype is torch.float32 else torch.int64).bitwise_and_(-8)


def _one_of(parameters: Sequence[torch.Tensor], number: int) -> Sequence[torch.Tensor]:
    """The one with that number, if there are any."""
    return [parameters[number % len(parameters)]] if parameters else []


def _options(options: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    return {name: _option(value) for name, value in options}


def _option(value: Any) -> Any:
    return torch.tensor(value.value) if isinstance(value, TensorOption) else value


def _without_params(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {name: group[name] for name in sorted(group) if name != "params"}
        for group in optimizer.param_groups
    ]


def _in_order(state_dict: dict[str, Any]) -> dict[str, Any]:
    """State by index, where torch has it by who stepped first, and options by name."""
    state = state_dict["state"]
    indexed = sorted(key for key in state if isinstance(key, int))
    shared = [key for key in state if not isinstance(key, int)]
    return {
        "state": {key: state[key] for key in [*indexed, *shared]},
        "param_groups": [dict(sorted(group.items())) for group in state_dict["param_groups"]],
    }


@contextlib.contextmanager
def _capacities(nbytes: int | None) -> Iterator[None]:
    if nbytes is None:
        yield
        return
    with (
        mock.patch.object(sharding_plan, "CAPACITY_BYTES", nbytes),
        mock.patch.object(sharding_plan, "LEAST_STAGED_CAPACITY_BYTES", nbytes),
        mock.patch.object(checkpoint, "PACK_BELOW_BYTES", nbytes // 2),
        mock.patch.object(checkpoint, "MESSAGE_BYTES", nbytes),
        mock.patch.object(checkpoint, "CHUNK_BYTES", 2 * nbytes),
    ):
        yield
