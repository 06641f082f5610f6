"""Tensors of one rank come to all, whatever they are; nothing else changes."""

from typing import Any

import pytest
import torch

from tensorplay.distributed.optim._core.ranks import GroupRank
from tensorplay.distributed.optim._core.replication import replicate_
from tests.fakes import FakeCommunicator, run_fake_ranks
from tests.reference.training import require_equal


def make_tensors(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    memory = torch.randn(60, generator=generator)
    return [
        memory[:6].view(2, 3),
        memory[6],
        memory[10:40:2],
        torch.randn(4, 5, generator=generator).t(),
        torch.randn(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last),
        torch.randint(99, (7,), generator=generator),
        torch.tensor([rank == 0, True]),
        torch.empty(0, 3),
        torch.full((3,), 1j + rank),
        torch.randn(9, generator=generator).bfloat16(),
        memory[50:],
        memory[41:44:2].double()[::2],  # one element, whose stride is 2
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("capacity_bytes", [1, 40, 10**6])
def test_every_kind_of_tensor(world_size: int, capacity_bytes: int) -> None:
    def replicate(communicator: Any) -> list[torch.Tensor]:
        tensors = make_tensors(communicator.members.group_rank)
        strides = [tensor.stride() for tensor in tensors]
        gap = tensors[2]._base[11] if tensors[2]._base is not None else torch.zeros(())
        before = gap.clone()
        replicate_(communicator, tensors, GroupRank(world_size - 1), capacity_bytes)
        assert strides == [tensor.stride() for tensor in tensors]
        assert torch.equal(gap, before), "what lies between the elements has changed"
        return tensors

    for tensors in run_fake_ranks(world_size, replicate):
        require_equal(make_tensors(world_size - 1), tensors)


def test_small_tensors_travel_together() -> None:
    def replicate(communicator: FakeCommunicator) -> int:
        tensors = [torch.ones(10) for _ in range(100)]
        replicate_(communicator, tensors, GroupRank(0), 400)
        return communicator.calls["gather_from_owners"]

    for num_messages in run_fake_ranks(2, replicate):
        assert num_messages == 10
