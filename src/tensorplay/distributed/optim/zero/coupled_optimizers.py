"""Optimizers that can't be sharded, because one parameter's update depends on all the others."""

COUPLED = {
    "LBFGS": "its search direction and step length come from all gradients together",
    "Prodigy": "its step size is estimated from all parameters together",
    "DoG": "its step size is estimated from all parameters together",
    "DAdapt": "its step size is estimated from all parameters together",
}
"""Beginnings of class names, and why. Subclasses count as well."""


def refuse_coupled(optimizer_class: object) -> None:
    """Raises ``ValueError`` with the reason for a class that is known to couple parameters.

    Raises ``TypeError`` for an optimizer instance, where a class belongs.
    """
    if not callable(optimizer_class):
        raise TypeError(
            f"optimizer_class must be a class such as torch.optim.AdamW, got {optimizer_class!r}; "
            "pass the class, and its options as keyword arguments"
        )
    for ancestor in getattr(optimizer_class, "__mro__", ()):
        for beginning, reason in COUPLED.items():
            if ancestor.__name__.startswith(beginning):
                raise ValueError(
                    f"{getattr(optimizer_class, '__name__', optimizer_class)} can't be sharded: "
                    f"{reason}, so that every rank would compute something else. Use it without "
                    "sharding"
                )
