"""The ways to train that are compared. To add one, add an entry to ``CANDIDATES``.

All use AdamW with the same options and, unless they say so, its fused kernel. What differs between
them is one subclass of ``Trainer``, where the plain one doesn't do, and a function that builds it.
"""

import dataclasses
import importlib
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from benchmarks.step.models import Batch

ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
FUSED: dict[str, Any] = {**ADAMW, "fused": True}


FLOOR = "floor"
KERNEL_TOLERANCE = 1e-6
NORM_TOLERANCE = 3e-5


class Trainer:
    """A model with its optimizer, stepped in phases; every method is called on all ranks.

    Args:
        module: what a training script would call: it takes a batch and returns the loss.
        optimizer: what a training script would step.
        local_optimizer: the optimizer that holds this rank's state, if that's another one.
    """

    def __init__(
        self, module: nn.Module, optimizer: Optimizer, local_optimizer: Any = None
    ) -> None:
        self.module = module
        self.optimizer = optimizer
        self.local_optimizer = optimizer if local_optimizer is None else local_optimizer

    def forward(self, batch: Batch) -> Tensor:
        """The loss of this rank's batch."""
        loss: Tensor = self.module(*batch)
        return loss

    def backward(self, loss: Tensor) -> None:
        """Computes gradients, and whatever communication happens meanwhile."""
        loss.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped

    def clip_(self, max_norm: float) -> None:
        """Clips the averaged gradients by their global norm."""
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

    def step_(self) -> None:
        """Updates the parameters and frees the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def finish(self) -> None:
        """Waits for what a step has left under way: nothing."""

    def full_parameters(self) -> list[Tensor]:
        """The parameters as every rank sees them after a step, in the model's order."""
        return [parameter.detach() for parameter in self.module.parameters()]

    def state_nbytes(self) -> int:
        """Bytes of optimizer state that this rank holds."""
        return sum(
            tensor.numel() * tensor.element_size()
            for state in self.local_optimizer.state.values()
            for tensor in state.values()
            if isinstance(tensor, Tensor)
        )


class SteppedInBackward(Trainer):
    """Backward has already stepped."""

    def step_(self) -> None:
        """Frees the gradients."""
        self.optimizer.zero_grad()


@dataclass(frozen=True)
class Candidate:
    """An entry of the table.

    Attributes:
        name: what ``--candidates`` calls it.
        label: what the table and the plot call it.
        family: whose it is; the plot has a colour for each.
        build: makes the trainer from a model, which it may change; called on all ranks.
        reference: name of the candidate whose step is the unit of this one's ratio.
        clips: false if it can't clip, so that it trains without.
        is_exact: whether the parameters must equal the reference's bit for bit.
        tolerance: the relative difference that is allowed otherwise.
        inert_steps: how many first steps don't update the parameters.
        needs: the package to import, for peers that may not be installed.
        trains: false for what only moves the bytes of a step, so that its parameters mean nothing.
    """

    name: str
    label: str
    family: str
    build: Callable[[nn.Module], Trainer]
    reference: str = "ddp"
    clips: bool = True
    is_exact: bool = True
    tolerance: float = KERNEL_TOLERANCE
    inert_steps: int = 0
    needs: str | None = None
    trains: bool = True

    def why_missing(self) -> str | None:
        """The reason why the peer can't be imported, or ``None`` if it can."""
        if self.needs is None:
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Megatron-core says what else it could use
                importlib.import_module(self.needs)
        except Exception as error:  # noqa: BLE001 - a broken peer is as good as none
            return f"{type(error).__name__}: {error}"
        return None


def _ddp(options: dict[str, Any]) -> Callable[[nn.Module], Trainer]:
    def build(module: nn.Module) -> Trainer:
        return Trainer(DistributedDataParallel(module), AdamW(module.parameters(), **options))

    return build


def _torch_zero(
    options: dict[str, Any], *, bucket_view: bool = False
) -> Callable[[nn.Module], Trainer]:
    def build(module: nn.Module) -> Trainer:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        zero = ZeroRedundancyOptimizer(
            module.parameters(), AdamW, parameters_as_bucket_view=bucket_view, **options
        )
        return Trainer(DistributedDataParallel(module), zero, zero.optim)

    return build


def _torch_zero_overlapped(module: nn.Module) -> Trainer:
    from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = DistributedDataParallel(module)
    zero = ZeroRedundancyOptimizer(module.parameters(), AdamW, overlap_with_ddp=True, **FUSED)
    # The hook refuses gloo, which it says may hang; a hang ends in the group's time-out.
    with mock.patch.object(dist, "get_backend", return_value="nccl"):
        hook = hook_with_zero_step(allreduce_hook, ddp, zero)
    ddp.register_comm_hook(None, hook)
    return SteppedInBackward(ddp, zero, _LateLocalOptimizer(zero))


