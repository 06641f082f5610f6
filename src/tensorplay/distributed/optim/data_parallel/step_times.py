"""Where the time of a training step goes: backward, communication hidden and exposed, the update."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import torch

from tensorplay.distributed.optim._core.collectives import (
    Communicator,
    Exchange,
    PendingMaximum,
    Waitable,
)
from tensorplay.distributed.optim._core.ranks import GroupRank

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class StepProfile:
    """What :meth:`DataParallelOptimizer.profile` has measured, on this rank, in seconds.

    Attributes:
        num_steps: how many steps were taken.
        backward_s: between the first gradient of a pass and its end, without waiting for others.
        communication_exposed_s: this rank waited for other ranks, or for data from them.
        communication_hidden_s: data were under way while this rank computed.
        reduction_s: the computing part of averaging gradients: packing, adding, dividing.
        step_s: clipping and the update.
    """

    num_steps: int
    backward_s: float
    communication_exposed_s: float
    communication_hidden_s: float
    reduction_s: float
    step_s: float

    def __str__(self) -> str:
        steps = max(1, self.num_steps)
        rows = (
            ("backward", self.backward_s),
            ("communication, exposed", self.communication_exposed_s),
            ("communication, hidden", self.communication_hidden_s),
            ("averaging", self.reduction_s),
            ("clipping and update", self.step_s),
        )
        lines = [f"{what:24}{1000 * seconds / steps:10.2f} ms" for what, seconds in rows]
        return "\n".join([f"per step, over {self.num_steps} steps", *lines])


class StepTimes:
    """Stopwatches of one optimizer; they run only while it is profiled."""

    def __init__(self) -> None:
        self.is_on = False
        self.reset()

    def reset(self) -> None:
        """Begins anew."""
        self.num_steps = 0
        self._totals = {"backward": 0.0, "reduction": 0.0, "step": 0.0}
        self._exposed = 0.0
        self._under_way = 0.0
        self._num_under_way = 0
        self._since = 0.0
        self._begun: dict[str, tuple[float, float]] = {}

    def count_step(self) -> None:
        """One more step."""
        self.num_steps += self.is_on

    def begin(self, phase: str) -> None:
        """A phase begins."""
        if self.is_on:
            self._begun[phase] = time.perf_counter(), self._exposed

    def discard(self, phase: str) -> None:
        """A phase that has begun doesn't count."""
        self._begun.pop(phase, None)

    def end(self, phase: str) -> None:
        """A phase ends; what it waited for other ranks isn't its own time."""
        if self.is_on and phase in self._begun:
            start, exposed = self._begun.pop(phase)
            self._totals[phase] += time.perf_counter() - start - (self._exposed - exposed)

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """A phase that is left on every way out."""
        self.begin(phase)
        try:
            yield
        finally:
            self.end(phase)

    def launched(self) -> None:
        """Something is under way from now on."""
        if self._num_under_way == 0:
            self._since = time.perf_counter()
        self._num_under_way += 1

    def waited(self, since: float) -> None:
        """It has arrived, and was waited for since then."""
        now = time.perf_counter()
        self._exposed += now - since
        self._num_under_way -= 1
        if self._num_under_way == 0:
            self._under_way += now - self._since

    def profile(self) -> StepProfile:
        """What has been measured so far."""
        return StepProfile(
            num_steps=self.num_steps,
            backward_s=self._totals["backward"],
            communication_exposed_s=self._exposed,
            communication_hidden_s=max(0.0, self._under_way - self._exposed),
            reduction_s=self._totals["reduction"],
            step_s=self._totals["step"],
        )


class _Timed(Generic[_Result]):
    def __init__(self, wait: Callable[[], _Result], times: StepTimes) -> None:
        self._wait = wait
        self._measured = _Measured(times)

    def wait(self) -> _Result:
        return self._measured.wait(self._wait)


