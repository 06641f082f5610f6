"""Post-local SGD against plain DDP where all ranks average, and against one process otherwise."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from tensorplay.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from tensorplay.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from tensorplay.distributed.algorithms.model_averaging.hierarchical_model_averager import (
    HierarchicalModelAverager,
)
from tensorplay.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from tests.launch import run_ranks
from tests.reference.ddp import make_net, train
from tests.reference.training import require_equal, values_of

OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"lr": 0.05, "fused": True}),
]


def _where_the_subgroup_is_the_world() -> None:
    for optimizer_class, options in OPTIMIZERS:
        for start in (0, 3):
            plain_model = DistributedDataParallel(make_net())
            plain_model.register_comm_hook(None, allreduce_hook)
            plain = optimizer_class(plain_model.parameters(), **options)
            model = DistributedDataParallel(make_net())
            state = PostLocalSGDState(None, dist.group.WORLD, start)
            model.register_comm_hook(state, post_localSGD_hook)
            optimizer = PostLocalSGDOptimizer(
                optimizer_class(model.parameters(), **options),
                PeriodicModelAverager(2, start),
                hook_state=state,
            )
            train(plain_model, plain, steps=8)
            train(model, optimizer, steps=8)
            require_equal(values_of(plain_model.parameters()), values_of(model.parameters()))
            assert (state.iter, optimizer.averager.step) == (start, 8)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_where_the_subgroup_is_the_world_it_is_ddp_bitwise(world_size: int) -> None:
    run_ranks(world_size, _where_the_subgroup_is_the_world)


BATCH = 4


def _gradients_(model: nn.Module, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(BATCH, 6, generator=generator)
    targets = torch.randn(BATCH, 3, generator=generator)
    model.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()


def one_process(world_size: int, steps: int, group_at: Any) -> list[list[torch.Tensor]]:
    """All ranks' models in one process; ``group_at(step)`` says how many neighbours average."""
    models = [make_net() for _ in range(world_size)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            _gradients_(model, rank, step)
            optimizer.step()
        size = group_at(step)
        for start in range(0, world_size, size):
            for same in zip(*(m.parameters() for m in models[start : start + size]), strict=True):
                mean = torch.stack([p.detach().double() for p in same]).mean(0)
                for parameter in same:
                    parameter.data.copy_(mean)
    return [values_of(model.parameters()) for model in models]


def _local(averager: Any, steps: int) -> list[torch.Tensor]:
    model = make_net()
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), averager
    )
    for step in range(steps):
        _gradients_(model, dist.get_rank(), step)
        optimizer.step()
    return values_of(model.parameters())


def _periodic(steps: int) -> list[torch.Tensor]:
    return _local(PeriodicModelAverager(3, 2), steps)


def _hierarchical(steps: int) -> list[torch.Tensor]:
    return _local(HierarchicalModelAverager({2: 2, 4: 4}, 1), steps)


@pytest.mark.parametrize("steps", [8, 9])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_periodic_average_equals_one_process(world_size: int, steps: int) -> None:
    expected = one_process(
        world_size, steps, lambda step: world_size if step >= 2 and (step - 2) % 3 == 0 else 1
    )
    for one, other in zip(expected, run_ranks(world_size, _periodic, steps), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_a_hierarchical_average_equals_one_process() -> None:
    def group_at(step: int) -> int:
        return 1 if step < 1 or step % 2 else 4 if step % 4 == 0 else 2

    expected = one_process(4, 7, group_at)
    for one, other in zip(expected, run_ranks(4, _hierarchical, 7), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


class _ManyKinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(dist.get_rank())

        def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        self.large = nn.Parameter(randn(300, 1_000))
        self.conv = nn.Parameter(randn(8, 9, 40, 30).to(memory_format=torch.channels_last))
        self.transposed = nn.Parameter(randn(300, 400).t())
        self.small = nn.ParameterList(randn(i, 7) for i in range(20))
        self.scalar = nn.Parameter(randn(1)[0])
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.gapped = nn.Parameter(randn(30, 50)[:, ::2])
        self.kinds = nn.ParameterList(
            randn(5, 3, dtype=dtype)
            for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.complex64)
        )
        self.part = nn.Parameter(self.large.data[0])  # shares memory
        self.frozen = nn.Parameter(torch.ones(3) * dist.get_rank(), requires_grad=False)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf, torch.inf]))
        self.register_buffer("number", torch.tensor(dist.get_rank()))


