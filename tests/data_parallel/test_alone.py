"""Without a process group, and where ``WORLD_SIZE`` doesn't say otherwise: the plain optimizer."""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tensorplay.distributed.optim import DistributedOptimizer
from tests.data_parallel.twins import make_small_and_large
from tests.reference.data_parallel import ADAMW, squares
from tests.reference.optimizers import OPTIMIZERS
from tests.reference.training import first_difference, values_of


@pytest.mark.parametrize("world_size", [None, "1"])
@pytest.mark.parametrize("options", [{}, {"compression": "bf16", "gradient_predivide_factor": 3.0}])
def test_it_is_the_plain_optimizer(world_size: str | None, options: dict[str, object]) -> None:
    assert not dist.is_initialized()
    environment = {} if world_size is None else {"WORLD_SIZE": world_size}
    with mock.patch.dict(os.environ, environment):
        for name in ("AdamW fused", "SGD momentum"):
            optimizer_class, defaults = OPTIMIZERS[name]
            models = [make_small_and_large() for _ in range(2)]
            plain = optimizer_class(models[0].parameters(), **defaults)
            ours = DistributedOptimizer(
                optim=optimizer_class, params=models[1].parameters(), **options, **defaults
            )
            for step in range(3):
                for model, optimizer in zip(models, (plain, ours), strict=True):
                    optimizer.zero_grad()
                    squares(step)(model, 0)
                    optimizer.step()
                difference = first_difference(*(values_of(m.parameters()) for m in models))
                assert difference is None, f"{name}, step {step}: {difference}"
            ours.synchronize()
            ours.broadcast_optimizer_state()
            assert ours.check_replicas() is None
            assert ours.process_group is None


def test_a_group_that_comes_later_needs_a_new_optimizer() -> None:
    optimizer = DistributedOptimizer(
        torch.optim.AdamW, make_small_and_large().parameters(), **ADAMW
    )
    with pytest.raises(ValueError, match="root=1 is not a rank of a group of 1"):
        optimizer.broadcast_parameters(root=1)
