"""Shards of optimizer state -> the full state on one rank, and back.

Consolidation sends each byte once, from its owner to the target. The structure of the state goes
first, as tagged JSON; then the tensors: large ones straight out of and into their own memory, small
ones packed. Nothing is unpickled, and no rank but the target holds more than one chunk of it.
"""

import functools
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from tensorplay.distributed.optim._core import tagged_json
from tensorplay.distributed.optim._core.agreement import Agreement
from tensorplay.distributed.optim._core.collectives import Communicator, Waitable
from tensorplay.distributed.optim._core.parameter_spec import is_dense
from tensorplay.distributed.optim._core.ranks import GroupRank
from tensorplay.distributed.optim._core.state_dicts import IndexedState
from tensorplay.distributed.optim._core.tagged_json import Json
from tensorplay.distributed.optim._core.tensor_spec import TensorSpec

CHUNK_BYTES = 8 * 1024 * 1024
"""The most that a rank holds besides the state itself (and a tensor that has gaps, packed)."""

MESSAGE_BYTES = CHUNK_BYTES // 2
"""Small tensors are packed into messages; while one travels the next is packed."""

PACK_BELOW_BYTES = 64 * 1024
"""Larger tensors travel on their own, straight out of and into their memory."""


@dataclass(frozen=True)
class Shard:
    """One rank's part of the state, ready to travel.

    Attributes:
        structure: everything but the tensors.
        tensors: the tensors that ``structure`` refers to; dense, though not always contiguous.
    """

    structure: Json
    tensors: tuple[torch.Tensor, ...]

    @classmethod
    def encode(cls, state: IndexedState) -> "Shard":
        """Takes the tensors out of ``state``; ``TypeError`` names what can't be sent."""
        tensors: list[torch.Tensor] = []
        structure = [
            [index, tagged_json.encode(value, tensors, f"the state of parameter {index}")]
            for index, value in state.items()
        ]
        return cls(structure, tuple(t if is_dense(t) else t.contiguous() for t in tensors))

    def decode(self) -> IndexedState:
        """The state again, around :attr:`tensors`."""
        return {index: tagged_json.decode(value, self.tensors) for index, value in self.structure}

    def header(self) -> bytes:
        """The structure and the tensors' metadata as JSON."""
        specs = [TensorSpec.of(tensor) for tensor in self.tensors]
        return json.dumps(
            [
                self.structure,
                [
                    [
                        str(spec.dtype).removeprefix("torch."),
                        spec.shape,
                        spec.stride,
                        spec.device_type,
                    ]
                    for spec in specs
                ],
            ]
        ).encode()

    @classmethod
    def allocate(cls, header: bytes, device_of_type: Mapping[str, torch.device]) -> "Shard":
        """A shard of the announced structure, whose tensors wait to be received."""
        structure, described = json.loads(header)
        return cls(
            structure,
            tuple(
                TensorSpec(
                    getattr(torch, dtype), tuple(shape), tuple(stride), device_type
                ).allocate(device_of_type)
                for dtype, shape, stride, device_type in described
            ),
        )


def consolidate(
    communicator: Communicator,
    agreement: Agreement,
    state: IndexedState,
    target: GroupRank,
    device_of_type: Mapping[str, torch.device],
) -> IndexedState | None:
    """Brings every rank's part of the state to ``target``; every rank must call.

    Args:
        communicator: carries headers and tensors.
        agreement: settles that nothing went wrong before bytes begin to move.
        state: this rank's part, by parameter index.
        target: who receives; it gets copies, also of its own part.
        device_of_type: this rank's device of each type, for the tensors that it receives.

    Returns:
        On ``target`` the full state in index order, elsewhere ``None``.

    Raises:
        TypeError: if some state is neither tensor nor plain data, on the rank that holds it; the
            other ranks raise ``PeerError``.
    """
    shard, header = Shard([], ()), b""
    error: Exception | None = None
    try:
        shard = Shard.encode(state)
        header = shard.header()
    except Exception as problem:  # noqa: BLE001 - the other ranks must hear of it first
        error = problem
    agreement.settle("consolidate_state_dict (structure)", error=error)
    members = communicator.members
    received: dict[GroupRank, Shard] = {}
    if members.group_rank == target:
        headers = {  # all of them before anything can fail, since their senders wait
            source: header if source == target else communicator.receive_bytes(source)
            for source in members
        }
        try:
            for source in members:
                received[source] = Shard.allocate(headers[source], device_of_type)
        except Exception as problem:  # noqa: BLE001 - most likely a lack of memory
            error = problem
    else:
        communicator.send_bytes(header, target)
    agreement.settle("consolidate_state_dict (memory)", error=error)
    if members.group_rank != target:
        send_tensors(communicator, shard.tensors, target)
        return None
    full: IndexedState = {}
    for source, arriving in received.items():
        if source == target:
            for own, kept in zip(shard.tensors, arriving.tensors, strict=True):
                kept.copy_(own)
        else:
            receive_tensors_(communicator, arriving.tensors, source)
        full.update(arriving.decode())
    return {index: full[index] for index in sorted(full)}


