"""Windows of backward passes, ``no_sync``, ``synchronize``, clipping, sparse gradients, closures."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler

from tensorplay.distributed.optim import DistributedOptimizer
from tests.data_parallel.twins import Twins, make_small_and_large
from tests.reference.data_parallel import make_parameters, square_loss, squares
from tests.reference.training import require_equal, values_of

Run = Callable[..., list[Any]]


def _windows() -> None:
    twins = Twins(make_small_and_large, backward_passes_per_step=3)
    for step, num_passes in enumerate((3, 3, 1, 3, 2, 5)):  # some are short, one is too long
        twins.zero_grad()
        for number in range(num_passes):
            twins.backward(squares(10 * step + number), reduces=number == 2)
        twins.step()
        twins.require_same(f"window {step}, ")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_short_and_long_windows_of_backward_passes(run: Run, world_size: int) -> None:
    run(world_size, _windows)


def _no_sync(ends: str) -> None:
    twins = Twins(make_small_and_large)
    for step in range(2):
        twins.zero_grad()
        for number in range(2):
            twins.backward(squares(10 * step + number), sync=False)
        if ends == "backward":
            twins.backward(squares(10 * step + 5))
        elif ends == "synchronize":
            twins.ours.synchronize()
            twins.one.reduce()
        if ends != "step":
            twins.require_same_gradients()
        twins.step()
        twins.require_same()


@pytest.mark.parametrize("ends", ["backward", "synchronize", "step"])
def test_no_sync(run: Run, ends: str) -> None:
    run(2, _no_sync, ends)


def _clipped_between() -> None:
    twins = Twins(make_small_and_large)
    for step in range(2):
        twins.zero_grad()
        twins.backward(squares(step), sync=step == 0)
        twins.one.reduce()
        twins.ours.synchronize()
        for model in (twins.plain_model, twins.model):
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        twins.plain.step()
        with twins.ours.skip_synchronize():
            twins.ours.step()
        twins.require_same()


def test_clipping_between_synchronize_and_step(run: Run) -> None:
    run(2, _clipped_between)


def _skipped_too_early() -> str:
    twins = Twins(make_small_and_large)
    before = values_of(twins.model.parameters())
    with twins.ours.no_sync():
        squares(0)(twins.model, twins.rank)
    raises = pytest.raises(RuntimeError, match=r"call synchronize\(\)")
    with raises as caught, twins.ours.skip_synchronize():
        twins.ours.step()
    require_equal(before, values_of(twins.model.parameters()))
    return str(caught.value)


def test_skipping_what_is_needed_is_an_error_on_every_rank(run: Run) -> None:
    first, second = run(2, _skipped_too_early)
    assert first == second


def _clipped_in_step(scale: float, fused: bool, observed: bool = False) -> None:
    options = {"lr": 0.1, "fused": fused}
    twins = Twins(make_small_and_large, torch.optim.SGD, options, clip_grad_norm=scale)
    seen: list[torch.Tensor] = []
    if observed:
        twins.ours.optim.register_step_pre_hook(
            lambda *_: seen.extend(
                p.grad.clone() for p in twins.model.parameters() if p.grad is not None
            )
        )
    for step in range(3):
        twins.zero_grad()
        if step == 2:
            for model in (twins.plain_model, twins.model):
                next(model.parameters()).requires_grad_(False)
        twins.backward(squares(step))
        gradients = [p.grad for p in twins.plain_model.parameters() if p.grad is not None]
        norm = torch.cat([gradient.double().reshape(-1) for gradient in gradients]).norm()
        for gradient in gradients:  # torch's own norm is off by 3e-6 in float32
            gradient.mul_((scale / (norm + 1e-6)).clamp(max=1.0).float())
        twins.step()
        torch.testing.assert_close(twins.ours.grad_norm, norm.float(), rtol=1e-5, atol=0)
        pairs = zip(twins.plain_model.parameters(), twins.model.parameters(), strict=True)
        for plain, ours in pairs:
            torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)
            if plain.grad is not None:
                torch.testing.assert_close(ours.grad, plain.grad, rtol=1e-5, atol=1e-7)
                if observed:
                    torch.testing.assert_close(seen.pop(0), plain.grad, rtol=1e-5, atol=1e-7)
        assert not {"grad_scale", "found_inf"} & set(vars(twins.ours.optim))
        seen.clear()
        assert twins.ours.check_replicas() is None


@pytest.mark.parametrize("scale", [0.5, 1e9])
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("fused", [False, True])
def test_clipping_in_the_step_is_torchs(
    run: Run, world_size: int, scale: float, fused: bool
) -> None:
    run(world_size, _clipped_in_step, scale, fused)


def test_a_hook_of_the_inner_optimizer_sees_clipped_gradients(run: Run) -> None:
    run(2, _clipped_in_step, 0.5, True, True)


def _zeroed(how: str) -> None:
    twins = Twins(make_small_and_large)
    for step in range(3):
        if how == "to zero":
            twins.zero_grad(set_to_none=False)
        elif how == "by the model":
            twins.model.zero_grad()
            twins.plain_model.zero_grad()
        twins.backward(squares(step))
        twins.require_same_gradients()
        twins.step()
        twins.require_same()


@pytest.mark.parametrize("how", ["to zero", "by the model", "never"])
def test_zero_grad(run: Run, how: str) -> None:
    run(2, _zeroed, how)


def _discarded() -> None:
    twins = Twins(make_small_and_large, backward_passes_per_step=2)
    squares(0)(twins.model, twins.rank)
    twins.ours.zero_grad()
    for number in range(2):
        twins.backward(squares(number), reduces=number == 1)
    twins.require_same_gradients()


def test_zero_grad_begins_a_new_window(run: Run) -> None:
    run(2, _discarded)


class _Bags(nn.Module):
    """A small and a large embedding with sparse gradients, and dense parameters around."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.small = nn.Embedding(50, 4, sparse=True)
        self.large = nn.Embedding(40_000, 32, sparse=True)
        self.unused = nn.Embedding(7, 3, sparse=True)
        self.head = nn.Linear(36, 3)


