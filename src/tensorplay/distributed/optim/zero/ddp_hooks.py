"""Communication hooks of ``DistributedDataParallel`` for a sharded optimizer.

Two update the parameters inside backward; one reduces gradients to their owners only.

Note [Averaged gradients and ``.grad``]
    A parameter is stepped with its part of what the reduction returned; ``.grad`` is put back, and
    DDP writes the averages there when backward ends, as always.

Note [Ends of a backward pass]
    The hook of the last bucket queues a callback, which is called before the one with which DDP
    concludes, since that one is queued later: it completes the last buckets. It queues another,
    which is called after DDP's: what raises there leaves DDP ready for the next iteration.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from tensorplay.distributed.optim._core.backward_pass import call_at_end
from tensorplay.distributed.optim._core.collectives import CommunicationError, start_all_reduce_
from tensorplay.distributed.optim._core.ddp_buckets import KeptViews, elements_of
from tensorplay.distributed.optim._core.tagged_json import Json
from tensorplay.distributed.optim.zero.optimizer import ZeroRedundancyOptimizer
from tensorplay.distributed.optim.zero.overlap import OverlappedStep

Future = torch.futures.Future[torch.Tensor]
Hook = Callable[[Any, GradBucket], Future]


def hook_with_zero_step(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
) -> Hook:
    """Makes of ``hook`` one that also updates the parameters, when all reductions are under way.

    Backward isn't interrupted. When the last bucket's reduction has been launched, the buckets are
    completed one after another: as soon as a bucket's gradients are reduced, each rank steps its own
    parameters of it, and their gather is launched, while later buckets are still being reduced. When
    ``backward()`` returns, every rank has the new parameters.

    Follows torch's function of the same name, with these differences: parameters are updated from
    the first iteration on, on any backend, by any optimizer class with any param groups, with the
    learning rates of the moment, and checkpoints can be made and loaded at any time. ``step()`` may
    be called in the loop; it does nothing.

    Every rank must call it, before the first backward.

    Args:
        hook: reduces a bucket, for instance ``default_hooks.allreduce_hook``.
        ddp: the model, on the process group of ``zero``.
        zero: its optimizer, built with ``overlap_with_ddp=True``.
        shard_buckets: has no effect: the update of a bucket is always divided among the owners of
            its parameters, of which there may be any number, and these don't depend on DDP's buckets.

    Returns:
        A hook for ``ddp.register_comm_hook``, with the state that ``hook`` wants.

    Raises:
        ValueError: if ``zero`` wasn't built with ``overlap_with_ddp=True``, is on another process
            group, or has trainable parameters that ``ddp`` doesn't reduce.
        TypeError: if an argument isn't what it should be.
        RuntimeError: if the ranks' arguments differ.

    Example:
        >>> zero = ZeroRedundancyOptimizer(
        ...     ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=1e-3
        ... )
        >>> ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero))
        >>> loss_fn(ddp(inputs), targets).backward()
    """
    return _with_step(hook, ddp, zero, shard_buckets, "hook_with_zero_step", lag=None)


def hook_with_zero_step_interleaved(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
) -> Hook:
    """Like :func:`hook_with_zero_step`, but the update is made while backward goes on.

    When the reduction of a bucket has been launched, the bucket before it is completed at once:
    backward waits for its gradients, this rank steps its own parameters, and their gather is
    launched. Of two gradient buckets one is being reduced while the other is stepped, and gathers
    are under way during backward.

    Args, returns and raises: as :func:`hook_with_zero_step`.
    """
    return _with_step(hook, ddp, zero, shard_buckets, "hook_with_zero_step_interleaved", lag=1)


def _with_step(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool,
    name: str,
    *,
    lag: int | None,
) -> Hook:
    if not callable(hook):
        raise TypeError(
            f"{name} needs a communication hook such as default_hooks.allreduce_hook, got {hook!r}"
        )
    _require_pair(ddp, zero, name)
    step = zero.overlapped_step
    if step is None:
        raise ValueError(
            f"{name} needs an optimizer that was built with overlap_with_ddp=True; this one has "
            "overlap_with_ddp=False and updates parameters in step()"
        )
    _settle_group(ddp, zero, name, {"shard_buckets": bool(shard_buckets)})
    error = None
    try:
        step.attach(reduced_by(ddp))
    except ValueError as problem:
        error = problem
    zero.settle_call(f"{name} (parameters)", None, error)
    schedule = _Schedule(hook, ddp, zero, step, lag)

    def hook_with_step(state: Any, bucket: GradBucket) -> Future:
        return schedule.reduce(state, bucket)

    return hook_with_step


def reduce_to_owners_hook(ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer) -> Hook:
    """A hook that averages each gradient to the rank that owns the parameter, instead of to all.

    Together with the gather in ``step()`` an iteration sends what plain data parallelism sends, a
    third less than DDP with sharded state. Use it to keep ``DistributedDataParallel`` where
    ``shard_gradients=True``, which does without, isn't wanted. The training loop stays as it is, but
    when ``backward()`` returns, ``.grad`` of a parameter that another rank owns is a placeholder,
    which raises if it's taken for a gradient: clip with ``zero.clip_grad_norm_()``, look with
    ``zero.full_grad()``. An unmodified ``GradScaler`` works.

    Sums are made in rank order; where the number of ranks is no power of two, they differ from DDP's
    in the last bits. Buckets with sparse gradients, and those with a parameter that isn't in the
    optimizer, are averaged to all ranks as always.

    Every rank must call it, before the first backward.

    Args:
        ddp: the model, on the process group of ``zero``.
        zero: its optimizer, built without ``overlap_with_ddp`` and ``shard_gradients``.

    Returns:
        A hook for ``ddp.register_comm_hook``; its state isn't used.

    Raises:
        ValueError: if ``zero`` was built with one of these, or is on another process group.
        TypeError: if an argument isn't what it should be, or a parameter is a ``DTensor``.
        RuntimeError: if the ranks' arguments differ.

    Example:
        >>> zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-3)
        >>> ddp.register_comm_hook(None, reduce_to_owners_hook(ddp, zero))
        >>> loss_fn(ddp(inputs), targets).backward()
        >>> zero.clip_grad_norm_(1.0)
        >>> zero.step()
    """
    name = "reduce_to_owners_hook"
    _require_pair(ddp, zero, name)
    _settle_group(ddp, zero, name, None)
    gradients = zero.take_gradients_from_hooks(list(ddp.parameters()))
    if ddp.gradient_as_bucket_view and (ddp.static_graph or not ddp.find_unused_parameters):
        gradients.reduce_whole(2 if ddp.static_graph else 1)  # then DDP has formed its buckets anew
    reference = weakref.ref(ddp)  # which will hold the hook

    def reduce_to_owners(state: Any, bucket: GradBucket) -> Future:  # noqa: ARG001 - DDP passes it
        in_join = _is_in_join(reference())
        if bucket.index() == 0 and in_join:
            _require_both_in_join(zero)
            if not getattr(reference(), "_divide_by_initial_world_size", True):
                raise ValueError(
                    "inside Join reduce_to_owners_hook divides by the number of all ranks; leave "
                    "divide_by_initial_world_size=True"
                )
        return gradients.reduce_bucket(
            bucket, joined=not _in_backward(), shares_uses=in_join and _finds_unused(reference())
        )

    return reduce_to_owners


def _require_pair(ddp: Any, zero: Any, name: str) -> None:
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(f"{name} needs a DistributedDataParallel module, got {type(ddp).__name__}")
    if not isinstance(zero, ZeroRedundancyOptimizer):
        raise TypeError(
            f"{name} needs a tensorplay.distributed.optim.ZeroRedundancyOptimizer, got "
            f"{type(zero).__module__}.{type(zero).__name__}"
        )


def _settle_group(
    ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, name: str, description: Json
) -> None:
    error = None
    if ddp.process_group is not zero.process_group:
        error = ValueError(
            f"{name} needs model and optimizer on one process group, but DistributedDataParallel "
            f"averages on {_describe_group(ddp.process_group)} and the optimizer shards across "
            f"{_describe_group(zero.process_group)}; pass the same process_group to both"
        )
    zero.settle_call(name, description, error)


def _in_backward() -> bool:
    """False where DDP calls a hook on a rank that has joined, to follow the others."""
    return bool(torch._C._current_graph_task_id() != -1)  # noqa: SLF001 - torch has no public name for it


def _is_in_join(ddp: DistributedDataParallel | None) -> bool:
    return ddp is not None and bool(ddp._join_config.enable)  # noqa: SLF001 - torch has no public name for it


def _finds_unused(ddp: DistributedDataParallel | None) -> bool:
    """DDP leaves alone what no rank has used, and tells its hook nothing of that."""
    return ddp is not None and bool(ddp.find_unused_parameters or ddp.static_graph)


def _require_both_in_join(zero: ZeroRedundancyOptimizer) -> None:
    if not zero.is_in_join:
        raise RuntimeError(
            "inside Join a model whose communication hook reduces to the optimizer, or steps it, "
            "needs its optimizer there too: Join([model, optimizer])"
        )


def reduced_by(ddp: DistributedDataParallel) -> list[torch.Tensor]:
    """The parameters whose gradients pass through the communication hook of ``ddp``."""
    return [
        parameter
        for name, parameter in ddp.module.named_parameters(remove_duplicate=False)
        if name not in ddp.parameters_to_ignore
    ]


class _Schedule:
    """Reduces with the user's hook, and completes buckets when it's time.

    Args:
        hook: the user's.
        ddp: whose buckets come.
        zero: whose ``step`` it is.
        step: what completes buckets.
        lag: how many buckets may be incomplete when a hook returns; ``None`` for all of them.
    """

    def __init__(
        self,
        hook: Hook,
        ddp: DistributedDataParallel,
        zero: ZeroRedundancyOptimizer,
        step: OverlappedStep,
        lag: int | None,
    ) -> None:
        self._hook = hook
        self._ddp = weakref.ref(ddp)  # which will hold this
        self._zero = zero
        self._step = step
        self._lag = lag
        self._process_group = ddp.process_group
        self._finds_unused = _finds_unused(ddp)
        self._views = KeptViews()

    def reduce(self, state: Any, bucket: GradBucket) -> Future:
        """What DDP calls."""
        joined = not _in_backward()
        if bucket.index() == 0:
            if _is_in_join(self._ddp()):
                _require_both_in_join(self._zero)
            self._step.begin(joined=joined)
        uses: torch.Tensor | None = None
        using: Future | None = None
        parameters = bucket.parameters()
        if self._finds_unused:
            # As DDP without a hook leaves it: what no rank has a gradient of isn't stepped.
            uses = torch.tensor(
                [p.grad is not None and not joined for p in parameters], dtype=torch.int32
            ).to(bucket.buffer().device)
        reduction = self._hook(state, bucket)
        if uses is not None:
            using = start_all_reduce_(uses, self._process_group)
        self._step.add(_DDPBucket(bucket, reduction, uses, using, self._views))
        if bucket.is_last() and not joined:
            call_at_end(self._conclude)  # Note [Ends of a backward pass]
        if self._lag is not None:
            self._step.complete(but=self._lag)
        return reduction

    def _conclude(self) -> None:
        self._step.complete()
        call_at_end(self._step.end)


class _DDPBucket:
    """A bucket of DDP under reduction."""

    def __init__(
        self,
        bucket: GradBucket,
        reduction: Future,
        uses: torch.Tensor | None,
        using: Future | None,
        views: KeptViews,
    ) -> None:
        self._views = views
        self._buffer = bucket.buffer()
        self.parameters: Sequence[torch.Tensor] = bucket.parameters()
        self._number = bucket.index()
        self._reduction = reduction
        self._uses = uses
        self._using = using

    def wait(self) -> Sequence[torch.Tensor | None]:
        """See :class:`ReducedBucket`."""
        try:
            result: Any = self._reduction.wait()
            if self._using is not None:
                self._using.wait()
        except RuntimeError as error:
            raise CommunicationError(
                f"reducing gradients failed in bucket {self._number} of DistributedDataParallel, "
                f"which holds {len(self.parameters)} parameters: {error}"
            ) from error
        if isinstance(result, (list, tuple)):  # as DDP takes it
            (result,) = result
        gradients = (
            self._views.of(
                elements_of(result, self.parameters), self._number, self._buffer, self.parameters
            )
            if result.layout is torch.strided
            else [result]  # DDP has a bucket for each sparse gradient
        )
        if self._uses is None:
            return gradients
        return [
            gradient if used else None
            for gradient, used in zip(gradients, self._uses.tolist(), strict=True)
        ]


def _describe_group(group: dist.ProcessGroup) -> str:
    return f"the group of global ranks {dist.get_process_group_ranks(group)}"
