"""The specification's snippets run as written, on gloo and the CPU."""

import re

import torch
import torch.distributed as dist

from tensorplay.distributed.optim import PostLocalSGDOptimizer
from tests.launch import run_ranks

PACKAGE_PAGE = """
import tensorplay as tp
import tensorplay.distributed as dist
from tensorplay.distributed.optim import ZeroRedundancyOptimizer

dist.init_process_group("nccl")
model = tp.nn.Linear(1024, 1024).cuda()

optimizer = ZeroRedundancyOptimizer(  # shards the Adam state across ranks
    model.parameters(),
    optimizer_class=tp.optim.Adam,
    lr=1e-3,
)
"""

ARTICLE = """
import tensorplay.distributed as dist
import tensorplay

dist.init_process_group(backend='nccl', init_method='env://')
tensorplay.cuda.set_device(dist.get_rank())

import tensorplay.nn as nn

model = nn.Linear(100, 10).cuda()

from tensorplay.distributed.optim import ZeroRedundancyOptimizer

optimizer = ZeroRedundancyOptimizer(
    model.parameters(),
    optimizer_class=tensorplay.optim.Adam,
    lr=1e-4
)
"""

POST_LOCAL_SGD = """
import tensorplay as tp
model = tp.nn.Linear(10, 10)

from tensorplay.distributed.algorithms.model_averaging.averagers import (
    PeriodicModelAverager,
)
from tensorplay.distributed.optim import PostLocalSGDOptimizer

local_optim = tp.optim.SGD(model.parameters(), lr=0.01)
optimizer = PostLocalSGDOptimizer(
    optim=local_optim,
    averager=PeriodicModelAverager(period=4, warmup_steps=100),
)
"""

ARTICLE_STEPS = """
import tensorplay.distributed as dist
import tensorplay

dist.init_process_group(backend='nccl', init_method='env://')
tensorplay.cuda.set_device(dist.get_rank())

import tensorplay.nn as nn

model = nn.Linear(100, 10).cuda()

from tensorplay.distributed.optim import DistributedOptimizer
from tensorplay.distributed.optim.functional_adam import functional_adam

optimizer = DistributedOptimizer(
    optim=tensorplay.optim.Adam,
    params=model.parameters(),
    named_parameters=dict(model.named_parameters())
)
"""

TRAINING_STEP = """
features = model.in_features
model(tensorplay.ones(2, features)).sum().backward()
optimizer.step()
optimizer.zero_grad()
"""


def on_cpu(snippet: str) -> str:
    """The snippet for a machine without GPUs; the process group is there already."""
    snippet = re.sub(r"\n.*(init_process_group|set_device)\(.*", "", snippet)
    return snippet.replace(".cuda()", "")


def _optimizer_of(snippet: str) -> torch.optim.Optimizer:
    names: dict[str, object] = {}
    exec(on_cpu(snippet) + "\nimport tensorplay\n" + TRAINING_STEP, names)  # noqa: S102 - the test
    optimizer = names["optimizer"]
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer


def _run(snippet: str) -> int:
    optimizer = _optimizer_of(snippet)
    return sum(parameter.numel() for parameter in optimizer.state)


def test_the_package_page_shards_adam() -> None:
    assert sum(run_ranks(2, _run, PACKAGE_PAGE)) == 1024 * 1024 + 1024


def test_the_article_shards_adam() -> None:
    assert sum(run_ranks(2, _run, ARTICLE)) == 100 * 10 + 10


def _run_post_local_sgd() -> int:
    optimizer = _optimizer_of(POST_LOCAL_SGD)
    assert isinstance(optimizer, PostLocalSGDOptimizer)
    return optimizer.averager.step


def test_the_package_page_runs_post_local_sgd() -> None:
    assert run_ranks(2, _run_post_local_sgd) == [1, 1]


def _run_replicated() -> tuple[int, list[float]]:
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    names: dict[str, object] = {}
    exec(on_cpu(ARTICLE_STEPS) + TRAINING_STEP, names)  # noqa: S102 - the test
    optimizer = names["optimizer"]
    assert isinstance(optimizer, torch.optim.Optimizer)
    (weight, _) = optimizer.param_groups[0]["params"]
    return sum(parameter.numel() for parameter in optimizer.state), weight[0, :5].tolist()


def test_the_article_averages_gradients() -> None:
    first, second = run_ranks(2, _run_replicated)
    assert first == second
    assert first[0] == 100 * 10 + 10


def test_the_article_without_a_process_group_is_plain_adam() -> None:
    numel, weight = _run_replicated()
    assert numel == 100 * 10 + 10
    torch.manual_seed(0)
    model = torch.nn.Linear(100, 10)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 100)).sum().backward()
    optimizer.step()
    assert model.weight[0, :5].tolist() == weight


def _import_without_group() -> None:
    import tensorplay.distributed

    assert tensorplay.distributed.init_process_group is dist.init_process_group


def test_the_facade_initialises_torchs_process_group() -> None:
    run_ranks(1, _import_without_group)
