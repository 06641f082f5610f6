"""Awkward parameters with the gradients that DDP's backward really gives them."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tests.launch import run_ranks
from tests.reference.ddp import MODES, batch, make_twins, require_twins_equal, train
from tests.reference.optimizers import OPTIMIZERS

KERNELS = ("AdamW", "SGD momentum")  # the fused ones refuse complex parameters


class Complex(nn.Module):
    """A complex matrix beside a real bias."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(6, 3, dtype=torch.complex64))
        self.bias = nn.Parameter(torch.randn(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs.to(torch.complex64) @ self.weight).abs() + self.bias


class ScalarAndNothing(nn.Module):
    """A 0-d parameter, and one without elements that takes part in the sum."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.empty(0, 4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs) * self.scale + self.nothing.sum()


class ChannelsLast(nn.Module):
    """A convolution whose weight is channels_last, and so is its gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv2d(2, 3, (1, 3)).to(memory_format=torch.channels_last)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.convolution(inputs.view(4, 2, 1, 3)).flatten(1)


class Transposed(nn.Module):
    """A weight whose memory is in column order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 6).T)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ self.weight


class Tied(nn.Module):
    """One matrix under two names, used both ways round."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(6, 6, bias=False)
        self.decoder = nn.Linear(6, 6, bias=False)
        self.decoder.weight = self.encoder.weight
        self.last = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.decoder(torch.tanh(self.encoder(inputs))))


class SharedStorage(nn.Module):
    """Three parameters cut from one tensor, as fused projections are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.flat = torch.randn(6 * 6 + 6 * 3 + 3)
        self.first = nn.Parameter(self.flat[:36].view(6, 6))
        self.second = nn.Parameter(self.flat[36:54].view(6, 3))
        self.bias = nn.Parameter(self.flat[54:])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(inputs @ self.first) @ self.second + self.bias


KINDS = (Complex, ScalarAndNothing, ChannelsLast, Transposed, Tied, SharedStorage)


def _trained(resident: bool, kind: type[nn.Module]) -> None:
    for name in KERNELS:
        for gradient_as_bucket_view in (False, True):
            plain, sharded = make_twins(
                kind,
                resident,
                *OPTIMIZERS[name],
                gradient_as_bucket_view=gradient_as_bucket_view,
            )
            train(*plain)
            train(*sharded)
            require_twins_equal(plain, sharded, f"{name}: ")
            strides = [p.stride() for p in plain.model.parameters()]
            assert [p.stride() for p in sharded.model.parameters()] == strides


@MODES
@pytest.mark.parametrize("kind", KINDS)
def test_kind_of_parameter(resident: bool, kind: type[nn.Module]) -> None:
    run_ranks(2, _trained, resident, kind)


def make_three() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 3))


def _toggled(resident: bool) -> None:
    plain, sharded = make_twins(make_three, resident, find_unused_parameters=True)
    for trainer in (plain, sharded):
        layers = list(trainer.module.children())
        for step, frozen in enumerate([(), (0,), (0, 2), (2,), (4,), ()]):
            for index in (0, 2, 4):
                layers[index].requires_grad_(index not in frozen)
            inputs, targets = batch(step)
            trainer.optimizer.zero_grad()
            before = [p.detach().clone() for i in frozen for p in layers[i].parameters()]
            nn.functional.mse_loss(trainer.model(inputs), targets).backward()
            trainer.optimizer.step()
            after = [p.detach() for i in frozen for p in layers[i].parameters()]
            assert all(map(torch.equal, before, after)), f"a frozen layer moved in step {step}"
    require_twins_equal(plain, sharded)


@MODES
@pytest.mark.parametrize("world_size", [2, 3])
def test_layers_frozen_and_thawed_between_steps(resident: bool, world_size: int) -> None:
    run_ranks(world_size, _toggled, resident)


def _dtensors(resident: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    distributed = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
    message = r"parameter 1 of group 0 \('weight'\) is a DTensor.*A plain optimizer keeps the state"
    with pytest.raises(TypeError, match=message):
        ZeroRedundancyOptimizer(
            [("bias", nn.Parameter(torch.ones(3))), ("weight", distributed)],
            torch.optim.AdamW,
            parameters_as_bucket_view=resident,
        )
    optimizer = ZeroRedundancyOptimizer([nn.Parameter(torch.ones(3))], torch.optim.AdamW)
    with pytest.raises(TypeError, match=r"parameter 0 of group 1 is a DTensor"):
        optimizer.add_param_group({"params": distributed})
    optimizer.step()
    assert len(optimizer.param_groups) == 1


@MODES
def test_dtensors_sharded_across_the_group_are_refused_with_the_cure(resident: bool) -> None:
    run_ranks(2, _dtensors, resident)


def _one_dtensor() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    distributed = nn.Parameter(distribute_tensor(torch.ones(3), mesh, [Replicate()]))
    mine = distributed if dist.get_rank() == 1 else nn.Parameter(torch.ones(3))
    expected = r"parameters\[0\].part of a DTensor is None on rank 0 but"
    with pytest.raises(RuntimeError, match=expected):
        ZeroRedundancyOptimizer([mine], torch.optim.AdamW)


def test_a_dtensor_on_one_rank_is_an_error_on_all() -> None:
    run_ranks(2, _one_dtensor)