class _LateLocalOptimizer:
    """The overlapped ZeRO builds its local optimizer in the second backward."""

    def __init__(self, zero: Any) -> None:
        self._zero = zero

    @property
    def state(self) -> dict[Tensor, dict[str, Tensor]]:
        state: dict[Tensor, dict[str, Tensor]] = self._zero.optim.state
        return state


def _fairscale_oss(module: nn.Module) -> Trainer:
    from fairscale.optim.oss import OSS

    oss = OSS(module.parameters(), optim=AdamW, **FUSED)
    return Trainer(DistributedDataParallel(module), oss, oss.optim)


class Floor(Trainer):
    """What a sharded step can't avoid over gloo, bucket by bucket, with nothing else around it.

    Each rank sends every other its part of flat memory of the model's size, adds up what it gets,
    steps a flat AdamW on its own part and sends that to all.
    """

    def __init__(self, module: nn.Module) -> None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        numel = sum(parameter.numel() for parameter in module.parameters())
        share = -(-numel // world_size)
        self._parameters = torch.zeros(world_size, share)
        self._gradients = torch.zeros(world_size, share)
        self._received = torch.zeros(world_size, share)
        self._own = nn.Parameter(self._parameters[rank])
        self._own.grad = self._gradients[rank]
        super().__init__(module, AdamW([self._own], **FUSED))

    def clip_(self, max_norm: float) -> None:
        """Nothing."""

    def step_(self) -> None:
        """Reduces, steps and gathers."""
        rank, peers = (
            dist.get_rank(),
            [p for p in range(dist.get_world_size()) if p != dist.get_rank()],
        )
        for sources, targets in (
            (self._gradients, self._received),
            ([self._own.detach()] * dist.get_world_size(), self._parameters),
        ):
            receiving = [(dist.irecv(targets[peer], peer), peer) for peer in peers]
            sending = [dist.isend(sources[peer], peer) for peer in peers]
            for work, peer in receiving:
                work.wait()
                if targets is self._received:
                    self._gradients[rank].add_(targets[peer])
            if targets is self._received:
                self.optimizer.step()
            for work in sending:
                work.wait()
        self.module.zero_grad()


class DeepSpeedEngine(Trainer):
    """DeepSpeed's engine, which clips inside its step."""

    def backward(self, loss: Tensor) -> None:
        """See :class:`Trainer`."""
        self.module.backward(loss)  # type: ignore[operator] # an engine has it

    def clip_(self, max_norm: float) -> None:
        """Lets the next step clip."""
        self.optimizer.clip_grad = max_norm  # type: ignore[attr-defined] # DeepSpeed's own

    def step_(self) -> None:
        """See :class:`Trainer`."""
        self.module.step()  # type: ignore[operator] # an engine has it


def _deepspeed(stage: int) -> Callable[[nn.Module], Trainer]:
    def build(module: nn.Module) -> Trainer:
        rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
        os.environ.update({"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size})
        deepspeed = importlib.import_module("deepspeed")
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        backend = importlib.import_module("deepspeed.comm.torch")
        with mock.patch.object(backend, "build_shm_op", return_value=None):  # it would compile C++
            deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
        engine, zero, _, _ = deepspeed.initialize(
            model=module,
            optimizer=AdamW(module.parameters(), **FUSED),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "zero_allow_untested_optimizer": True,
                "zero_optimization": {"stage": stage},
            },
        )
        return DeepSpeedEngine(engine, zero, zero.optimizer)

    return build


class MegatronTrainer(Trainer):
    """Megatron-core's training step, which clips inside the optimizer's."""

    def backward(self, loss: Tensor) -> None:
        """Computes gradients into Megatron's flat buffer, then reduces them to their owners."""
        super().backward(loss)
        self.module.finish_grad_sync()  # type: ignore[operator] # Megatron's wrapper has it

    def clip_(self, max_norm: float) -> None:
        """Lets the next step clip."""
        self.optimizer.config.clip_grad = max_norm  # type: ignore[attr-defined] # Megatron's own

    def step_(self) -> None:
        """Clips, updates, gathers, and zeroes the buffer, which it keeps."""
        self.optimizer.step()
        self.module.zero_grad_buffer()  # type: ignore[operator] # Megatron's wrapper has it
        self.optimizer.zero_grad()


def _megatron(module: nn.Module) -> Trainer:
    """See :mod:`benchmarks.step.megatron_on_cpu` for what was adapted."""
    from benchmarks.step.megatron_on_cpu import distribute

    distributed, optimizer = distribute(module, ADAMW)
    return MegatronTrainer(distributed, optimizer, optimizer.optimizer)


def _tensorplay_zero(*, bucket_view: bool) -> Callable[[nn.Module], Trainer]:
    def build(module: nn.Module) -> Trainer:
        from tensorplay.distributed.optim import ZeroRedundancyOptimizer

        zero = ZeroRedundancyOptimizer(
            module.parameters(), AdamW, parameters_as_bucket_view=bucket_view, **FUSED
        )
        return Trainer(DistributedDataParallel(module), zero, zero.optim)

    return build


def _tensorplay_zero_hook(module: nn.Module) -> Trainer:
    from tensorplay.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import (
        reduce_to_owners_hook,
    )
    from tensorplay.distributed.optim import ZeroRedundancyOptimizer

    zero = ZeroRedundancyOptimizer(
        module.parameters(), AdamW, parameters_as_bucket_view=True, **FUSED
    )
    ddp = DistributedDataParallel(module)
    ddp.register_comm_hook(None, reduce_to_owners_hook(ddp, zero))
    return ShardedGradients(ddp, zero, zero.optim)


def _tensorplay_zero_overlapped(module: nn.Module) -> Trainer:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    from tensorplay.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import (
        hook_with_zero_step,
    )
    from tensorplay.distributed.optim import ZeroRedundancyOptimizer

    ddp = DistributedDataParallel(module)
    zero = ZeroRedundancyOptimizer(
        module.parameters(),
        AdamW,
        parameters_as_bucket_view=True,
        overlap_with_ddp=True,
        **FUSED,
    )
    ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero))
    return SteppedInBackward(ddp, zero, zero.optim)


