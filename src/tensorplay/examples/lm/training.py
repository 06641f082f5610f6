"""One training run under DistributedDataParallel, the same whatever the placement of the state."""

import time
from collections.abc import Iterable
from dataclasses import asdict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from tensorplay.examples.lm.checkpoint import Checkpoint, write_checkpoint
from tensorplay.examples.lm.errors import UsageError
from tensorplay.examples.lm.memory import PeakGradients, PeakMemory
from tensorplay.examples.lm.model import ByteGPT
from tensorplay.examples.lm.options import Options
from tensorplay.examples.lm.placement import (
    LARGEST_GRADIENT_NORM,
    PLACEMENTS,
    build_optimizers,
    describe_shards,
    full_states,
    gather_nbytes,
    in_backward,
    state_nbytes,
)
from tensorplay.examples.lm.record import RunRecord
from tensorplay.examples.lm.text import Text, cut_windows, partition_batch, sample_positions

WARMUP_STEPS = 10


def train(
    mode: str, options: Options, text: Text, checkpoint: Checkpoint | None, device: torch.device
) -> RunRecord:
    """Trains from the seed, or from ``checkpoint``, to ``options.steps``; every rank calls it."""
    config = options.config
    rank, world_size = dist.get_rank(), dist.get_world_size()
    share = partition_batch(config.batch, world_size, rank)
    peak = PeakMemory(device)

    torch.manual_seed(config.seed)
    model = ByteGPT(config.model).to(device)
    steps_in_backward = mode == "in-backward"
    gradients = PeakGradients(model.parameters())
    replica: nn.Module = model
    if not (steps_in_backward and world_size == 1):  # DDP's buckets would keep all gradients
        replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    place = in_backward(model) if steps_in_backward else PLACEMENTS[mode]
    optimizers = build_optimizers(config.optimizer, model, place, config.lr)
    first_step = 0
    if checkpoint is not None:
        first_step = checkpoint.step
        _restore_(model, optimizers, checkpoint)

    losses: list[float] = []
    steps = tqdm(
        range(first_step, options.steps),
        desc=f"{mode:>10}",
        initial=first_step,
        total=options.steps,
        unit="step",
        disable=rank != 0,
        mininterval=0.5,
        dynamic_ncols=True,
    )
    began = time.perf_counter()
    for step in steps:
        _set_learning_rate_(optimizers, config.lr * min(1.0, (step + 1) / WARMUP_STEPS))
        positions = sample_positions(
            len(text.tokens), config.context, config.batch, config.seed, step
        )
        inputs, targets = cut_windows(text.tokens, positions[share], config.context)
        logits = replica(inputs.to(device))
        summed = F.cross_entropy(
            logits.flatten(0, 1), targets.to(device).flatten(), reduction="sum"
        )
        # Shares may differ in size, so each rank contributes a part of the global mean. DDP
        # averages over ranks where these parts want summing: hence the factor.
        part = summed / (config.batch * config.context)
        torch.autograd.backward(part * world_size)
        if step == first_step:
            gradients.stop()
        if not steps_in_backward:
            # DDP leaves the whole mean gradient on every rank: torch's own clipping is right here.
            clipped = model.parameters()
            for together in [[p] for p in clipped] if config.in_backward else [clipped]:
                torch.nn.utils.clip_grad_norm_(together, LARGEST_GRADIENT_NORM)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

        losses.append(_sum_over_ranks(part.detach()))
        steps.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
        if step == first_step:
            first_step_s = time.perf_counter() - began
    elapsed_s = time.perf_counter() - began
    steps.close()

    record = RunRecord(
        mode=mode,
        device=device.type,
        first_step=first_step,
        losses=losses,
        state_nbytes=_largest_over_ranks(state_nbytes(optimizers), device),
        peak_memory_nbytes=_largest_over_ranks(peak.nbytes(), device),
        gradient_nbytes=_largest_over_ranks(gradients.nbytes, device),
        steps_per_second=(
            (len(losses) - 1) / (elapsed_s - first_step_s) if len(losses) > 1 else 1 / elapsed_s
        ),
        sent_nbytes=_all_reduce_nbytes(model, world_size) + gather_nbytes(optimizers) / world_size,
        shards=describe_shards(optimizers),
    )
    if options.save is not None and mode == options.modes[-1]:
        states = full_states(optimizers)
        if rank == 0:
            write_checkpoint(
                options.save,
                Checkpoint(options.steps, asdict(config), text.digest, model.state_dict(), states),
            )
    return record


def check_same_text(text: Text, device: torch.device) -> None:
    """Raises on every rank unless all of them learn the same text; every rank calls it."""
    digest = torch.tensor(list(bytes.fromhex(text.digest)), dtype=torch.int64, device=device)
    bounds = torch.stack([digest, -digest])
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
    if not torch.equal(bounds[0], -bounds[1]):
        raise UsageError(
            "the machines read different texts (their Python versions may differ); "
            "pass the same --text FILE on all of them"
        )


def _restore_(
    model: ByteGPT, optimizers: Iterable[torch.optim.Optimizer], checkpoint: Checkpoint
) -> None:
    model.load_state_dict(checkpoint.model)
    for optimizer, state in zip(optimizers, checkpoint.optimizers, strict=True):
        optimizer.load_state_dict(state)


def _set_learning_rate_(optimizers: Iterable[torch.optim.Optimizer], lr: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr


def _sum_over_ranks(value: torch.Tensor) -> float:
    total = value.clone()
    dist.all_reduce(total)
    return total.item()


def _largest_over_ranks(value: int, device: torch.device) -> int:
    largest = torch.tensor(value, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest.item())


def _all_reduce_nbytes(model: ByteGPT, world_size: int) -> float:
    """Bytes that each rank sends when DDP all-reduces the gradients in a ring."""
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    return 2 * (world_size - 1) / world_size * nbytes
