"""Steps each bucket inside backward, as soon as its gradients have been averaged, and frees them.

Note [Stages of a bucket]
    Sent -> averaged -> stepped -> gathered. A bucket is sent when it and those before it are
    complete. While it travels, backward goes on; when enough is under way, the oldest is awaited,
    averaged and stepped, and its gather is launched. All ranks do this in the same order. Or all
    begins when the last gradient has been computed, where communication would only take the
    processor from backward; then gradients are freed at the end.

Note [Order of steps]
    A bucket takes its place where its last gradient is expected: first by order of registration,
    later as the first backward passes of rank 0 went, so that none waits long for one before it.
    Where all begins when backward has ended, owners take turns, so that all have something to do.

Note [Second gradients]
    A bucket can't be stepped twice. Inside a nested backward (reentrant checkpointing) a gradient
    is final only when the outermost ends, so the bucket waits until then; as it does for a
    parameter of which somebody has said that it will be used in one (:meth:`postpone`). A gradient
    that comes after its bucket was sent raises, on every rank.

Note [Stopping]
    When something goes wrong on one rank, the others wait for what it was to send. So it sends, but
    marked as unusable; nobody steps such a bucket, and when backward ends all ranks raise. What was
    stepped before stays stepped, alike on every rank; but where every rank steps for itself, a
    bucket whose step has failed on one of them isn't the same on all. Where only owners step, and
    all begins when the last gradient has been computed, ranks tell each other at once which
    gradients there are; then the others step what they own also after one has failed.
"""

import itertools
import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch

from tensorplay.distributed.optim._core.agreement import PeerError, RankDisagreementError
from tensorplay.distributed.optim._core.bucket_layout import BucketLayout, take_turns
from tensorplay.distributed.optim._core.collectives import CommunicationError, Waitable
from tensorplay.distributed.optim._core.gradient_buckets import GradientBucket, assign
from tensorplay.distributed.optim._core.nested_backward import is_nested
from tensorplay.distributed.optim._core.tagged_json import Json
from tensorplay.distributed.optim._core.transfers import Transfer
from tensorplay.distributed.optim._core.usage import Usage

NUM_SENT = 3
"""Exchanges under way at a time, if they are small."""

NUM_GATHERED = 2
"""Gathers under way at a time."""

STEPPED_BYTES = 12 * 1024 * 1024
"""Of buckets that are stepped together, if all begins when the last gradient has been computed."""

NUM_ORDERS = 3
"""How often the order of buckets may change."""


class Stage(Protocol):
    """Who steps."""

    steps_everywhere: bool
    """Whether every rank steps every parameter, or each those that it owns."""

    def describe(self) -> dict[str, Json]:
        """What must be the same on every rank when a pass begins."""

    def find_problem(self) -> Exception | None:
        """What makes it impossible to step on this rank."""

    def begin(self) -> None:
        """All ranks have agreed that gradients are reduced and stepped now."""

    def step(self, averaged: Sequence[tuple[Transfer, set[int]]]) -> None:
        """Buckets have been averaged: the last transfer of each, and what some rank used. It may fail."""

    def gather(self, transfer: Transfer, used: set[int]) -> Waitable | None:
        """Launches what brings all ranks up to date with a bucket; to wait may fail.

        ``None`` where it is to be gathered together with a later one.
        """

    def step_empty(self, parameters: list[torch.Tensor]) -> None:
        """Steps parameters that have gradients but no elements, and so no bucket. It may fail."""

    def end(self, *, succeeded: bool) -> None:
        """The pass has ended, on every rank."""


class Settling(Protocol):
    """What ranks are about to agree on."""

    def wait(self) -> int:
        """Returns the largest flag; raises on every rank if there is an error on one."""


class Reductions(Protocol):
    """What the schedule needs of a reducer."""

    parameters: list[torch.Tensor]
    buckets: list[GradientBucket]

    @property
    def is_first_rank(self) -> bool:
        """Whether this is group rank 0."""

    def before_backward_reduces(self) -> None:
        """Called once for each backward pass that is reduced."""

    def settle_start(self, description: dict[str, Json], error: Exception | None) -> None:
        """Settles with all ranks that the reduction of a pass begins."""

    def settle_used(self, description: dict[str, Json], error: Exception | None) -> set[int]:
        """The same when all gradients are there; returns which parameters some rank has one of."""

    def settle_steps(self, error: Exception | None, *, was_aborted: bool, flag: int) -> "Settling":
        """Begins to settle how it ended."""

    def find_unreducible(self) -> Exception | None:
        """An error for gradients of this pass that can't be reduced."""

    def share(self, message: bytes) -> bytes:
        """What group rank 0 passes, on every rank."""

    def exchange_usage(
        self, bucket: GradientBucket, has: Sequence[bool], *, stopped: bool
    ) -> Usage:
        """Starts to find out which parameters of a bucket some rank has gradients of."""

    def launch(self, bucket: GradientBucket) -> Iterable[Transfer]:
        """Starts the exchanges of a bucket one by one."""

    def finish(self, transfer: Transfer) -> torch.Tensor | None:
        """Waits for one and averages."""

    def room_nbytes(self) -> float:
        """How much a rank should send at a time, gathers included."""

    def after_reduction(self) -> None:
        """Called after each reduction, on every rank."""