class ShardedGradients(Trainer):
    """Our ZeRO with its own reduction: no DDP, and the optimizer clips."""

    def clip_(self, max_norm: float) -> None:
        """Clips the owned gradients by the norm of all."""
        self.optimizer.clip_grad_norm_(max_norm)  # type: ignore[attr-defined] # mypy can't see that it has this


class GatheredInForward(ShardedGradients):
    """Parameters arrive while the next forward goes on."""

    def finish(self) -> None:
        """Waits for the parameters."""
        self.optimizer.wait()  # type: ignore[attr-defined] # only this optimizer has it


def _tensorplay_gathered_in_forward(**options: Any) -> Callable[[nn.Module], Trainer]:
    def build(module: nn.Module) -> Trainer:
        from tensorplay.distributed.optim import ZeroRedundancyOptimizer

        zero = ZeroRedundancyOptimizer(
            module.parameters(),
            AdamW,
            module=module,
            shard_gradients=True,
            partition="elements",
            overlap_with_forward=True,
            **options,
            **FUSED,
        )
        return GatheredInForward(module, zero, zero.optim)

    return build


def _tensorplay_sharded(**options: Any) -> Callable[[nn.Module], Trainer]:
    def build(module: nn.Module) -> Trainer:
        from tensorplay.distributed.optim import ZeroRedundancyOptimizer

        zero = ZeroRedundancyOptimizer(
            module.parameters(), AdamW, shard_gradients=True, **options, **FUSED
        )
        return ShardedGradients(module, zero, zero.optim)

    return build


def _tensorplay_sharded_overlapped(module: nn.Module) -> Trainer:
    from tensorplay.distributed.optim import ZeroRedundancyOptimizer

    zero = ZeroRedundancyOptimizer(
        module.parameters(),
        AdamW,
        parameters_as_bucket_view=True,
        shard_gradients=True,
        overlap_with_ddp=True,
        **FUSED,
    )
    return SteppedInBackward(module, zero, zero.optim)


class InBackward(Trainer):
    """Backward has stepped and freed the gradients."""

    def step_(self) -> None:
        """Nothing is left to do."""


def _tensorplay_in_backward(module: nn.Module) -> Trainer:
    from tensorplay.distributed.optim import apply_optimizer_in_backward

    inside = apply_optimizer_in_backward(
        AdamW, module.parameters(), FUSED, process_group=dist.group.WORLD
    )
    return InBackward(module, inside)


class ClippedInStep(Trainer):
    """Our data-parallel optimizer, which clips in its step."""

    def clip_(self, max_norm: float) -> None:
        """From the next step on."""
        self.optimizer.clip_grad_norm = max_norm  # type: ignore[attr-defined] # mypy can't see that it has this


