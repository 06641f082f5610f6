"""Where gradients lie in a bucket that DDP hands to its communication hook.

Note [Not ``GradBucket.gradients()``]
    It is right for contiguous real parameters only. DDP lays each gradient out with the strides of
    its parameter (``channels_last``, for instance) where they are dense, but these views are
    contiguous; and a bucket of complex gradients is handed over as twice as many real numbers, but
    the views' offsets count complex ones. (torch 2.13)
"""

from collections.abc import Sequence
from itertools import accumulate

import torch

from tensorplay.distributed.optim._core.parameter_spec import dense_stride


def elements_of(buffer: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """``(numel,)``: a dense bucket, or what its reduction returned, as elements of the parameters."""
    flat = buffer.view(-1)
    if parameters[0].is_complex() and not flat.is_complex():
        return torch.view_as_complex(flat.view(-1, 2))
    return flat


def offsets_of(parameters: Sequence[torch.Tensor]) -> list[int]:
    """Where each parameter's gradient begins, in elements; they stand side by side."""
    return list(accumulate((parameter.numel() for parameter in parameters), initial=0))[:-1]


def views_of(elements: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each parameter's gradient in its shape; Note [Not ``GradBucket.gradients()``]."""
    start = int(elements.storage_offset())
    return [
        elements.as_strided(parameter.shape, dense_stride(parameter), start + offset)
        for parameter, offset in zip(parameters, offsets_of(parameters), strict=True)
    ]


class KeptViews:
    """Views of the buffers that DDP keeps from one iteration to the next, made once for each."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[tuple[int, ...], int, list[torch.Tensor]]] = {}

    def of(
        self,
        elements: torch.Tensor,
        number: int,
        buffer: torch.Tensor,
        parameters: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """What :func:`views_of` returns, from the last time if nothing has changed.

        Args:
            elements: what the reduction has returned, as elements of the parameters.
            number: of the bucket.
            buffer: the bucket's own: only views of it are kept, as they keep its memory.
            parameters: whose gradients they are.
        """
        pointer, members = elements.data_ptr(), tuple(map(id, parameters))
        if pointer != buffer.data_ptr() or elements.dtype != parameters[0].dtype:
            return views_of(elements, parameters)
        known_members, known_pointer, views = self._kept.get(number, ((), 0, []))
        if known_pointer != pointer or known_members != members:
            for later in [each for each in self._kept if each >= number]:
                del self._kept[later]  # DDP has formed its buckets anew
            views = views_of(elements, parameters)
            self._kept[number] = members, pointer, views
        return views
