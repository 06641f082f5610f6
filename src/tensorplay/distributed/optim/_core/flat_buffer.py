"""Memory of a bucket: one flat tensor, and views of it in the shapes of its parameters."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

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


class KeptStorages:
    """Remembers in which memory parameters live, and brings them back there.

    Args:
        parameters: their storages are kept alive, but not copied.
        places: views of where some of them live, which saves making one.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        places: Mapping[torch.Tensor, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        self._places = [
            (parameter, places[parameter] if parameter in places else parameter.detach())
            for parameter in parameters
        ]

    @torch.no_grad()
    def restore_(self) -> torch.Tensor | None:
        """Moves parameters whose ``.data`` was replaced back, with their new values.

        Returns:
            A parameter whose new shape, dtype or device doesn't fit; it gets its old values back.
        """
        misfit = None
        for parameter, place in self._places:
            if parameter.is_set_to(place) and parameter.dtype == place.dtype:
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
        self._parameters = parameters
        self._buffer.pack_(parameters, layout.slots)
        self._views: list[tuple[Slot, torch.Tensor]] = []
        for slot in layout.slots:
            view = self._buffer.view(slot)
            parameters[slot.parameter].data = view
            self._views.append((slot, view))

    @property
    def layout(self) -> BucketLayout:
        """Where each parameter lies."""
        return self._buffer.layout

    @property
    def flat(self) -> torch.Tensor:
        """``(numel,)``: all parameters of the bucket; owned by this object."""
        return self._buffer.flat

    @property
    def places(self) -> dict[torch.Tensor, torch.Tensor]:
        """The view in which each parameter lives."""
        return {self._parameters[slot.parameter]: view for slot, view in self._views}

    def strayed(self) -> Slot | None:
        """The first parameter that is no longer exactly its view of the buffer, if any."""
        for slot, view in self._views:
            parameter = self._parameters[slot.parameter]
            if (
                parameter.dtype != view.dtype
                or parameter.device != view.device
                or not parameter.is_set_to(view)
            ):
                return slot
        return None
