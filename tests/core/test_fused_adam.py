"""The shortened step of a fused Adam: torch's own results bit for bit, and left to torch elsewhere."""

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tensorplay.distributed.optim._core import wrapped_optimizer
from tensorplay.distributed.optim._core.fused_adam import step_fused
from tensorplay.distributed.optim._core.wrapped_optimizer import step_inner

NUM = 20


def two_groups(optimizer_class: type[Optimizer], **options: Any) -> Optimizer:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(3, 2 + index % 3)) for index in range(NUM)]
    groups = [
        {"params": parameters[: NUM // 2], "weight_decay": 0.1},
        {"params": parameters[NUM // 2 :], "betas": (0.5, 0.7)},
    ]
    return optimizer_class(groups, **{"lr": 0.1, "fused": True, **options})


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def give_gradients(optimizer: Optimizer, seed: int, without: range = range(0)) -> None:
    torch.manual_seed(seed)
    for index, parameter in enumerate(parameters_of(optimizer)):
        gradient = torch.randn_like(parameter)
        parameter.grad = None if index in without else gradient


def assert_same(ours: Optimizer, theirs: Optimizer) -> None:
    torch.testing.assert_close(
        [ours.state_dict(), parameters_of(ours), [p.grad for p in parameters_of(ours)]],
        [theirs.state_dict(), parameters_of(theirs), [p.grad for p in parameters_of(theirs)]],
        rtol=0,
        atol=0,
    )


class Watch:
    """What ``step_fused`` has answered."""

    def __init__(self) -> None:
        self.answers: list[bool] = []

    def __call__(self, optimizer: Optimizer) -> bool:
        self.answers.append(step_fused(optimizer))
        return self.answers[-1]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch = Watch()
    monkeypatch.setattr(wrapped_optimizer, "step_fused", watch)
    return watch


Change = Callable[[Optimizer, int], None]


def nothing(optimizer: Optimizer, iteration: int) -> None:
    pass


def learning_rate(optimizer: Optimizer, iteration: int) -> None:
    optimizer.param_groups[0]["lr"] = 0.3 / (1 + iteration)


def scale(optimizer: Optimizer, iteration: int) -> None:
    optimizer.grad_scale = torch.tensor(2.0 + iteration)  # type: ignore[attr-defined] # as GradScaler sets it


def one_count_replaced(optimizer: Optimizer, iteration: int) -> None:
    if iteration == 3:
        optimizer.state[parameters_of(optimizer)[1]]["step"] = torch.tensor(1.0)


def one_count_set(optimizer: Optimizer, iteration: int) -> None:
    if iteration == 3:
        optimizer.state[parameters_of(optimizer)[1]]["step"].zero_()


def one_count_shared(optimizer: Optimizer, iteration: int) -> None:
    if iteration == 3:
        first, second = parameters_of(optimizer)[:2]
        optimizer.state[first]["step"] = optimizer.state[second]["step"]


def one_count_shared_early(optimizer: Optimizer, iteration: int) -> None:
    if iteration == 1:  # before they lie side by side
        first, second = parameters_of(optimizer)[:2]
        optimizer.state[first]["step"] = optimizer.state[second]["step"]


def state_dropped(optimizer: Optimizer, iteration: int) -> None:
    if iteration == 3:
        optimizer.state.pop(parameters_of(optimizer)[4])


def loaded(optimizer: Optimizer, iteration: int) -> None:
    if iteration == 3:
        buffer = io.BytesIO()
        torch.save(optimizer.state_dict(), buffer)
        buffer.seek(0)
        optimizer.load_state_dict(torch.load(buffer))


def group_added(optimizer: Optimizer, iteration: int) -> None:
    if iteration == 2:
        added = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
        optimizer.add_param_group({"params": added})


@pytest.mark.parametrize("optimizer_class", [Adam, AdamW])
@pytest.mark.parametrize(
    ("change", "shortened"),
    [
        (nothing, [False, True, True, True, True, True]),
        (learning_rate, [False, True, True, True, True, True]),
        (scale, [False, True, True, True, True, True]),
        (one_count_set, [False, True, True, True, True, True]),
        (one_count_replaced, [False, True, True, False, False, False]),
        (one_count_shared, [False, True, True, False, False, False]),
        (one_count_shared_early, [False, False, False, False, False, False]),
        (state_dropped, [False, True, True, False, False, False]),
        (loaded, [False, True, True, True, True, True]),
        (group_added, [False, True, False, True, True, True]),
    ],
)
@pytest.mark.parametrize("maximize", [False, True])
def test_same_as_torch_whatever_happens_between_steps(
    watch: Watch,
    optimizer_class: type[Optimizer],
    change: Change,
    shortened: list[bool],
    maximize: bool,
) -> None:
    ours, theirs = (two_groups(optimizer_class, maximize=maximize) for _ in range(2))
    for iteration in range(6):
        for optimizer in (ours, theirs):
            change(optimizer, iteration)
            give_gradients(optimizer, iteration)
        step_inner(ours, None, {})
        theirs.step()
        assert_same(ours, theirs)
    assert watch.answers == shortened


def test_parameters_that_never_have_gradients(watch: Watch) -> None:
    ours, theirs = two_groups(AdamW), two_groups(AdamW)
    for iteration in range(3):
        for optimizer in (ours, theirs):
            give_gradients(optimizer, iteration, without=range(3, 9))
        step_inner(ours, None, {})
        theirs.step()
        assert_same(ours, theirs)
    assert watch.answers == [False, True, True]


def test_a_group_without_any_gradient(watch: Watch) -> None:
    ours, theirs = two_groups(AdamW), two_groups(AdamW)
    for iteration in range(3):
        for optimizer in (ours, theirs):
            give_gradients(optimizer, iteration, without=range(NUM // 2))
        step_inner(ours, None, {})
        theirs.step()
        assert_same(ours, theirs)
    assert watch.answers == [False, True, True]


def test_parameters_used_in_some_iterations(watch: Watch) -> None:
    ours, theirs = two_groups(AdamW), two_groups(AdamW)
    for iteration, without in enumerate([range(0), range(0), range(4), range(0), range(2, 5)]):
        for optimizer in (ours, theirs):
            give_gradients(optimizer, iteration, without)
        step_inner(ours, None, {})
        theirs.step()
        assert_same(ours, theirs)
    assert watch.answers == [False, True, False, True, False]


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_twice_in_a_group_is_stepped_as_torch_does(watch: Watch) -> None:
    ours, theirs = two_groups(AdamW), two_groups(AdamW)
    for optimizer in (ours, theirs):
        first, second = (torch.nn.Parameter(torch.full((3,), value)) for value in (1.0, 2.0))
        optimizer.add_param_group({"params": [first, second, first]})
    for iteration in range(4):
        for optimizer in (ours, theirs):
            give_gradients(optimizer, iteration)
        step_inner(ours, None, {})
        theirs.step()
        assert_same(ours, theirs)
    assert watch.answers == [False, False, False, False]


def test_counts_made_outside_of_inference_mode_stay_usable_there(watch: Watch) -> None:
    ours, theirs = two_groups(AdamW), two_groups(AdamW)
    for iteration, without in enumerate([range(0), range(0), range(4), range(0)]):
        for optimizer in (ours, theirs):
            give_gradients(optimizer, iteration, without)
        with torch.inference_mode(iteration == 1):
            step_inner(ours, None, {})
            theirs.step()
        assert_same(ours, theirs)
    assert watch.answers == [False, False, True, False]


@pytest.mark.parametrize(
    "options",
    [
        {"amsgrad": True},
        {"fused": False},
        {"fused": None, "foreach": True},
        {"lr": torch.tensor(0.1)},
        {"betas": (torch.tensor(0.9), torch.tensor(0.99))},
    ],
    ids=str,
)
def test_other_options_are_left_to_torch(watch: Watch, options: dict[str, Any]) -> None:
    ours, theirs = two_groups(Adam, **options), two_groups(Adam, **options)
    for iteration in range(2):
        for optimizer in (ours, theirs):
            give_gradients(optimizer, iteration)
        step_inner(ours, None, {})
        theirs.step()
        assert_same(ours, theirs)
    assert watch.answers == [False, False]


def test_a_grad_scaler_that_found_infinities_skips_nothing_of_its_own(watch: Watch) -> None:
    ours, theirs = two_groups(AdamW), two_groups(AdamW)
    for iteration in range(3):
        for optimizer in (ours, theirs):
            give_gradients(optimizer, iteration)
            optimizer.grad_scale = torch.tensor(2.0)  # type: ignore[attr-defined] # as GradScaler sets it
            optimizer.found_inf = torch.tensor(float(iteration == 1))  # type: ignore[attr-defined] # as above
        step_inner(ours, None, {})
        theirs.step()
        assert_same(ours, theirs)
    assert watch.answers == [False, False, False]


def test_a_sparse_gradient_gets_torchs_error() -> None:
    optimizer = two_groups(AdamW)
    for iteration in range(2):
        give_gradients(optimizer, iteration)
        step_inner(optimizer, None, {})
    last = parameters_of(optimizer)[-1]
    last.grad = torch.zeros_like(last).to_sparse()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        step_inner(optimizer, None, {})


def test_subclasses_are_left_to_torch() -> None:
    class Mine(AdamW):
        pass

    optimizer = two_groups(Mine)
    give_gradients(optimizer, 0)
    optimizer.step()
    assert not step_fused(optimizer)


def test_hooks_closures_and_a_patched_step_run_as_without(watch: Watch) -> None:
    optimizer = two_groups(AdamW)
    give_gradients(optimizer, 0)
    step_inner(optimizer, None, {})
    calls: list[str] = []
    before = optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    after = optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    step_inner(optimizer, None, {})
    assert calls == ["before", "after"]
    assert watch.answers == [False, True]
    before.remove()
    after.remove()
    assert step_inner(optimizer, lambda: 3.0, {}) == 3.0
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # patches `step`
    step_inner(optimizer, None, {})
    assert watch.answers == [False, True]


@pytest.fixture
def global_calls() -> Iterator[list[str]]:
    calls: list[str] = []
    handle = register_optimizer_step_pre_hook(lambda *_: calls.append("before"))
    yield calls
    handle.remove()


def test_global_hooks_run_where_they_are_wanted(global_calls: list[str]) -> None:
    optimizer = two_groups(AdamW)
    give_gradients(optimizer, 0)
    step_inner(optimizer, None, {})
    assert global_calls == []
    step_inner(optimizer, None, {}, runs_global_hooks=True)
    assert global_calls == ["before"]


def test_a_copy_counts_by_itself(watch: Watch) -> None:
    ours = two_groups(AdamW)
    for iteration in range(2):
        give_gradients(ours, iteration)
        step_inner(ours, None, {})
    copied = copy.deepcopy(ours)
    give_gradients(copied, 2)
    step_inner(copied, None, {})
    step_inner(copied, None, {})
    assert {float(state["step"]) for state in ours.state.values()} == {2.0}
    assert {float(state["step"]) for state in copied.state.values()} == {4.0}
    assert watch.answers == [False, True, True, True]