class _Sent(NamedTuple):
    """An exchange under way."""

    transfer: Transfer
    usage: Usage | None
    """Tells which parameters are used; ``None`` where that is known."""
    received_nbytes: int
    """What is received of the bucket, where that's the most: the same on every rank."""

    @property
    def nbytes(self) -> int:
        """Of a rank's gradients and of what is received; likewise."""
        return self.transfer.bucket.layout.nbytes + self.received_nbytes


class _Gathered(NamedTuple):
    """A gather under way."""

    bucket: GradientBucket
    """Whose step was the last before it."""
    gathering: Waitable
    kept_nbytes: int
    """Of gradients that it keeps."""
    loads: tuple[int, ...]
    """How many bytes each rank sends, about: of what was stepped since the last."""


class StepInBackward:
    """Each bucket is sent, stepped and freed as soon as it and those before it are complete.

    Args:
        reductions: does the work.
        stage: steps.
        capacity_bytes: gradients under way at a time.
        early: whether this begins while backward goes on, or at its end.
    """

    def __init__(
        self, reductions: Reductions, stage: Stage, capacity_bytes: int, *, early: bool
    ) -> None:
        self.hears_ready = early
        self._reductions = reductions
        self._stage = stage
        self._capacity_bytes = capacity_bytes
        self._is_open = False
        self._order: list[int] = []
        self._num_orders = 0
        self._members: dict[int, frozenset[int]] = {}
        self._bucket_of: dict[int, int] = {}
        self._postponed: set[int] = set()

    def postpone(self, index: int) -> None:
        """In the next pass the gradient of a parameter is final only when it ends."""
        self._postponed.add(index)

    def begin(self, *, syncs: bool) -> None:
        """See :class:`Schedule`."""
        buckets = self._reductions.buckets
        planned = [number for number, each in enumerate(buckets) if each.layout.trainable]
        if len(self._order) != len(planned):  # first, or parameters were added
            last = {n: min(slot.parameter for slot in buckets[n].layout.slots) for n in planned}
            self._order = sorted(planned, key=last.__getitem__, reverse=True)
            if not self.hears_ready:
                turns = take_turns([buckets[number].layout.loads for number in self._order])
                self._order = [self._order[place] for place in turns]
            self._num_orders = 0
            self._members = {
                n: frozenset(slot.parameter for slot in buckets[n].layout.slots) for n in planned
            }
            self._bucket_of = {i: n for n, members in self._members.items() for i in members}
        if self.hears_ready:
            self._missing = {number: set(members) for number, members in self._members.items()}
        self._is_open = syncs
        self._is_settled = False
        self._launched: set[int] = set()
        self._completed: list[int] = []
        self._held: set[int] = set()
        self._nested_tasks: dict[int, bool] = {}
        self._error: Exception | None = None
        self._is_stopped = False
        self._used: set[int] | None = None
        self._sent: deque[_Sent] = deque()
        self._averaged: list[tuple[Transfer, set[int]]] = []
        self._ungathered: list[tuple[int, ...]] = []
        self._gathered: deque[_Gathered] = deque()

    def ready(self, index: int) -> None:
        """See :class:`Schedule`; Note [Second gradients]."""
        number = self._bucket_of.get(index) if self._is_open else None
        if number is None:
            return
        if number in self._launched:
            self._stop(self._second_gradient(index))
            return
        if self._in_nested() or index in self._postponed or index in self._held:
            self._held.add(index)
            self._missing[number].add(index)
            return
        missing = self._missing[number]
        missing.discard(index)
        if not missing:
            self._completed.append(number)
            while self._has_next() and not self._missing[self._order[len(self._launched)]]:
                self._launch_next()

    def end(self) -> None:
        """See :class:`Schedule`."""
        self._end(was_aborted=False)

    def abandon(self) -> None:
        """Takes part to the end in what has been begun: other ranks wait for it. Drops gradients.

        Raises:
            RuntimeError: if that was late: the next forward has read the parameters already.
        """
        has_begun = self._is_open and self._is_settled
        if has_begun:
            self._is_stopped = True
            self._end(was_aborted=True)
        self._is_open = False
        self._postponed.clear()
        self._drop_gradients()
        if has_begun and torch._C._current_graph_task_id() != -1:  # noqa: SLF001 - torch has no public name for it
            raise RuntimeError(
                "the last backward pass ended in an exception, and updates that were under way have "
                "ended only now, when forward had used the parameters again. After such an exception "
                "call zero_grad() before the next forward, on every rank; from here on all is well"
            )

    @torch.no_grad()
    def _end(self, *, was_aborted: bool) -> None:
        self._is_open = False
        succeeded = False
        try:
            self._start()
            while self._has_next():
                self._launch_next()
            self._step_all()
            self._step_empty()
            if self._stage.steps_everywhere:  # what has been gathered, which may fail
                self._complete_all()
            error = self._error
            if error is None and self._used is None:  # else all ranks know
                error = self._reductions.find_unreducible()
            wish = self._wish()
            settling = self._reductions.settle_steps(error, was_aborted=was_aborted, flag=wish)
            self._complete_all()
            agreed = settling.wait()
            if self._error is not None and self._error is not error:
                raise self._error
            if was_aborted:
                return
            if agreed == _HAS_THAWED:
                self._step_thawed()
            elif agreed == _HAS_NEW_ORDER:
                self._change_order()
            succeeded = True
        finally:
            if self._is_settled:
                self._stage.end(succeeded=succeeded)
            self._postponed.clear()
            self._drop_gradients()
        self._reductions.after_reduction()

    def _wish(self) -> int:
        """What this rank wants to be done when all buckets have been stepped."""
        others = (p for i, p in enumerate(self._reductions.parameters) if i not in self._bucket_of)
        if any(parameter.grad is not None and parameter.numel() for parameter in others):
            return _HAS_THAWED
        is_new = self._completed != self._order[: len(self._completed)]
        may_change = self._reductions.is_first_rank and self._num_orders < NUM_ORDERS
        return _HAS_NEW_ORDER if may_change and is_new else 0

    def _step_thawed(self) -> None:
        """Those buckets whose parameters were all frozen when they were planned."""
        for number, bucket in enumerate(self._reductions.buckets):
            if not bucket.layout.trainable:
                self._launch(number)
        self._step_all()
        self._complete_all()
        self._reductions.settle_steps(self._error, was_aborted=False, flag=0).wait()

    def _change_order(self) -> None:
        """Note [Order of steps]."""
        self._num_orders += 1
        rest = [number for number in self._order if number not in set(self._completed)]
        message = json.dumps([*self._completed, *rest]).encode()
        self._order = json.loads(self._reductions.share(message))

    def _start(self) -> None:
        if not self._is_settled:
            self._reductions.before_backward_reduces()
            problem = self._stage.find_problem()
            description = {} if problem else self._stage.describe()
            if self.hears_ready or self._stage.steps_everywhere:
                self._reductions.settle_start(description, problem)
            else:
                self._used = self._reductions.settle_used(description, problem)
            self._stage.begin()
            self._is_settled = True

    @torch.no_grad()
    def _launch_next(self) -> None:
        self._start()
        number = self._order[len(self._launched)]
        self._launched.add(number)
        try:
            self._launch(number)
        except CommunicationError:
            self._is_open = False  # nobody waits for this rank any more
            raise

    def _launch(self, number: int) -> None:
        bucket, parameters = self._reductions.buckets[number], self._reductions.parameters
        members = [parameters[slot.parameter] for slot in bucket.layout.slots]
        usage = None
        if self._used is None:
            for parameter in members:
                gradient = parameter.grad
                if gradient is not None and gradient.layout is not torch.strided:
                    parameter.grad = None  # find_unreducible() tells
                    self._is_stopped = True
            has = [parameter.grad is not None for parameter in members]
            usage = self._reductions.exchange_usage(bucket, has, stopped=self._is_stopped)
        received = _received_nbytes(bucket.layout, self._capacity_bytes)
        for transfer in self._reductions.launch(bucket):
            if members:
                assign(members, "grad", itertools.repeat(None))
                members = []
            self._sent.append(_Sent(transfer, usage, received))
            while len(self._sent) > 1 and self._is_crowded():
                self._finish_oldest()
        while self._sent and self._is_crowded():
            self._finish_oldest()
        while self._gathered and self._is_crowded():
            self._complete_oldest()

    def _is_crowded(self) -> bool:
        if not self.hears_ready:  # all gradients are there anyway
            loads = _sum([each.transfer.loads for each in self._sent])
            return max(loads, default=0) > 2 * self._capacity_bytes
        if len(self._sent) > NUM_SENT:
            return True
        under_way = sum(each.nbytes for each in self._sent)
        under_way += sum(each.kept_nbytes for each in self._gathered)
        return under_way > self._capacity_bytes

    def _step_all(self) -> None:
        while self._sent:
            self._finish_oldest()
        self._step_averaged()

    def _complete_all(self) -> None:
        while self._gathered:
            self._complete_oldest()

    def _finish_oldest(self) -> None:
        transfer, usage, _ = self._sent.popleft()
        self._reductions.finish(transfer)
        if not transfer.is_last:
            return
        used = self._used_in(transfer.bucket, usage)
        self._averaged.append((transfer, used))
        nbytes = sum(each.bucket.layout.nbytes for each, _ in self._averaged)
        if self.hears_ready or nbytes >= STEPPED_BYTES:
            self._step_averaged()

    def _used_in(self, bucket: GradientBucket, usage: Usage | None) -> set[int]:
        """Which parameters of a bucket some rank has gradients of, if it's to be stepped."""
        if usage is None:
            return self._used or set()
        slots = bucket.layout.slots
        with _named("learning which parameters are used", bucket):
            told = usage.wait()
        if told is None:
            return set()
        return {slot.parameter for slot, is_used in zip(slots, told, strict=True) if is_used}

    def _step_averaged(self) -> None:
        averaged, self._averaged = self._averaged, []
        if not averaged:
            return
        try:
            self._stage.step(averaged)
        except Exception as error:  # noqa: BLE001 - raised when backward ends, Note [Stopping]
            self._stop(error)
        for transfer, used in averaged:
            transfer.bucket.release()
            kept = transfer.local.nbytes if self._stage.steps_everywhere else 0
            self._ungathered.append(transfer.bucket.layout.loads)
            gathering = self._stage.gather(transfer, used)
            if gathering is not None:
                loads = _sum(self._ungathered)
                self._ungathered = []
                self._gathered.append(_Gathered(transfer.bucket, gathering, kept, loads))
        while self._gathered and self._gathers_too_many():
            self._complete_oldest()

    def _gathers_too_many(self) -> bool:
        if self.hears_ready:
            return len(self._gathered) > NUM_GATHERED
        if self._stage.steps_everywhere:
            return sum(each.kept_nbytes for each in self._gathered) > self._capacity_bytes
        room = self._reductions.room_nbytes()
        return max(_sum([each.loads for each in self._gathered])) > room

    def _complete_oldest(self) -> None:
        bucket, gathering, *_ = self._gathered.popleft()
        try:
            with _named("gathering", bucket):
                gathering.wait()
        except Exception as error:  # noqa: BLE001 - as above
            self._stop(error)

    def _stop(self, error: Exception) -> None:
        if isinstance(error, (CommunicationError, PeerError, RankDisagreementError)):
            raise error
        self._error = self._error or error
        self._is_stopped = True

    def _step_empty(self) -> None:
        empty = [p for p in self._reductions.parameters if p.grad is not None and not p.numel()]
        if empty and not self._is_stopped:
            try:
                self._stage.step_empty(empty)
            except Exception as error:  # noqa: BLE001 - as above
                self._stop(error)

    def _has_next(self) -> bool:
        return len(self._launched) < len(self._order)

    def _drop_gradients(self) -> None:
        assign(self._reductions.parameters, "grad", itertools.repeat(None))

    def _in_nested(self) -> bool:
        task = torch._C._current_graph_task_id()  # noqa: SLF001 - torch has no public name for it
        if task not in self._nested_tasks:
            self._nested_tasks[task] = is_nested()
        return self._nested_tasks[task]

    def _second_gradient(self, index: int) -> RuntimeError:
        shape = tuple(self._reductions.parameters[index].shape)
        return RuntimeError(
            f"parameter {index}, of shape {shape}, has been updated in this backward and now gets "
            "another gradient, from reentrant checkpointing of a part of the model; use "
            "checkpoint(..., use_reentrant=False), or pass the model as module=, whose forward shows "
            "such a use, so that the parameter is updated when backward ends"
        )


_HAS_NEW_ORDER, _HAS_THAWED = 1, 2


def _received_nbytes(layout: BucketLayout, capacity_bytes: int) -> int:
    longest = max(end - start for start, end in pairwise(layout.cuts))
    num_peers = len(layout.cuts) - 2
    return min(longest * num_peers * layout.dtype.itemsize, capacity_bytes)


def _sum(loads: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Of each rank."""
    return tuple(map(sum, zip(*loads, strict=True)))


@contextmanager
def _named(what: str, bucket: GradientBucket) -> Iterator[None]:
    """Failures of communication inside say in which bucket."""
    try:
        yield
    except CommunicationError as error:
        slots = bucket.layout.slots
        raise CommunicationError(
            f"{what} failed in the bucket that holds {len(slots)} parameters (the first is number "
            f"{slots[0].parameter}), {error}"
        ) from error
