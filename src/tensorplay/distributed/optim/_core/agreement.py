"""Ranks find out together that something is wrong, instead of hanging or training apart.

Every public call that communicates begins with :meth:`Agreement.settle`: one reduction of a few
integers, of the same size for every call. If all ranks are in the same call, with the same
description and without an error, it returns. Otherwise each rank learns what the others have, and
all of them raise: the rank with an error its own, the others one that names it.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from tensorplay.distributed.optim._core import tagged_json
from tensorplay.distributed.optim._core.collectives import (
    CommunicationError,
    Communicator,
    PendingMaximum,
)
from tensorplay.distributed.optim._core.ranks import GroupRank
from tensorplay.distributed.optim._core.tagged_json import Json

_DIGEST_BYTES = 7  # fits a signed 64-bit integer


class RankDisagreementError(RuntimeError):
    """Ranks made different calls or passed different things; raised on every rank alike."""


class PeerError(RuntimeError):
    """Another rank failed in this call; the message names it and what it raised."""


class Description:
    """What must be the same on every rank, for calls that say it often: digested once."""

    def __init__(self, value: Json) -> None:
        self.value = value
        self.digest = _digest(value)


class Settlement:
    """A call that is being settled."""

    def __init__(
        self,
        agreement: "Agreement",
        pending: PendingMaximum,
        call: str,
        description: Description,
        error: BaseException | None,
    ) -> None:
        self._agreement = agreement
        self._arguments = pending, call, description, error

    def wait(self) -> int:
        """See :meth:`Agreement.settle`."""
        return self._agreement.conclude(*self._arguments)


class Agreement:
    """Settles each call of one distributed object among the ranks of its group.

    Args:
        communicator: carries the integers.
        owner: the class whose calls are settled; messages carry its name.
    """

    def __init__(self, communicator: Communicator, owner: str) -> None:
        self._communicator = communicator
        self._owner = owner
        self.num_refused = 0
        """How many calls have ended in an error on every rank: the same number on all of them."""

    def settle(
        self,
        call: str,
        description: Json | Description = None,
        error: BaseException | None = None,
        flag: int = 0,
    ) -> int:
        """Returns the largest ``flag`` of all ranks if they agree, else raises on every rank.

        :meth:`start` and ``wait()`` in one.

        Args:
            call: the public call that this is, for instance ``"step"``.
            description: what must be the same on every rank.
            error: what went wrong on this rank, if anything.
            flag: a small integer to be maximised.

        Raises:
            BaseException: ``error`` itself, on the rank that passed it.
            PeerError: if only others passed one.
            RankDisagreementError: if calls or descriptions differ.
            CommunicationError: if some rank doesn't come within the group's time-out, or has died.
        """
        return self.start(call, description, error, flag).wait()

    def start(
        self,
        call: str,
        description: Json | Description = None,
        error: BaseException | None = None,
        flag: int = 0,
    ) -> "Settlement":
        """Begins to settle a call, so that something else can be done until the others have come.

        Its ``wait()`` must be called before anything else is begun that needs all ranks to agree.
        """
        if not isinstance(description, Description):
            description = Description(description)
        facts = [_digest(call), description.digest]
        values = [*facts, *(-fact for fact in facts), int(error is not None), flag]
        try:
            pending = self._communicator.max_(values)
        except RuntimeError as failure:
            raise self._nobody_came(call, failure) from (error or failure)
        return Settlement(self, pending, call, description, error)

    def _nobody_came(self, call: str, failure: RuntimeError) -> CommunicationError:
        return CommunicationError(
            f"{self._owner}.{call}: not every rank has come to the same call: {failure}"
        )

    def conclude(
        self,
        pending: PendingMaximum,
        call: str,
        description: Description,
        error: BaseException | None,
    ) -> int:
        """For :class:`Settlement`: see :meth:`settle`."""
        try:
            agreed = pending.wait()
        except RuntimeError as failure:
            raise self._nobody_came(call, failure) from (error or failure)
        highest, lowest, failed = agreed[:2], [-fact for fact in agreed[2:4]], agreed[4]
        if highest == lowest and not failed:
            return agreed[5]
        self.num_refused += 1
        # Descriptions may be long: only sent around if they are what differs.
        same_call = highest[0] == lowest[0]
        raise self._explain(call, description.value if same_call and not failed else None, error)

    def _explain(self, call: str, description: Json, error: BaseException | None) -> BaseException:
        statement = {
            "call": call,
            "description": description,
            "error": None if error is None else f"{type(error).__name__}: {error}",
        }
        messages = self._communicator.all_gather_bytes(json.dumps(statement).encode())
        parsed: dict[bytes, Any] = {message: json.loads(message) for message in set(messages)}
        statements = [parsed[message] for message in messages]  # equal ones share their parts
        if error is not None:
            return error
        members = self._communicator.members
        errors = [
            f"{members.name(rank)}: {each['error']}"
            for rank, each in zip(members, statements, strict=True)
            if each["error"] is not None
        ]
        if errors:
            return PeerError(
                f"{self._owner}.{call} failed on another rank, and was given up here. "
                + "; ".join(errors)
            )
        calls = [each["call"] for each in statements]
        if len(set(calls)) > 1:
            return RankDisagreementError(
                f"{self._differs(f'the call of {self._owner}', calls)}; all ranks must make the "
                "same calls in the same order (has one of them swallowed an exception?)"
            )
        difference = first_difference([each["description"] for each in statements])
        assert difference is not None  # noqa: S101 - digests differed
        return RankDisagreementError(
            f"ranks disagree in {self._owner}.{call}: {self._differs(*difference)}; "
            "it must be the same on every rank"
        )

    def _differs(self, subject: str, values: Sequence[Any]) -> str:
        members = self._communicator.members
        holders: dict[str, list[GroupRank]] = {}
        for rank, value in zip(members, values, strict=True):
            holders.setdefault(_readable(value), []).append(rank)
        return f"{subject} is " + " but ".join(
            f"{value} on {', '.join(members.name(rank) for rank in ranks[:4])}"
            + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
            for value, ranks in holders.items()
        )


class _Absent:
    """Stands for something that a rank doesn't have at all."""


