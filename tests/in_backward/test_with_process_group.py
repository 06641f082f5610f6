"""Over a process group without DDP: the results of the plain optimizer on averaged gradients."""

import copy
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import utils
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tensorplay.distributed.optim import (
    ZeroRedundancyOptimizer,
    apply_optimizer_in_backward,
    get_in_backward_optimizers,
)
from tensorplay.distributed.optim.in_backward import group_gradients
from tests.in_backward.group_twins import GroupTwins
from tests.reference.data_parallel import Passes, average, make_parameters, square_loss, squares
from tests.reference.optimizers import OPTIMIZERS
from tests.reference.training import make_model, require_equal, values_of
from tests.zero.gradients.test_aborted import aborted
from tests.zero.gradients.test_oracle import DTYPES, make_small_and_large
from tests.zero.gradients.test_passes import _Net, make, net_passes

Run = Callable[..., list[Any]]
SGD: dict[str, Any] = {"lr": 0.1}
WITH_MODULE = pytest.mark.parametrize("with_module", [True, False])


@pytest.fixture(autouse=True)
def bucket_nbytes() -> None:
    """The reducer's own buckets are what counts here."""


def _small_and_large(with_module: bool) -> None:
    for name in ("SGD momentum", "AdamW fused", "KeepsCounters"):
        GroupTwins(make_small_and_large, *OPTIMIZERS[name], with_module=with_module).train(
            squares, what=name
        )


@pytest.mark.parametrize("world_size", [1, 2, 3])
@WITH_MODULE
def test_small_and_large_parameters(run: Run, world_size: int, with_module: bool) -> None:
    run(world_size, _small_and_large, with_module)


def _every_optimizer() -> None:
    for name, (optimizer_class, options) in OPTIMIZERS.items():
        GroupTwins(make_model, optimizer_class, options).train(squares, steps=2, what=name)


def test_every_optimizer(run: Run) -> None:
    run(2, _every_optimizer)


def _many_buckets() -> None:
    sizes = [(300,), (10,), (250,), (9000,), (7,), (100,), (400,), (600,), (600,), (20,)]
    with (
        mock.patch.object(group_gradients, "CAPACITY_BYTES", 4000),
        mock.patch.object(group_gradients, "ALONE_BYTES", 3000),
    ):
        GroupTwins(lambda: make_parameters(*sizes)).train(squares)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_many_buckets_and_exchanges_in_rounds(run: Run, world_size: int) -> None:
    run(world_size, _many_buckets)


def _mixed_dtypes() -> None:
    def make_mixed() -> nn.ParameterList:
        shapes = [((600, 500), (5, 3), (11,))[number % 3] for number in range(9)]
        return make_parameters(*((*s, DTYPES[n % 5]) for n, s in enumerate(shapes)))

    for name in ("Adam", "SGD momentum"):
        GroupTwins(make_mixed, *OPTIMIZERS[name]).train(squares, what=name)


@pytest.mark.parametrize("world_size", [2, 3])
def test_mixed_dtypes(run: Run, world_size: int) -> None:
    run(world_size, _mixed_dtypes)


def _groups() -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        parameters = list(model.parameters())
        return [
            {"params": parameters[4:], "lr": 0.3},
            {"params": parameters[:1], "betas": (0.5, 0.6)},
            {"params": parameters[1:4], "weight_decay": 0.5},
        ]

    twins = GroupTwins(make_small_and_large, params_of=groups)
    schedulers = [
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for optimizer in (twins.plain, twins.inside)
    ]
    for step in range(3):
        twins.train(lambda _, step=step: squares(step), steps=1)
        for scheduler in schedulers:
            scheduler.step()


def test_several_groups_and_schedulers(run: Run) -> None:
    run(2, _groups)


def _on_subgroup() -> None:
    group = dist.new_group([3, 1])
    if dist.get_rank() in (1, 3):
        GroupTwins(make_small_and_large, group=group).train(squares)


def test_on_a_subgroup_whose_ranks_differ_from_the_global_ones(run: Run) -> None:
    run(4, _on_subgroup)