def _lookups(step: int, *, skip_rank: int | None = None) -> Callable[[nn.Module, int], None]:
    def passes(model: nn.Module, rank: int) -> None:
        generator = torch.Generator().manual_seed(10 * step + rank)
        rows = torch.randint(50, (6,), generator=generator)
        small = model.small(rows)
        if rank == skip_rank:
            small = torch.zeros_like(small)
        features = torch.cat([small, model.large(rows * 700)], 1)
        model.head(features).square().sum().backward()

    return passes


def _sparse(as_dense: bool, skip_rank: int | None) -> None:
    twins = Twins(_Bags, torch.optim.SGD, {"lr": 0.1}, sparse_as_dense=as_dense)
    for step in range(3):
        twins.zero_grad()
        twins.one.backward(_lookups(step, skip_rank=skip_rank), sync=False)
        _lookups(step, skip_rank=skip_rank)(twins.model, twins.rank)
        assert twins.model.small.weight.grad.is_sparse is not as_dense
        assert twins.model.large.weight.grad.is_sparse is not as_dense
        assert twins.model.unused.weight.grad is None
        for plain, ours in zip(
            twins.plain_model.parameters(), twins.model.parameters(), strict=True
        ):
            parts = [local[plain] for local in twins.one.local if plain in local]
            if not parts:
                continue
            mean = torch.stack([part.to_dense() for part in parts]).sum(0) / twins.world_size
            torch.testing.assert_close(ours.grad.to_dense(), mean)
            plain.grad = mean
        for local in twins.one.local:
            local.clear()
        twins.plain.step()
        twins.ours.step()
        pairs = zip(twins.plain_model.parameters(), twins.model.parameters(), strict=True)
        for plain, ours in pairs:
            torch.testing.assert_close(ours, plain)
        assert twins.ours.check_replicas() is None


