"""A gradient of which this rank holds only a part, in the shape of the whole.

Code that takes it for a whole gradient (a norm, a clip, a plot) gets an error with the cure, not a
wrong number. What is right on every part by itself goes through: scaling, zeroing, and the check
and unscaling of ``torch.amp.GradScaler``.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten
from typing_extensions import Self

_aten = torch.ops.aten

# In-place operations that act on each element alone, in the same way wherever it lies.
_ELEMENTWISE = frozenset(
    {
        _aten.zero_.default,
        _aten.mul_.Scalar,
        _aten.mul_.Tensor,
        _aten.div_.Scalar,
        _aten.div_.Tensor,
        _aten._foreach_zero_.default,
        _aten._foreach_mul_.Scalar,
        _aten._foreach_mul_.Tensor,
        _aten._foreach_div_.Scalar,
        _aten._foreach_div_.Tensor,
        _aten._amp_foreach_non_finite_check_and_unscale_.default,
    }
)


class PartialGradient(torch.Tensor):
    """The parts of a gradient that this rank holds: perhaps none, or a slice.

    Args:
        like: the parameter, whose shape, strides, dtype and device this takes.
        parts: tensors of its dtype and device; several gradients may share a part.
        own: one of the parts: the stretch that this rank owns, flat, in the order in which the
            elements lie in memory; ``None`` if it owns nothing.
        complete: called before the parts are used; it may wait for what is still to come of them.
    """

    parts: tuple[torch.Tensor, ...]
    own: torch.Tensor | None
    complete: Callable[[], None]

    @staticmethod
    def __new__(
        cls,
        like: torch.Tensor,
        parts: Sequence[torch.Tensor] = (),
        own: torch.Tensor | None = None,
        complete: Callable[[], None] = lambda: None,
    ) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001 - torch's documented way to make one
            cls,
            like.shape,
            strides=like.stride(),
            dtype=like.dtype,
            device=like.device,
            requires_grad=False,
        )
        made.parts = tuple(parts)
        made.own = own
        made.complete = complete
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # torch leaves it untyped
        sizes = [part.numel() for part in self.parts]
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"parts of {sizes} elements)"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch leaves it untyped
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[Any, Any] | None = None,
    ) -> Any:
        if func is _aten.detach.default:
            return PartialGradient(args[0], args[0].parts, args[0].own, args[0].complete)
        if func not in _ELEMENTWISE:
            raise TypeError(
                f"{func} needs a whole gradient, but this rank holds only a part of it: the gradients "
                "were reduced to the ranks that own them. Use the optimizer's clip_grad_norm_() to "
                "clip, and its full_grad(parameter), on every rank, to look at one"
            )
        _on_parts(func, args, kwargs or {})
        return args[0] if isinstance(args[0], torch.Tensor) else None  # as these operations do


def _on_parts(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Calls ``func`` on the parts instead, on each shared one only once."""
    target, *rest = args
    if any(isinstance(leaf, PartialGradient) for leaf in tree_flatten((rest, kwargs))[0]):
        raise TypeError(f"{func} can't combine partial gradients")
    for each in (target,) if isinstance(target, torch.Tensor) else target:
        if isinstance(each, PartialGradient):
            each.complete()
    if isinstance(target, PartialGradient):
        for part in target.parts:
            func(part, *rest, **kwargs)
        return
    found: dict[int, torch.Tensor] = {}
    for each in target:
        for part in each.parts if isinstance(each, PartialGradient) else (each,):
            found[id(part)] = part
    if found:
        func(list(found.values()), *rest, **kwargs)
