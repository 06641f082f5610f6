"""What a sharded optimizer holds where, as a value that prints as a table."""

from dataclasses import dataclass
from itertools import pairwise

from tensorplay.distributed.optim._core.partition import IN_PARTS
from tensorplay.distributed.optim.zero.sharding_plan import ShardingPlan


@dataclass(frozen=True)
class RankShare:
    """One rank's share.

    Attributes:
        parameters: how many parameters it owns, or a part of, frozen ones included.
        elements: how many of their elements it owns.
        state_bytes: size of their optimizer state in bytes; measured on this rank, elsewhere
            estimated from this rank's bytes of state per byte of parameter (``None`` if this rank
            has no state to judge from).
        measured: whether ``state_bytes`` was measured.
    """

    parameters: int
    elements: int
    state_bytes: int | None
    measured: bool


@dataclass(frozen=True)
class ShardingReport:
    """How an optimizer is sharded; ``str()`` gives a table.

    Attributes:
        ranks: each rank's share, by group rank.
        load_ratio: the largest load of trainable bytes over the mean load (λ): 1 is even.
        buckets: in how many buckets the trainable parameters travel.
        bytes_per_step: what all ranks together send in a step to gather the updated parameters.
        gradient_bytes_per_step: what they send to reduce the gradients; 0 if something else does.
        gradient_bytes: the averaged gradients that this rank keeps; ``None`` if it keeps all.
    """

    ranks: tuple[RankShare, ...]
    load_ratio: float
    buckets: int
    bytes_per_step: int
    gradient_bytes_per_step: int = 0
    gradient_bytes: int | None = None

    @classmethod
    def of(
        cls, plan: ShardingPlan, group_rank: int, state_bytes: int, *, reduces: bool
    ) -> "ShardingReport":
        """Reports on ``plan`` as seen from ``group_rank``, whose state takes ``state_bytes``.

        Args:
            plan: who owns what.
            group_rank: this rank.
            state_bytes: of this rank's optimizer state.
            reduces: whether the optimizer reduces the gradients itself.
        """
        num_ranks = plan.partition.num_ranks
        parameters, elements = [0] * num_ranks, [0] * num_ranks
        for spec, owner in zip(plan.specs, plan.partition.owners, strict=True):
            if owner != IN_PARTS:
                parameters[owner] += 1
                elements[owner] += spec.numel
                continue
            for rank, (start, end) in enumerate(pairwise(plan.cuts_of(spec.index))):
                parameters[rank] += start < end
                elements[rank] += end - start
        loads = plan.loads
        known = state_bytes > 0 and loads[group_rank] > 0
        shares = tuple(
            RankShare(
                parameters[rank],
                elements[rank],
                state_bytes
                if rank == group_rank
                else (round(state_bytes * loads[rank] / loads[group_rank]) if known else None),
                measured=rank == group_rank,
            )
            for rank in range(num_ranks)
        )
        trainable = [layout for layout in plan.layouts if layout.trainable]
        payload = sum(layout.nbytes for layout in trainable)
        sent = sum(layout.nbytes for layout in plan.gradient_layouts if layout.trainable)
        return cls(
            shares,
            plan.load_ratio,
            len(trainable),
            payload * (num_ranks - 1),
            sent * (num_ranks - 1) if reduces else 0,
            loads[group_rank] if reduces else None,
        )

    def __str__(self) -> str:
        lines = [f"{'rank':>4}  {'parameters':>10}  {'elements':>14}  {'state':>12}"]
        for rank, share in enumerate(self.ranks):
            state = "not yet" if share.state_bytes is None else _size(share.state_bytes)
            about = "" if share.measured or share.state_bytes is None else "~"
            lines.append(
                f"{rank:>4}  {share.parameters:>10,}  {share.elements:>14,}  {about + state:>12}"
            )
        lines.append(
            f"load ratio {self.load_ratio:.3f} (largest / mean; 1 is even), {self.buckets} "
            f"bucket{'' if self.buckets == 1 else 's'}, {_size(self.bytes_per_step)} sent per step by all "
            "ranks together to gather the parameters"
        )
        if self.gradient_bytes is not None:
            lines.append(
                f"gradients: {_size(self.gradient_bytes_per_step)} sent per step by all ranks "
                f"together to reduce them, {_size(self.gradient_bytes)} kept on this rank"
            )
        return "\n".join(lines)


def _size(nbytes: int) -> str:
    for unit, divisor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= divisor:
            return f"{nbytes / divisor:,.2f} {unit}"
    return f"{nbytes} B"
