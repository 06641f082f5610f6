"""Updated shards -> every rank: the last of the three verbs of a sharded step.

A bucket travels in one of three ways. *Resident*: its parameters live in it, nothing is copied.
*In place*: its only parameter is sent from and received into its own storage, as long as its
elements lie there in the order of the plan. *Staged*: the owner packs its slots into a staging
buffer, the others unpack theirs from it. Two staging buffers serve the staged buckets in turn, so
that packing one overlaps with sending the other.
"""

import functools
import itertools
import operator
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import torch

from tensorplay.distributed.optim._core.bucket_layout import BucketLayout, Slot
from tensorplay.distributed.optim._core.collectives import (
    CommunicationError,
    Communicator,
    Waitable,
)
from tensorplay.distributed.optim._core.flat_buffer import FlatBuffer, ParameterHome
from tensorplay.distributed.optim._core.parameter_spec import ParameterSpec
from tensorplay.distributed.optim._core.ranks import GroupRank
from tensorplay.distributed.optim.zero.step_stages import plan_stages

NUM_STAGING_BUFFERS = 2


class ParameterBucket(Protocol):
    """A bucket that can be gathered."""

    layout: BucketLayout

    def launch(self, communicator: Communicator) -> Waitable:
        """Starts the gather; after ``wait()`` this rank holds every owner's values."""


class ResidentBucket:
    """The parameters live in the bucket."""

    def __init__(self, home: ParameterHome) -> None:
        self.home = home
        self.layout = home.layout

    def launch(self, communicator: Communicator) -> Waitable:
        """See :class:`ParameterBucket`."""
        return communicator.gather_from_owners(self.home.flat, self.layout.cuts)


class StagedBucket:
    """The parameters keep their storages and travel through a staging buffer."""

    def __init__(
        self,
        layout: BucketLayout,
        specs: Sequence[ParameterSpec],
        parameters: Sequence[torch.Tensor],
        staging: "StagingBuffer",
        group_rank: GroupRank,
    ) -> None:
        self.layout = layout
        self._specs = specs
        self._parameters = parameters
        self._staging = staging
        self._own = layout.slots_of(group_rank)
        self._others = layout.slots_except(group_rank)
        self._buffer: FlatBuffer | None = None

    def launch(self, communicator: Communicator) -> Waitable:
        """See :class:`ParameterBucket`."""
        storage = self._staging.take(self.layout)
        buffer = self._buffer
        if buffer is None or buffer.flat.data_ptr() != storage.data_ptr():
            buffer = self._buffer = FlatBuffer(self.layout, self._specs, storage)
        buffer.pack_(self._parameters, self._own)
        gathering = communicator.gather_from_owners(buffer.flat, self.layout.cuts)
        unpack = functools.partial(buffer.unpack_, self._parameters, self._others)
        return self._staging.occupy(gathering, unpack)


class InPlaceBucket:
    """The bucket is one parameter, which keeps its storage; staged while its strides aren't planned.

    They may differ from rank to rank and change at any time; what travels is the same.
    """

    def __init__(
        self,
        staged: StagedBucket,
        specs: Sequence[ParameterSpec],
        parameters: Sequence[torch.Tensor],
    ) -> None:
        self.layout = staged.layout
        (slot,) = staged.layout.slots
        self._staged = staged
        self._stride = specs[slot.parameter].stride
        self._parameter = parameters[slot.parameter]

    def launch(self, communicator: Communicator) -> Waitable:
        """See :class:`ParameterBucket`."""
        parameter = self._parameter.detach()
        if parameter.stride() != self._stride:
            return self._staged.launch(communicator)
        flat = parameter.as_strided((parameter.numel(),), (1,))
        return communicator.gather_from_owners(flat, self.layout.cuts)


