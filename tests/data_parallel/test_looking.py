"""What a user can ask: whether replicas agree, where the time went, how it prints."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorplay.distributed.optim import DistributedOptimizer, StepProfile
from tests.data_parallel.twins import make_small_and_large
from tests.reference.data_parallel import squares

Run = Callable[..., list[Any]]


def _checked() -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = DistributedOptimizer(
        torch.optim.Adam, model.parameters(), model.named_parameters(), lr=0.1
    )
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    found = [optimizer.check_replicas()]
    if dist.get_rank() == 1:
        optimizer.state[model[1].bias]["exp_avg"][1] += 1e-7
    found.append(optimizer.check_replicas())
    if dist.get_rank() == 2:
        with torch.no_grad():
            model[0].bias[3] = -model[0].bias[3]
    found.append(optimizer.check_replicas())
    return [each and (each.name, each.what, each.ranks, each.num_differing) for each in found] + [
        str(found[-1])
    ]


def test_the_first_parameter_that_differs_is_named(run: Run) -> None:
    results = run(3, _checked)
    assert results == [results[0]] * 3
    assert results[0] == [
        None,
        ("1.bias", "exp_avg", (1,), 1),
        ("0.bias", "value", (2,), 2),
        "the value of parameter 0.bias on rank 2 isn't that of rank 0; 2 parameters differ",
    ]


def _profiled() -> StepProfile:
    model = make_small_and_large()
    optimizer = DistributedOptimizer(
        torch.optim.SGD, model.parameters(), lr=0.1, clip_grad_norm=1.0
    )
    squares(0)(model, dist.get_rank())
    optimizer.step()
    with optimizer.profile() as profile:
        for step in range(3):
            optimizer.zero_grad()
            squares(step)(model, dist.get_rank())
            optimizer.step()
        assert profile().num_steps == 3
    optimizer.step()
    text = str(profile())
    assert "per step, over 3 steps" in text
    assert text.count(" ms") == 5
    return profile()


def test_profile_says_where_the_time_went(run: Run) -> None:
    for profile in run(2, _profiled):
        assert profile.backward_s > 0
        assert profile.reduction_s > 0
        assert profile.communication_exposed_s > 0
        assert profile.communication_hidden_s >= 0
        assert profile.step_s > 0


def test_profile_without_other_ranks() -> None:
    model = make_small_and_large()
    optimizer = DistributedOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    with optimizer.profile() as profile:
        squares(0)(model, 0)
        optimizer.step()
    assert profile().num_steps == 1
    assert repr(optimizer).startswith("DistributedOptimizer on rank 0 of 1: SGD (")
