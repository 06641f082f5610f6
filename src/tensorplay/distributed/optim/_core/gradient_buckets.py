"""Memory of gradients: what a bucket sends, and where the averaged gradients come to lie.

Note [Two kinds of buckets]
    A large parameter is a bucket of its own: autograd hands over a fresh gradient, which is sent
    from where it is and averaged in place. Small ones share a flat buffer: their ``.grad`` are made
    views of it before backward accumulates, so that nothing is packed afterwards.

Note [Views that count]
    What adds to a tensor in place raises its version. The views have versions of their own, unlike
    usual views, which share one: so a view whose version is still what it was when the pass began
    has got no gradient, and its parameter's ``.grad`` goes back to ``None``. That is cheaper than a
    hook, which would have to run for each gradient.
"""

import itertools
import operator
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from tensorplay.distributed.optim._core.bucket_layout import BucketLayout
from tensorplay.distributed.optim._core.flat_buffer import FlatBuffer
from tensorplay.distributed.optim._core.parameter_spec import ParameterSpec


class AveragedMark:
    """Says of a ``.grad`` whether it has been averaged, on the tensor itself: nothing else lives as long."""

    def set_(self, gradient: torch.Tensor) -> None:
        """The gradient has been averaged."""
        gradient._averaged_by = self  # type: ignore[attr-defined]  # noqa: SLF001 - our attribute on torch's object

    def set_all_(self, gradients: Iterable[torch.Tensor]) -> None:
        """The same for many."""
        assign(gradients, "_averaged_by", itertools.repeat(self))

    def is_on_any(self, gradients: Iterable[torch.Tensor]) -> bool:
        """Whether one of them has."""
        marks = map(getattr, gradients, itertools.repeat("_averaged_by"), itertools.repeat(None))
        return self in set(marks)

    def is_on(self, gradient: torch.Tensor) -> bool:
        """Whether it has."""
        return getattr(gradient, "_averaged_by", None) is self

    @staticmethod
    def clear_(gradient: torch.Tensor) -> None:
        """The memory of the gradient is used again."""
        gradient._averaged_by = None  # type: ignore[attr-defined]  # noqa: SLF001 - our attribute on torch's object


def assign(targets: Iterable[Any], name: str, values: Iterable[Any]) -> None:
    """Sets an attribute of each, which may be thousands: the loop isn't Python's."""
    deque(map(setattr, targets, itertools.repeat(name), values), maxlen=0)


class GradientBucket(Protocol):
    """The gradients of the parameters in one bucket."""

    layout: BucketLayout

    def arm_(self) -> None:
        """Before a pass: prepares parameters without gradients for what will come."""

    def retract_(self, index: int) -> None:
        """During a pass: takes back what was prepared for a parameter that has got none yet."""

    def disarm_(self) -> None:
        """After a pass: takes back what was prepared for parameters that didn't get any."""

    def local(self) -> torch.Tensor:
        """``(numel,)``: this rank's gradients as the layout says, zeros where it has none."""

    def destination(
        self, local: torch.Tensor, start: int, end: int, *, reuse: bool
    ) -> torch.Tensor:
        """``(end - start,)``: memory for the average of that stretch; it may be ``local``'s own.

        Args:
            local: what :meth:`local` has returned.
            start: where the stretch begins.
            end: where it ends.
            reuse: whether the last average isn't needed any more.
        """

    def views(self, result: torch.Tensor, start: int) -> dict[int, torch.Tensor]:
        """Gradients by parameter, of those that lie as a whole in a result that begins at ``start``."""

    def whole(self, start: int, end: int) -> torch.Tensor | None:
        """``(end - start,)``: a stretch as one tensor, if exactly its gradients are there in ``.grad``."""

    def release(self) -> None:
        """Lets go of the memory of this rank's gradients, after they have been sent."""


