"""Slices stepped on whole gradients: under DistributedDataParallel, or as the user sets them."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler

from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tests.reference.data_parallel import make_parameters
from tests.reference.ddp import ADAMW, Trainer, make_net, train
from tests.reference.optimizers import OPTIMIZERS
from tests.reference.training import make_model, require_close, set_gradients, values_of
from tests.zero.elements.ways import ELEMENTS, FLAT, WAYS

Run = Callable[..., list[Any]]
ADAM: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1}


def make_many() -> nn.ParameterList:
    """Cut on any number of ranks, large and small, in several strides."""
    parameters = make_parameters((3, 4), (400, 400), (17,), (), (0, 4), (5, 3, 2), (333,), (9, 8))
    parameters.append(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    parameters.append(torch.randn(64, 64, 6, 6).to(memory_format=torch.channels_last))
    parameters.append(torch.randn(7, 9).t())
    return parameters


class Pair:
    """The plain optimizer and ours, whose gradients the test sets alike on every rank."""

    def __init__(
        self,
        make: Callable[[], nn.Module] = make_many,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        options: dict[str, Any] = ADAM,
        group: dist.ProcessGroup | None = None,
        **ours: Any,
    ) -> None:
        self.plain_model, self.model = make(), make()
        self.plain = optimizer_class(self.plain_model.parameters(), **options)
        self.sharded = ZeroRedundancyOptimizer(
            self.model.parameters(),
            optimizer_class,
            group,
            elementwise=True,
            **{**ELEMENTS, **ours},
            **options,
        )

    @property
    def pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return list(zip(self.plain_model.parameters(), self.model.parameters(), strict=True))

    def step(self, number: int, without: Any = ()) -> None:
        for model in (self.plain_model, self.model):
            set_gradients(model.parameters(), number, without=without)
        self.plain.step()
        self.sharded.step()

    def require_close(self, what: str = "") -> None:
        plains, ours = (values_of(m.parameters()) for m in (self.plain_model, self.model))
        require_close(plains, ours, what)
        rank = dist.get_rank(self.sharded.process_group)
        self.sharded.consolidate_state_dict(to=0)
        if rank == 0:
            expected = self.plain.state_dict()["state"]
            indices = sorted(key for key in expected if isinstance(key, int))
            shared = [key for key in expected if not isinstance(key, int)]
            expected = {key: expected[key] for key in [*indices, *shared]}
            require_close(expected, self.sharded.state_dict()["state"], f"{what} state")


def _under_ddp(way: dict[str, Any], as_view: bool, find_unused: bool) -> None:
    plain_model, model = (
        nn.parallel.DistributedDataParallel(
            make_net(), gradient_as_bucket_view=as_view, find_unused_parameters=find_unused
        )
        for _ in range(2)
    )
    plain = Trainer(plain_model, torch.optim.AdamW(plain_model.parameters(), **ADAMW))
    sharded = Trainer(
        model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **way, **ADAMW)
    )
    for step in range(4):
        train(*plain, steps=1, first=step)
        train(*sharded, steps=1, first=step)
        require_close(
            values_of(plain.model.parameters()), values_of(sharded.model.parameters()), factor=3
        )


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
@WAYS
def test_under_ddp(run: Run, world_size: int, way: dict[str, Any], as_view: bool) -> None:
    run(world_size, _under_ddp, way, as_view, world_size == 3)


def _some_unused(way: dict[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        pair = Pair(make_many, *OPTIMIZERS[name], **way)
        for step, without in enumerate([(), (1, 5), (), (0, 1, 2, 3, 9), (5,), range(11), ()]):
            pair.step(step, without)
            pair.require_close(f"{name}, step {step}")


@pytest.mark.parametrize("world_size", [1, 2, 3])
@WAYS
def test_parameters_without_gradients_are_skipped(
    run: Run, world_size: int, way: dict[str, Any]
) -> None:
    run(world_size, _some_unused, way, ("AdamW", "SGD momentum", "KeepsCounters", "Rprop"))


def _never_used() -> tuple[int, int]:
    pair = Pair()
    for step in range(2):
        pair.step(step, (0, 1, 5))
        pair.require_close(f"step {step}")
    for unused in (0, 1, 5):
        parameter = list(pair.model.parameters())[unused]
        assert parameter not in pair.sharded.state
    before = len(pair.sharded._sharded.slices.slices)
    pair.step(3)
    return before, len(pair.sharded._sharded.slices.slices)


def test_what_is_never_used_has_no_state_and_slices_are_not_joined_again(run: Run) -> None:
    for before, after in run(2, _never_used):
        assert before == after


def _on_subgroup(way: dict[str, Any]) -> None:
    group = dist.new_group([3, 1])
    if dist.get_rank() in (1, 3):
        pair = Pair(group=group, **way)
        for step in range(3):
            pair.step(step, (step, 7))
            pair.require_close(f"step {step}")


@WAYS
def test_on_a_subgroup(run: Run, way: dict[str, Any]) -> None:
    run(4, _on_subgroup, way)


def _more_ranks_than_elements() -> list[int]:
    pair = Pair(lambda: make_parameters((1,), (2,)))
    for step in range(3):
        pair.step(step, (0,) * (step == 1))
        pair.require_close(f"step {step}")
    return [len(pair.sharded.state)]


def test_more_ranks_than_elements(run: Run) -> None:
    assert sorted(run(4, _more_ranks_than_elements)) == [[0], [0], [1], [1]]


def _closures() -> list[float]:
    pair = Pair()
    losses = []
    for step, without in enumerate([(), (1, 5), ()]):

        def closure(step: int = step, without: Any = without) -> float:
            set_gradients(pair.model.parameters(), step, without=without)
            return 1.5 + step

        set_gradients(pair.plain_model.parameters(), step, without=without)
        pair.plain.step()
        losses.append(pair.sharded.step(closure))
        pair.require_close(f"step {step}")
    return losses


def test_closures(run: Run) -> None:
    assert run(2, _closures) == [[1.5, 2.5, 3.5]] * 2


def _a_gradient_in_other_strides(norm_type: float) -> None:
    """Neither the norm nor the scaling may depend on how a gradient lies in memory."""
    pair = Pair(lambda: make_parameters((3, 4), (400, 400), (17,), (5, 3, 2), (9, 8)))
    for step in range(2):
        for plain, ours in pair.pairs:
            generator = torch.Generator().manual_seed(step)
            values = torch.randn(plain.shape, generator=generator)
            plain.grad = values
            if values.ndim == 2:  # transposed on one rank, with gaps on the other
                ours.grad = (
                    values.t().contiguous().t()
                    if dist.get_rank()
                    else torch.stack([values, values], -1)[..., 1]
                )
            else:
                ours.grad = torch.empty_like(ours).copy_(values)
        norm = pair.sharded.clip_grad_norm_(0.5, norm_type)
        expected = nn.utils.clip_grad_norm_(pair.plain_model.parameters(), 0.5, norm_type)
        assert math.isclose(norm.item(), expected.item(), rel_tol=1e-5)
        for number, (plain, ours) in enumerate(pair.pairs):
            torch.testing.assert_close(ours.grad, plain.grad, rtol=2e-5, atol=1e-9)
            full = pair.sharded.full_grad(ours)
            torch.testing.assert_close(full, plain.grad, rtol=2e-5, atol=1e-9, msg=str(number))
        for plain, ours in pair.pairs:
            plain.grad = ours.grad
        pair.plain.step()
        pair.sharded.step()
        pair.require_close(f"step {step}")


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_gradients_in_other_strides_are_clipped_and_stepped_right(
    run: Run, norm_type: float
) -> None:
    run(2, _a_gradient_in_other_strides, norm_type)


def _changed_in_place(way: dict[str, Any]) -> None:
    pair = Pair(**way)
    for step in range(2):
        for model in (pair.plain_model, pair.model):
            set_gradients(model.parameters(), step)
            for number, parameter in enumerate(model.parameters()):
                assert parameter.grad is not None
                if number % 3 == 0:
                    parameter.grad.mul_(3)
                elif number % 3 == 1:
                    parameter.grad = torch.empty_like(parameter).fill_(0.5)
                else:
                    parameter.grad.clamp_(-0.1, 0.1)
        pair.plain.step()
        pair.sharded.step()
        pair.require_close(f"step {step}")


@WAYS
def test_gradients_changed_by_the_user(run: Run, way: dict[str, Any]) -> None:
    run(2, _changed_in_place, way)


def _frozen_and_thawed() -> None:
    def make() -> nn.Module:
        model = make_many()
        list(model.parameters())[7].requires_grad_(False)
        return model

    pair = Pair(make)
    pair.step(0, (7,))
    for plain, ours in (pair.pairs[1], pair.pairs[2]):
        plain.requires_grad_(False)
        ours.requires_grad_(False)
    pair.step(1, (1, 2, 7))
    for plain, ours in (pair.pairs[1], pair.pairs[7]):
        plain.requires_grad_(True)
        ours.requires_grad_(True)
    pair.step(2, (2,))
    pair.require_close()


def test_parameters_frozen_and_thawed(run: Run) -> None:
    run(3, _frozen_and_thawed)


def _repeated() -> None:
    pair: Any = Pair.__new__(Pair)
    pair.plain_model, pair.model = make_many(), make_many()
    twice = [[*m.parameters(), next(m.parameters())] for m in (pair.plain_model, pair.model)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "optimizer contains a parameter group with duplicate")
        pair.plain = torch.optim.SGD(twice[0], lr=0.1, momentum=0.9)
        pair.sharded = ZeroRedundancyOptimizer(
            twice[1], torch.optim.SGD, lr=0.1, momentum=0.9, **ELEMENTS
        )
    for step in range(3):
        pair.step(step)
        require_close(*(values_of(m.parameters()) for m in (pair.plain_model, pair.model)))


def test_a_parameter_given_twice_is_stepped_twice_as_by_torch(run: Run) -> None:
    run(2, _repeated)


def _sparse(way: dict[str, Any]) -> str:
    embedding = nn.Embedding(40, 3, sparse=True)
    optimizer = ZeroRedundancyOptimizer(
        [*embedding.parameters(), nn.Parameter(torch.ones(3))], torch.optim.SGD, lr=0.1, **way
    )
    before = values_of(embedding.parameters())
    embedding(torch.tensor([1, 39])).sum().backward()
    embedding.weight.grad = embedding.weight.grad.coalesce()  # type: ignore[union-attr] # backward has set it
    optimizer.param_groups[0]["params"][1].grad = torch.ones(3)
    with pytest.raises(
        (TypeError, RuntimeError), match=r"torch.sparse_coo.*sparse=False"
    ) as caught:
        optimizer.step()
    require_close(before, values_of(embedding.parameters()))
    optimizer.zero_grad()
    set_gradients(optimizer.param_groups[0]["params"], 0)
    optimizer.step()  # nobody hangs
    return type(caught.value).__name__


@WAYS
def test_a_sparse_gradient_is_refused_on_every_rank(run: Run, way: dict[str, Any]) -> None:
    assert "TypeError" in run(2, _sparse, way)


def _missing_on_one_rank() -> None:
    pair = Pair()
    set_gradients(pair.model.parameters(), 0, without=(1,) if dist.get_rank() == 1 else ())
    before = values_of(pair.model.parameters())
    with pytest.raises(RuntimeError, match="parameters without a gradient"):
        pair.sharded.step()
    require_close(before, values_of(pair.model.parameters()))
    pair.step(0)
    pair.require_close()


def test_a_gradient_that_one_rank_lacks_is_an_error_on_every_rank(run: Run) -> None:
    run(2, _missing_on_one_rank)


def _scaler() -> list[float]:
    pair = Pair(options={"lr": 0.1, "weight_decay": 0.1, "fused": True})
    scalers = [GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in range(2)]
    models = pair.plain_model, pair.model
    for step in range(4):
        for model, optimizer, scaler in zip(
            models, (pair.plain, pair.sharded), scalers, strict=True
        ):
            set_gradients(model.parameters(), step)
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(scaler.scale(torch.ones(())) * (math.inf if step == 1 else 1))
            scaler.step(optimizer)
            scaler.update()
        require_close(*(values_of(m.parameters()) for m in models), f"step {step}")
    pair.require_close()
    return [scaler.get_scale() for scaler in scalers]


def test_a_grad_scaler(run: Run) -> None:
    for plain, ours in run(2, _scaler):
        assert plain == ours


DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.complex64)


def _mixed_dtypes(way: dict[str, Any]) -> None:
    def make() -> nn.Module:
        shapes = [((60, 50), (5, 3), (11,))[number % 3] for number in range(12)]
        return make_parameters(
            *((*shape, DTYPES[number % 4]) for number, shape in enumerate(shapes))
        )

    pair = Pair(make, *OPTIMIZERS["Adam"], **way)
    for step in range(3):
        for model in (pair.plain_model, pair.model):
            set_gradients(model.parameters(), step, without=(step,))
        norms = [pair.sharded.clip_grad_norm_(1.0, p).item() for p in (1.0, 2.0, math.inf)]
        assert all(map(math.isfinite, norms))
        for plain, ours in pair.pairs:
            plain.grad = ours.grad
        pair.plain.step()
        pair.sharded.step()
    plains, ours = (values_of(m.parameters()) for m in (pair.plain_model, pair.model))
    require_close(plains, ours, factor=3)


@pytest.mark.parametrize("world_size", [2, 3])
@WAYS
def test_mixed_dtypes(run: Run, world_size: int, way: dict[str, Any]) -> None:
    run(world_size, _mixed_dtypes, way)


def _a_whole_model(way: dict[str, Any]) -> None:
    pair = Pair(make_model, *OPTIMIZERS["AdamW fused"], **way)
    for step in range(3):
        pair.step(step)
    pair.require_close()
    for plain, ours in pair.pairs:
        assert plain.stride() == ours.stride()


@WAYS
def test_strides_stay(run: Run, way: dict[str, Any]) -> None:
    run(2, _a_whole_model, way)


def _both() -> None:
    pair = Pair(**{**ELEMENTS, **FLAT, "parameters_as_bucket_view": True})
    for step in range(2):
        pair.step(step, (2,))
    pair.require_close()


def test_all_flags_together(run: Run) -> None:
    run(2, _both)