class _TimedExchange:
    def __init__(self, exchange: Exchange, times: StepTimes) -> None:
        self._exchange = exchange
        self._measured = _Measured(times)

    def wait(self) -> None:
        self._measured.wait(self._exchange.wait)

    def parts(self) -> list[torch.Tensor]:
        return self._measured.wait(self._exchange.parts)

    def let_go(self) -> None:
        self._exchange.let_go()


class _Measured:
    """Something under way, and how long the first wait for it takes."""

    def __init__(self, times: StepTimes) -> None:
        self._times: StepTimes | None = times
        times.launched()

    def wait(self, wait: Callable[[], _Result]) -> _Result:
        times, self._times = self._times, None
        since = time.perf_counter()
        try:
            return wait()
        finally:
            if times is not None:
                times.waited(since)


class TimedCommunicator:
    """The verbs of another communicator, and how long they take.

    Args:
        communicator: does what is asked.
        times: learns of it.
    """

    def __init__(self, communicator: Communicator, times: StepTimes) -> None:
        self._communicator = communicator
        self._times = times
        self.members = communicator.members

    def _timed(self, waitable: Waitable) -> Waitable:
        return _Timed(waitable.wait, self._times) if self._times.is_on else waitable

    @contextmanager
    def _blocking(self) -> Iterator[None]:
        if not self._times.is_on:
            yield
            return
        self._times.launched()
        since = time.perf_counter()
        try:
            yield
        finally:
            self._times.waited(since)

    def can_send(self, device: torch.device) -> bool:
        """See :class:`Communicator`."""
        return self._communicator.can_send(device)

    def describe_backend(self) -> str:
        """See :class:`Communicator`."""
        return self._communicator.describe_backend()

    def transport_device(self) -> torch.device:
        """See :class:`Communicator`."""
        return self._communicator.transport_device()

    def gather_from_owners(self, flat: torch.Tensor, cuts: Sequence[int]) -> Waitable:
        """See :class:`Communicator`."""
        return self._timed(self._communicator.gather_from_owners(flat, cuts))

    def average_(self, flat: torch.Tensor, contributors: Sequence[GroupRank]) -> Waitable:
        """See :class:`Communicator`."""
        return self._timed(self._communicator.average_(flat, contributors))

    def send(self, tensor: torch.Tensor, target: GroupRank) -> Waitable:
        """See :class:`Communicator`."""
        return self._timed(self._communicator.send(tensor, target))

    def receive_(self, tensor: torch.Tensor, source: GroupRank) -> Waitable:
        """See :class:`Communicator`."""
        return self._timed(self._communicator.receive_(tensor, source))

    def exchange(
        self,
        outgoing: Sequence[tuple[GroupRank, torch.Tensor]],
        incoming: Sequence[tuple[GroupRank, torch.Tensor]],
    ) -> Exchange:
        """See :class:`Communicator`."""
        exchange = self._communicator.exchange(outgoing, incoming)
        return _TimedExchange(exchange, self._times) if self._times.is_on else exchange

    def all_reduce_(self, tensor: torch.Tensor, op: Literal["sum", "max"]) -> Waitable:
        """See :class:`Communicator`."""
        return self._timed(self._communicator.all_reduce_(tensor, op))

    def send_bytes(self, payload: bytes, target: GroupRank) -> None:
        """See :class:`Communicator`."""
        with self._blocking():
            self._communicator.send_bytes(payload, target)

    def receive_bytes(self, source: GroupRank) -> bytes:
        """See :class:`Communicator`."""
        with self._blocking():
            return self._communicator.receive_bytes(source)

    def max_(self, values: list[int]) -> PendingMaximum:
        """See :class:`Communicator`."""
        pending = self._communicator.max_(values)
        return _Timed(pending.wait, self._times) if self._times.is_on else pending

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """See :class:`Communicator`."""
        with self._blocking():
            return self._communicator.all_gather_bytes(payload)

    def room_nbytes(self) -> float:
        """See :class:`Communicator`."""
        return self._communicator.room_nbytes()

    def awaited_in_any_order(self) -> "TimedCommunicator":
        """See :class:`Communicator`."""
        return TimedCommunicator(self._communicator.awaited_in_any_order(), self._times)