class PackedGradients:
    """Small parameters, whose gradients are accumulated in one flat buffer.

    Args:
        layout: where each lies.
        specs: all parameters' specs, by index.
        parameters: all parameters, by index.
        keep: whether the buffer stays allocated between passes.
    """

    def __init__(
        self,
        layout: BucketLayout,
        specs: Sequence[ParameterSpec],
        parameters: Sequence[torch.Tensor],
        *,
        keep: bool,
    ) -> None:
        self.layout = layout
        self._specs = specs
        self._indices = [slot.parameter for slot in layout.slots]
        self._offsets = [slot.offset for slot in layout.slots]
        self._ends = [slot.offset + slot.numel for slot in layout.slots]
        self._parameters = [parameters[index] for index in self._indices]
        self._keep = keep
        self._views: list[torch.Tensor] = []
        self._flat: torch.Tensor | None = None
        self._armed: dict[int, int] = {}
        """Places of parameters whose ``.grad`` is their zero view, with its version."""

    def arm_(self) -> None:
        """See :class:`GradientBucket`."""
        flat = self._allocate()
        views, parameters = self._views, self._parameters
        bare: Sequence[int] = range(len(parameters))
        if any(map(operator.is_not, map(_grad_of, parameters), itertools.repeat(None))):
            bare = [place for place, p in enumerate(parameters) if p.grad is None]
            views = list(map(views.__getitem__, bare))
            parameters = list(map(parameters.__getitem__, bare))
            if views:
                torch._foreach_zero_(views)
        else:
            flat.zero_()
        assign(views, "_averaged_by", itertools.repeat(None))
        assign(parameters, "grad", views)
        self._armed = dict(zip(bare, map(_version_of, views), strict=True))

    def retract_(self, index: int) -> None:
        """See :class:`GradientBucket`."""
        place = self._indices.index(index)
        if self._armed.pop(place, None) is not None:
            self._parameters[place].grad = None

    def disarm_(self) -> None:
        """See :class:`GradientBucket` and Note [Views that count]."""
        armed, self._armed = self._armed, {}
        views = self._views
        if any(map(operator.eq, map(_version_of, map(views.__getitem__, armed)), armed.values())):
            for place, version in armed.items():
                parameter, view = self._parameters[place], views[place]
                if parameter.grad is view and _version_of(view) == version:
                    parameter.grad = None

    def local(self) -> torch.Tensor:
        """See :class:`GradientBucket`."""
        flat = self._allocate()
        if all(map(operator.is_, map(_grad_of, self._parameters), self._views)):
            return flat
        for parameter, view in zip(self._parameters, self._views, strict=True):
            gradient = parameter.grad
            if gradient is view:
                continue
            if gradient is None:
                view.zero_()
            else:
                view.copy_(gradient.detach())
        return flat

    def destination(
        self,
        local: torch.Tensor,
        start: int,
        end: int,
        *,
        reuse: bool,  # noqa: ARG002 - the protocol has it
    ) -> torch.Tensor:
        """In place if the buffer stays or all of it is owned, else apart, so that it can go."""
        if self._keep or end - start == local.numel():
            return local[start:end]
        return local.new_empty(end - start)

    def views(self, result: torch.Tensor, start: int) -> dict[int, torch.Tensor]:
        """See :class:`GradientBucket`."""
        end = start + result.numel()
        origin = result.storage_offset() - start
        places = self._places_within(start, end)
        if self._flat is not None and result.data_ptr() == self._flat[start:].data_ptr():
            return dict(zip(self._indices[places], self._views[places], strict=True))
        return {
            slot.parameter: result.as_strided(
                self._specs[slot.parameter].shape,
                self._specs[slot.parameter].stride,
                origin + slot.offset,
            )
            for slot in self.layout.slots[places]
        }

    def whole(self, start: int, end: int) -> torch.Tensor | None:
        """See :class:`GradientBucket`; the padding holds zeros."""
        if self._flat is None:
            return None
        places = self._places_within(start, end)
        gradients = map(_grad_of, self._parameters[places])
        is_there = all(map(operator.is_, gradients, self._views[places]))
        return self._flat[start:end] if is_there else None

    def _places_within(self, start: int, end: int) -> slice:
        """Of the parameters that lie as a whole in a stretch."""
        return slice(bisect_left(self._offsets, start), bisect_right(self._ends, end))

    def release(self) -> None:
        """See :class:`GradientBucket`."""
        if not self._keep:
            self._flat, self._views = None, []

    def _allocate(self) -> torch.Tensor:
        if self._flat is None:
            flat = torch.zeros(
                self.layout.numel, dtype=self.layout.dtype, device=self.layout.device
            )
            buffer = FlatBuffer(self.layout, self._specs, flat)
            self._views = [buffer.view(slot).data for slot in self.layout.slots]
            self._flat = flat
        return self._flat


