"""The DDP hook: over all ranks first, then in subgroups, or nowhere; its counter can be saved."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tensorplay.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from tests.launch import run_ranks

START = 2


def _gradients(kind: str) -> list[float]:
    """What each rank's gradient of a weight is in each iteration; alone it is its rank."""
    subgroup = dist.new_subgroups(group_size=2)[0] if kind == "subgroup" else None
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    state = PostLocalSGDState(None, subgroup, START, kind != "none")
    model.register_comm_hook(state, post_localSGD_hook)
    gradients = []
    for iteration in range(4):
        if iteration == 3:  # a state that takes over
            saved = state.state_dict()
            assert saved == {"iter": START}
            state.load_state_dict(saved)
        model.zero_grad()
        model(torch.full((1, 1), float(dist.get_rank()))).sum().backward()
        assert model.module.weight.grad is not None
        gradients.append(model.module.weight.grad.item())
        assert state.iter == min(iteration + 1, START)
    return gradients


@pytest.mark.parametrize(
    ("kind", "later"),
    [
        ("subgroup", [0.5, 0.5, 2.5, 2.5]),
        ("none", [0.0, 1.0, 2.0, 3.0]),
        ("this host", [1.5] * 4),
    ],
)
def test_gradients_are_averaged_over_all_then_in_subgroups(kind: str, later: list[float]) -> None:
    for rank, gradients in enumerate(run_ranks(4, _gradients, kind)):
        assert gradients == [1.5, 1.5, later[rank], later[rank]]


def _host_of(rank: int) -> Any:
    import socket

    socket.gethostname = lambda: f"host-{rank % 2}"  # this process ends with the test
    return PostLocalSGDState(None, None, 0).gradient_group()


def _two_hosts() -> list[int]:
    group = _host_of(dist.get_rank())
    return dist.get_process_group_ranks(group)


def test_the_subgroup_of_a_host_is_found_by_its_name() -> None:
    assert run_ranks(4, _two_hosts) == [[0, 2], [1, 3], [0, 2], [1, 3]]