def _tensorplay_data_parallel(**options: Any) -> Callable[[nn.Module], Trainer]:
    def build(module: nn.Module) -> Trainer:
        from tensorplay.distributed.optim import DistributedOptimizer

        optimizer = DistributedOptimizer(AdamW, module.parameters(), **options, **FUSED)
        return ClippedInStep(module, optimizer)

    return build


class FullyShardedTrainer(Trainer):
    """FSDP2: parameters are shards between steps."""

    def clip_(self, max_norm: float) -> None:
        """Clips, and waits for the norm, which is a distributed tensor."""
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)
        norm.full_tensor()  # type: ignore[operator] # mypy takes it for a plain tensor or module

    def full_parameters(self) -> list[Tensor]:
        """Gathered from all ranks."""
        return [p.detach().full_tensor() for p in self.module.parameters()]  # type: ignore[operator] # mypy takes it for a plain tensor or module

    def state_nbytes(self) -> int:
        """Of the local parts."""
        return sum(
            getattr(tensor, "to_local", lambda t=tensor: t)().nbytes
            for state in self.optimizer.state.values()
            for tensor in state.values()
            if isinstance(tensor, Tensor)
        )


def _fsdp2(module: nn.Module) -> Trainer:
    from torch.distributed.fsdp import fully_shard

    for child in module.modules():
        if isinstance(child, nn.ModuleList):
            for block in child:
                fully_shard(block)
    fully_shard(module)
    return FullyShardedTrainer(module, AdamW(module.parameters(), **FUSED))


REFERENCE = "ddp"
UNCLIPPED_REFERENCE = "ddp-unclipped"

CANDIDATES = {
    candidate.name: candidate
    for candidate in (
        Candidate(REFERENCE, "DDP", "DDP", _ddp(FUSED)),
        Candidate("ddp-default", "DDP, default kernel", "DDP", _ddp(ADAMW), is_exact=False),
        Candidate("torch-zero", "torch ZeRO", "torch", _torch_zero(FUSED)),
        Candidate(
            "torch-zero-view",
            "torch ZeRO, bucket view",
            "torch",
            _torch_zero(FUSED, bucket_view=True),
        ),
        Candidate(
            "torch-zero-default",
            "torch ZeRO, default kernel",
            "torch",
            _torch_zero(ADAMW),
            is_exact=False,
        ),
        Candidate(FLOOR, "floor: send, receive, AdamW on 1/W, flat", "floor", Floor, trains=False),
        Candidate("oss", "fairscale OSS", "fairscale", _fairscale_oss, needs="fairscale.optim.oss"),
        *(
            Candidate(
                f"deepspeed-{stage}",
                f"DeepSpeed ZeRO-{stage}",
                "DeepSpeed",
                _deepspeed(stage),
                is_exact=False,
                tolerance=NORM_TOLERANCE,
                needs="deepspeed",
            )
            for stage in (1, 2)
        ),
        Candidate(
            "megatron",
            "Megatron-core",
            "Megatron",
            _megatron,
            is_exact=False,
            tolerance=NORM_TOLERANCE,  # adds up the norm of a tensor that ranks share in parts
            needs="megatron.core",
        ),
        Candidate("zero", "tensorplay ZeRO", "tensorplay", _tensorplay_zero(bucket_view=False)),
        Candidate(
            "zero-view",
            "tensorplay ZeRO, bucket view",
            "tensorplay",
            _tensorplay_zero(bucket_view=True),
        ),
        Candidate(
            "zero-hook",
            "tensorplay ZeRO, DDP reducing to owners",
            "tensorplay",
            _tensorplay_zero_hook,
            is_exact=False,
            tolerance=NORM_TOLERANCE,
        ),
        Candidate(
            "zero-shard",
            "tensorplay ZeRO, sharded gradients",
            "tensorplay",
            _tensorplay_sharded(parameters_as_bucket_view=True),
            is_exact=False,
            tolerance=NORM_TOLERANCE,
        ),
        Candidate(
            "zero-flat",
            "tensorplay ZeRO, sharded gradients, flat step",
            "tensorplay",
            _tensorplay_sharded(flat_step=True),
            is_exact=False,
            tolerance=NORM_TOLERANCE,
        ),
        Candidate(
            "zero-elements",
            "tensorplay ZeRO, sharded gradients, elements",
            "tensorplay",
            _tensorplay_sharded(partition="elements"),
            is_exact=False,
            tolerance=NORM_TOLERANCE,
        ),
        Candidate(
            "zero-forward",
            "tensorplay ZeRO, elements, gathered in forward",
            "tensorplay",
            _tensorplay_gathered_in_forward(),
            is_exact=False,
            tolerance=NORM_TOLERANCE,
        ),
        Candidate(
            "zero-backward",
            "tensorplay ZeRO, elements, reduced in backward",
            "tensorplay",
            _tensorplay_sharded(partition="elements", overlap_with_backward=True),
            is_exact=False,
            tolerance=NORM_TOLERANCE,
        ),
        Candidate(
            "zero-both",
            "tensorplay ZeRO, elements, reduced in backward, gathered in forward",
            "tensorplay",
            _tensorplay_gathered_in_forward(overlap_with_backward=True),
            is_exact=False,
            tolerance=NORM_TOLERANCE,
        ),
        Candidate(
            "data-parallel",
            "tensorplay DistributedOptimizer",
            "tensorplay",
            _tensorplay_data_parallel(),
            is_exact=False,
            tolerance=NORM_TOLERANCE,
        ),
        Candidate(
            "data-parallel-backward",
            "tensorplay DistributedOptimizer, averaged in backward",
            "tensorplay",
            _tensorplay_data_parallel(overlap_with_backward=True),
            is_exact=False,
            tolerance=NORM_TOLERANCE,
        ),
        Candidate("fsdp2", "FSDP2", "torch", _fsdp2, is_exact=False, tolerance=NORM_TOLERANCE),
        Candidate(UNCLIPPED_REFERENCE, "DDP, no clipping", "DDP", _ddp(FUSED), clips=False),
        Candidate(
            "torch-zero-overlap",
            "torch ZeRO, overlap hook, no clipping",
            "torch",
            _torch_zero_overlapped,
            reference=UNCLIPPED_REFERENCE,
            clips=False,
            is_exact=False,
            inert_steps=2,
        ),
        Candidate(
            "zero-shard-unclipped",
            "tensorplay ZeRO, sharded gradients, no clipping",
            "tensorplay",
            _tensorplay_sharded(parameters_as_bucket_view=True),
            reference=UNCLIPPED_REFERENCE,
            clips=False,
        ),
        Candidate(
            "zero-shard-overlap",
            "tensorplay ZeRO, sharded gradients, stepped in backward",
            "tensorplay",
            _tensorplay_sharded_overlapped,
            reference=UNCLIPPED_REFERENCE,
            clips=False,
        ),
        Candidate(
            "in-backward",
            "tensorplay, stepped in backward, no DDP",
            "tensorplay",
            _tensorplay_in_backward,
            reference=UNCLIPPED_REFERENCE,
            clips=False,
        ),
        Candidate(
            "zero-overlap",
            "tensorplay ZeRO, overlapped with DDP, no clipping",
            "tensorplay",
            _tensorplay_zero_overlapped,
            reference=UNCLIPPED_REFERENCE,
            clips=False,
        ),
    )
}