def _place_of(tensor: torch.Tensor) -> Any:
    return tensor.data_ptr(), tensor.stride(), tensor.shape, tensor.dtype


def _average_all_kinds() -> list[Any]:
    model = _ManyKinds()
    tensors = [*model.parameters(), *model.buffers()]
    places = [_place_of(tensor) for tensor in tensors]
    objects = [p.data_ptr() for p in model.parameters()]
    all_values = [None] * dist.get_world_size()
    dist.all_gather_object(all_values, [t.detach().clone() for t in tensors])
    PeriodicModelAverager(2).average_parameters(tensors)
    assert [_place_of(tensor) for tensor in tensors] == places
    assert [p.data_ptr() for p in model.parameters()] == objects
    assert model.frozen.tolist() == [dist.get_rank()] * 3
    assert model.number == dist.get_rank()
    assert model.mask.tolist() == [0.0, -torch.inf, torch.inf]
    averaged = [t.detach() for t in tensors if t is not model.frozen and t is not model.number]
    before = zip(*all_values, strict=True)  # type: ignore[misc] # mypy can't check what is unpacked or optional here
    for tensor, values in zip(tensors, before, strict=True):
        if tensor is model.frozen or tensor is model.number or tensor is model.mask:
            continue
        wide = torch.complex128 if tensor.is_complex() else torch.float64
        mean = torch.stack([v.to(wide) for v in values]).mean(0)
        torch.testing.assert_close(tensor.detach(), mean.to(tensor.dtype))
    again = copy.deepcopy(averaged)
    averager = PeriodicModelAverager(2)
    averager.average_parameters(tensors)
    require_equal(again, averaged, "equal values must stay as they are: ")
    return averaged


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_kind_of_tensor_is_averaged_in_place(world_size: int) -> None:
    first, *others = run_ranks(world_size, _average_all_kinds)
    for other in others:
        require_equal(first, other)


def _on_a_subgroup() -> list[Any]:
    group = dist.new_group([3, 1], sort_ranks=False)
    parameter = nn.Parameter(torch.full((300_000,), [0.0, 1.0, 5.0, 3.0][dist.get_rank()]))
    averager = PeriodicModelAverager(2, process_group=group)
    for _ in range(3):
        averager.average_parameters([parameter])
    return [parameter[0].item(), parameter[-1].item(), averager.step]


def test_ranks_outside_the_group_do_nothing_but_count() -> None:
    assert run_ranks(4, _on_a_subgroup) == [[0, 0, 3], [2, 2, 3], [5, 5, 3], [2, 2, 3]]


def _over_zero(resident: bool, with_hook: bool) -> None:
    """Two groups of two: ZeRO inside, averages across; next to the plain optimizer."""
    subgroup, _ = dist.new_subgroups(group_size=2)
    trainers = []
    for sharded in (False, True):
        if with_hook:
            model = DistributedDataParallel(make_net())
            state = PostLocalSGDState(None, subgroup, 3)
            model.register_comm_hook(state, post_localSGD_hook)
        else:
            model, state = DistributedDataParallel(make_net(), process_group=subgroup), None
        local: torch.optim.Optimizer
        if sharded:
            local = ZeroRedundancyOptimizer(
                model.parameters(),
                torch.optim.AdamW,
                subgroup,
                parameters_as_bucket_view=resident,
                lr=0.05,
            )
        else:
            local = torch.optim.AdamW(model.parameters(), lr=0.05)
        averager = PeriodicModelAverager(2, 3)
        optimizer = PostLocalSGDOptimizer(local, averager, hook_state=state)
        train(model, optimizer, steps=8)
        trainers.append(values_of(model.parameters()))
    require_equal(*trainers)


@pytest.mark.parametrize("with_hook", [False, True])
@pytest.mark.parametrize("resident", [False, True])
def test_over_a_sharded_optimizer_in_each_subgroup(resident: bool, with_hook: bool) -> None:
    run_ranks(4, _over_zero, resident, with_hook)
