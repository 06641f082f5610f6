"""When buckets of gradients are reduced: after backward has ended, or while it goes on.

Where communication has a processor of its own, a bucket is best sent as soon as its gradients are
there. Where it takes the one that computes, as between processes that share the cores of a host,
nothing is gained, and everything is simpler afterwards.

Note [Order of buckets]
    Ranks may finish their buckets in different orders. They are launched in the order in which they
    should be complete, if backward goes from the parameter registered last to the first: one that
    is ready waits for those before it.

Note [Late gradients]
    Reentrant checkpointing may give a parameter a second gradient after its bucket has been sent.
    It waits until the others are there, and is reduced by itself.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from tensorplay.distributed.optim._core.gradient_buckets import GradientBucket
from tensorplay.distributed.optim._core.transfers import InFlight, Transfer


class Reductions(Protocol):
    """What a schedule needs of a reducer."""

    parameters: list[torch.Tensor]
    buckets: list[GradientBucket]

    def before_backward_reduces(self) -> None:
        """Called once for each backward pass that is reduced."""

    def set_averages_aside(self) -> None:
        """Leaves only what is to be averaged in ``.grad``."""

    def reduce(self, call: str) -> None:
        """Reduces everything that is there, and shows it."""

    def settle_start(self) -> None:
        """Settles with all ranks that the reduction of a pass begins."""

    def settle_end(self, has: dict[int, bool], *, was_aborted: bool, is_late: bool) -> set[int]:
        """Settles how it ended; returns which parameters some rank has gradients of."""

    def launch(self, bucket: GradientBucket) -> Iterable[Transfer]:
        """Starts the exchanges of a bucket one by one."""

    def finish(self, transfer: Transfer) -> torch.Tensor | None:
        """Waits for one and averages; returns a scalar that is finite if all of it is."""

    def as_dense(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """What is to be sent of a gradient that isn't dense; ``None``: it is refused at the end."""

    def averaged(self, transfer: Transfer) -> None:
        """A bucket is complete on its owners while backward goes on; ``transfer`` is its last."""

    def show(self, transfer: Transfer, used: set[int]) -> None:
        """Makes averages visible, given the last transfer of a bucket."""

    def conclude(self, finite: Sequence[torch.Tensor | None]) -> None:
        """Lets all ranks know whether everything is finite, and brings in what was set aside."""

    def add_late(self, gradients: dict[int, torch.Tensor]) -> None:
        """Reduces further gradients and adds them to the averages."""


class Schedule(Protocol):
    """Told of one backward pass; ``syncs`` says whether it is to be reduced."""

    hears_ready: bool
    """Whether :meth:`ready` is to be called."""

    def begin(self, *, syncs: bool) -> None:
        """A pass begins."""

    def ready(self, index: int) -> None:
        """A parameter's gradient has been accumulated."""

    def end(self) -> None:
        """The pass has ended, and is to be reduced."""

    def abandon(self) -> None:
        """The pass was aborted."""


class AfterBackward:
    """All buckets one after another when backward has ended."""

    hears_ready = False

    def __init__(self, reductions: Reductions) -> None:
        self._reductions = reductions

    def begin(self, *, syncs: bool) -> None:
        """Nothing to do yet."""

    def ready(self, index: int) -> None:
        """Isn't asked for."""

    def end(self) -> None:
        """See :class:`Schedule`."""
        self._reductions.before_backward_reduces()
        self._reductions.reduce("backward")

    def abandon(self) -> None:
        """Nothing was begun."""


class DuringBackward:
    """Each bucket as soon as it and those before it are complete.

    Args:
        reductions: does the work.
        capacity_bytes: how much a rank receives at a time.
    """

    hears_ready = True

    def __init__(self, reductions: Reductions, capacity_bytes: int) -> None:
        self._reductions = reductions
        self._capacity_bytes = capacity_bytes
        self._is_open = False

    def begin(self, *, syncs: bool) -> None:
        """See :class:`Schedule`."""
        self._is_open = syncs
        self._is_settled = False
        trainable = [b for b in self._reductions.buckets if b.layout.trainable]
        self._order = sorted(trainable, key=_last_parameter, reverse=True)
        self._missing = [{slot.parameter for slot in b.layout.slots} for b in self._order]
        self._bucket_of = {
            index: number for number, members in enumerate(self._missing) for index in members
        }
        self._num_launched = 0
        self._has: dict[int, bool] = {}
        self._in_flight = InFlight(self._capacity_bytes)
        self._complete: list[Transfer] = []
        self._finite: list[torch.Tensor | None] = []

    def ready(self, index: int) -> None:
        """See :class:`Schedule`; Note [Order of buckets]."""
        if not self._is_open or index not in self._bucket_of:
            return
        self._missing[self._bucket_of[index]].discard(index)
        while self._num_launched < len(self._order) and not self._missing[self._num_launched]:
            self._launch_next()

    @torch.no_grad()
    def end(self) -> None:
        """See :class:`Schedule`."""
        self._reductions.set_averages_aside()
        late = {
            index: self._reductions.parameters[index].grad
            for index in self._has
            if self._reductions.parameters[index].grad is not None
        }
        self._complete_round(late, was_aborted=False)

    def abandon(self) -> None:
        """Takes part to the end in what has been begun: other ranks wait for it."""
        if self._is_open and self._is_settled:
            self._reductions.set_averages_aside()
            self._complete_round({}, was_aborted=True)
        self._is_open = False

    def _complete_round(self, late: dict[int, torch.Tensor | None], *, was_aborted: bool) -> None:
        self._is_open = False
        while self._num_launched < len(self._order):
            self._launch_next()
        while self._in_flight:
            self._finish_oldest()
        used = self._reductions.settle_end(self._has, was_aborted=was_aborted, is_late=bool(late))
        if was_aborted:
            return
        gradients = {index: gradient for index, gradient in late.items() if gradient is not None}
        for index in gradients:
            self._reductions.parameters[index].grad = None
        for transfer in self._complete:
            self._reductions.show(transfer, used)
        self._reductions.conclude(self._finite)
        self._complete.clear()
        self._reductions.add_late(gradients)

    @torch.no_grad()
    def _launch_next(self) -> None:
        if not self._is_settled:
            self._reductions.before_backward_reduces()
            self._reductions.settle_start()
            self._is_settled = True
        bucket = self._order[self._num_launched]
        self._num_launched += 1
        parameters = self._reductions.parameters
        members = [slot.parameter for slot in bucket.layout.slots]
        for index in members:
            gradient = parameters[index].grad
            if gradient is not None and gradient.layout is not torch.strided:
                parameters[index].grad = self._reductions.as_dense(gradient)
        self._has.update({index: parameters[index].grad is not None for index in members})
        is_detached = False
        for transfer in self._reductions.launch(bucket):
            if not is_detached:  # what comes later must not be written into what is being sent
                for index in members:
                    parameters[index].grad = None
                is_detached = True
            self._in_flight.append(transfer)
            while self._in_flight.is_full:
                self._finish_oldest()

    def _finish_oldest(self) -> None:
        transfer = self._in_flight.popleft()
        self._finite.append(self._reductions.finish(transfer))
        if transfer.is_last:
            self._complete.append(transfer)
            self._reductions.averaged(transfer)


def _last_parameter(bucket: GradientBucket) -> int:
    """The one whose gradient is expected last."""
    return min(slot.parameter for slot in bucket.layout.slots)
