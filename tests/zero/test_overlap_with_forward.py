"""Gathers that go on during the next forward: whoever reads parameters gets the new ones.

In these tests what a gather brings appears only when it is awaited, so that a read that forgets to
wait sees old values every time, not once in a while.
"""

import copy
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tensorplay.distributed.optim._core import host_memory
from tensorplay.distributed.optim._core.collectives import GroupCommunicator, Waitable
from tensorplay.distributed.optim.zero import sharding_plan

Run = Callable[..., list[Any]]

OPTIONS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "eps": 1e-3}


class _Late:
    """Brings values when it is awaited, and not before."""

    def __init__(self, gathering: Waitable, arrived: torch.Tensor, flat: torch.Tensor) -> None:
        self._gathering, self._arrived, self._flat = gathering, arrived, flat

    def wait(self) -> None:
        self._gathering.wait()
        self._flat.copy_(self._arrived)


@contextmanager
def late_gathers() -> Iterator[None]:
    """Inside, gathers are late, and buckets hold about one parameter each."""
    gather = GroupCommunicator.gather_from_owners

    def late(self: GroupCommunicator, flat: torch.Tensor, cuts: Sequence[int]) -> Waitable:
        arrived = flat.clone()
        return _Late(gather(self, arrived, cuts), arrived, flat)

    with (
        mock.patch.object(GroupCommunicator, "gather_from_owners", late),
        mock.patch.object(sharding_plan, "CAPACITY_BYTES", 64),
        mock.patch.object(sharding_plan, "LEAST_STAGED_CAPACITY_BYTES", 64),
    ):
        yield


class Attentive(nn.Module):
    """Modules whose parameters are read by others: attention's projection, a list, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(8)) for _ in range(2)])
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        hidden = self.layer(hidden * self.scales[0]) * self.scales[1]
        out: torch.Tensor = self.head(hidden)
        return out


class Shuffled(nn.Module):
    """Calls its layers in another order each time, and not all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.round = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        self.round += self.training
        order = torch.randperm(4, generator=torch.Generator().manual_seed(self.round))
        for index in order[:3].tolist():
            hidden = torch.tanh(self.layers[index](hidden))
        return hidden @ self.embedding.weight.detach().T


def _tokens(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(10 * step + rank))


def _loss(output: torch.Tensor) -> torch.Tensor:
    return (output**2).mean()


def _made(kind: type[nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = kind().double()
    return model, copy.deepcopy(model)


def _trained_alike(kind: type[nn.Module], options: dict[str, Any], compiles: bool = False) -> None:
    model, plain = _made(kind)
    reference = torch.optim.AdamW(plain.parameters(), **OPTIONS)
    shards = options.get("shard_gradients", False)
    with late_gathers():
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(),
            torch.optim.AdamW,
            overlap_with_forward=True,
            module=model,
            **options,
            **OPTIONS,
        )
        network: Any = (
            model if shards else DistributedDataParallel(model, find_unused_parameters=True)
        )
        if compiles:
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            network = torch.compile(network, backend="eager")
        for step in range(5):
            optimizer.zero_grad()
            reference.zero_grad()
            _loss(network(_tokens(step, dist.get_rank()))).backward()
            before = copy.copy(getattr(plain, "round", 0))
            for rank in range(dist.get_world_size()):
                if hasattr(plain, "round"):
                    plain.round = before
                (_loss(plain(_tokens(step, rank))) / dist.get_world_size()).backward()
            optimizer.step()
            reference.step()
            if step == 2:  # evaluation in between, without a step before it
                tokens = _tokens(99, 0)
                model.eval()
                plain.eval()
                with torch.no_grad():
                    torch.testing.assert_close(model(tokens), plain(tokens))
                model.train()
                plain.train()
    optimizer.wait()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", [Attentive, Shuffled])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"parameters_as_bucket_view": True},
        {"shard_gradients": True},
        {"shard_gradients": True, "partition": "elements"},
    ],
    ids=str,
)
def test_training_equals_the_plain_optimizer(
    run: Run, kind: type[nn.Module], options: dict[str, Any]
) -> None:
    run(2, _trained_alike, kind, options)


def test_three_ranks(run: Run) -> None:
    run(3, _trained_alike, Attentive, {"shard_gradients": True})


def test_a_compiled_model(run: Run) -> None:
    run(2, _trained_alike, Attentive, {"shard_gradients": True}, True)


def _stepped(model: nn.Module, **options: Any) -> ZeroRedundancyOptimizer:
    """An optimizer whose step every rank has done and not awaited."""
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.SGD,
        lr=0.5,
        overlap_with_forward=True,
        module=model,
        **options,
    )
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def _expected(plain: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach() - 0.5 for parameter in plain.parameters()]


def _require_new(values: Sequence[torch.Tensor], plain: nn.Module) -> None:
    for value, new in zip(values, _expected(plain), strict=True):
        torch.testing.assert_close(value.detach(), new)