def _more_ranks_than_elements() -> None:
    for shapes in ([(1,)], [()], [(2,), (1, 1)]):
        GroupTwins(lambda shapes=shapes: make_parameters(*shapes)).train(squares)


def test_more_ranks_than_elements(run: Run) -> None:
    run(3, _more_ranks_than_elements)


def _unused() -> None:
    def without(step: int) -> Callable[[int], list[int]]:
        nobody = [(0, 1), (2, 5), (6,), ()][step % 4]
        return lambda rank: [*nobody, (rank + step) % 7, 4 + rank % 2]

    options = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.5}
    twins = GroupTwins(make, torch.optim.SGD, options)
    twins.train(lambda step: squares(step, without=without(step)), steps=5)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_parameters_unused_on_some_or_all_ranks(run: Run, world_size: int) -> None:
    run(world_size, _unused)


def _frozen_and_thawed() -> None:
    def make_half_frozen() -> nn.ParameterList:
        model = make()
        for parameter in list(model.parameters())[::2]:
            parameter.requires_grad_(False)
        model.append(nn.Parameter(torch.randn(500, 500), requires_grad=False))
        return model

    twins = GroupTwins(make_half_frozen)
    twins.train(squares, steps=2, what="half frozen")
    for model in (twins.model, twins.plain_model):
        for parameter in model.parameters():
            parameter.requires_grad_(True)
    twins.train(lambda step: squares(step + 2), steps=2, what="thawed")
    for model in (twins.model, twins.plain_model):
        for parameter in list(model.parameters())[1::2]:
            parameter.requires_grad_(False)
    twins.train(lambda step: squares(step + 4), steps=2, what="others frozen")


def test_frozen_and_thawed_parameters(run: Run) -> None:
    run(3, _frozen_and_thawed)


class Tied(nn.Module):
    def __init__(self, use_reentrant: bool | None = None, both: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6)
        self.middle = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.use_reentrant = use_reentrant
        self.both = both

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        if self.use_reentrant is None:
            x = self.middle(x)
        else:
            x = checkpoint(self.middle, x, use_reentrant=self.use_reentrant)
        if self.both:
            x = self.middle(torch.tanh(x))
        logits: torch.Tensor = self.head(torch.tanh(self.norm(x)))
        return logits


def tied_passes(step: int) -> Passes:
    def passes(model: nn.Module, rank: int) -> None:
        generator = torch.Generator().manual_seed(100 * step + rank)
        tokens = torch.randint(11, (7,), generator=generator)
        nn.functional.cross_entropy(model(tokens), tokens.flip(0)).backward()

    return passes


def _tied(use_reentrant: bool | None, both: bool) -> None:
    with mock.patch.object(group_gradients, "ALONE_BYTES", 1):
        twins = GroupTwins(lambda: Tied(use_reentrant, both))
    twins.train(tied_passes)
    # Buffers are those of rank 0.
    means: list[Any] = [None] * twins.world_size
    dist.all_gather_object(means, twins.model.norm.running_mean)
    for each in means:
        require_equal(means[0], each)


@pytest.mark.parametrize("use_reentrant", [None, False, True])
@pytest.mark.parametrize("both", [False, True])
def test_tied_weights_and_checkpoints(run: Run, use_reentrant: bool | None, both: bool) -> None:
    run(2, _tied, use_reentrant, both)