def first_difference(
    descriptions: Sequence[Json], path: str = ""
) -> tuple[str, list[Json | _Absent]] | None:
    """Where JSON values differ first, depth first: the path, and each one's value there.

    What :mod:`tagged_json` has tagged counts as one value.
    """
    distinct = {id(each): each for each in descriptions}.values()
    if len({_canonical(each) for each in distinct}) == 1:
        return None
    if all(isinstance(each, dict) and "$" not in each for each in descriptions):
        return _first_difference_in_dicts(descriptions, path)
    if all(isinstance(each, list) for each in descriptions):
        longest = max(len(each) for each in descriptions)
        for position in range(longest):
            items = [each[position] if position < len(each) else _ABSENT for each in descriptions]
            difference = first_difference(items, f"{path}[{position}]")
            if difference:
                return difference
    return path, list(descriptions)


def _first_difference_in_dicts(
    descriptions: Sequence[Any], path: str
) -> tuple[str, list[Json | _Absent]] | None:
    names = {str(each.get("name")) for each in descriptions}
    if len(names) == 1 and names != {"None"}:
        path = f"{path} ({names.pop()!r})"
    for key in dict.fromkeys(key for each in descriptions for key in each):
        values = [each.get(key, _ABSENT) for each in descriptions]
        difference = first_difference(values, f"{path}.{key}" if path else key)
        if difference:
            return difference
    return None


_ABSENT: Any = _Absent()


def _readable(value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    if isinstance(value, dict):
        match value.get("$"):
            case "float":
                return repr(float.fromhex(value["hex"]))
            case "complex":
                return repr(tagged_json.decode(value))
            case "device":
                return f"device {value['name']!r}"
            case "object":
                return str(value.get("value", f"a {value['type']}"))
            case "dict":
                shown = [_readable(item) for item in value["items"]]
                pairs = zip(shown[::2], shown[1::2], strict=True)
                return f"{{{', '.join(f'{key}: {item}' for key, item in pairs)}}}"
            case "tuple" | "size":
                return f"({', '.join(_readable(item) for item in value['items'])})"
            case "dtype":
                return f"torch.{value['name']}"
            case "tensor":
                return f"a tensor {value.get('values', value.get('shape'))}"
    if isinstance(value, list):
        return f"[{', '.join(_readable(item) for item in value)}]"
    return repr(value)


def _canonical(value: Json | _Absent) -> str:
    """Equal for the same JSON; unlike ``==`` it tells ``True`` from ``1``."""
    return "absent" if value is _ABSENT else json.dumps(value, sort_keys=True)


def _digest(value: Json) -> int:
    canonical = _canonical(value).encode()
    return int.from_bytes(hashlib.blake2b(canonical, digest_size=_DIGEST_BYTES).digest(), "big")
