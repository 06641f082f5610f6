"""Model averagers: when, and over which ranks, parameters are replaced by their mean."""

import copy
import operator
import warnings
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorplay.distributed.optim._core.collectives import connect
from tensorplay.distributed.optim._core.tagged_json import Json
from tensorplay.distributed.optim.local_sgd.group_average import GroupAverage
from tensorplay.distributed.optim.local_sgd.schedule import due_level, is_due

Averaged = Iterable[torch.Tensor] | Iterable[dict[str, Any]]


class ModelAverager(ABC):
    """What decides when a model is averaged, and does it.

    A subclass implements :meth:`average_parameters`, and counts :attr:`step` in it. If it holds more
    than the count, it extends :meth:`state_dict` and :meth:`load_state_dict`, so that
    ``PostLocalSGDOptimizer`` saves and restores it.

    Args:
        process_group: the ranks to average over (default: the default group).

    Attributes:
        step: how many steps have been counted.

    Raises:
        RuntimeError: if there is no process group.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = _default_group() if process_group is None else process_group
        self.step = 0

    @abstractmethod
    def average_parameters(self, params: Averaged) -> None:
        """Counts a step, at the end of which parameters may be averaged; called once per step.

        Args:
            params: tensors, or param groups of an optimizer.
        """
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """What must be saved to go on later, under ``"step"`` at least the count."""
        return {"step": self.step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from what :meth:`state_dict` returned."""
        self.step = state_dict["step"]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy that averages over the same process groups."""
        for group in self._process_groups():
            memo[id(group)] = group
        twin = memo[id(self)] = object.__new__(type(self))
        vars(twin).update(copy.deepcopy(self._own_state(), memo))
        return twin

    def __getstate__(self) -> dict[str, Any]:
        for group in self._process_groups():
            if group is not dist.group.WORLD:
                raise TypeError(
                    f"this {type(self).__name__} can't be pickled: it holds a process group that is "
                    "not the default one. Save its state_dict(), and construct it anew"
                )
        return {**self._own_state(), "process_group": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.process_group = _default_group()

    def _own_state(self) -> dict[str, Any]:
        return vars(self).copy()

    def _process_groups(self) -> Sequence[Any]:
        return [self.process_group]


class ScheduledAverager(ModelAverager):
    """An averager that knows from the count alone when its time has come.

    Every rank of the process group must call :meth:`average_parameters` in every step, with the
    same parameters in the same order; ranks outside the group may, and nothing but the count
    changes there. The first call compares schedule and parameters across the ranks, and so does each one
    that averages.
    """

    def __init__(self, warmup_steps: int, process_group: dist.ProcessGroup | None) -> None:
        super().__init__(process_group)
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps={warmup_steps!r} must not be negative")
        self.warmup_steps = warmup_steps
        self._forget_what_can_be_made_anew()

    def _forget_what_can_be_made_anew(self) -> None:
        self._averages: dict[Any, GroupAverage] = {}
        self._is_settled = False
        self._given: list[torch.Tensor] = []
        self._chosen: list[torch.Tensor] = []
        self._passed_over: list[torch.Tensor] = []

    @abstractmethod
    def due_group(self) -> dist.ProcessGroup | None:
        """The process group that averages in the step to be counted next; ``None`` if none does."""

    @abstractmethod
    def _schedule(self) -> dict[str, Json]:
        """What must be the same on every rank."""

    def average_parameters(self, params: Averaged) -> None:
        """Averages the parameters in place if the schedule says so, and counts the step.

        Every rank of the process group must call it in every step.

        Unlike torch's, it averages the same set on every rank, whether or not a parameter has got a
        gradient there: every tensor of a floating or complex type, but not parameters that have
        never required a gradient. They keep storage, strides and views. Up to 12 MB of other memory
        are used, more only for tensors that have gaps and are larger than 4 MB.

        Args:
            params: the parameters of a model, param groups of an optimizer, or any tensors
                (buffers). Of a ``DTensor`` the local shard is averaged.

        Raises:
            NotImplementedError: for anything but tensors and param groups.
            TypeError: for sparse tensors, and for a ``DTensor`` of which the ranks hold different
                parts; the other ranks raise too.
            RuntimeError: if ranks differ in the number of steps, the schedule or the parameters, or
                the backend fails; on every rank. Nothing is counted then.
        """
        self.average_(params)

    def average_common_(
        self,
        named: Mapping[str, torch.Tensor],
        *,
        joined: bool = False,
        error: Exception | None = None,
    ) -> None:
        """As :meth:`average_parameters`, of those tensors whose names all ranks have.

        Args:
            named: tensors that some ranks may not have (yet), such as the state of an optimizer.
            joined: see :meth:`average_`.
            error: see :meth:`average_`.
        """
        self._average_and_count([], named, joined=joined, error=error)

    def average_(
        self, params: Averaged, *, joined: bool = False, error: Exception | None = None
    ) -> None:
        """As :meth:`average_parameters`, on a rank where not all is as usual.

        Args:
            params: see there.
            joined: this rank has run out of inputs (``Join``): it receives, and doesn't count.
            error: what went wrong here before. It is raised; if this step averages, on the others
                too, naming it.
        """
        self._average_and_count(self._choose(params), None, joined=joined, error=error)

    def _average_and_count(
        self,
        tensors: Sequence[torch.Tensor],
        named: Mapping[str, torch.Tensor] | None,
        *,
        joined: bool,
        error: Exception | None,
    ) -> None:
        if _is_member(self.process_group):
            call, schedule = f"average_parameters (step {self.step})", self._schedule()
            group = self.due_group()
            if not self._is_settled and group is not self.process_group:
                # One level of a hierarchy doesn't see all ranks.
                overall = self._average_over(self.process_group)
                overall.settle(call, tensors, schedule, error=error)
            if group is not None:
                average = self._average_over(group)
                if named is not None:
                    tensors = average.find_common(call, named, error)
                flag = average.settle(call, tensors, schedule, error=error, flag=int(joined))
                contributors = average.find_contributors(joined=joined) if flag else None
                if contributors != []:
                    average.average_(contributors)
            self._is_settled = True
        if error is not None:
            raise error
        self.step += 1

    def __repr__(self) -> str:
        schedule = ", ".join(f"{name}={value}" for name, value in self._schedule().items())
        return f"{type(self).__name__}({schedule})"

    def _average_over(self, group: dist.ProcessGroup) -> GroupAverage:
        # Not at construction: it may be collective, and torch's isn't.
        if group not in self._averages:
            name = type(self).__name__
            self._averages[group] = GroupAverage(connect(group, name), name)
        return self._averages[group]

    def _choose(self, params: Averaged) -> list[torch.Tensor]:
        """The tensors to average: the same on every rank, and once chosen always chosen.

        A parameter that was trained and is frozen now still differs from rank to rank.
        """
        given = tensors_of(params)
        if not _are_same(given, self._given):
            self._given = given
            self._choose_anew()
        elif any(map(may_change, self._passed_over)):
            self._choose_anew()
        return self._chosen

    def _choose_anew(self) -> None:
        before = set(self._chosen)
        self._chosen, self._passed_over = [], []
        for tensor in dict.fromkeys(self._given):
            chosen = tensor in before or may_change(tensor)
            (self._chosen if chosen else self._passed_over).append(tensor)

    def _own_state(self) -> dict[str, Any]:
        state = super()._own_state()
        for made in ("_averages", "_is_settled", "_given", "_chosen", "_passed_over"):
            del state[made]
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = super().__deepcopy__(memo)
        twin._forget_what_can_be_made_anew()  # noqa: SLF001 - another of this class
        return twin

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget_what_can_be_made_anew()


class PeriodicModelAverager(ScheduledAverager):
    """Averages in the first step after a warm-up, and in every ``period``-th step from there.

    This is the averager of `post-local SGD <https://arxiv.org/abs/1808.07217>`_. Follows
    ``torch.distributed.algorithms.model_averaging.averagers.PeriodicModelAverager``, whose schedule
    it has; :meth:`average_parameters` says what is different.

    Args:
        period: number of steps from one average to the next.
        warmup_steps: number of first steps without an average.
        process_group: the ranks to average over (default: the default group).

    Raises:
        ValueError: if ``period`` is below 1 or ``warmup_steps`` below 0.
        RuntimeError: if there is no process group.

    Example:
        >>> averager = PeriodicModelAverager(period=4, warmup_steps=100)
        >>> for inputs, targets in batches:
        ...     optimizer.zero_grad()
        ...     loss_fn(model(inputs), targets).backward()
        ...     optimizer.step()
        ...     averager.average_parameters(model.parameters())
    """

    def __init__(
        self,
        period: int,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(warmup_steps, process_group)
        if period < 1:
            raise ValueError(f"period={period!r} must be at least 1")
        if period == 1:
            _warn_of_period_1("period=1")
        self.period = period

    def due_group(self) -> dist.ProcessGroup | None:
        """See :class:`ScheduledAverager`."""
        due = is_due(self.step, self.period, self.warmup_steps)
        return self.process_group if due else None

    def _schedule(self) -> dict[str, Json]:
        return {"period": self.period, "warmup_steps": self.warmup_steps}


class HierarchicalModelAverager(ScheduledAverager):
    """Averages over groups of several sizes, each with its own period.

    The rule is that of `hierarchical SGD <https://arxiv.org/abs/2010.12998>`_: small groups average
    often, the whole group seldom. In a step in which several levels are due, the highest one
    averages, which contains the others. Follows
    ``torch.distributed.algorithms.model_averaging.hierarchical_model_averager``; a dict that isn't
    sorted is refused, :meth:`average_parameters` says what else is different.

    Every rank of ``process_group`` must construct it; ranks outside may.

    Args:
        period_group_size_dict: group size by period, both ascending. A group of size n is made of n
            neighbouring ranks of ``process_group``; the last size is that of ``process_group``.
        warmup_steps: number of first steps without an average.
        process_group: the ranks of the highest level (default: the default group).

    Keyword Args:
        relative_to_warmup: if true, a level averages in every ``period``-th step after the warm-up,
            as :class:`PeriodicModelAverager` does; if false, as in torch, in every step whose
            number since the very beginning its period divides.

    Attributes:
        period_process_group_dict: this rank's process group by period.

    Raises:
        ValueError: for periods and sizes that aren't as described, or ``warmup_steps`` below 0.
        RuntimeError: if there is no process group.
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
        *,
        relative_to_warmup: bool = False,
    ) -> None:
        super().__init__(warmup_steps, process_group)
        levels = dict(period_group_size_dict or {})
        size = dist.get_world_size(self.process_group) if _is_member(self.process_group) else None
        _validate_levels(levels, size)
        self.relative_to_warmup = relative_to_warmup
        self._periods = list(levels)
        self._sizes = list(levels.values())
        self.period_process_group_dict: OrderedDict[int, dist.ProcessGroup] = OrderedDict()
        if size is not None:
            for period, group_size in levels.items():
                self.period_process_group_dict[period] = self._group_of(group_size, size)
        if self._periods[-1] == 1:
            _warn_of_period_1("a longest period of 1")

    def _group_of(self, group_size: int, overall_size: int) -> dist.ProcessGroup:
        if group_size == overall_size:
            return self.process_group
        start = dist.get_rank(self.process_group) // group_size * group_size
        ranks = dist.get_process_group_ranks(self.process_group)[start : start + group_size]
        group: dist.ProcessGroup = dist.new_group(
            ranks, use_local_synchronization=True, sort_ranks=False
        )
        return group

    def due_group(self) -> dist.ProcessGroup | None:
        """See :class:`ScheduledAverager`."""
        level = due_level(
            self.step,
            self._periods,
            self.warmup_steps,
            relative_to_warmup=self.relative_to_warmup,
        )
        if level is None or not self.period_process_group_dict:
            return None
        return self.period_process_group_dict[self._periods[level]]

    def _schedule(self) -> dict[str, Json]:
        return {
            "periods": list(self._periods),
            "group_sizes": list(self._sizes),
            "warmup_steps": self.warmup_steps,
            "relative_to_warmup": self.relative_to_warmup,
        }

    def _process_groups(self) -> Sequence[Any]:
        return [self.process_group, *self.period_process_group_dict.values()]


