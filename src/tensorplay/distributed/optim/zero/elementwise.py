"""Which optimizers may step a stretch of a parameter: those whose update of an element needs no other."""

import re

from torch.optim import Optimizer

ELEMENTWISE = frozenset(
    {
        "ASGD",
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    }
)
"""Of the classes in ``torch.optim``."""

NOT_ELEMENTWISE = {
    "Adafactor": "its second moment is kept by rows and columns of the whole matrix",
    "CAME": "its second moment is kept by rows and columns of the whole matrix",
    "LAMB": "its step is scaled by the norm of the whole parameter",
    "LARS": "its step is scaled by the norm of the whole parameter",
    "Lamb": "its step is scaled by the norm of the whole parameter",
    "Lars": "its step is scaled by the norm of the whole parameter",
    "LBFGS": "its search direction and step length come from all gradients together",
    "Muon": "it orthogonalises the whole matrix",
    "SM3": "its second moment is kept by rows and columns of the whole matrix",
    "SOAP": "its preconditioner is a matrix of the whole parameter's size",
    "Shampoo": "its preconditioner is a matrix of the whole parameter's size",
    "SparseAdam": "its gradients are sparse rows, which can't be cut at any element",
}
"""Beginnings of class names, from torch and elsewhere, and why. Subclasses count as well."""


def require_elementwise(optimizer_class: type[Optimizer], *, is_confirmed: bool, use: str) -> None:
    """Raises ``ValueError`` for a class that needs whole parameters, or that may for all one knows.

    Args:
        optimizer_class: the class.
        is_confirmed: whether the user says that it is element-wise.
        use: what it is needed for, such as ``partition="elements"``.
    """
    name = getattr(optimizer_class, "__name__", str(optimizer_class))
    for ancestor in getattr(optimizer_class, "__mro__", ()):
        for beginning, reason in NOT_ELEMENTWISE.items():
            if re.match(f"{beginning}(?![a-z])", ancestor.__name__):
                raise ValueError(
                    f"{name} can't be used with {use}: {reason}, so that a rank with a part of it "
                    'would compute something else. Use partition="parameters", which works with it'
                )
    if is_confirmed or (
        name in ELEMENTWISE and optimizer_class.__module__.startswith("torch.optim.")
    ):
        return
    raise ValueError(
        f"{use} needs an optimizer that updates each element from its own gradient and state alone, "
        f"and whether {optimizer_class.__module__}.{name} does isn't known here. If it does, say so "
        'with elementwise=True; if not, use partition="parameters"'
    )
