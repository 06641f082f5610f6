"""What the user holds: an optimizer whose parameters are elsewhere."""

import math
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from tensorplay.distributed.optim._core.coupled_optimizers import refuse_coupled
from tensorplay.distributed.optim._core.state_dicts import (
    clone,
    full_indexed,
    own_part,
    require_fit,
)
from tensorplay.distributed.optim._core.wrapped_optimizer import (
    StateDictHooks,
    all_parameters,
    options_of,
    parameter_indices,
)
from tensorplay.distributed.optim.remote.availability import require_rpc
from tensorplay.distributed.optim.remote.failures import combine
from tensorplay.distributed.optim.remote.known_options import KnownOptions

if TYPE_CHECKING:
    from tensorplay.distributed.optim.remote.calls import Outcome

CPU = torch.device("cpu")
UNCHANGED = "nothing has changed on any worker"

Members = dict[int, list[Any]]
"""A worker's parameters, as RRefs, by the position of their group."""

Change = tuple[str, tuple[Any, ...]]
"""A method of the local optimizer that changes something, and its arguments."""


@dataclass
class _Owner:
    """A worker that owns some of the parameters.

    Attributes:
        key: finds the local optimizer there.
        handle: an RRef to it; it lives as long as this.
        info: the worker's, as RPC has it.
        members: the parameters; the local optimizer's groups are in the order of this dict.
    """

    key: int
    handle: Any
    info: Any
    members: Members

    def groups(self) -> list[dict[str, Any]]:
        """The groups of the local optimizer, with RRefs for parameters."""
        return [{"params": rrefs} for rrefs in self.members.values()]