def _used_twice(mode: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
        for with_module in (True, False):
            GroupTwins(lambda: _Net(mode), with_module=with_module).train(net_passes)


@pytest.mark.parametrize("mode", ["plain", "not reentrant", "reentrant", "nested"])
def test_modules_used_twice(run: Run, mode: str) -> None:
    run(2, _used_twice, mode)


def _second_gradient() -> str:
    with mock.patch.object(group_gradients, "ALONE_BYTES", 1):
        twins = GroupTwins(lambda: Tied(use_reentrant=True, both=True), with_module=False)
    with pytest.raises(RuntimeError) as caught:
        tied_passes(0)(twins.model, twins.rank)
    assert [p for p in twins.model.parameters() if p.grad is not None] == []
    return str(caught.value)


def test_a_second_gradient_without_module_raises(run: Run) -> None:
    for message in run(2, _second_gradient):
        assert "another gradient, from reentrant checkpointing" in message
        assert "module=" in message


def _accumulated(with_module: bool) -> None:
    twins = GroupTwins(make, with_module=with_module)
    for step in range(3):
        accumulating = squares(9 * step, without=lambda rank: (rank,))
        last = squares(9 * step + 1, without=lambda _: (0, 2))
        with twins.inside.accumulate():
            accumulating(twins.model, twins.rank)
        last(twins.model, twins.rank)
        twins.one.backward(accumulating, sync=False)
        twins.plain_step(last)
        twins.require_same(f"step {step}")


@WITH_MODULE
def test_accumulation(run: Run, with_module: bool) -> None:
    run(2, _accumulated, with_module)


def _clipped() -> None:
    clips: dict[str, tuple[float, Callable[[Any], Any]]] = {
        "clip_value": (0.1, lambda ps: utils.clip_grad_value_(ps, 0.1)),
        "clip_parameter_norm": (0.5, lambda ps: [utils.clip_grad_norm_(p, 0.5) for p in ps]),
    }
    for name, (limit, clip) in clips.items():
        GroupTwins(make, **{name: limit}).train(squares, clip=clip)
    twins = GroupTwins(make, torch.optim.SGD, SGD)
    for step in range(2):
        twins.plain_step(squares(step), lambda ps: utils.clip_grad_norm_(ps, 0.5))
        twins.inside.clip_norm_in_two_passes(
            lambda s=step: squares(s)(twins.model, twins.rank), 0.5
        )
        for plain, ours in zip(
            twins.plain_model.parameters(), twins.model.parameters(), strict=True
        ):
            torch.testing.assert_close(ours, plain)


def test_clipping(run: Run) -> None:
    run(2, _clipped)


def _clipped_by_the_previous_norm() -> list[torch.Tensor]:
    twins = GroupTwins(make, torch.optim.SGD, SGD, clip_previous_norm=0.5)
    limits: list[torch.Tensor] = []

    def clip(parameters: Any) -> None:
        parameters = list(parameters)
        norm = utils.get_total_norm([p.grad for p in parameters])
        if limits:
            utils.clip_grads_with_norm_(parameters, 0.5, limits[-1])
        limits.append(norm)

    for step in range(3):
        squares(step)(twins.model, twins.rank)
        twins.plain_step(squares(step), clip)
        for plain, ours in zip(
            twins.plain_model.parameters(), twins.model.parameters(), strict=True
        ):
            torch.testing.assert_close(ours, plain)
    return values_of(twins.model.parameters())


def test_clipping_by_the_previous_norm(run: Run) -> None:
    first, second = run(2, _clipped_by_the_previous_norm)
    require_equal(first, second)


def _two_optimizers() -> None:
    plain_model, model = make(), make()
    one = GroupTwins(make).one  # only for its passes
    one.model = plain_model
    halves = list(model.parameters())[2:5]
    plain = [
        torch.optim.SGD(plain_model.parameters(), **SGD),
        torch.optim.AdamW(list(plain_model.parameters())[2:5], lr=0.05),
    ]
    group = dist.group.WORLD
    first = apply_optimizer_in_backward(
        torch.optim.SGD, model.parameters(), SGD, module=model, process_group=group
    )
    second = apply_optimizer_in_backward(
        torch.optim.AdamW, halves, {"lr": 0.05}, module=model, process_group=group
    )
    assert get_in_backward_optimizers(model) == [first, second]
    rank = dist.get_rank()

    def step_plain(step: int, optimizers: Any) -> None:
        plain_model.zero_grad()
        one.backward(squares(step))
        for optimizer in optimizers:
            optimizer.step()
        require_equal(
            values_of(plain_model.parameters()), values_of(model.parameters()), f"step {step}: "
        )

    for step in range(2):
        squares(step)(model, rank)
        step_plain(step, plain)
    first.remove()
    for step in range(2, 4):
        squares(step)(model, rank)
        step_plain(step, plain[1:])
        model.zero_grad()
    second.remove()
    before = values_of(model.parameters())
    if rank == 0:  # alone: nothing communicates any more
        squares(5)(model, rank)
        assert all(p.grad is not None for p in model.parameters())
    require_equal(before, values_of(model.parameters()))


def test_several_optimizers_and_their_removal(run: Run) -> None:
    run(2, _two_optimizers)


def _side_by_side() -> None:
    """Two calls for the halves of a model: two reductions in one backward."""
    twins = GroupTwins(
        make, params_of=lambda model: list(model.parameters())[:4], with_module=False
    )
    rest = [list(model.parameters())[4:] for model in (twins.plain_model, twins.model)]
    plain = torch.optim.SGD(rest[0], **SGD)
    apply_optimizer_in_backward(torch.optim.SGD, rest[1], SGD, process_group=twins.group)
    for step in range(3):
        squares(step)(twins.model, twins.rank)
        twins.plain_step(squares(step))
        plain.step()
        plain.zero_grad()
        twins.require_same(f"step {step}")


def test_two_registrations_of_one_model(run: Run) -> None:
    run(3, _side_by_side)


def _autograd_notices() -> str:
    twins = GroupTwins(make)
    loss = square_loss(twins.model.parameters(), twins.rank)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    return str(caught.value)


def test_a_second_backward_through_a_graph_raises(run: Run) -> None:
    for message in run(2, _autograd_notices):
        assert "modified by an inplace operation" in message


def _removed() -> None:
    twins = GroupTwins(make)
    twins.train(squares)
    twins.inside.remove()
    for step in range(2):
        twins.plain_step(squares(step))
        squares(step)(twins.model, twins.rank)
        grads = [p.grad for p in twins.model.parameters()]
        for parameter, gradient in zip(twins.model.parameters(), grads, strict=True):
            every = [torch.empty_like(gradient) for _ in range(twins.world_size)]
            dist.all_gather(every, gradient.contiguous())
            parameter.grad = average(every)
        twins.inside.step()
        twins.inside.zero_grad()
        twins.require_same(f"plain step {step}")


def test_what_is_left_by_remove_is_a_plain_optimizer_with_its_state(run: Run) -> None:
    run(2, _removed)


def _converted(with_module: bool) -> None:
    twins = GroupTwins(make, with_module=with_module)
    twins.train(squares, steps=2)
    for model in (twins.model, twins.plain_model):
        model.double()
    state = twins.plain.state_dict()
    twins.plain.load_state_dict(state)  # as the state is converted
    twins.train(lambda step: squares(step + 2), steps=2)


@WITH_MODULE
def test_double_goes_on(run: Run, with_module: bool) -> None:
    run(2, _converted, with_module)


def _converted_on_one_rank() -> str:
    twins = GroupTwins(make)
    if twins.rank == 1:
        twins.model.double()
    with pytest.raises(RuntimeError) as caught:
        squares(0)(twins.model, twins.rank)
    return f"{caught.typename}: {caught.value}"


def test_double_on_one_rank_raises_on_every_rank(run: Run) -> None:
    for message in run(2, _converted_on_one_rank):
        assert message.startswith("RankDisagreementError")
        assert "shapes and dtypes" in message


def _assigned() -> None:
    twins = GroupTwins(Tied)
    twins.train(tied_passes, steps=2)
    state = {key: value.clone() for key, value in twins.model.state_dict().items()}
    fresh = {name: nn.Parameter(state[name]) for name, _ in twins.model.named_parameters()}
    weight = fresh["embedding.weight"]
    twins.model.load_state_dict({**state, **fresh, "head.weight": weight}, assign=True)
    assert twins.model.head.weight is weight
    twins.train(lambda step: tied_passes(step + 2), steps=2)


def test_load_state_dict_assign_is_followed(run: Run) -> None:
    run(2, _assigned)


def _copied() -> str:
    twins = GroupTwins(Tied)
    twins.train(tied_passes, steps=1)
    other = copy.deepcopy(twins.model)
    with pytest.raises(RuntimeError) as caught:
        tied_passes(0)(other, twins.rank)
    twins.train(lambda step: tied_passes(step + 1), steps=1)
    return str(caught.value)


def test_a_copied_module_raises(run: Run) -> None:
    for message in run(2, _copied):
        assert "this Embedding is a copy" in message


def _different_start() -> None:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model[1].running_mean.fill_(dist.get_rank())  # type: ignore[operator,union-attr] # mypy takes it for any attribute of a module
    apply_optimizer_in_backward(
        torch.optim.SGD,
        model[0].parameters(),
        SGD,
        module=model,
        process_group=dist.group.WORLD,
    )
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, model.state_dict())
    for each in every:
        require_equal(dict(every[0]), dict(each))