def tensors_of(params: Averaged) -> list[torch.Tensor]:
    """The tensors in parameters or param groups, in order.

    Raises:
        NotImplementedError: for anything else.
    """
    if isinstance(params, torch.Tensor):
        raise NotImplementedError("one tensor is not a list of parameters; put it into a list")
    given: list[Any] = list(params)
    if set(map(type, given)) <= {nn.Parameter, torch.Tensor}:  # thousands, without a loop in Python
        return given
    tensors: list[torch.Tensor] = []
    for each in given:
        if isinstance(each, torch.Tensor):
            tensors.append(each)
        elif isinstance(each, dict):
            tensors.extend(each["params"])
        else:
            raise NotImplementedError(
                f"{each!r} of type {type(each).__name__} can't be averaged; pass parameters, or the "
                "param groups of an optimizer"
            )
    return tensors


def may_change(tensor: torch.Tensor) -> bool:
    """Whether training can change a tensor, so that it is worth averaging and can be."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    return tensor.requires_grad or not isinstance(tensor, nn.Parameter)


def _are_same(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _is_member(process_group: Any) -> bool:
    # Also false for what `new_group` returns on ranks outside.
    return bool(dist.get_rank(process_group) >= 0)


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if group is None:
        raise RuntimeError(
            "there is no process group to average over: call torch.distributed.init_process_group() "
            "first, or pass process_group"
        )
    return group


def _validate_levels(levels: Mapping[int, int], overall_size: int | None) -> None:
    if not levels:
        raise ValueError("period_group_size_dict must hold at least one period and group size")
    periods, sizes = list(levels), list(levels.values())
    if min(periods) < 1:
        raise ValueError(f"period_group_size_dict has a period of {min(periods)}; the least is 1")
    if any(one >= other for one, other in pairwise(periods)):
        raise ValueError(
            f"the periods in period_group_size_dict must ascend, but are {periods}; sort the dict"
        )
    if overall_size is not None and sizes[-1] != overall_size:
        raise ValueError(
            f"the last group size in period_group_size_dict is {sizes[-1]}, and must be the number of "
            f"ranks in process_group, {overall_size}"
        )
    if sizes[0] < 1 or any(other % one for one, other in pairwise(sizes)):
        raise ValueError(
            f"the group sizes in period_group_size_dict are {sizes}, but each must divide the next, "
            "so that higher levels contain lower ones"
        )


def _warn_of_period_1(what: str) -> None:
    warnings.warn(
        f"{what} averages the parameters in every step, which sends as much as averaging the "
        "gradients does; DistributedDataParallel alone is enough then",
        stacklevel=3,
    )
