"""Ranks as threads of one process, and a communicator that exchanges through their shared memory.

A bug fails instead of hanging: every wait has a timeout, ranks that issue different collectives are
told so, and an exception on one rank aborts the others.
"""

import math
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from tensorplay.distributed.optim._core.ranks import GlobalRank, GroupMembers, GroupRank

WAIT_TIMEOUT_S = 10.0


class FakeRankError(AssertionError):
    """A rank raised; the message names the one that was first, whose exception is the cause."""


class FakeTimeoutError(RuntimeError):
    """What this rank waited for didn't come: with real processes it would hang."""


class FakeAbortError(RuntimeError):
    """Another rank has failed, so that what this one waits for will never come."""


class Message(NamedTuple):
    """One call of a communicator, as its ledger keeps it."""

    verb: str
    nbytes: int


class FakeWorld:
    """What the ranks share."""

    def __init__(self, world_size: int, timeout_s: float) -> None:
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.changed = threading.Condition()
        self.failures: list[tuple[int, BaseException]] = []
        self.rounds: defaultdict[int, dict[int, tuple[Any, Any]]] = defaultdict(dict)
        self.readers: Counter[int] = Counter()
        self.mail: defaultdict[tuple[int, int], deque[Any]] = defaultdict(deque)
        self.num_taken: Counter[tuple[int, int]] = Counter()

    def fail(self, rank: int, error: BaseException) -> None:
        with self.changed:
            self.failures.append((rank, error))
            self.changed.notify_all()

    def wait_until(self, ready: Callable[[], bool], what: Callable[[], str]) -> None:
        """Waits, with the lock held, or raises what stands in the way."""
        deadline = time.monotonic() + self.timeout_s
        while not ready():
            if self.failures:
                raise FakeAbortError(f"rank {self.failures[0][0]} failed while {what()}")
            if not self.changed.wait(max(0.0, deadline - time.monotonic())):
                raise FakeTimeoutError(f"timed out while {what()}")

    def post(self, number: int, rank: int, signature: Any, value: Any) -> None:
        with self.changed:
            self.rounds[number][rank] = signature, value
            self.changed.notify_all()

    def collect(self, number: int, rank: int, signature: Any) -> list[Any]:
        """What every rank has posted in a round of the same signature."""
        with self.changed:
            posted = self.rounds[number]
            self.wait_until(
                lambda: len(posted) == self.world_size,
                lambda: (
                    f"rank {rank} waited in {signature} for ranks "
                    f"{sorted(set(range(self.world_size)) - set(posted))}"
                ),
            )
            signatures = {other: posted[other][0] for other in sorted(posted)}
            self.readers[number] += 1
            if self.readers[number] == self.world_size:
                del self.rounds[number], self.readers[number]
        if any(each != signature for each in signatures.values()):
            raise RuntimeError(f"ranks issued different collectives: {signatures}")
        return [posted[other][1] for other in range(self.world_size)]


