"""State dicts whose tensors own their memory, for models whose parameters live in buckets."""

import copy
from typing import Any, TypeVar

import torch

__all__ = ["detach_copy"]

_T = TypeVar("_T")

_Place = tuple[torch.device, int, torch.dtype, torch.Size, tuple[int, ...]]


def detach_copy(state_dict: _T) -> _T:
    """Copies a state dict so that each tensor owns its memory: exactly its own bytes, no more.

    ``torch.save`` writes the whole storage of every tensor. A parameter that is a view of a bucket
    (``parameters_as_bucket_view=True``) therefore takes all parameters of its bucket along into the
    file, and whoever loads the file keeps all of them alive. Save the copy instead::

        torch.save(detach_copy(model.head.state_dict()), "head.pt")

    The copy is also a snapshot: later steps don't change it. No communication; any rank may call
    it alone. It takes the memory of the tensors in ``state_dict`` until it is dropped.

    Args:
        state_dict: of a model or an optimizer: any nest of dicts, lists and tuples.

    Returns:
        The same nest in fresh containers of the same types (with their attributes, such as
        ``_metadata``). Every tensor is a detached copy on the same device, with the same strides if
        its elements are dense in memory. Two tensors that are the same piece of memory (tied
        weights) are one piece of memory in the copy too; those that merely overlap or share a
        storage are parted. What is neither tensor nor container is passed on as it is.
    """
    return _copy(state_dict, {})  # type: ignore[no-any-return] # torch leaves it untyped


def _copy(value: Any, copies: dict[_Place, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return _copy_tensor(value, copies)
    if isinstance(value, dict):
        fresh = copy.copy(value)  # unlike .copy(), keeps attributes and a default factory
        fresh.update((key, _copy(item, copies)) for key, item in value.items())
        return fresh
    if type(value) in {list, tuple}:
        return type(value)(_copy(item, copies) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(_copy(item, copies) for item in value)  # a named tuple
    return value


def _copy_tensor(tensor: torch.Tensor, copies: dict[_Place, torch.Tensor]) -> torch.Tensor:
    place = _place_of(tensor)
    if place is None:
        return tensor.detach().clone()
    if place not in copies:
        copies[place] = tensor.detach().clone()
    return copies[place].detach()  # tied tensors are distinct objects, as in the original


def _place_of(tensor: torch.Tensor) -> _Place | None:
    """Which piece of memory the tensor is; ``None`` for one that has no plain memory of its own."""
    if tensor.layout != torch.strided or type(tensor) not in {torch.Tensor, torch.nn.Parameter}:
        return None
    if tensor.is_conj() or tensor.is_neg():  # the same memory may mean two things
        return None
    address = tensor.data_ptr()
    if address == 0:  # nothing there: no elements, or the meta device
        return None
    return (
        tensor.device,
        address,
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
    )
