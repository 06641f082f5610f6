"""Which optimizers step a parameter inside backward: kept on the parameter itself.

The list dies with the parameter, is lost where the hooks are lost too (``copy.deepcopy``), and does
not go into files. Autograd's hooks can't hold the optimizer: the garbage collector doesn't look into
them, and the parameters would never be freed.
"""

from collections import OrderedDict
from typing import Any

import torch

# Not `_in_backward_optimizers`: DDP looks for that name, and into torch's private maps then.
_ATTRIBUTE = "_tensorplay_in_backward"


class Registration(list[Any]):
    """The optimizers of a parameter in order of registration; the first hears of its gradients."""

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()  # in a copy or a file: nothing, of a type that torch.load accepts


def registration_of(parameter: torch.Tensor) -> Registration:
    """Who steps ``parameter``; empty if nobody does. Not to be changed."""
    found = getattr(parameter, _ATTRIBUTE, None)
    return found if isinstance(found, Registration) else Registration()


def register(parameter: torch.Tensor, optimizer: Any) -> None:
    """Adds an optimizer, after those that are there."""
    setattr(parameter, _ATTRIBUTE, Registration([*registration_of(parameter), optimizer]))


def unregister(parameter: torch.Tensor, optimizer: Any) -> None:
    """Takes an optimizer away."""
    left = [each for each in registration_of(parameter) if each is not optimizer]
    if left:
        setattr(parameter, _ATTRIBUTE, Registration(left))
    elif hasattr(parameter, _ATTRIBUTE):
        delattr(parameter, _ATTRIBUTE)