_grad_of = operator.attrgetter("grad")
_version_of = operator.attrgetter("_version")


class PackedWhenSent(PackedGradients):
    """Small parameters whose gradients come one by one, and are packed when all are there.

    So only buckets that are under way have a buffer.
    """

    def __init__(
        self,
        layout: BucketLayout,
        specs: Sequence[ParameterSpec],
        parameters: Sequence[torch.Tensor],
    ) -> None:
        super().__init__(layout, specs, parameters, keep=False)

    def arm_(self) -> None:
        """Nothing to prepare: the gradients will be fresh."""

    def local(self) -> torch.Tensor:
        """See :class:`GradientBucket`; the buffer is new, and zero where there are no gradients."""
        layout = self.layout
        pieces: list[torch.Tensor] = []
        ends = [*(slot.offset for slot in layout.slots[1:]), layout.numel]
        nothing = torch.zeros(1, dtype=layout.dtype, device=layout.device)
        for parameter, slot, end in zip(self._parameters, layout.slots, ends, strict=True):
            gradient, spec = parameter.grad, self._specs[slot.parameter]
            filled = slot.offset
            if gradient is not None:
                if gradient.stride() != spec.stride or gradient.dtype != layout.dtype:
                    planned = torch.empty_strided(
                        spec.shape, spec.stride, dtype=layout.dtype, device=layout.device
                    )
                    gradient = planned.copy_(gradient)
                pieces.append(gradient.as_strided((slot.numel,), (1,)))
                filled += slot.numel
            if filled < end:
                pieces.append(nothing.expand(end - filled))
        return torch.cat(pieces)


class SoleGradient:
    """One large parameter, whose gradient is sent from its own memory.

    Args:
        layout: where it lies: from the start.
        specs: all parameters' specs, by index.
        parameters: all parameters, by index.
        keep: whether the memory of a part's average stays allocated between passes.
    """

    def __init__(
        self,
        layout: BucketLayout,
        specs: Sequence[ParameterSpec],
        parameters: Sequence[torch.Tensor],
        *,
        keep: bool,
    ) -> None:
        self.layout = layout
        self._keep = keep
        self._kept: torch.Tensor | None = None
        (slot,) = layout.slots
        self._index = slot.parameter
        self._spec = specs[slot.parameter]
        self._parameter = parameters[slot.parameter]

    def arm_(self) -> None:
        """Nothing to prepare: the gradient will be fresh."""

    def retract_(self, index: int) -> None:
        """Nothing was prepared."""

    def disarm_(self) -> None:
        """Nothing was prepared."""

    def local(self) -> torch.Tensor:
        """See :class:`GradientBucket`."""
        gradient = self._parameter.grad
        numel, spec = self.layout.numel, self._spec
        if gradient is None:
            return torch.zeros(numel, dtype=self.layout.dtype, device=self.layout.device)
        gradient = gradient.detach()
        if gradient.stride() != spec.stride or gradient.dtype != spec.dtype:
            planned = torch.empty_strided(
                spec.shape, spec.stride, dtype=spec.dtype, device=spec.device
            )
            gradient = planned.copy_(gradient)
        return gradient.as_strided((numel,), (1,))

    def destination(
        self, local: torch.Tensor, start: int, end: int, *, reuse: bool
    ) -> torch.Tensor:
        """In place if all of it is owned, else apart, so that the gradient can go."""
        if end - start == local.numel():
            return local
        kept, self._kept = self._kept, None
        if not reuse or kept is None or kept.numel() != end - start or kept.dtype != local.dtype:
            kept = local.new_empty(end - start)
        if self._keep:
            self._kept = kept
        return kept

    def views(self, result: torch.Tensor, start: int) -> dict[int, torch.Tensor]:
        """See :class:`GradientBucket`."""
        if start or result.numel() != self.layout.numel:
            return {}
        return {self._index: result.as_strided(self._spec.shape, self._spec.stride)}

    def whole(self, start: int, end: int) -> torch.Tensor | None:  # noqa: ARG002 - it has one stretch
        """Nothing that ``.grad`` isn't by itself."""
        return None

    def release(self) -> None:
        """Autograd's memory goes with the ``.grad``."""
