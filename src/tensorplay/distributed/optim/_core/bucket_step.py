"""Stepping a part of an optimizer's parameters: an iteration is several such steps, and counts once.

Note [Part of an optimizer]
    An optimizer steps what its ``param_groups`` list. For the length of one call these are replaced
    by groups of the same options with just the parameters at hand, so that a step costs what these
    cost and not what the whole model costs, whatever the class. The state stays where it is.

Note [Counted once]
    Some classes write to their groups, or keep state that belongs to no parameter: a number of
    steps, for instance. Every bucket of an iteration must read what the previous iteration left and
    must leave the same; that is checked, and takes effect when backward ends. What depends on the
    gradients of one bucket would differ, and raises.
"""

import copy
import operator
import threading
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch.optim import Optimizer

from tensorplay.distributed.optim._core.wrapped_optimizer import (
    all_parameters,
    options_of,
    step_inner,
)

_ABSENT = object()


class BucketStepper:
    """Steps any part of the parameters of ``optimizer``, from any thread.

    Args:
        optimizer: its ``param_groups`` may change between iterations; call :meth:`refresh` then.
        cure: how messages go on after they have said why an optimizer can't be stepped in parts.
    """

    def __init__(
        self, optimizer: Optimizer, cure: str = "Use it without apply_optimizer_in_backward"
    ) -> None:
        self._optimizer = optimizer
        self._cure = cure
        # Communication hooks finish in the backend's threads.
        self._lock = threading.Lock()
        self._advanced_options: dict[int, dict[str, Any]] = {}
        self._loose: dict[Any, Any] = {}
        self._advanced_loose: dict[Any, Any] = {}
        self._num_states = 0
        self._is_first = True
        self.refresh()

    def refresh(self) -> None:
        """Learns anew which parameter is in which group, and what state there is."""
        self._group_of: dict[int, int] = {}
        self._kinds: dict[int, tuple[torch.dtype, torch.device]] = {}
        for index, group in enumerate(self._optimizer.param_groups):
            for parameter in group["params"]:
                self._group_of[id(parameter)] = index
                self._kinds[id(parameter)] = _kind_of(parameter)
        times = Counter(map(id, all_parameters(self._optimizer.param_groups)))
        self._repeated = {key: number for key, number in times.items() if number > 1}
        state = self._optimizer.state
        self._loose = {key: state[key] for key in state if not isinstance(key, torch.Tensor)}
        self._num_states = len(state)

    def replace(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """``new`` has taken the place of ``old`` in groups and state."""
        self._group_of[id(new)] = self._group_of.pop(id(old))
        self._kinds[id(new)] = self._kinds.pop(id(old))
        if id(old) in self._repeated:
            self._repeated[id(new)] = self._repeated.pop(id(old))

    def knows(self, parameter: torch.Tensor) -> bool:
        """Whether the optimizer has ``parameter``."""
        return id(parameter) in self._group_of

    def step_groups(self) -> None:
        """If nothing has been stepped in this iteration, a step without gradients, which counts."""
        if self._is_first:
            self.step([])

    def step(self, parameters: Sequence[torch.Tensor]) -> None:
        """One step of those ``parameters`` with their ``.grad``.

        Raises:
            RuntimeError: if what the optimizer writes to its groups depends on the gradients.
        """
        with self._lock:
            optimizer = self._optimizer
            groups = optimizer.param_groups
            if self._repeated:  # torch steps what a group lists twice twice, and warns
                parameters = [p for p in parameters for _ in range(self._repeated.get(id(p), 1))]
            members = self._members_of(parameters)
            # Once per iteration also those groups in which nothing is ready, for their counters.
            indices = range(len(groups)) if self._is_first else sorted(members)
            parts = {
                index: {**groups[index], "params": members.get(index, [])} for index in indices
            }
            optimizer.param_groups = list(parts.values())
            try:
                step_inner(optimizer, None, {}, runs_global_hooks=True)
            finally:
                optimizer.param_groups = groups
            for index, part in parts.items():
                self._note_options(index, groups[index], part)
            if self._loose or len(optimizer.state) != self._num_states:
                self._note_loose_state()
            self._is_first = False

    def _members_of(self, parameters: Sequence[torch.Tensor]) -> dict[int, list[torch.Tensor]]:
        """Which of them are in which group. Converts the state of those that were converted."""
        keys = list(map(id, parameters))
        kinds = map(self._kinds.__getitem__, keys)
        if not all(map(operator.eq, map(_kind_of, parameters), kinds)):
            for parameter, key in zip(parameters, keys, strict=True):
                if _kind_of(parameter) != self._kinds[key]:
                    self._convert_state(parameter)
        places = list(map(self._group_of.__getitem__, keys))
        if len(set(places)) == 1:
            return {places[0]: list(parameters)}
        members: dict[int, list[torch.Tensor]] = {}
        for parameter, place in zip(parameters, places, strict=True):
            members.setdefault(place, []).append(parameter)
        return members

    def end_iteration(self) -> None:
        """What the steps since the last call wrote beside parameters and their state takes effect."""
        for index, options in self._advanced_options.items():
            self._optimizer.param_groups[index].update(options)
        for key, value in self._advanced_loose.items():
            self._loose[key] = self._optimizer.state[key] = value
        self._advanced_options, self._advanced_loose = {}, {}
        self._num_states = len(self._optimizer.state)
        self._is_first = True

    def _note_options(self, index: int, group: dict[str, Any], part: dict[str, Any]) -> None:
        written = {
            key: value for key, value in options_of(part).items() if value is not group.get(key)
        }
        if self._is_first:
            if written:
                self._advanced_options[index] = written
        elif not equal(written, self._advanced_options.get(index, {})):
            self._refuse(f"options {', '.join(map(repr, written))} of its param groups")

    def _note_loose_state(self) -> None:
        """Puts state that belongs to no parameter back as it was before the iteration."""
        state = self._optimizer.state
        added = islice(reversed(state), max(0, len(state) - self._num_states))
        keys = [key for key in added if not isinstance(key, torch.Tensor)]
        for key in {*keys, *self._loose}:
            value = state.pop(key, None)
            if self._is_first:
                self._advanced_loose[key] = value
            elif not equal(value, self._advanced_loose.get(key, _ABSENT)):
                self._refuse(f"state {key!r}, which belongs to no parameter,")
        for key, value in self._loose.items():
            state[key] = copy.deepcopy(value)
        self._num_states = len(state)

    def _refuse(self, what: str) -> None:
        name = type(self._optimizer).__name__
        raise RuntimeError(
            f"{name} writes {what} from the gradients that it sees in a step; inside backward these "
            f"are only a part of them, so that it would compute something else. {self._cure}"
        )

    def _convert_state(self, parameter: torch.Tensor) -> None:
        """State follows a parameter that ``.double()``, ``.to(device)`` or the like has converted.

        As loading a checkpoint into the converted model would do it.
        """
        group = self._optimizer.param_groups[self._group_of[id(parameter)]]
        policy = Optimizer._process_value_according_to_param_policy  # noqa: SLF001 - torch has no public name for it
        state = self._optimizer.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                state[key] = policy(
                    parameter, value, 0, [{**options_of(group), "params": [0]}], key
                )
        self._kinds[id(parameter)] = _kind_of(parameter)


_kind_of = operator.attrgetter("dtype", "device")


def equal(one: Any, other: Any) -> bool:
    """Whether options or counters are the same."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return bool(one == other)
