"""Whatever differs between ranks raises on every rank, naming it; nobody hangs, nothing changes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tensorplay.distributed.optim import ZeroRedundancyOptimizer
from tests.launch import run_ranks
from tests.reference.training import make_model, require_equal, set_gradients, values_of

Parameter = torch.nn.Parameter


def _parameters(rank: int, difference: str) -> dict[str, Any]:
    a, b = torch.ones(2, 3), torch.ones(4)
    odd = rank == 1
    cases: dict[str, Callable[[], dict[str, Any]]] = {
        "order": lambda: {
            "params": [("b", Parameter(b)), ("a", Parameter(a))][:: -1 if odd else 1]
        },
        "shape": lambda: {"params": [("a", Parameter(a.T if odd else a))]},
        "dtype": lambda: {"params": [Parameter(a), Parameter(b.double() if odd else b)]},
        "number": lambda: {"params": [Parameter(a), *([Parameter(b)] if odd else [])]},
        "frozen": lambda: {"params": [Parameter(a), Parameter(b, requires_grad=not odd)]},
        "groups": lambda: {
            "params": [{"params": [Parameter(a), *([Parameter(b)] if odd else [])]}]
            + ([] if odd else [{"params": [Parameter(b)]}])
        },
        "option": lambda: {"params": [Parameter(a)], "weight_decay": 0.25 if odd else 0.5},
        "class": lambda: {
            "params": [Parameter(a)],
            "optimizer_class": torch.optim.AdamW if odd else torch.optim.Adam,
            **({} if odd else {"decoupled_weight_decay": True}),
            "weight_decay": 0.1,
        },
        "mode": lambda: {"params": [Parameter(a)], "parameters_as_bucket_view": odd},
        "only one invalid": lambda: {"params": [Parameter(a)], "lr": -1.0 if odd else 0.1},
    }
    return {"optimizer_class": torch.optim.Adam, **cases[difference]()}


EXPECTED = {
    "order": r"parameters\[0\].name is 'b' on rank 0 but 'a' on rank 1",
    "shape": r"parameters\[0\] \('a'\).shape\[0\] is 2 on rank 0 but 3 on rank 1",
    "dtype": r"parameters\[1\].dtype is torch.float32 on rank 0 but torch.float64 on rank 1",
    "number": r"parameters\[1\] is absent on rank 0 but ",
    "frozen": r"parameters\[1\].requires_grad is True on rank 0 but False on rank 1",
    "groups": r"parameters\[1\].group is 1 on rank 0 but 0 on rank 1",
    "option": r"param_groups\[0\].weight_decay is 0.5 on rank 0 but 0.25 on rank 1",
    "class": r"optimizer_class is 'torch.optim.adam.Adam' on rank 0 but",
    "mode": r"parameters_as_bucket_view is False on rank 0 but True on rank 1",
    "only one invalid": "Invalid learning rate: -1.0",
}


def _construct(difference: str) -> str:
    arguments = _parameters(dist.get_rank(), difference)
    params = arguments["params"]
    flat = [p[1] if isinstance(p, tuple) else p for p in params if not isinstance(p, dict)]
    pointers = [p.data_ptr() for p in flat]
    with pytest.raises((RuntimeError, ValueError), match=EXPECTED[difference]) as caught:
        ZeroRedundancyOptimizer(**arguments)
    assert [p.data_ptr() for p in flat] == pointers
    dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize("difference", EXPECTED)
def test_at_construction(difference: str) -> None:
    run_ranks(2, _construct, difference)


def _different_rate() -> None:
    model = make_model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.5)
    before = values_of(model.parameters())
    set_gradients(model.parameters(), 0)
    optimizer.param_groups[0]["lr"] = 0.5 / (1 + dist.get_rank())
    expected = r"ZeroRedundancyOptimizer.step: param_groups\[0\].lr is 0.5 on rank 0 but 0.25 on ra"
    with pytest.raises(RuntimeError, match=expected):
        optimizer.step()
    require_equal(before, values_of(model.parameters()))
    assert not optimizer.state
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()


def test_options_at_a_step() -> None:
    run_ranks(2, _different_rate)


def _plateau() -> None:
    model = make_model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.5)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    set_gradients(model.parameters(), 0)
    for _ in range(2):
        optimizer.step()
        scheduler.step(1.0 if dist.get_rank() else 1.0 / (scheduler.last_epoch + 1))
    with pytest.raises(RuntimeError, match=r"lr is 0.5 on rank 0 but 0.05 on rank 1"):
        optimizer.step()


def test_a_plateau_scheduler_fed_with_each_ranks_own_metric() -> None:
    run_ranks(2, _plateau)


class _FailsOnRankOne(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        if dist.get_rank() == 1:
            raise ValueError("seventeen")


def _failing_update(resident: bool) -> list[torch.Tensor]:
    model = make_model()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), _FailsOnRankOne, lr=0.1, parameters_as_bucket_view=resident
    )
    set_gradients(model.parameters(), 0)
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match=r"^seventeen$"):
            optimizer.step()
    else:
        with pytest.raises(RuntimeError, match=r"rank 1: ValueError: seventeen$"):
            optimizer.step()
    return values_of(model.parameters())


@pytest.mark.parametrize("resident", [False, True])
def test_an_update_that_fails_on_one_rank_raises_on_all_and_leaves_equal_replicas(
    resident: bool,
) -> None:
    first, *others = run_ranks(3, _failing_update, resident)
    for other in others:
        require_equal(first, other)


def _different_calls() -> None:
    optimizer = ZeroRedundancyOptimizer(make_model().parameters(), torch.optim.SGD, lr=0.1)
    expected = (
        "call of ZeroRedundancyOptimizer is 'step' on rank 0 but 'consolidate_state_dict' on rank 1"
    )
    with pytest.raises(RuntimeError, match=expected):
        optimizer.step() if dist.get_rank() == 0 else optimizer.consolidate_state_dict()


def test_different_calls_on_different_ranks() -> None:
    run_ranks(2, _different_calls)


def _different_targets() -> None:
    optimizer = ZeroRedundancyOptimizer(make_model().parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(RuntimeError, match="to is 0 on rank 0 but 1 on rank 1"):
        optimizer.consolidate_state_dict(to=dist.get_rank())


def test_different_targets_of_a_consolidation() -> None:
    run_ranks(2, _different_targets)


def _view_on_one_rank() -> None:
    flat = torch.ones(10)
    parameter = Parameter(flat[:6] if dist.get_rank() else torch.ones(6))
    optimizer = ZeroRedundancyOptimizer([parameter], torch.optim.SGD, lr=0.1)
    set_gradients([parameter], 0)
    optimizer.step()


def test_a_view_on_one_rank_is_no_disagreement_where_parameters_keep_their_storage() -> None:
    run_ranks(2, _view_on_one_rank)