class ResidentStretch:
    """Adjacent parameters of a resident bucket, which travel without the others.

    Args:
        layout: as :func:`resident_stretches` makes it.
        parameters: all parameters, by index.
    """

    def __init__(self, layout: BucketLayout, parameters: Sequence[torch.Tensor]) -> None:
        self.layout = layout
        self._first = parameters[layout.slots[0].parameter]

    def launch(self, communicator: Communicator) -> Waitable:
        """See :class:`ParameterBucket`."""
        flat = self._first.detach().as_strided((self.layout.numel,), (1,))
        return communicator.gather_from_owners(flat, self.layout.cuts)


def resident_stretches(
    layouts: Sequence[BucketLayout], indices: Collection[int], least_nbytes: int
) -> list[BucketLayout]:
    """The stretches of resident buckets in which there is nothing but these parameters.

    Args:
        layouts: the buckets.
        indices: of the parameters.
        least_nbytes: how long a stretch must be to be worth a message; shorter ones are left out.
    """
    found = []
    for layout in layouts:
        if not layout.resident:
            continue
        run: list[Slot] = []
        for slot in layout.slots:
            if slot.parameter in indices:
                run.append(slot)
            elif run:
                found.append(_part_of(layout, run, slot.offset))
                run = []
        if run:
            found.append(_part_of(layout, run, layout.numel))
    return [stretch for stretch in found if stretch.nbytes >= least_nbytes]


def _part_of(layout: BucketLayout, slots: Sequence[Slot], end: int) -> BucketLayout:
    start = slots[0].offset
    return replace(
        layout,
        slots=tuple(slot._replace(offset=slot.offset - start) for slot in slots),
        cuts=tuple(min(max(cut, start), end) - start for cut in layout.cuts),
    )


class StagingBuffer:
    """Memory lent to one staged bucket at a time, as large as the largest needs it."""

    def __init__(self) -> None:
        self._nbytes = 0
        self._storage: torch.Tensor | None = None
        self._occupant: _Unpacking | None = None

    def reserve(self, nbytes: int) -> None:
        """Lets the memory be large enough for ``nbytes`` when it is allocated."""
        self._nbytes = max(self._nbytes, nbytes)

    def take(self, layout: BucketLayout) -> torch.Tensor:
        """Waits until the last user has unpacked; returns ``(layout.numel,)`` elements."""
        if self._occupant is not None:
            occupant, self._occupant = self._occupant, None
            occupant.wait()
        if self._storage is None or self._storage.numel() < layout.nbytes:
            self.reserve(layout.nbytes)
            self._storage = torch.empty(self._nbytes, dtype=torch.uint8, device=layout.device)
        return self._storage[: layout.nbytes].view(layout.dtype)

    def occupy(self, gathering: Waitable, unpack: Callable[[], None]) -> Waitable:
        """Marks the memory as in use until ``gathering`` has arrived and been unpacked."""
        self._occupant = _Unpacking(gathering, unpack)
        return self._occupant


class _Unpacking:
    def __init__(self, gathering: Waitable, unpack: Callable[[], None]) -> None:
        self._gathering = gathering
        self._unpack = unpack
        self._done = False

    def wait(self) -> None:
        if not self._done:
            self._done = True
            self._gathering.wait()
            self._unpack()


