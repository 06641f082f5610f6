"""Several optimizers over one model, a GAN's among them; hooks go with their optimizer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tensorplay.distributed.optim import DistributedOptimizer
from tests.reference.data_parallel import average, make_parameters, squares
from tests.reference.training import require_equal, values_of

Run = Callable[..., list[Any]]


class _Gan:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 6))
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def critic_loss(self, step: int, rank: int) -> torch.Tensor:
        real, fake = self._samples(step, rank)
        loss: torch.Tensor = self.critic(fake.detach()).mean() - self.critic(real).tanh().mean()
        return loss

    def generator_loss(self, step: int, rank: int) -> torch.Tensor:
        loss: torch.Tensor = -self.critic(self._samples(step, rank)[1]).mean()
        return loss

    def _samples(self, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        source = torch.Generator().manual_seed(100 * step + rank)
        real = torch.randn(5, 6, generator=source)
        return real, self.generator(torch.randn(5, 4, generator=source))


def _adversaries() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ours, plain = _Gan(), _Gan()
    adam = {"lr": 0.05}
    optimizers = [
        DistributedOptimizer(torch.optim.Adam, ours.critic.parameters(), **adam),
        DistributedOptimizer(torch.optim.Adam, ours.generator.parameters(), **adam),
    ]
    plains = [
        torch.optim.Adam(plain.critic.parameters(), **adam),
        torch.optim.Adam(plain.generator.parameters(), **adam),
    ]
    for step in range(4):
        for number, loss in enumerate((_Gan.critic_loss, _Gan.generator_loss)):
            optimizers[number].zero_grad()
            loss(ours, step, rank).backward()  # the generator's also reaches the critic
            optimizers[number].step()
            parameters = list((plain.critic, plain.generator)[number].parameters())
            gradients = [
                torch.autograd.grad(loss(plain, step, other), parameters)
                for other in range(world_size)
            ]
            for parameter, contributions in zip(
                parameters, zip(*gradients, strict=True), strict=True
            ):
                parameter.grad = average(contributions)
            plains[number].step()
        for mine, theirs in ((ours.critic, plain.critic), (ours.generator, plain.generator)):
            require_equal(values_of(theirs.parameters()), values_of(mine.parameters()))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_gan_trains_as_on_one_process(run: Run, world_size: int) -> None:
    run(world_size, _adversaries)


def _wrapped_again() -> None:
    model = make_parameters((3, 4), (1200, 1200))
    first = DistributedOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    second = DistributedOptimizer(first.optim)
    gradients = [parameter.grad for parameter in model.parameters()]
    assert gradients == [None, None]
    squares(0)(model, dist.get_rank())
    second.step()
    assert second.check_replicas() is None
    with pytest.raises(RuntimeError, match="go on with that one"):
        first.step()


def test_the_last_optimizer_on_a_parameter_averages_it(run: Run) -> None:
    run(2, _wrapped_again)


def _removed() -> None:
    model = make_parameters((3, 4), (1200, 1200))
    optimizer = DistributedOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    squares(0)(model, dist.get_rank())
    averages = [parameter.grad.clone() for parameter in model.parameters()]
    optimizer.remove()
    if dist.get_rank() == 0:  # nobody else needs to
        optimizer.zero_grad()
        before = values_of(model.parameters())
        squares(0)(model, 0)
        own = [parameter.grad.clone() for parameter in model.parameters()]
        assert not any(map(torch.equal, own, averages))
        optimizer.step()
        optimizer.synchronize()
        for old, parameter, gradient in zip(before, model.parameters(), own, strict=True):
            torch.testing.assert_close(parameter.detach(), old - 0.1 * gradient)


def test_remove_leaves_the_plain_optimizer(run: Run) -> None:
    run(2, _removed)


def _other_order() -> list[str]:
    models = [make_parameters((3, 4)) for _ in range(2)]
    for model in models:
        DistributedOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    optimizers = [
        DistributedOptimizer(torch.optim.SGD, model.parameters(), lr=0.1) for model in models
    ]
    order = optimizers if dist.get_rank() == 0 else optimizers[::-1]
    with pytest.raises(RuntimeError, match="optimizer number") as caught:
        order[0].step()
    return [str(caught.value)]


def test_ranks_that_step_different_optimizers_are_told(run: Run) -> None:
    first, second = run(2, _other_order)
    assert first == second