@pytest.mark.parametrize("skip_rank", [None, 0, 1])
@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients(run: Run, as_dense: bool, skip_rank: int | None) -> None:
    run(2, _sparse, as_dense, skip_rank)


def _sparse_adam() -> None:
    torch.manual_seed(0)
    embedding = nn.Embedding(50, 4, sparse=True)
    optimizer = DistributedOptimizer(
        torch.optim.SparseAdam, list(embedding.parameters()), lr=0.1, clip_grad_norm=0.1
    )
    for step in range(2):  # the second accumulates onto an average
        for number in range(2):
            embedding(torch.tensor([dist.get_rank(), 7, 7 + step])).square().sum().backward()
            assert embedding.weight.grad.is_sparse, number
        optimizer.step()
        assert embedding.weight.grad.coalesce().values().norm() <= 0.1 + 1e-6
        assert optimizer.check_replicas() is None
        optimizer.zero_grad()


def test_sparse_adam_with_clipping(run: Run) -> None:
    run(3, _sparse_adam)


def _closure(rank: int, world_size: int) -> None:
    model, plain_model = (make_parameters((5, 3), (7,)) for _ in range(2))
    plain = torch.optim.LBFGS(plain_model.parameters(), lr=0.5, line_search_fn="strong_wolfe")
    ours = DistributedOptimizer(
        torch.optim.LBFGS, model.parameters(), lr=0.5, line_search_fn="strong_wolfe"
    )

    def plain_closure() -> torch.Tensor:
        plain.zero_grad()
        losses = [square_loss(plain_model.parameters(), r).exp() for r in range(world_size)]
        loss = torch.stack([each / world_size for each in losses]).sum()
        loss.backward()
        return loss

    def closure() -> torch.Tensor:
        ours.zero_grad()
        loss = square_loss(model.parameters(), rank).exp()
        loss.backward()
        return loss

    for _ in range(2):
        torch.testing.assert_close(ours.step(closure).detach(), plain.step(plain_closure).detach())
        pairs = zip(model.parameters(), plain_model.parameters(), strict=True)
        for mine, other in pairs:
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
        assert ours.check_replicas() is None


def _closures() -> None:
    _closure(dist.get_rank(), dist.get_world_size())


def test_lbfgs_follows_the_loss_of_all_ranks(run: Run) -> None:
    run(2, _closures)


def _failing_closure() -> str:
    model = make_parameters((5, 3))
    optimizer = DistributedOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        if dist.get_rank() == 1:
            raise ValueError("no more data")
        return model[0].sum()

    with pytest.raises((ValueError, RuntimeError)) as caught:
        optimizer.step(closure)
    return str(caught.value)


def test_a_closure_that_fails_on_one_rank(run: Run) -> None:
    first, second = run(2, _failing_closure)
    assert second == "no more data"
    assert "rank 1: ValueError: no more data" in first


def _scaled(spoil_rank: int | None) -> None:
    twins = Twins(make_small_and_large, backward_passes_per_step=1)
    scalers = [GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in range(2)]
    for step in range(5):
        spoiled = step == 2

        def passes(model: nn.Module, rank: int, step: int = step, spoiled: bool = spoiled) -> None:
            scaler = scalers[model is twins.model]
            loss = square_loss(model.parameters(), 10 * step + rank).float()
            if spoiled and rank == spoil_rank:
                loss = loss * torch.inf
            scaler.scale(loss).backward()

        twins.zero_grad()
        twins.backward(passes)
        for scaler, optimizer in zip(scalers, (twins.plain, twins.ours), strict=True):
            scaler.step(optimizer)
            scaler.update()
        twins.require_same(f"step {step}, ")
        assert scalers[0].state_dict() == scalers[1].state_dict()


@pytest.mark.parametrize("spoil_rank", [None, 1])
def test_grad_scaler_unmodified(run: Run, spoil_rank: int | None) -> None:
    run(2, _scaled, spoil_rank)
