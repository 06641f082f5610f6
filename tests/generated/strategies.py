"""Hypothesis strategies for plans that the plain optimizer can carry out."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from tests.generated.plan import (
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
    Thaw,
    Way,
    ZeroGrad,
)

_NUMBERS = st.integers(0, 7)
_MEMBERS = st.sampled_from(MEMBERS)
_SCHEDULES = (None, None, "exponential", "step", "lambda", "one cycle", "warm restarts")
DOUBLE = ("float64", "complex128")
_CAPACITIES = (None, 64, 16, 200)


def plans() -> st.SearchStrategy[Plan]:
    """Plans of all kinds of optimizers, the users' more often, on all groups of ranks."""
    return st.sampled_from([*KINDS, "KeepsCounters", "NeedsAParameter"]).flatmap(_plans_of)


def _plans_of(name: str) -> st.SearchStrategy[Plan]:
    kind = KINDS[name]
    if not kind.is_elementwise:
        return _plans_in(name, kind, is_flat=False)
    # Slices differ from whole parameters by rounding, which double precision keeps from growing.
    flat = replace(kind, dtypes=DOUBLE if "complex64" in kind.dtypes else DOUBLE[:1])
    return st.booleans().flatmap(
        lambda is_flat: _plans_in(name, flat if is_flat else kind, is_flat=is_flat)
    )


def _plans_in(name: str, kind: OptimizerKind, *, is_flat: bool) -> st.SearchStrategy[Plan]:
    ways = _ways(kind, is_flat=is_flat)
    groups = st.lists(_groups(kind, is_flat=is_flat), min_size=1, max_size=3).map(tuple)
    return st.builds(
        Plan,
        optimizer=st.just(name),
        options=_options(kind, min_size=0),
        groups=groups,
        events=st.lists(_events(kind, ways, is_flat=is_flat), min_size=2, max_size=16).map(tuple),
        members=_MEMBERS,
        resident=st.booleans(),
        named=st.booleans(),
        schedule=st.sampled_from(_SCHEDULES),
        capacity=st.sampled_from(_CAPACITIES),
        way=ways,
    )


def _ways(kind: OptimizerKind, *, is_flat: bool) -> st.SearchStrategy[Way]:
    return st.builds(
        Way,
        partition=st.sampled_from(("elements", "parameters") if is_flat else ("parameters",)),
        flat_step=st.booleans() if is_flat else st.just(False),
        shard_gradients=st.just(False) if kind.sparse else st.booleans(),
        overlap=_seldom(),
    )


def _options(kind: OptimizerKind, min_size: int) -> st.SearchStrategy[tuple[tuple[str, Any], ...]]:
    pairs = [(name, value) for name, values in kind.choices.items() for value in values]
    return st.lists(
        st.sampled_from(pairs), min_size=min_size, max_size=4, unique_by=lambda pair: pair[0]
    ).map(tuple)


def _groups(kind: OptimizerKind, *, is_flat: bool) -> st.SearchStrategy[GroupPlan]:
    return st.builds(
        GroupPlan,
        parameters=st.lists(_parameters(kind), min_size=1, max_size=5).map(tuple),
        options=st.one_of(st.just(()), _options(kind, min_size=1), st.just((("note", "mine"),))),
        repeats=_seldom() if kind.repeats else st.just(False),
        partition=st.sampled_from((None, "elements", "parameters") if is_flat else (None,)),
    )


def _parameters(kind: OptimizerKind) -> st.SearchStrategy[ParameterPlan]:
    return st.builds(
        ParameterPlan,
        shape=st.sampled_from(kind.shapes),
        dtype=st.sampled_from(kind.dtypes),
        memory=st.sampled_from(kind.memories),
        trainable=st.sampled_from((True, True, False)) if kind.skips else st.just(True),
        other=_NUMBERS,
    )


def _events(
    kind: OptimizerKind, ways: st.SearchStrategy[Way], *, is_flat: bool
) -> st.SearchStrategy[Event]:
    steps = st.builds(
        Step,
        seed=st.integers(0, 1000),
        without=st.sampled_from((0, 0, 1, 2, 4, 5, 10, 255, 251) if kind.skips else (0,)),
        keep=st.booleans(),
        scale=st.sampled_from((1.0, 1.0, 0.0, 1e4)),
        closure=_seldom() if kind.takes_closure else st.just(False),
    )
    settings = [
        st.builds(
            SetOption,
            group=_NUMBERS,
            name=st.just(name),
            value=st.sampled_from(values),
            in_place=st.booleans(),
        )
        for name, values in kind.choices.items()
        if name in {"lr", "weight_decay", "betas", "momentum"}
    ]
    others: list[st.SearchStrategy[Event]] = [
        st.one_of(settings),
        st.just(AdvanceSchedule()),
        st.builds(ZeroGrad, set_to_none=st.booleans()),
        st.builds(Save, to=_NUMBERS, keep=st.booleans(), release=st.booleans()),
        st.just(Load()),
        st.builds(
            Resume,
            members=_MEMBERS,
            to=_NUMBERS,
            resident=st.booleans(),
            through_plain=st.booleans(),
            values_last=st.booleans(),
            named=st.booleans(),
            way=ways,
        ),
    ]
    if kind.skips:
        others.append(st.builds(Freeze, parameter=_NUMBERS, keep_gradient=st.booleans()))
        others.append(st.builds(Thaw, parameter=_NUMBERS))
    if kind.grows:
        # Nothing can be added inside the memory of a parameter that is divided.
        apart = tuple(each for each in kind.memories if each != "inside")
        added = replace(kind, memories=apart) if is_flat else kind
        others.append(st.builds(AddGroup, group=_groups(added, is_flat=is_flat)))
    return st.sampled_from([steps] * len(others) + others).flatmap(lambda events: events)


def _seldom() -> st.SearchStrategy[bool]:
    return st.sampled_from((False, False, False, False, True))
