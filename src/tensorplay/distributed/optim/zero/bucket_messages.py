"""How a flat bucket whose order isn't ours is sent to the owners of its parts: a pure plan.

DDP lays its buckets out as gradients arrive, so that the parts of an owner may be scattered. A long
stretch travels from where it lies; the short ones of an owner are packed into one message.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import NamedTuple

import torch

from tensorplay.distributed.optim._core.ranks import GroupRank

LEAST_DIRECT_NUMEL = 16 * 1024
"""Elements of a stretch that is worth a message of its own: a copy of fewer costs less than that."""


class Stretch(NamedTuple):
    """Adjacent elements of one owner: ``[start, end)`` of a parameter, or of a bucket."""

    start: int
    end: int
    owner: GroupRank


@dataclass(frozen=True)
class Message:
    """What an owner gets from every other rank at once.

    Attributes:
        owner: who receives.
        extents: ascending stretches ``(start, end)`` of the bucket; several are packed.
    """

    owner: GroupRank
    extents: tuple[tuple[int, int], ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return sum(end - start for start, end in self.extents)


Round = tuple[Message, ...]
"""Messages that are under way together."""


@dataclass(frozen=True)
class BucketPlan:
    """How one bucket travels.

    Attributes:
        rounds: one after another.
        sizes: into which the bucket is split, so that each extent of a message is a piece, and gaps.
        piece_at: the number of the piece that begins there.
    """

    rounds: tuple[Round, ...]
    sizes: tuple[int, ...]
    piece_at: Mapping[int, int]

    @classmethod
    def of(cls, stretches: Sequence[Stretch], numel: int, longest: int) -> "BucketPlan":
        """Plans for a bucket of ``numel`` elements; the other arguments are :func:`plan_rounds`'."""
        rounds = plan_rounds(stretches, longest)
        extents = [extent for messages in rounds for each in messages for extent in each.extents]
        cuts = sorted({0, numel, *(cut for extent in extents for cut in extent)})
        sizes = tuple(end - start for start, end in pairwise(cuts))
        return cls(rounds, sizes, {start: number for number, start in enumerate(cuts[:-1])})

    def pieces_of(self, message: Message, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The pieces of a split bucket that make up a message."""
        return [pieces[self.piece_at[start]] for start, _ in message.extents]


def plan_rounds(stretches: Sequence[Stretch], longest: int) -> tuple[Round, ...]:
    """Divides a bucket into messages, and these into rounds.

    Args:
        stretches: of the bucket, ascending; elements that belong to nobody are in none.
        longest: how many elements an owner gets from each rank in a round.
    """
    of_owner: dict[GroupRank, list[Stretch]] = {}
    for stretch in _joined(stretches):
        of_owner.setdefault(stretch.owner, []).append(stretch)
    queues = [list(_in_rounds(own, longest)) for _, own in sorted(of_owner.items())]
    return tuple(
        tuple(message for messages in together if messages for message in messages)
        for together in zip_longest(*queues)
    )


def _joined(stretches: Sequence[Stretch]) -> Iterator[Stretch]:
    """Adjacent stretches of one owner as one."""
    current: Stretch | None = None
    for stretch in stretches:
        if stretch.start == stretch.end:
            continue
        if current and (current.end, current.owner) == (stretch.start, stretch.owner):
            current = current._replace(end=stretch.end)
            continue
        if current:
            yield current
        current = stretch
    if current:
        yield current


def _in_rounds(stretches: Sequence[Stretch], longest: int) -> Iterator[list[Message]]:
    """The messages of one owner, by round."""
    owner, free = stretches[0].owner, longest
    pieces: list[tuple[int, int]] = []
    for start, end, _ in stretches:
        begin = start
        while begin < end:
            until = min(end, begin + free)
            pieces.append((begin, until))
            free -= until - begin
            begin = until
            if not free:
                yield _messages(owner, pieces)
                pieces, free = [], longest
    if pieces:
        yield _messages(owner, pieces)


def _messages(owner: GroupRank, pieces: Sequence[tuple[int, int]]) -> list[Message]:
    long = [(start, end) for start, end in pieces if end - start >= LEAST_DIRECT_NUMEL]
    short = tuple(piece for piece in pieces if piece not in long)
    messages = [Message(owner, (piece,)) for piece in long]
    return [*messages, Message(owner, short)] if short else messages