class ParameterBuckets:
    """All buckets of an optimizer, in the order in which they are gathered.

    Args:
        parameters: all parameters by index; the list is kept and may grow.
        group_rank: this rank, whose parameters are sent.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], group_rank: GroupRank) -> None:
        self._parameters = parameters
        self._group_rank = group_rank
        self._staging: dict[torch.device, tuple[StagingBuffer, ...]] = {}
        self._num_staged = 0
        self.buckets: list[ParameterBucket] = []
        self._stages: dict[bool, list[list[int]]] = {}

    def add(self, layout: BucketLayout, specs: Sequence[ParameterSpec]) -> None:
        """Adds a bucket, and moves its parameters into it if they are to be resident."""
        self._stages.clear()
        if layout.resident:
            home = ParameterHome(layout, specs, self._parameters)
            self.buckets.append(ResidentBucket(home))
            return
        buffers = self._staging.setdefault(
            layout.device, tuple(StagingBuffer() for _ in range(NUM_STAGING_BUFFERS))
        )
        buffer = buffers[self._num_staged % NUM_STAGING_BUFFERS]
        staged = StagedBucket(layout, specs, self._parameters, buffer, self._group_rank)
        if len(layout.slots) == 1:
            self.buckets.append(InPlaceBucket(staged, specs, self._parameters))
        else:
            self._num_staged += 1
            buffer.reserve(layout.nbytes)
            self.buckets.append(staged)

    def gather(self, communicator: Communicator, *, trainable: bool) -> None:
        """Gathers the buckets that were trainable, or frozen, when they were planned.

        Several are under way at a time.

        Raises:
            CommunicationError: if the backend fails or times out, naming bucket and rank.
        """
        under_way: deque[tuple[int, Waitable]] = deque()
        nbytes, room = [0] * communicator.members.world_size, communicator.room_nbytes()
        for number in itertools.chain.from_iterable(self.stages(trainable)):
            nbytes = list(map(operator.add, nbytes, self.buckets[number].layout.loads))
            while under_way and max(nbytes) > room:
                arrived = self.buckets[under_way[0][0]].layout.loads
                nbytes = list(map(operator.sub, nbytes, arrived))
                self.finish(*under_way.popleft())
            under_way.append((number, self.launch(number, communicator)))
        self.finish_all(under_way)

    def finish_all(self, launched: Iterable[tuple[int, Waitable]]) -> None:
        """Waits until the parameters of several buckets are there."""
        for number, gathering in launched:
            self.finish(number, gathering)

    def stages(self, trainable: bool) -> list[list[int]]:
        """:meth:`numbers` in the order in which they are gathered after a step, in stages."""
        if trainable not in self._stages:
            layouts = {number: self.buckets[number].layout for number in self.numbers(trainable)}
            self._stages[trainable] = plan_stages(layouts)
        return self._stages[trainable]

    def numbers(self, trainable: bool) -> list[int]:
        """The numbers of the buckets that were trainable, or frozen, when they were planned."""
        return [
            number
            for number, bucket in enumerate(self.buckets)
            if bucket.layout.trainable == trainable
        ]

    def launch(self, number: int, communicator: Communicator) -> Waitable:
        """Begins to gather a bucket; :meth:`finish` ends it."""
        with self._naming(number):
            return self.buckets[number].launch(communicator)

    def finish(self, number: int, gathering: Waitable) -> None:
        """Waits until a bucket's parameters are there."""
        with self._naming(number):
            gathering.wait()

    @contextmanager
    def _naming(self, number: int) -> Iterator[None]:
        try:
            yield
        except CommunicationError as error:
            slots = self.buckets[number].layout.slots
            raise CommunicationError(
                f"gathering parameters failed in bucket {number + 1} of {len(self.buckets)}, which "
                f"holds {len(slots)} parameters (the first is number {slots[0].parameter}), {error}"
            ) from error

    def flats_of(
        self, layouts: Sequence[BucketLayout], among: Sequence[BucketLayout]
    ) -> list[torch.Tensor]:
        """``(numel,)`` each: the memory of those of the resident ``layouts`` that are ``among`` others."""
        flats = {
            id(bucket.layout): bucket.home.flat
            for bucket in self.buckets
            if isinstance(bucket, ResidentBucket)
        }
        wanted = set(map(id, among))
        return [flats[id(layout)] for layout in layouts if id(layout) in wanted]

    @property
    def resident(self) -> set[int]:
        """The indices of the parameters that live in buckets."""
        return {
            slot.parameter
            for bucket in self.buckets
            if isinstance(bucket, ResidentBucket)
            for slot in bucket.layout.slots
        }

    def strayed(self) -> int | None:
        """The index of a resident parameter whose storage was replaced, if there is one."""
        for bucket in self.buckets:
            if isinstance(bucket, ResidentBucket):
                slot = bucket.home.strayed()
                if slot is not None:
                    return slot.parameter
        return None
