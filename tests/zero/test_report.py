"""``sharding_report()`` and ``repr()``: what a user prints."""

import torch
import torch.distributed as dist

from tensorplay.distributed.optim import ShardingReport, ZeroRedundancyOptimizer
from tests.launch import run_ranks
from tests.reference.training import set_gradients


def _report(shapes: list[tuple[int, ...]], frozen: int) -> tuple[ShardingReport, str, str, int]:
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    parameters[frozen].requires_grad_(False)
    optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.1)
    text = str(optimizer.sharding_report())
    set_gradients(parameters, 0)
    parameters[frozen].grad = None
    optimizer.step()
    actual = sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values())
    return optimizer.sharding_report(), text, repr(optimizer), actual


def test_the_report_adds_up() -> None:
    shapes: list[tuple[int, ...]] = [(100, 10), (500,), (30,), (20, 20), (64,)]
    results = run_ranks(2, _report, shapes, 4)
    for rank, (report, _, _, actual) in enumerate(results):
        assert sum(share.parameters for share in report.ranks) == 5
        assert sum(share.elements for share in report.ranks) == 1000 + 500 + 30 + 400 + 64
        assert report.load_ratio == 1000 / ((1000 + 500 + 30 + 400) / 2)
        assert report.buckets == 1
        assert report.ranks[rank].measured
        assert report.ranks[rank].state_bytes == actual
        other = report.ranks[1 - rank]
        assert not other.measured
        assert other.state_bytes is not None
        assert abs(other.state_bytes - results[1 - rank][3]) < 30


def test_the_report_reads_well() -> None:
    before, after = run_ranks(2, _report, [(1000, 1000), (1000, 500)], 1)[0][1::-1]
    lines = before.splitlines()
    assert lines[0].split() == ["rank", "parameters", "elements", "state"]
    assert lines[1].split() == ["0", "1", "1,000,000", "0", "B"]
    assert lines[-1] == (
        "load ratio 2.000 (largest / mean; 1 is even), 1 bucket, 4.00 MB sent per step by all ranks "
        "together to gather the parameters"
    )
    assert str(after).splitlines()[1].split() == ["0", "1", "1,000,000", "8.00", "MB"]


def test_repr_names_the_local_optimizer_and_the_options() -> None:
    text = run_ranks(2, _report, [(2,), (2,)], 0)[1][2]
    assert text.startswith("ZeroRedundancyOptimizer (\nParameter Group 0\n")
    assert "    lr: 0.1\n" in text
    assert text.endswith("sharded Adam on rank 1 of 2\n)")


def _nothing_owned() -> str:
    optimizer = ZeroRedundancyOptimizer([torch.nn.Parameter(torch.ones(4))], torch.optim.Adam)
    return str(optimizer.sharding_report()) if dist.get_rank() == 1 else ""


def test_a_rank_that_owns_nothing_can_report() -> None:
    assert "not yet" in run_ranks(2, _nothing_owned)[1]