class _Deferred:
    """What arrives when it is awaited, not earlier."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        finish, self._finish = self._finish, None
        if finish:
            finish()


class _DeferredExchange(_Deferred):
    """Messages that arrive when they are awaited."""

    def __init__(self, finish: Callable[[], None], parts: list[torch.Tensor]) -> None:
        super().__init__(finish)
        self._parts = parts

    def parts(self) -> list[torch.Tensor]:
        self.wait()
        return list(self._parts)

    def let_go(self) -> None:
        pass


class _DeferredMaximum:
    """Integers of all ranks, when they are awaited."""

    def __init__(self, collect: Callable[[], list[list[int]]]) -> None:
        self._collect = collect

    def wait(self) -> list[int]:
        return [max(each) for each in zip(*self._collect(), strict=True)]


class FakeCommunicator:
    """The verbs of ``Communicator`` between threads.

    Args:
        world: shared by all ranks.
        members: this rank's place.
        deferred: whether gathers arrive when they are awaited, else before they are returned.
        sendable: the device types that can take part.

    Attributes:
        calls: how often each verb was called.
        sent: what this rank handed over, in order; a gather counts its own slice.
        received: what arrived at this rank, in order.
    """

    def __init__(
        self,
        world: FakeWorld,
        members: GroupMembers,
        *,
        deferred: bool = True,
        sendable: Sequence[str] = ("cpu",),
    ) -> None:
        self.members = members
        self.calls: Counter[str] = Counter()
        self.sent: list[Message] = []
        self.received: list[Message] = []
        self._world = world
        self._deferred = deferred
        self._sendable = sendable
        self._num_rounds = 0

    def can_send(self, device: torch.device) -> bool:
        return device.type in self._sendable

    def describe_backend(self) -> str:
        return ",".join(f"{device}:fake" for device in self._sendable)

    def transport_device(self) -> torch.device:
        return torch.device("cpu")

    def gather_from_owners(self, flat: torch.Tensor, cuts: Sequence[int]) -> _Deferred:
        assert list(cuts) == sorted(cuts)
        assert len(cuts) == self.members.world_size + 1
        assert flat.is_contiguous()
        assert cuts[-1] <= flat.numel()
        rank = self.members.group_rank
        own = flat[cuts[rank] : cuts[rank + 1]].detach().clone()
        self._count("gather_from_owners", own.nbytes)
        signature = ("gather_from_owners", flat.dtype, tuple(cuts))
        number = self._post(signature, own)

        def finish() -> None:
            slices = self._world.collect(number, rank, signature)
            for owner, (start, end) in enumerate(pairwise(cuts)):
                if owner != rank:
                    flat[start:end].detach().copy_(slices[owner])
                    self.received.append(Message("gather_from_owners", slices[owner].nbytes))

        gathering = _Deferred(finish)
        if not self._deferred:
            gathering.wait()
        return gathering

    def average_(self, flat: torch.Tensor, contributors: Sequence[GroupRank]) -> _Deferred:
        assert flat.is_contiguous()
        self._count("average_", flat.nbytes)
        signature = ("average_", flat.numel(), flat.dtype, tuple(contributors))
        number = self._post(signature, flat.detach().clone())

        def finish() -> None:
            values = self._world.collect(number, self.members.group_rank, signature)
            mean = torch.stack([values[rank] for rank in contributors]).mean(0)
            flat.detach().copy_(mean)
            self.received.append(Message("average_", flat.nbytes))

        averaging = _Deferred(finish)
        if not self._deferred:
            averaging.wait()
        return averaging

    def send(self, tensor: torch.Tensor, target: GroupRank) -> _Deferred:
        assert tensor.is_contiguous()
        self._count("send", tensor.nbytes)
        return self._hand_over(("send", tensor.numel(), tensor.dtype), tensor, target)

    def receive_(self, tensor: torch.Tensor, source: GroupRank) -> _Deferred:
        """Waitables of receives must be awaited in the order of launch."""
        assert tensor.is_contiguous()

        def finish() -> None:
            tensor.copy_(self._take(("send", tensor.numel(), tensor.dtype), source))
            self.calls["receive_"] += 1
            self.received.append(Message("receive_", tensor.nbytes))

        return _Deferred(finish)

    def exchange(
        self,
        outgoing: Sequence[tuple[GroupRank, torch.Tensor]],
        incoming: Sequence[tuple[GroupRank, torch.Tensor]],
    ) -> "_DeferredExchange":
        sends = [self.send(tensor, target) for target, tensor in outgoing]
        receives = [self.receive_(tensor, source) for source, tensor in incoming]

        def finish() -> None:
            for waitable in (*receives, *sends):
                waitable.wait()

        return _DeferredExchange(finish, [tensor for _, tensor in incoming])

    def all_reduce_(self, tensor: torch.Tensor, op: str) -> _Deferred:
        self._count("all_reduce_", tensor.nbytes)
        signature = ("all_reduce_", tensor.dtype, tuple(tensor.shape), op)
        number = self._post(signature, tensor.detach().clone())

        def finish() -> None:
            stacked = torch.stack(self._world.collect(number, self.members.group_rank, signature))
            tensor.copy_(stacked.sum(0) if op == "sum" else stacked.amax(0))

        return _Deferred(finish)

    def send_bytes(self, payload: bytes, target: GroupRank) -> None:
        self._count("send_bytes", len(payload))
        self._hand_over("send_bytes", payload, target).wait()

    def receive_bytes(self, source: GroupRank) -> bytes:
        payload: bytes = self._take("send_bytes", source)
        self.calls["receive_bytes"] += 1
        self.received.append(Message("receive_bytes", len(payload)))
        return payload

    def max_(self, values: list[int]) -> "_DeferredMaximum":
        self._count("max_", 8 * len(values))
        signature = ("max_", len(values))
        number = self._post(signature, values)
        return _DeferredMaximum(
            lambda: self._world.collect(number, self.members.group_rank, signature)
        )

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        self._count("all_gather_bytes", len(payload))
        return self._exchange("all_gather_bytes", payload)

    def room_nbytes(self) -> float:
        return math.inf

    def awaited_in_any_order(self) -> "FakeCommunicator":
        return self

    def _count(self, verb: str, nbytes: int) -> None:
        self.calls[verb] += 1
        self.sent.append(Message(verb, nbytes))

    def _post(self, signature: Any, value: Any) -> int:
        number, self._num_rounds = self._num_rounds, self._num_rounds + 1
        self._world.post(number, self.members.group_rank, signature, value)
        return number

    def _exchange(self, signature: Any, value: Any) -> list[Any]:
        number = self._post(signature, value)
        return self._world.collect(number, self.members.group_rank, signature)

    def _hand_over(self, signature: Any, value: Any, target: GroupRank) -> _Deferred:
        """Done when the target has taken it: like a real send, it can't outrun its receiver."""
        world, way = self._world, (self.members.group_rank, target)
        assert way[0] != way[1], "a rank sends nothing to itself"
        with world.changed:
            ticket = world.num_taken[way] + len(world.mail[way])
            world.mail[way].append((signature, value))
            world.changed.notify_all()

        def finish() -> None:
            with world.changed:
                world.wait_until(
                    lambda: world.num_taken[way] > ticket,
                    lambda: f"rank {way[0]} waited for rank {way[1]} to receive {signature}",
                )

        return _Deferred(finish)

    def _take(self, signature: Any, source: GroupRank) -> Any:
        world, way = self._world, (source, self.members.group_rank)
        with world.changed:
            world.wait_until(
                lambda: bool(world.mail[way]),
                lambda: f"rank {way[1]} waited for rank {way[0]} to send {signature}",
            )
            sent, value = world.mail[way].popleft()
            if isinstance(value, torch.Tensor):
                value = value.clone()  # the sender may reuse its memory from now on
            world.num_taken[way] += 1
            world.changed.notify_all()
        if sent != signature:
            raise RuntimeError(f"rank {way[0]} sent {sent}, rank {way[1]} expected {signature}")
        return value


def run_fake_ranks(
    world_size: int,
    function: Callable[[FakeCommunicator], Any],
    *,
    global_ranks: Sequence[int] | None = None,
    deferred: bool = True,
    sendable: Sequence[str] = ("cpu",),
    timeout_s: float = WAIT_TIMEOUT_S,
) -> list[Any]:
    """Returns what ``function(communicator)`` returned on each rank, in rank order."""
    world = FakeWorld(world_size, timeout_s)
    numbers = tuple(GlobalRank(rank) for rank in global_ranks or range(world_size))
    results: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        members = GroupMembers(numbers, GroupRank(rank))
        communicator = FakeCommunicator(world, members, deferred=deferred, sendable=sendable)
        try:
            results[rank] = function(communicator)
        except BaseException as error:  # noqa: BLE001 - whatever it was, the caller must hear of it
            world.fail(rank, error)

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=6 * timeout_s)
    if world.failures:
        first, error = world.failures[0]
        raise FakeRankError(
            f"rank {first} failed first: {type(error).__name__}: {error}"
        ) from error
    stuck = [thread.name for thread in threads if thread.is_alive()]
    if stuck:
        raise FakeRankError(f"{', '.join(stuck)} did not finish in time")
    return results
