"""The pure form under ``vmap``, ``grad`` and ``torch.compile``."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap

from tensorplay.distributed import optim
from tests.functional.variants import CLASSES, Variant, mathematical_variants

NUM_MEMBERS = 8
LEARNING_RATES = torch.logspace(-3, -1, NUM_MEMBERS)


def pure(name: str) -> Any:
    return getattr(optim, f"functional_{name}")


def problem(dtype: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], Callable[..., Tensor]]:
    """Parameters of a small network, and its loss on fixed data."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    params = {"w": randn(4, 6), "b": randn(6), "v": randn(6, 2)}
    x, y = randn(16, 4), randn(16, 2)

    def loss(params: dict[str, Tensor]) -> Tensor:
        hidden = torch.tanh(x @ params["w"] + params["b"])
        return (hidden @ params["v"] - y).square().mean()

    return params, loss


def train(name: str, num_steps: int, lr: Any, params: Any, loss: Any, **options: Any) -> Any:
    state = pure(name).init(params, **options)
    for _ in range(num_steps):
        params, state = pure(name).update(grad(loss)(params), state, params, lr=lr, **options)
    return params


@pytest.mark.parametrize("variant", mathematical_variants(), ids=str)
def test_an_ensemble_is_a_loop_over_its_members(variant: Variant) -> None:
    options = {key: value for key, value in variant.options.items() if key != "lr"}
    params, loss = problem()
    members = {
        key: torch.stack([value + 0.1 * i for i in range(NUM_MEMBERS)])
        for key, value in params.items()
    }

    def train_member(params: dict[str, Tensor], lr: Tensor) -> dict[str, Tensor]:
        trained: dict[str, Tensor] = train(variant.name, 3, lr, params, loss, **options)
        return trained

    ensemble = vmap(train_member)(members, LEARNING_RATES)
    for i in range(NUM_MEMBERS):
        alone = train_member({key: value[i] for key, value in members.items()}, LEARNING_RATES[i])
        for key, value in alone.items():
            torch.testing.assert_close(ensemble[key][i], value, rtol=1e-6, atol=1e-6)


def test_states_of_an_ensemble_can_be_kept_between_steps() -> None:
    params, loss = problem()
    members = {key: torch.stack([value] * NUM_MEMBERS) for key, value in params.items()}
    state = vmap(optim.functional_adam.init)(members)

    @vmap
    def step(params: Any, state: Any, lr: Tensor) -> Any:
        return optim.functional_adam.update(grad(loss)(params), state, params, lr=lr)

    for _ in range(3):
        members, state = step(members, state, LEARNING_RATES)
    alone = train("adam", 3, LEARNING_RATES[-1], params, loss)
    torch.testing.assert_close(
        {key: value[-1] for key, value in members.items()}, alone, rtol=1e-6, atol=1e-6
    )


def test_learning_rates_in_double_precision_leave_an_ensemble_in_single() -> None:
    members = torch.zeros(NUM_MEMBERS, 3)
    new, _ = vmap(
        lambda p, lr: optim.functional_adam.update(
            torch.ones_like(p), optim.functional_adam.init(p), p, lr=lr
        )
    )(members, LEARNING_RATES.double())
    assert new.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("name", CLASSES)
def test_an_ensemble_keeps_other_dtypes(name: str, dtype: torch.dtype) -> None:
    members = torch.randn(NUM_MEMBERS, 3, dtype=dtype)

    def step(member: Tensor, lr: Tensor) -> Tensor:
        new: Tensor = pure(name).update(member, pure(name).init(member), member, lr=lr)[0]
        return new

    loop = [step(member, lr) for member, lr in zip(members, LEARNING_RATES, strict=True)]
    torch.testing.assert_close(vmap(step)(members, LEARNING_RATES), torch.stack(loop))


@pytest.mark.parametrize("variant", mathematical_variants(), ids=str)
def test_the_derivative_by_the_learning_rate_is_the_finite_difference(variant: Variant) -> None:
    options = {key: value for key, value in variant.options.items() if key != "lr"}
    params, loss = problem(torch.float64)

    def final_loss(lr: Tensor) -> Tensor:
        return loss(train(variant.name, 3, lr, params, loss, **options))

    lr, h = torch.tensor(0.02, dtype=torch.float64), 1e-5
    expected = (final_loss(lr + h) - final_loss(lr - h)) / (2 * h)
    torch.testing.assert_close(grad(final_loss)(lr), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("option", ["betas", "eps", "weight_decay"])
def test_other_options_have_derivatives(option: str) -> None:
    params, loss = problem(torch.float64)

    def final_loss(value: Tensor) -> Tensor:
        chosen = (value, torch.full_like(value, 0.99)) if option == "betas" else value
        return loss(train("adamw", 3, 0.02, params, loss, **{option: chosen}))

    value, h = torch.tensor(0.1, dtype=torch.float64), 1e-5
    expected = (final_loss(value + h) - final_loss(value - h)) / (2 * h)
    torch.testing.assert_close(grad(final_loss)(value), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("variant", mathematical_variants(), ids=str)
def test_derivatives_are_finite_where_gradients_are_zero(variant: Variant) -> None:
    options = {key: value for key, value in variant.options.items() if key != "lr"}

    def final(lr: Tensor, start: Tensor) -> Tensor:
        # The first element never has a gradient.
        final: Tensor = train(variant.name, 3, lr, start, lambda p: p[1:].square().sum(), **options)
        return final

    by_lr, by_start = jacrev(final, argnums=(0, 1))(torch.tensor(0.1), torch.tensor([1.0, 2.0]))
    assert by_lr.isfinite().all()
    assert by_start.isfinite().all()


def test_second_derivatives_are_finite_where_gradients_are_zero() -> None:
    def final(lr: Tensor) -> Tensor:
        start = torch.tensor([1.0, 2.0])
        return train("adam", 3, lr, start, lambda p: p[1:].square().sum()).sum()

    assert grad(grad(final))(torch.tensor(0.1)).isfinite()


@pytest.mark.parametrize("name", CLASSES)
def test_it_compiles_without_a_graph_break(name: str) -> None:
    params = {"w": torch.ones(2, 3), "b": torch.ones(3)}
    grads = {"w": torch.full((2, 3), 0.5), "b": torch.zeros(3)}
    state = pure(name).init(params)

    def step(params: Any, state: Any, lr: Tensor) -> Any:
        return pure(name).update(grads, state, params, lr=lr)

    compiled = torch.compile(step, backend="eager", fullgraph=True)
    lr = torch.tensor(0.05)
    torch.testing.assert_close(compiled(params, state, lr), step(params, state, lr))


def test_a_compiled_ensemble_is_the_ensemble() -> None:
    params, loss = problem()
    members = {key: torch.stack([value] * NUM_MEMBERS) for key, value in params.items()}
    step = vmap(lambda params, lr: train("adamw", 1, lr, params, loss))
    compiled = torch.compile(step, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(members, LEARNING_RATES), step(members, LEARNING_RATES))
