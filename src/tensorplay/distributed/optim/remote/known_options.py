"""The options of a param group that the other side has: which of this side's are news to it."""

import operator
from collections.abc import Mapping
from typing import Any

import torch

from tensorplay.distributed.optim._core.state_dicts import clone
from tensorplay.distributed.optim._core.wrapped_optimizer import NOT_OPTIONS

CPU = torch.device("cpu")
_PLAIN = (bool, int, float, str, type(None))


class KnownOptions:
    """What the trainer has sent to the owners of a group or got from them; on an owner, before a step.

    What can be changed in place is known as a copy. A group without such options is looked through
    once: as long as it holds the same objects there is no news.
    """

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}
        self._looked_through: tuple[Any, ...] = ()

    def take(self, options: Mapping[str, Any]) -> None:
        """The other side has these."""
        self._known.update(clone(dict(options)))
        self._looked_through = ()

    def forget(self) -> None:
        """Nobody knows what the other side has."""
        self._known.clear()
        self._looked_through = ()

    def news(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Copies of the options that the other side doesn't have; the group's parameters are none."""
        objects = (*group, *group.values())
        seen = self._looked_through
        if len(objects) == len(seen) and all(map(operator.is_, objects, seen)):
            return {}
        options = {key: value for key, value in group.items() if key not in NOT_OPTIONS}
        known = self._known
        news = {
            key: clone(value, CPU)
            for key, value in options.items()
            if key not in known or not _is_same(value, known[key])
        }
        if not news and all(map(_is_plain, options.values())):
            self._looked_through = objects
        return news


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if type(value) is tuple else type(value) in _PLAIN


def _is_same(value: Any, known: Any) -> bool:
    if isinstance(value, torch.Tensor) or isinstance(known, torch.Tensor):
        return (
            isinstance(value, torch.Tensor)
            and isinstance(known, torch.Tensor)
            and value.dtype == known.dtype
            and torch.equal(value.detach().to(known.device), known)
        )
    if isinstance(value, dict) and isinstance(known, dict):
        return value.keys() == known.keys() and all(_is_same(value[k], known[k]) for k in known)
    if type(value) is not type(known):
        return False
    if isinstance(value, list | tuple):
        return len(value) == len(known) and all(map(_is_same, value, known))
    try:
        return bool(value == known)
    except (RuntimeError, ValueError):  # an array of something, which compares its elements
        return False
