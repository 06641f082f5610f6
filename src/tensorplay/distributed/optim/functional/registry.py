"""From an optimizer class, or a key of the user's, to a functional optimizer."""

import warnings
from collections.abc import Hashable
from typing import Any

from tensorplay.distributed.optim.functional.optimizer import FunctionalOptimizer
from tensorplay.distributed.optim.functional.rules import CLASSES, rule_of

_registered: dict[Hashable, Any] = {}


def as_functional_optim(optim_cls: Any, *args: Any, **kwargs: Any) -> Any:
    """An optimizer that steps with gradients passed as arguments, in place of an optimizer class.

    It begins without parameters: give them to ``step_param`` one by one, or put them into
    ``param_group["params"]`` or ``add_param_group``, and their gradients to ``step``::

        optimizer = as_functional_optim(torch.optim.AdamW, lr=1e-3)
        optimizer.step_param(param, grad)

    Follows ``torch.distributed.optim.as_functional_optim``, with the defaults and the checks of the
    class. A key given to `register_functional_optim` comes before what is known of a class.

    Args:
        optim_cls: Adadelta, Adagrad, Adam, AdamW, Adamax, RMSprop, Rprop or SGD in ``torch.optim``;
            a subclass that changes options only; or a registered key.
        *args: Passed on, after the parameters.
        **kwargs: Passed on.

    Returns:
        A `FunctionalOptimizer`; for a registered key, an instance of the class registered.

    Raises:
        ValueError: There is no functional counterpart; or the class refuses an option.
    """
    if optim_cls in _registered:
        return _registered[optim_cls]([], *args, **kwargs, _allow_empty_param_list=True)
    rule_of(optim_cls, also_supported=_registered)
    return FunctionalOptimizer([], optim_cls, *args, **kwargs)


def register_functional_optim(key: Hashable, optim: Any) -> None:
    """Makes `as_functional_optim` know one more class or key.

    Follows ``torch.distributed.optim.utils.register_functional_optim``: what is known already stays.
    That is no longer silent.

    Args:
        key: What will be given to `as_functional_optim`: a class, a string, anything hashable.
        optim: What will be called, as ``optim([], *args, **kwargs, _allow_empty_param_list=True)``.

    Warns:
        UserWarning: ``key`` has another counterpart already, and keeps it.
    """
    if key in CLASSES or _registered.setdefault(key, optim) is not optim:
        warnings.warn(
            f"{key!r} has a functional counterpart already, which stays; {optim!r} is not registered",
            stacklevel=2,
        )