class RemoteOptimizer(StateDictHooks):
    """``DistributedOptimizer`` over RRefs: see there.

    Args:
        optimizer_class: class of the local optimizers, one on each worker that owns parameters.
        params_rref: RRefs to parameters, or dicts of them with options.
        *args: for ``optimizer_class``, after the parameters.
        clip_grad_norm: the largest norm of all gradients together, on all workers.
        atomic: whether a step that raises on one worker is undone on the others.
        **kwargs: for ``optimizer_class``.
    """

    def __init__(
        self,
        optimizer_class: Callable[..., Optimizer],
        params_rref: Iterable[Any],
        *args: Any,
        clip_grad_norm: float | None = None,
        atomic: bool = False,
        **kwargs: Any,
    ) -> None:
        require_rpc()
        from tensorplay.distributed.optim.remote import calls  # torch may not have RPC

        self._calls = calls
        if clip_grad_norm is not None and not clip_grad_norm > 0:
            raise ValueError(f"clip_grad_norm must be a positive number, got {clip_grad_norm!r}")
        self.clip_grad_norm = clip_grad_norm
        self.atomic = bool(atomic)
        self._constructor = (optimizer_class, args, kwargs)
        self._owners: dict[str, _Owner] = {}
        self._known: list[KnownOptions] = []  # of each group
        super().__init__(_canonical(params_rref), {})
        self._create("DistributedOptimizer()", range(len(self.param_groups)))

    @property
    def remote_optimizers(self) -> list[Any]:
        """RRefs to the local optimizers, one for each owner."""
        return [owner.handle for owner in self._owners.values()]

    def step(self, context_id: int) -> None:  # type: ignore[override]  # torch's signature over RRefs
        """Steps all parameters, on their workers, with the gradients of an autograd context.

        Parameters that have no gradient in this context stay as they are, and so does every
        parameter's ``.grad``. The options in :attr:`param_groups` travel along if they have changed.

        Args:
            context_id: what ``torch.distributed.autograd.context()`` gave, and is still open.

        Raises:
            RuntimeError, or what the local optimizer raised if all failing workers raised alike: if
                a worker fails, or gives no answer within the RPC time-out. The message names each
                such worker, with its traceback, and says what holds on the others.
        """
        # Torch would wrap this method into one that always does what this does where it is needed.
        is_watched = (
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or torch_optimizer._global_optimizer_pre_hooks  # noqa: SLF001 - torch has no public name for it
            or torch_optimizer._global_optimizer_post_hooks  # noqa: SLF001 - torch has no public name for it
            or torch.autograd._profiler_enabled()  # type: ignore[attr-defined]  # noqa: SLF001 - torch has no public name for it
        )
        (self._watched_step if is_watched else self._step)(context_id)

    step.hooked = True  # type: ignore[attr-defined] # mypy can't see that it has this

    def _step(self, context_id: int) -> None:
        self._calls.require_context(context_id)
        scale = self._clip(context_id)
        changed = self._changed_options()
        outcome = None
        if not self.atomic and scale is None and not changed:  # most often; a step may be short
            outcome = self._calls.step(self._owners.items(), context_id)
            if outcome is None:
                return
        changes: dict[str, Change] = {
            name: (
                "step",
                (
                    context_id,
                    scale,
                    {i: changed[p] for i, p in enumerate(owner.members) if p in changed},
                ),
            )
            for name, owner in self._owners.items()
        }
        try:
            answers = (
                self._all_or_none("step()", changes)
                if self.atomic
                else self._each("step()", changes, outcome)
            )
        except BaseException:
            for position in changed:  # some owners may have them, others not: send them again
                self._known[position].forget()
            raise
        for position, options in changed.items():
            self._known[position].take(options)
        for name, answer in answers.items():
            if not answer:
                continue
            members = list(self._owners[name].members)
            for i, options in answer.items():  # what the optimizer itself has written
                self.param_groups[members[i]].update(options)
                self._known[members[i]].take(options)

    _watched_step = Optimizer.profile_hook_step(_step)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the parameters' ``.grad`` on their workers.

        Not needed between steps: each context begins without gradients, and no step reads ``.grad``.
        """
        self._ask("zero_grad()", "zero_grad", set_to_none, state="it is done on all others")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters, on the same or on other workers.

        Args:
            param_group: a dict of ``params``, RRefs, and options; it isn't changed.

        Raises:
            TypeError, ValueError: for what the optimizer class refuses, a parameter that it has
                already, or an optimizer class that can't work on several workers.
            RuntimeError: if workers fail in other ways. Whatever is raised, nothing has changed.
        """
        (group,) = _canonical([param_group], len(self.param_groups))
        self.param_groups.append(group)
        if not self._known:  # the constructor adds the first groups, and then creates all at once
            return
        position = len(self.param_groups) - 1
        try:
            self._add_to_owners(position)
        except BaseException:
            del self.param_groups[position:], self._known[position:]
            for name in [
                n for n, owner in self._owners.items() if list(owner.members) == [position]
            ]:
                del self._owners[name]
            raise

    def state_dict(self) -> dict[str, Any]:
        """The full state of all parameters: the plain optimizer's format, copies in CPU memory.

        Parameters are numbered in the order in which they were passed; where they live doesn't show.

        Raises:
            RuntimeError: if a worker gives no answer.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        parts = self._ask("state_dict()", "state_dict", state=UNCHANGED)
        state: dict[int, Any] = {}
        others: dict[Any, Any] = {}
        additions: dict[str, Any] = {}
        for name, owner in self._owners.items():
            own, shared, rest = full_indexed(parts[name], owner.groups(), self.param_groups)
            state |= own
            others |= shared
            additions |= rest
        indices = parameter_indices(self.param_groups)
        groups = [
            {**clone(options_of(group)), "params": [indices[rref] for rref in group["params"]]}
            for group in self.param_groups
        ]
        state = {index: state[index] for index in sorted(state)}
        return self._run_state_dict_hooks(
            {"state": {**state, **others}, "param_groups": groups, **additions}
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a full state dict, of this class or the plain one: each owner gets its part.

        Args:
            state_dict: from any distribution of the parameters over workers; it isn't changed.

        Raises:
            ValueError: if the dict doesn't fit, or a worker refuses its part.
            RuntimeError: if workers fail in other ways. Whatever is raised, nothing has changed.
        """
        state_dict = self._run_load_hooks(state_dict)
        require_fit(state_dict, self.param_groups)
        changes: dict[str, Change] = {
            name: ("load_state_dict", (clone(self._part(state_dict, owner), CPU),))
            for name, owner in self._owners.items()
        }
        answers = self._all_or_none("load_state_dict()", changes)
        for name, owner in self._owners.items():
            self._adopt_options(owner.members, answers[name])
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def __repr__(self) -> str:
        owners = ", ".join(
            f"{sum(map(len, owner.members.values()))} on {name}"
            for name, owner in self._owners.items()
        )
        return f"{super().__repr__()[:-1]}parameters: {owners}\n)"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a DistributedOptimizer over RRefs can't be copied or pickled: its state is on other "
            "workers. Save its state_dict(), and construct a new one to copy it"
        )

    # Who owns what

    def _place(self, positions: Iterable[int]) -> dict[str, Members]:
        """The parameters of some groups by worker."""
        placed: dict[str, Members] = {}
        for position in positions:
            for rref in self.param_groups[position]["params"]:
                members = placed.setdefault(rref.owner_name(), {})
                members.setdefault(position, []).append(rref)
        return placed

    def _names(self, position: int, rrefs: Iterable[Any]) -> list[str]:
        group = self.param_groups[position]["params"]
        places: dict[Any, list[int]] = {}
        for place, rref in enumerate(group):
            places.setdefault(rref, []).append(place)
        return [f"parameter {places[rref].pop(0)} of group {position}" for rref in rrefs]

    def _local_group(self, position: int, rrefs: list[Any]) -> dict[str, Any]:
        return {**clone(options_of(self.param_groups[position]), CPU), "params": rrefs}

    def _create(self, call: str, positions: Iterable[int]) -> None:
        """Makes a local optimizer on each worker that owns something of these groups."""
        optimizer_class, args, kwargs = self._constructor
        placed = {
            name: members
            for name, members in self._place(positions).items()
            if name not in self._owners
        }
        num_owners = len(self._owners) + len(placed)
        if num_owners > 1:
            refuse_coupled(
                optimizer_class,
                "spread over several workers",
                "so that each worker would compute something else. Keep its parameters on one worker",
            )
        outcome = self._calls.ask(
            {
                name: (
                    "create",
                    optimizer_class,
                    [self._local_group(position, rrefs) for position, rrefs in members.items()],
                    [self._names(position, rrefs) for position, rrefs in members.items()],
                    args,
                    kwargs,
                    num_owners == 1,
                )
                for name, members in placed.items()
            }
        )
        if outcome.failures:
            raise combine(
                call, outcome.failures, len(placed), "there is no optimizer on any worker"
            )
        for name, (key, handle, (defaults, options)) in outcome.answers.items():
            self._owners[name] = _Owner(key, handle, handle.owner(), placed[name])
            self.defaults = defaults
            self._adopt_options(placed[name], options)

    def _add_to_owners(self, position: int) -> None:
        before = set(self._owners)
        self._create("add_param_group()", [position])
        added = {n: m[position] for n, m in self._place([position]).items() if n in before}
        changes: dict[str, Change] = {
            name: (
                "add_param_group",
                (self._local_group(position, rrefs), self._names(position, rrefs)),
            )
            for name, rrefs in added.items()
        }
        answers = self._all_or_none("add_param_group()", changes)
        for name, rrefs in added.items():
            self._owners[name].members[position] = rrefs
            self._adopt_options({position: rrefs}, [answers[name]])

    def _part(self, state_dict: Mapping[str, Any], owner: _Owner) -> dict[str, Any]:
        """The part of a full state dict that one owner's local optimizer is to load."""
        saved = [state_dict["param_groups"][position] for position in owner.members]
        everyones = set(all_parameters(state_dict["param_groups"]))
        missing = everyones - set(all_parameters(saved))
        state = {key: value for key, value in state_dict["state"].items() if key not in missing}
        return own_part(
            {**state_dict, "state": state, "param_groups": saved},
            [self.param_groups[position] for position in owner.members],
            owner.groups(),
        )

    # Options

    def _adopt_options(self, members: Members, options: Iterable[dict[str, Any]]) -> None:
        """Our groups take the options that a local optimizer has."""
        for position, own in zip(members, options, strict=True):
            group = self.param_groups[position]
            params = group["params"]
            group.clear()
            group.update({"params": params, **own})
            self._known.extend(KnownOptions() for _ in range(position + 1 - len(self._known)))
            self._known[position].forget()
            self._known[position].take(own)

    def _changed_options(self) -> dict[int, dict[str, Any]]:
        """By the position of the group, the options that owners don't have yet."""
        changed = {}
        for position, (group, known) in enumerate(zip(self.param_groups, self._known, strict=True)):
            news = known.news(group)
            if news:
                changed[position] = news
        return changed

    # Calls

    def _clip(self, context_id: int) -> float | None:
        """What to multiply the gradients with, if anything; as ``clip_grad_norm_`` has it."""
        if self.clip_grad_norm is None:
            return None
        squares = self._ask("step()", "squared_norm", context_id, state=UNCHANGED)
        scale = self.clip_grad_norm / (math.sqrt(sum(squares.values())) + 1e-6)
        return None if scale >= 1 else scale

    def _ask(self, call: str, action: str, *arguments: Any, state: str) -> dict[str, Any]:
        """Asks all owners for something that waits for nobody's turn."""
        requests = {n: (action, owner.key, *arguments) for n, owner in self._owners.items()}
        outcome = self._calls.ask(requests)
        if outcome.failures:
            raise combine(call, outcome.failures, len(requests), state)
        return outcome.answers

    def _each(
        self, call: str, changes: Mapping[str, Change], outcome: "Outcome | None"
    ) -> dict[str, Any]:
        """Asks owners for changes that don't depend on each other; ``outcome`` if they have been."""
        outcome = outcome or self._calls.ask(
            {
                name: (change, self._owners[name].key, *arguments)
                for name, (change, arguments) in changes.items()
            }
        )
        for name in sorted(outcome.busy):  # one by one: whoever holds one turn waits for no other
            in_turn, _ = self._in_turns({name: changes[name]})
            outcome.answers |= in_turn.answers
            outcome.failures |= in_turn.failures
        if outcome.failures:
            raise combine(
                call,
                outcome.failures,
                len(changes),
                f"it is done on {', '.join(outcome.answers) or 'no worker'}, and may be done in part "
                "on those that failed",
            )
        return outcome.answers

    def _all_or_none(self, call: str, changes: Mapping[str, Change]) -> dict[str, Any]:
        """Changes all these owners, or none."""
        outcome, state = self._in_turns(changes)
        if outcome.failures:
            raise combine(call, outcome.failures, len(changes), state)
        return outcome.answers

    def _in_turns(self, changes: Mapping[str, Change]) -> tuple["Outcome", str]:
        """Prepares all changes, then keeps all or undoes all; says what holds after failures."""
        token = uuid.uuid4().hex
        taken = self._calls.take_turns(changes, token)
        if taken.failures:
            self._calls.ask(dict.fromkeys(taken.answers, ("end_turn", token, False)))
            return taken, UNCHANGED
        prepared = self._calls.ask(
            {
                name: ("prepare", token, self._owners[name].key, *change)
                for name, change in changes.items()
            }
        )
        if prepared.failures:
            # Those that gave no answer undo it when their turn has lasted too long.
            present = [n for n in changes if n in prepared.answers or prepared.failures[n].answered]
            self._calls.ask(dict.fromkeys(present, ("end_turn", token, False)))
            return prepared, UNCHANGED
        ended = self._calls.ask(dict.fromkeys(changes, ("end_turn", token, True)))
        state = (
            f"it is done on {', '.join(ended.answers) or 'no worker'}; those that failed were lost "
            "between preparing and keeping it, so whether it is done there is unknown"
        )
        return self._calls.Outcome(prepared.answers, ended.failures), state