def send_tensors(
    communicator: Communicator, tensors: Sequence[torch.Tensor], target: GroupRank
) -> None:
    """Sends dense tensors to ``target``, which calls :func:`receive_tensors_` with their likes."""
    in_flight = _InFlight()
    for piece in _pieces(communicator, tensors):
        in_flight.make_room(piece)
        in_flight.add(piece, communicator.send(piece.to_wire(), target), lambda: None)
    in_flight.finish()


def receive_tensors_(
    communicator: Communicator, tensors: Sequence[torch.Tensor], source: GroupRank
) -> None:
    """Receives into dense tensors what ``source`` sends from tensors of the same metadata."""
    in_flight = _InFlight()
    for piece in _pieces(communicator, tensors):
        in_flight.make_room(piece)
        wire = piece.wire()
        receiving = communicator.receive_(wire, source)
        in_flight.add(piece, receiving, functools.partial(piece.from_wire_, wire))
    in_flight.finish()


@dataclass(frozen=True)
class _Piece:
    """Some stretches of bytes that travel as one message."""

    parts: tuple[torch.Tensor, ...]
    direct: bool
    device: torch.device

    def wire(self) -> torch.Tensor:
        """Memory for the message: the only part itself, or fresh."""
        if self.direct:
            return self.parts[0]
        nbytes = sum(part.numel() for part in self.parts)
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def to_wire(self) -> torch.Tensor:
        """The message, packed if it has several parts."""
        wire = self.wire()
        if not self.direct:
            torch.cat([part.to(self.device) for part in self.parts], out=wire)
        return wire

    def from_wire_(self, wire: torch.Tensor) -> None:
        """Unpacks what has arrived."""
        if not self.direct:
            arrived = torch.split(wire, [part.numel() for part in self.parts])
            for part, stretch in zip(self.parts, arrived, strict=True):
                part.copy_(stretch)


class _InFlight:
    """Messages under way, of which only two may hold memory of their own."""

    def __init__(self) -> None:
        self._messages: deque[tuple[_Piece, Waitable, Callable[[], None]]] = deque()
        self._num_packed = 0

    def make_room(self, piece: _Piece) -> None:
        """Waits until ``piece`` may have memory, if it needs it."""
        while not piece.direct and self._num_packed == CHUNK_BYTES // MESSAGE_BYTES:
            self._finish_first()

    def add(self, piece: _Piece, work: Waitable, when_done: Callable[[], None]) -> None:
        self._messages.append((piece, work, when_done))
        self._num_packed += not piece.direct

    def finish(self) -> None:
        while self._messages:
            self._finish_first()

    def _finish_first(self) -> None:
        piece, work, when_done = self._messages.popleft()
        work.wait()
        when_done()
        self._num_packed -= not piece.direct


def _pieces(communicator: Communicator, tensors: Sequence[torch.Tensor]) -> Iterator[_Piece]:
    """The messages, derived from metadata only, so that both ends derive the same."""
    transport = communicator.transport_device()
    small: list[torch.Tensor] = []
    num_small_bytes = 0
    for tensor in tensors:
        flat = _flat_bytes(tensor)
        if flat.numel() < PACK_BELOW_BYTES:
            if num_small_bytes + flat.numel() > MESSAGE_BYTES:
                yield _Piece(tuple(small), direct=False, device=transport)
                small, num_small_bytes = [], 0
            if flat.numel():
                small.append(flat)
                num_small_bytes += flat.numel()
        elif communicator.can_send(tensor.device):
            yield _Piece((flat,), direct=True, device=tensor.device)
        else:
            for part in torch.split(flat, MESSAGE_BYTES):
                yield _Piece((part,), direct=False, device=transport)
    if small:
        yield _Piece(tuple(small), direct=False, device=transport)


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