def test_every_rank_starts_with_the_values_of_the_first(run: Run) -> None:
    run(2, _different_start)


# What goes wrong


def require_replicas_equal(twins: GroupTwins) -> None:
    for ours, plain in zip(twins.model.parameters(), twins.plain_model.parameters(), strict=True):
        assert ours.grad is None
        values = [torch.empty_like(ours) for _ in range(twins.world_size)]
        dist.all_gather(values, ours.detach().contiguous())
        for each in values[1:]:
            require_equal(values[0], each)
        plain.data.copy_(ours)


class Listed(nn.Module):
    """Parameters of a module that is called, as ``module=`` needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.list = make()

    def forward(self, seed: int) -> torch.Tensor:
        return square_loss(self.parameters(), seed)


def listed(step: int) -> Passes:
    return lambda model, rank: model(1000 * step + rank).backward()


def _aborted(on: str, with_module: bool) -> str:
    twins = GroupTwins(Listed, torch.optim.SGD, SGD, with_module=with_module)
    twins.train(listed, steps=1)
    message = ""
    try:
        if on == "every rank" or twins.rank == 1:
            aborted(twins.model, twins.rank)
            listed(2)(twins.model, twins.rank)
        else:
            listed(1)(twins.model, twins.rank)
    except RuntimeError as error:
        message = str(error)
    require_replicas_equal(twins)
    twins.train(listed)
    return message


@pytest.mark.parametrize("on", ["every rank", "one rank"])
@WITH_MODULE
def test_an_aborted_backward(run: Run, on: str, with_module: bool) -> None:
    for message in run(2, _aborted, on, with_module):
        if on == "one rank":
            assert "exception" in message
        elif with_module:
            assert message == ""
        else:
            assert "before the next forward" in message


def _zeroed_after_an_exception() -> str:
    twins = GroupTwins(make, torch.optim.SGD, SGD, with_module=False)
    message = ""
    for on_every_rank in (True, False):
        try:
            if on_every_rank or twins.rank == 1:
                aborted(twins.model, twins.rank)
                twins.inside.zero_grad()
            else:
                squares(1)(twins.model, twins.rank)
        except RuntimeError as error:
            assert not on_every_rank
            message = str(error)
        require_replicas_equal(twins)
        twins.train(squares)
    return message


def test_zero_grad_after_an_aborted_backward(run: Run) -> None:
    for message in run(2, _zeroed_after_an_exception):
        assert "exception" in message


class Fails(torch.optim.SGD):
    on_rank = -1

    def step(self, closure: Any = None) -> Any:
        if dist.get_rank() == self.on_rank:
            raise ArithmeticError("can't be stepped")
        return super().step(closure)


def _step_fails() -> str:
    twins = GroupTwins(make, Fails, SGD)
    before = values_of(twins.model.parameters())
    Fails.on_rank = 1
    try:
        squares(0)(twins.model, twins.rank)
    except Exception as error:  # noqa: BLE001 - which one is what the test is about
        message = f"{type(error).__name__}: {error}"
    else:
        message = ""
    Fails.on_rank = -1
    assert [p for p in twins.model.parameters() if p.grad is not None] == []
    for parameter, value in zip(twins.model.parameters(), before, strict=True):
        parameter.data.copy_(value)
    twins.train(squares)
    return message


def test_a_step_that_fails_on_one_rank(run: Run) -> None:
    first, second, third = run(3, _step_fails)
    assert second == "ArithmeticError: can't be stepped"
    for message in (first, third):
        assert message.startswith("PeerError")
        assert "global rank 1" in message or "rank 1" in message
        assert "can't be stepped" in message


def _options_differ() -> str:
    twins = GroupTwins(make)
    twins.inside.param_groups[0]["lr"] = 0.05 + twins.rank
    with pytest.raises(RuntimeError) as caught:
        squares(0)(twins.model, twins.rank)
    twins.inside.param_groups[0]["lr"] = 0.05
    for parameter in twins.model.parameters():
        parameter.grad = None
    twins.train(squares)
    return f"{caught.typename}: {caught.value}"


def test_options_that_differ_between_ranks(run: Run) -> None:
    for message in run(2, _options_differ):
        assert message.startswith("RankDisagreementError")
        assert "lr" in message
        assert "1.05" in message


def _refusal(what: str) -> str:
    model: nn.Module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    rank, group = dist.get_rank(), dist.group.WORLD
    optimizer_class: Any = torch.optim.SGD
    options: dict[str, Any] = dict(SGD)
    extras: dict[str, Any] = {"process_group": group}
    params = list(model.parameters())
    if what == "zero":
        optimizer_class, options = ZeroRedundancyOptimizer, {"optimizer_class": torch.optim.SGD}
    elif what == "ddp":
        model = DistributedDataParallel(model)
        extras["module"] = model
    elif what == "not registered":
        extras["register_hook"] = False
    elif what == "params":
        params = params[: 4 - rank]
    elif what == "lr":
        options["lr"] = 0.1 + rank
    elif what == "clipping":
        extras["clip_value"] = 1.0 + rank
    elif what == "class":
        optimizer_class = (torch.optim.SGD, torch.optim.Adam)[rank]
    elif what == "other module":
        extras["module"] = model if rank == 0 else nn.Linear(2, 2)
    elif what == "without group before":
        apply_optimizer_in_backward(torch.optim.Adam, params, {"lr": 0.1})
    try:
        apply_optimizer_in_backward(optimizer_class, params, options, **extras)
    except (RuntimeError, ValueError, TypeError) as error:
        left = [each for each in get_in_backward_optimizers(model) if each.request.group]  # type: ignore[attr-defined] # ours
        assert left == []
        if rank == 0 and what != "without group before":  # nothing listens
            for parameter in params:
                parameter.sum().backward()
                assert parameter.grad is not None
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("what", "kinds", "words"),
    [
        ("zero", ["TypeError"], "overlap_with_ddp=True"),
        ("ddp", ["ValueError"], "pass the module inside it"),
        ("not registered", ["ValueError"], "register_hook=False"),
        ("params", ["RankDisagreementError"], "parameters"),
        ("lr", ["RankDisagreementError"], "1.1"),
        ("clipping", ["RankDisagreementError"], "clipping.value"),
        ("class", ["RankDisagreementError"], ""),
        ("other module", ["ValueError", "PeerError"], "none of the params is a parameter"),
        ("without group before", ["ValueError"], "another process_group already"),
    ],
)
def test_what_is_refused_on_every_rank(run: Run, what: str, kinds: list[str], words: str) -> None:
    for message in run(2, _refusal, what):
        assert message.split(":")[0] in kinds, message
        assert words in message


def _wrapped_later() -> str:
    twins = GroupTwins(lambda: nn.Sequential(nn.Linear(3, 3)))
    model = DistributedDataParallel(twins.model)
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(1, 3))
    return str(caught.value)


def test_ddp_around_it_is_refused(run: Run) -> None:
    for message in run(2, _wrapped_later):
        assert "process_group= averages gradients, and so does DistributedDataParallel" in message