def select(names: Iterable[str], *, clipping: bool) -> list[Candidate]:
    """The named candidates and the references that they need, in the order of the table.

    Without clipping there is one reference: the two would be the same.
    """
    chosen = dict(CANDIDATES)
    if not clipping:
        del chosen[UNCLIPPED_REFERENCE]
        chosen = {
            name: dataclasses.replace(candidate, reference=REFERENCE)
            if candidate.reference == UNCLIPPED_REFERENCE
            else candidate
            for name, candidate in chosen.items()
        }
    wanted = {REFERENCE, *names}
    wanted |= {chosen[name].reference for name in wanted if name in chosen}
    return [candidate for name, candidate in chosen.items() if name in wanted]


def split(candidates: Sequence[Candidate], at_most: int) -> list[list[Candidate]]:
    """Sets of candidates that may be alive together, each with the references of its members.

    Args:
        candidates: what :func:`select` returned.
        at_most: how many may be alive together; the references come on top if they must.
    """
    by_name = {candidate.name: candidate for candidate in candidates}

    def with_references(members: Sequence[Candidate]) -> list[Candidate]:
        names = {member.name for member in members}
        while missing := {by_name[name].reference for name in names} - names:
            names |= missing
        return [candidate for candidate in candidates if candidate.name in names]

    references = {candidate.reference for candidate in candidates}
    groups: list[list[Candidate]] = []
    current: list[Candidate] = []
    for candidate in candidates:
        if candidate.name in references:
            continue
        if current and len(with_references([*current, candidate])) > at_most:
            groups.append(with_references(current))
            current = []
        current.append(candidate)
    if current:
        groups.append(with_references(current))
    seated = {candidate.name for group in groups for candidate in group}
    alone = [candidate for candidate in candidates if candidate.name not in seated]
    if alone:
        groups.append(with_references(alone))
    return groups