def _canonical(params: Any, position: int = 0) -> list[dict[str, Any]]:
    """Turns RRefs or dicts of them into fresh group dicts of lists; the first has this position."""
    if _is_rref(params):
        raise TypeError(
            "params_rref must be an iterable of RRefs or dicts; put the RRef into a list"
        )
    entries = list(params)
    if not entries:
        raise ValueError("optimizer got an empty parameter list")
    groups = []
    for number, group in enumerate(
        entries if isinstance(entries[0], dict) else [{"params": entries}], position
    ):
        if not isinstance(group, dict) or "params" not in group:
            raise TypeError(f"group {number} must be a dict with the key 'params', got {group!r}")
        rrefs = [group["params"]] if _is_rref(group["params"]) else list(group["params"])
        if not rrefs:
            raise ValueError(f"group {number} has no parameters")
        for place, rref in enumerate(rrefs):
            if not _is_rref(rref):
                raise TypeError(
                    f"parameter {place} of group {number} is a {type(rref).__name__}, not an RRef; "
                    "parameters of this process go into an optimizer of their own"
                )
        groups.append({**group, "params": rrefs})
    return groups


def _is_rref(value: Any) -> bool:
    from torch.distributed import rpc

    return isinstance(value, rpc.PyRRef)  # type: ignore[attr-defined]  # torch re-exports it implicitly
