"""Optimizers that can't step a part of the parameters: each update depends on all the others."""

from torch.optim import Optimizer

COUPLED = {
    "LBFGS": "its search direction and step length come from all gradients together",
    "Prodigy": "its step size is estimated from all parameters together",
    "DoG": "its step size is estimated from all parameters together",
    "DAdapt": "its step size is estimated from all parameters together",
    "SAM": "its perturbation is scaled by the norm of all gradients together",
}
"""Beginnings of class names, and why. Subclasses count as well."""


def refuse_coupled(optimizer_class: object, treatment: str, consequence: str) -> None:
    """Raises ``ValueError`` with the reason for a class that is known to couple parameters.

    Raises ``TypeError`` for an optimizer instance, where a class belongs.

    Args:
        optimizer_class: what the user passed.
        treatment: what would be done to it, such as "sharded".
        consequence: what it would then do, and the cure.
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
                    f"{getattr(optimizer_class, '__name__', optimizer_class)} can't be {treatment}: "
                    f"{reason}, {consequence}"
                )


def refuse_coupling_options(optimizer: Optimizer, treatment: str, consequence: str) -> None:
    """Raises ``ValueError`` for an optimizer that clips by the norm of all gradients (LAMB's do)."""
    for group in optimizer.param_groups:
        if group.get("max_grad_norm"):
            raise ValueError(
                f"{type(optimizer).__name__} with max_grad_norm={group['max_grad_norm']} can't be "
                f"{treatment}: {consequence}"
            )
