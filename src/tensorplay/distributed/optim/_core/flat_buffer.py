"""Memory of a bucket: one flat tensor, and views of it in the shapes of its parameters."""

import operator
from collections.abc import Sequence

import torch

from tensorplay.distributed.optim._core.bucket_layout import BucketLayout, Slot
from tensorplay.distributed.optim._core.parameter_spec import ParameterSpec


class FlatBuffer:
    """One flat tensor laid out as ``layout`` says.

    Args:
        layout: where each parameter lies.
        specs: all parameters' specs, by index.
        storage: ``(numel,)`` memory to use, at least as long as the layout; allocated if absent.
    """

    def __init__(
        self,
        layout: BucketLayout,
        specs: Sequence[ParameterSpec],
        storage: torch.Tensor | None = None,
    ) -> None:
        self.layout = layout
        self.flat = (
            torch.zeros(layout.numel, dtype=layout.dtype, device=layout.device)
            if storage is None
            else storage[: layout.numel]
        )
        start = self.flat.storage_offset()
        self._views = {
            slot.parameter: self.flat.as_strided(
                specs[slot.parameter].shape, specs[slot.parameter].stride, start + slot.offset
            )
            for slot in layout.slots
        }

    def view(self, slot: Slot) -> torch.Tensor:
        """The slot in the shape and strides of its parameter; writes go through."""
        return self._views[slot.parameter]

    @torch.no_grad()
    def pack_(self, parameters: Sequence[torch.Tensor], slots: Sequence[Slot]) -> None:
        """Copies the values of ``parameters`` (by index) into ``slots``."""
        if slots:
            torch._foreach_copy_(
                [self.view(slot) for slot in slots],
                [parameters[slot.parameter] for slot in slots],
            )

    @torch.no_grad()
    def unpack_(self, parameters: Sequence[torch.Tensor], slots: Sequence[Slot]) -> None:
        """Copies ``slots`` back into the storages of ``parameters`` (by index)."""
        if slots:
            torch._foreach_copy_(
                [parameters[slot.parameter] for slot in slots],
                [self.view(slot) for slot in slots],
            )


_dtype_of = operator.attrgetter("dtype")
_data_of = operator.attrgetter("data")


def live_in(parameters: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> bool:
    """Whether each parameter is exactly the tensor at the same place: memory, strides, dtype.

    It runs before and after each step for thousands of tensors, so the loops are not Python's.
    """
    try:
        return all(map(torch.Tensor.is_set_to, parameters, places)) and all(
            map(operator.is_, map(_dtype_of, parameters), map(_dtype_of, places))
        )
    except NotImplementedError:  # one is on the meta device, which has no memory to compare
        return False


class KeptStorages:
    """Remembers in which memory parameters live, and brings them back there.

    Args:
        parameters: their storages are kept alive, but not copied.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._places = list(map(_data_of, parameters))

    @torch.no_grad()
    def restore_(self) -> torch.Tensor | None:
        """Moves parameters whose ``.data`` was replaced back, with their new values.

        Returns:
            A parameter whose new shape, dtype or device doesn't fit; it gets its old values back.
        """
        misfit = None
        if live_in(self._parameters, self._places):
            return misfit
        for parameter, place in zip(self._parameters, self._places, strict=True):
            if live_in([parameter], [place]):
                continue
            if (parameter.dtype, parameter.shape, parameter.device) == (
                place.dtype,
                place.shape,
                place.device,
            ):
                place.copy_(parameter)
            else:
                misfit = parameter
            parameter.data = place
        return misfit


class ParameterHome:
    """A flat buffer in which parameters live: their ``.data`` are views of it, values unchanged."""

    def __init__(
        self,
        layout: BucketLayout,
        specs: Sequence[ParameterSpec],
        parameters: Sequence[torch.Tensor],
    ) -> None:
        self._buffer = FlatBuffer(layout, specs)
        self._buffer.pack_(parameters, layout.slots)
        self._members = [parameters[slot.parameter] for slot in layout.slots]
        self._places = [self._buffer.view(slot) for slot in layout.slots]
        for parameter, place in zip(self._members, self._places, strict=True):
            parameter.data = place

    @property
    def layout(self) -> BucketLayout:
        """Where each parameter lies."""
        return self._buffer.layout

    @property
    def flat(self) -> torch.Tensor:
        """``(numel,)``: all parameters of the bucket; owned by this object."""
        return self._buffer.flat

    def strayed(self) -> Slot | None:
        """The first parameter that is no longer exactly its view of the buffer, if any."""
        if live_in(self._members, self._places):
            return None
        return next(
            slot
            for slot, parameter, place in zip(
                self.layout.slots, self._members, self._places, strict=True
            )
            if not live_in([parameter], [place])
        )
