"""How long it takes to plan P parameters over W ranks: owners, then bucket layouts.

Times are seconds of CPU time on one core, the best of several runs.
"""

import argparse
import gc
import random
import time
from collections.abc import Iterator

import torch

from tensorplay.distributed.optim._core.bucket_layout import layout_buckets
from tensorplay.distributed.optim._core.parameter_spec import ParameterSpec
from tensorplay.distributed.optim._core.partition import partition_whole
from tensorplay.distributed.optim.zero.sharding_plan import CAPACITY_BYTES

SIZES = ((100, 8), (1_000, 64), (10_000, 256), (100_000, 8), (100_000, 128), (100_000, 1_024))
WIDTHS = (256, 384, 512, 768, 1024)


def layer_shapes(rng: random.Random) -> Iterator[tuple[int, ...]]:
    """The parameters of transformer blocks of various widths, one in eight with eight experts."""
    while True:
        width = rng.choice(WIDTHS)
        yield from [(width,), (width,)]  # a norm
        yield from [(3 * width, width), (3 * width,), (width, width), (width,)]  # attention
        yield from [(width,), (width,)]  # a norm
        for _ in range(8 if rng.random() < 1 / 8 else 1):
            yield from [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]


def make_specs(num_parameters: int) -> list[ParameterSpec]:
    """Specs without tensors; the shapes are the same in every run."""
    shapes = layer_shapes(random.Random(0))  # noqa: S311 - nothing secret
    device = torch.device("cpu")
    return [
        ParameterSpec(
            index, shape, (*shape[1:], 1), torch.bfloat16, device, True, index, owns_storage=True
        )
        for index, shape in zip(range(num_parameters), shapes, strict=False)
    ]


def best(times: list[tuple[float, float]]) -> tuple[float, float]:
    return min(times, key=sum)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks planning", description=__doc__)
    parser.add_argument("--repeat", type=int, default=3, help="runs, of which the best counts")
    repeat = parser.parse_args(argv).repeat
    print(
        f"{'P':>8} {'W':>6} {'GiB':>7} {'buckets':>8} {'λ':>6} {'owners s':>9} {'layout s':>9} {'s':>7}"
    )
    for num_parameters, num_ranks in SIZES:
        specs = make_specs(num_parameters)
        times = []
        for _ in range(repeat):
            gc.collect()
            start = time.process_time()
            partition = partition_whole(specs, num_ranks)
            middle = time.process_time()
            layouts = layout_buckets(specs, partition.owners, num_ranks, CAPACITY_BYTES)
            times.append((middle - start, time.process_time() - middle))
        owners_s, layout_s = best(times)
        gib = sum(spec.nbytes for spec in specs) / 2**30
        print(
            f"{num_parameters:>8} {num_ranks:>6} {gib:>7.1f} {len(layouts):>8} "
            f"{partition.load_ratio:>6.3f} {owners_s:>9.3f} {layout_s:>9.3f} "
            f"{owners_s + layout_s:>7.3f}"
        )
