"""An optimizer around an optimizer: hooks fire once, groups are copied, indices are torch's."""

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tensorplay.distributed.optim._core.wrapped_optimizer import (
    WrappedOptimizer,
    canonical_group,
    canonical_groups,
    copy_options_,
    options_of,
    parameter_indices,
)


def parameter(numel: int = 1) -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.ones(numel))
    made.grad = torch.ones(numel)
    return made


class Wrapper(WrappedOptimizer):
    """The least that a wrapper is."""

    def __init__(self, params: Any, optimizer_class: type[Optimizer], **defaults: Any) -> None:
        super().__init__(canonical_groups(params), dict(defaults))
        self.optim = optimizer_class(self.param_groups, **defaults)

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        return self._step_inner(closure, kwargs)


class Recorder:
    """A hook that notes on which class of optimizer it was called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, optimizer: Optimizer, *_args: Any) -> None:
        self.calls.append(type(optimizer).__name__)


@pytest.mark.parametrize(
    "register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook]
)
@pytest.mark.parametrize("inner_hook", [False, True], ids=["plain", "inner hook"])
def test_global_step_hooks_fire_once_per_step(
    register: Callable[..., Any], inner_hook: bool
) -> None:
    wrapper = Wrapper([parameter()], SGD, lr=0.1)
    if inner_hook:
        wrapper.optim.register_step_post_hook(Recorder())
    recorder = Recorder()
    handle = register(recorder)
    try:
        wrapper.step()
        wrapper.step()
    finally:
        handle.remove()
    assert recorder.calls == ["Wrapper", "Wrapper"]


def test_step_hooks_of_the_wrapper_fire_once_for_the_wrapper() -> None:
    wrapper = Wrapper([parameter()], SGD, lr=0.1)
    before, after = Recorder(), Recorder()
    wrapper.register_step_pre_hook(before)
    wrapper.register_step_post_hook(after)
    wrapper.step()
    assert before.calls == after.calls == ["Wrapper"]


def test_step_hooks_of_the_inner_optimizer_fire_once_for_it() -> None:
    wrapper = Wrapper([parameter()], SGD, lr=0.1)
    before, after = Recorder(), Recorder()
    wrapper.optim.register_step_pre_hook(before)
    wrapper.optim.register_step_post_hook(after)
    wrapper.step()
    assert before.calls == after.calls == ["SGD"]


def test_a_hook_may_replace_the_arguments_of_the_inner_step() -> None:
    wrapper = Wrapper([parameter()], SGD, lr=0.1)
    wrapper.optim.register_step_pre_hook(lambda optim, _args, _kwargs: ((optim, lambda: 7.0), {}))
    assert wrapper.step() == 7.0


@pytest.mark.parametrize("hooked", [False, True])
def test_the_inner_step_gets_closure_and_arguments_and_returns_its_value(hooked: bool) -> None:
    class Scaled(SGD):
        def step(self, closure: Any = None, *, scale: int = 1) -> Any:  # type: ignore[override] # the base class leaves it untyped or wider
            return closure() * scale

    wrapper = Wrapper([parameter()], Scaled, lr=0.1)
    if hooked:
        wrapper.optim.register_step_post_hook(Recorder())
    assert wrapper.step(lambda: 3, scale=2) == 6


def test_a_patched_step_of_the_inner_optimizer_is_called() -> None:
    wrapper = Wrapper([parameter()], SGD, lr=0.1)
    wrapper.optim.step = lambda: "patched"  # type: ignore[method-assign,assignment,misc] # replaced for the test
    assert wrapper.step() == "patched"


def test_the_step_updates_as_the_inner_class_alone_does() -> None:
    wrapped, alone = parameter(3), parameter(3)
    wrapper, plain = Wrapper([wrapped], Adam, lr=0.1), Adam([alone], lr=0.1)
    for _ in range(3):
        wrapper.step()
        plain.step()
    assert torch.equal(wrapped, alone)


def test_state_and_defaults_are_the_inner_optimizers_own() -> None:
    wrapper = Wrapper([parameter()], SGD, lr=0.1, momentum=0.9)
    wrapper.step()
    assert wrapper.state is wrapper.optim.state
    assert wrapper.defaults is wrapper.optim.defaults
    assert wrapper.defaults["dampening"] == 0


def test_assigned_state_and_defaults_reach_the_inner_optimizer() -> None:
    wrapper = Wrapper([parameter()], SGD, lr=0.1)
    state, defaults = copy.copy(wrapper.state), {"lr": 7.0}
    wrapper.state, wrapper.defaults = state, defaults
    assert wrapper.optim.state is state
    assert wrapper.optim.defaults is defaults


def test_schedulers_take_a_wrapper() -> None:
    wrapper = Wrapper([parameter()], SGD, lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(wrapper, max_lr=1.0, total_steps=10)
    wrapper.step()
    scheduler.step()
    assert wrapper.param_groups[0]["lr"] == scheduler.get_last_lr()[0]


def test_groups_are_copies_and_the_callers_dicts_stay() -> None:
    first, second = parameter(), parameter()
    groups = [{"params": [first], "lr": 0.5}, {"params": (second,)}]
    given = [dict(group) for group in groups]
    made = canonical_groups(groups)
    for group in made:
        group["lr"] = 7
        group["params"].append(parameter())
    assert groups == given
    assert groups[0]["params"] == [first]


@pytest.mark.parametrize(
    "form",
    [
        lambda p: p,
        tuple,
        iter,
        lambda p: (each for each in p),
        lambda p: dict.fromkeys(p).keys(),
    ],
    ids=["list", "tuple", "iterator", "generator", "keys"],
)
def test_every_ordered_form_of_parameters_gives_one_group(form: Callable[..., Any]) -> None:
    parameters = [parameter(), parameter()]
    (group,) = canonical_groups(form(parameters))
    assert list(map(id, group["params"])) == list(map(id, parameters))


def test_named_parameters_stay_named() -> None:
    named = list(torch.nn.Linear(2, 2).named_parameters())
    assert canonical_groups(iter(named)) == [{"params": named}]


def test_generators_inside_groups_are_kept() -> None:
    parameters = [parameter(), parameter()]
    groups = canonical_groups([{"params": (each for each in parameters), "lr": 0.1}])
    wrapper = Wrapper(groups, SGD, lr=1.0)
    assert list(map(id, wrapper.param_groups[0]["params"])) == list(map(id, parameters))


def test_a_single_tensor_in_a_group_becomes_a_list() -> None:
    only = parameter()
    wrapper = Wrapper([{"params": only}], SGD, lr=1.0)
    assert wrapper.param_groups[0]["params"] == [only]


@pytest.mark.parametrize("kind", [set, frozenset])
@pytest.mark.parametrize("grouped", [False, True], ids=["parameters", "group"])
def test_sets_are_refused_since_ranks_would_order_them_differently(
    kind: Callable[..., Any], grouped: bool
) -> None:
    unordered = kind([parameter(), parameter()])
    with pytest.raises(TypeError, match="ordered"):
        Wrapper([{"params": unordered}] if grouped else unordered, SGD, lr=0.1)


def test_a_bare_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match="put the tensor into a list"):
        canonical_groups(parameter())


def test_no_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        canonical_groups(iter(()))


def test_a_group_must_be_a_dict_with_params() -> None:
    with pytest.raises(TypeError, match="must be a dict"):
        canonical_group([parameter()])
    with pytest.raises(ValueError, match=r"needs the key 'params'.*\['lr'\]"):
        canonical_group({"lr": 0.1})


def test_options_are_what_is_not_optimized() -> None:
    group = {"params": [1], "param_names": ["a"], "lr": 0.1, "betas": (0.9, 0.99)}
    assert options_of(group) == {"lr": 0.1, "betas": (0.9, 0.99)}


def test_copied_options_leave_the_parameters() -> None:
    source, target = {"params": [1], "lr": 0.1}, {"params": [2], "lr": 0.5, "momentum": 0}
    copy_options_([source], [target])
    assert target == {"params": [2], "lr": 0.1, "momentum": 0}


def some_groups() -> Iterator[Any]:
    a, b, c, d = (parameter() for _ in range(4))
    yield pytest.param([{"params": [a, b]}, {"params": [c]}, {"params": [d]}], id="groups")
    yield pytest.param([{"params": [a, b, a, c]}, {"params": [d]}], id="duplicate in a group")


@pytest.mark.parametrize("groups", list(some_groups()))
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_indices_are_those_of_torchs_state_dict(groups: list[dict[str, Any]]) -> None:
    plain = SGD(groups, lr=0.1)
    indices = parameter_indices(plain.param_groups)
    for group, packed in zip(plain.param_groups, plain.state_dict()["param_groups"], strict=True):
        assert [indices[each] for each in group["params"]] == packed["params"]


def test_a_decorated_step_of_the_inner_optimizer_is_called_with_its_decorator() -> None:
    SGD([parameter()])  # torch marks `SGD.step`, and `wraps` copies the mark

    @functools.wraps(SGD.step)
    def step(self: SGD) -> str:
        return f"decorated {SGD.step(self)}"

    decorated = type("Decorated", (SGD,), {"step": step})
    assert Wrapper([parameter()], decorated, lr=0.1).step() == "decorated None"