def _reads(how: str) -> None:
    model, plain = _made(Attentive)
    with late_gathers():
        optimizer = _stepped(model)
        stale = any(
            not torch.allclose(ours, new)
            for ours, new in zip(model.parameters(), _expected(plain), strict=True)
        )
        assert stale  # what the methods below are for
        if how == "wait":
            optimizer.wait()
            _require_new(list(model.parameters()), plain)
        elif how == "state_dict":
            loaded = copy.deepcopy(plain)
            loaded.load_state_dict(model.state_dict())
            _require_new(list(loaded.parameters()), plain)
        elif how == "state_dict of a part":
            saved = model.layer.linear1.state_dict()
            torch.testing.assert_close(saved["weight"], plain.layer.linear1.weight - 0.5)
        elif how == "torch.save of the module":
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            _require_new(list(torch.load(file, weights_only=False).parameters()), plain)
        elif how == "load_state_dict":
            model.load_state_dict(plain.state_dict())
            optimizer.wait()
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs)
        elif how == "a part is called":
            hidden = torch.ones(1, 5, 8, dtype=torch.float64)
            with torch.no_grad():
                for parameter in plain.parameters():
                    parameter.sub_(0.5)
            torch.testing.assert_close(
                model.attention(hidden, hidden, hidden)[0],
                plain.attention(hidden, hidden, hidden)[0],
            )
        elif how == "add_param_group":
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
            _require_new(list(model.parameters()), plain)
    optimizer.wait()


@pytest.mark.parametrize(
    "how",
    [
        "wait",
        "state_dict",
        "state_dict of a part",
        "torch.save of the module",
        "load_state_dict",
        "a part is called",
        "add_param_group",
    ],
)
def test_whoever_reads_gets_new_values(run: Run, how: str) -> None:
    run(2, _reads, how)


def _awaits_what_it_needs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    model(torch.ones(1, 16))  # nothing is known of calls before there is an optimizer
    with late_gathers():
        optimizer = _stepped(model)
        model(torch.ones(1, 16))  # the first awaits all, and learns who is called
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert optimizer._forward_gather is not None
        pending = optimizer._forward_gather._pending
        counts = [len(pending)]
        for layer in model:
            layer.register_forward_hook(lambda *_: counts.append(len(pending)))
        model(torch.ones(1, 16))
    assert counts == [8, 6, 4, 2, 0]


def test_a_module_waits_for_what_it_needs(run: Run) -> None:
    run(2, _awaits_what_it_needs)


def _outside_the_module() -> None:
    model, plain = _made(Attentive)
    outside = nn.Parameter(torch.ones(4))
    with late_gathers():
        optimizer = ZeroRedundancyOptimizer(
            [*model.parameters(), outside],
            torch.optim.SGD,
            lr=0.5,
            overlap_with_forward=True,
            module=model,
        )
        for parameter in [*model.parameters(), outside]:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert outside.tolist() == [0.5] * 4
        optimizer.wait()
    _require_new(list(model.parameters()), plain)


def test_parameters_outside_the_module_are_awaited_in_the_step(run: Run) -> None:
    run(2, _outside_the_module)


def _thawed() -> None:
    model, _ = _made(Attentive)
    model.head.bias.requires_grad_(False)
    with late_gathers():
        optimizer = _stepped(model)
        optimizer.wait()
        before = model.head.bias.detach().clone()
        model.head.bias.requires_grad_(True)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        model(_tokens(0, 0))
    torch.testing.assert_close(model.head.bias.detach(), before - 0.5)


def test_a_thawed_parameter(run: Run) -> None:
    run(2, _thawed)


class _Failing(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        if dist.get_rank() == 1:
            raise ArithmeticError("on purpose")


def _evaluates_on_rank_0() -> None:
    """While the other rank waits for it, and without room in memory that they share."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    options: dict[str, Any] = {"parameters_as_bucket_view": True, "overlap_with_forward": True}
    with (
        mock.patch.multiple(host_memory, ARENA_BYTES=0, RESERVED_BYTES=0),
        mock.patch.object(sharding_plan, "CAPACITY_BYTES", 64),
    ):
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(),
            torch.optim.SGD,
            process_group=dist.new_group(),
            module=model,
            lr=0.1,
            shard_gradients=True,
            **options,
        )
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            if dist.get_rank() == 0:
                model(torch.ones(2, 8))
            dist.barrier()


def test_one_rank_may_evaluate_while_the_others_wait(run: Run) -> None:
    run(2, _evaluates_on_rank_0)


def _failing_step() -> str:
    model, plain = _made(Attentive)
    with late_gathers():
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), _Failing, lr=0.5, overlap_with_forward=True, module=model
        )
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        with pytest.raises((ArithmeticError, RuntimeError)) as caught:
            optimizer.step()
        optimizer.wait()
    _require_new(list(model.parameters()), plain)
    return str(caught.value)


def test_a_step_that_fails_on_one_rank(run: Run) -> None:
    messages = run(2, _failing_step)
    assert "rank 1" in messages[0]
    assert messages[1] == "on purpose"


def _without_module() -> None:
    with pytest.raises(ValueError, match="needs module="):
        ZeroRedundancyOptimizer(
            [nn.Parameter(torch.ones(2))], torch.optim.SGD, lr=1.0, overlap_with_forward=True
        )


def test_it_needs_a_module(run: Run) -> None:
    run(2, _without_module)


def _in_a_subgroup() -> None:
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return
    model, plain = _made(Attentive)
    with late_gathers():
        _stepped(model, process_group=group)
        model(_tokens(0, 0))
    _require_new(list(model.parameters()), plain)


def test_a_subgroup(run: Run) -> None:
    run(3, _in_a_subgroup)
