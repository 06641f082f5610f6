"""What can't work is refused on every rank, by name and with the cure, and nothing has changed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tests.reference.data_parallel import Twins, make_parameters, squares

Run = Callable[..., list[Any]]


def _message(function: Callable[[], Any], expected: type[Exception] = Exception) -> str:
    try:
        function()
    except expected as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _dtensor() -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Replicate()]))
    plain = make_parameters((3,))
    optimizer = ZeroRedundancyOptimizer(
        plain.parameters(), torch.optim.SGD, lr=0.1, shard_gradients=True
    )
    return [
        _message(
            lambda: ZeroRedundancyOptimizer([weight], torch.optim.SGD, lr=0.1, shard_gradients=True)
        ),
        _message(lambda: optimizer.add_param_group({"params": [weight]})),
        str(len(optimizer.param_groups)),
    ]


def test_a_dtensor(run: Run) -> None:
    for at_construction, later, num_groups in run(2, _dtensor):
        for message in (at_construction, later):
            assert message.startswith("TypeError: parameter 0 is a DTensor")
            assert "leave it False" in message
        assert num_groups == "1"


def _sparse(rows: int, on_rank: int | None, was_dense: bool) -> str:
    """An embedding whose gradient is sparse, on all ranks or on one only, perhaps dense before."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding = nn.Embedding(rows, 8)
            self.linear = nn.Linear(8, 3)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.linear(self.embedding(tokens))
            return output

    def passes(model: nn.Module, rank: int) -> None:
        model(torch.tensor([1, 2 + rank])).square().sum().backward()

    twins = Twins(Net)
    if was_dense:
        twins.train(lambda _: passes, steps=1)
        twins.zero_grad()
    embedding: Any = twins.model.embedding
    embedding.sparse = on_rank in (None, twins.rank)
    message = _message(lambda: passes(twins.model, twins.rank))
    twins.require_same("after the refusal")
    embedding.sparse = False
    twins.train(lambda _: passes)
    return message


@pytest.mark.parametrize(("rows", "was_dense"), [(10, False), (20_000, False), (20_000, True)])
@pytest.mark.parametrize("on_rank", [None, 1])
def test_a_sparse_gradient(run: Run, rows: int, on_rank: int | None, was_dense: bool) -> None:
    for rank, message in enumerate(run(2, _sparse, rows, on_rank, was_dense)):
        kind = "TypeError" if on_rank in (None, rank) else "PeerError"
        assert message.startswith(kind)
        assert "parameter 0" in message
        assert "sparse=False" in message


@pytest.mark.parametrize("on_rank", [None, 1])
def test_a_gradient_that_has_become_sparse_is_added_to_a_dense_one(
    run: Run, on_rank: int | None
) -> None:
    assert run(2, _sparse, 10, on_rank, True) == ["", ""]


def _without_shard_gradients() -> list[str]:
    model = make_parameters((3,), (4,))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    return [
        _message(optimizer.no_sync),
        _message(
            lambda: ZeroRedundancyOptimizer(
                model.parameters(), torch.optim.SGD, lr=0.1, module=model
            )
        ),
    ]


def test_options_that_need_shard_gradients(run: Run) -> None:
    for no_sync, module in run(2, _without_shard_gradients):
        assert no_sync.startswith("RuntimeError: no_sync() needs shard_gradients=True")
        assert module.startswith("ValueError: module= is used with shard_gradients=True only")


def _on_one_rank_only(what: str) -> str:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    first = dist.get_rank() == 0
    options: dict[str, Any] = {
        "shard_gradients": {"shard_gradients": first},
        "overlap_with_backward": {"shard_gradients": True, "overlap_with_backward": first},
        "module": {"shard_gradients": True, "module": model if first else None},
        "buffers": {
            "shard_gradients": True,
            "module": model if first else nn.Sequential(*model, nn.BatchNorm1d(2)),
        },
    }[what]
    return _message(
        lambda: ZeroRedundancyOptimizer(
            list(model.parameters()), torch.optim.SGD, lr=0.1, **options
        )
    )


@pytest.mark.parametrize("what", ["shard_gradients", "overlap_with_backward", "module", "buffers"])
def test_what_is_passed_on_one_rank_only(run: Run, what: str) -> None:
    for message in run(2, _on_one_rank_only, what):
        assert message.startswith("RankDisagreementError")
        assert {"buffers": "module"}.get(what, what) in message


def _no_parameter_of_ours() -> list[str]:
    twins = Twins(lambda: make_parameters((3,), (4,)))
    twins.backward(squares(0))
    own = next(twins.model.parameters())
    stranger = nn.Parameter(torch.ones(3))
    messages = [
        _message(lambda: twins.sharded.full_grad(stranger)),
        _message(lambda: twins.sharded.full_grad(stranger if twins.rank == 0 else own)),
        _message(lambda: twins.sharded.full_grad(list(twins.model.parameters())[twins.rank])),
    ]
    twins.require_same_gradients()
    return messages


def test_full_grad_of_something_else(run: Run) -> None:
    first, second = run(2, _no_parameter_of_ours)
    assert all(message.startswith("ValueError") for message in (*first[:2], second[0]))
    assert second[1].startswith("PeerError")
    assert "full_grad() needs a parameter" in second[1]
    for message in (first[2], second[2]):
        assert message.startswith("RankDisagreementError")


def _no_sync_on_one_rank() -> str:
    twins = Twins(lambda: make_parameters((3,), (4,)))
    twins.train(squares, steps=1)
    twins.zero_grad()

    def train() -> None:
        if twins.rank == 0:
            squares(0)(twins.model, twins.rank)
        else:
            with twins.sharded.no_sync():
                squares(0)(twins.model, twins.rank)
        twins.sharded.step()

    message = _message(train)
    twins.require_same("nothing has changed")
    twins.train(squares)
    return message


def test_no_sync_on_one_rank_only(run: Run) -> None:
    for message in run(2, _no_sync_on_one_rank):
        assert message.startswith("RankDisagreementError")
        assert "backward" in message


def _clip_arguments() -> list[str]:
    twins = Twins(lambda: make_parameters((3,), (4,)))
    twins.backward(squares(0))
    messages = [
        _message(lambda: twins.sharded.clip_grad_norm_(1.0, norm_type=0)),
        _message(lambda: twins.sharded.clip_grad_norm_(1.0 + twins.rank)),
    ]
    twins.require_same_gradients()
    return messages


def test_clipping_arguments(run: Run) -> None:
    for zero, differing in run(2, _clip_arguments):
        assert zero.startswith("ValueError: norm_type=0")
        assert differing.startswith("RankDisagreementError")
        assert "max_norm" in differing
