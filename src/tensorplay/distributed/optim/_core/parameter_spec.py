"""What a plan knows of a parameter: metadata only, the same on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from tensorplay.distributed.optim._core.local_shard import local_memory


@dataclass(frozen=True)
class ParameterSpec:
    """Metadata of one parameter.

    Attributes:
        index: its place among all parameters, in the order in which the user gave them.
        shape: its sizes.
        stride: its strides in elements if it is dense without overlap, else those of a contiguous
            tensor of its shape: the order in which its elements travel.
        dtype: its element type.
        device: where it lives.
        trainable: whether it required a gradient when the plan was made.
        memory_unit: parameters with the same number overlap in memory and must stay together.
        owns_storage: nothing else lives in its storage, as far as these parameters show.
        numel: number of elements.
        nbytes: size in bytes.
    """

    index: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    trainable: bool
    memory_unit: int
    owns_storage: bool
    numel: int = field(init=False, repr=False, compare=False)
    nbytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "numel", prod(self.shape))  # frozen, and planning reads it often
        object.__setattr__(self, "nbytes", self.numel * self.dtype.itemsize)


def describe_parameters(parameters: Sequence[torch.Tensor]) -> tuple[ParameterSpec, ...]:
    """Reads the metadata of ``parameters``, among which no tensor may stand twice.

    Of a ``DTensor`` it is the metadata of the local tensor.
    """
    memories = [local_memory(parameter) for parameter in parameters]
    units = _memory_units(memories, [_extent(memory) for memory in memories])
    lodgers: dict[int, int] = {}
    for memory in memories:
        pointer = _storage_pointer(memory)
        lodgers[pointer] = lodgers.get(pointer, 0) + 1
    return tuple(
        ParameterSpec(
            index=index,
            shape=tuple(memory.shape),
            stride=dense_stride(memory),
            dtype=memory.dtype,
            device=memory.device,
            trainable=parameter.requires_grad,
            memory_unit=units[index],
            owns_storage=(
                lodgers[_storage_pointer(memory)] == 1
                and _fills_storage(memory)
                and memory is parameter  # a DTensor ignores it when its data are assigned
            ),
        )
        for index, (parameter, memory) in enumerate(zip(parameters, memories, strict=True))
    )


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a contiguous stretch of memory once each, in any order of axes."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """A tensor's strides if it is dense without overlap, else those of a contiguous one."""
    if tensor.numel() and is_dense(tensor):
        return tuple(tensor.stride())
    stride, step = [], 1
    for size in reversed(tensor.shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def _storage_pointer(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _fills_storage(tensor: torch.Tensor) -> bool:
    return (
        is_dense(tensor)
        and tensor.storage_offset() == 0
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    )


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses between which the elements lie; empty for a tensor without elements."""
    start = tensor.data_ptr()
    if start == 0 or tensor.numel() == 0:
        return (0, 0)
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (start, start + (last + 1) * tensor.element_size())


def _memory_units(
    parameters: Sequence[torch.Tensor], extents: Sequence[tuple[int, int]]
) -> list[int]:
    """Numbers parameters so that those whose extents overlap share the lowest of their indices."""
    units = list(range(len(parameters)))
    order = sorted(
        (index for index, extent in enumerate(extents) if extent != (0, 0)),
        key=lambda index: (str(parameters[index].device), extents[index], index),
    )
    run: list[int] = []  # parameters whose extents form one unbroken stretch
    run_device, run_end = None, 0
    for index in order:
        start, end = extents[index]
        if not run or parameters[index].device != run_device or start >= run_end:
            run, run_device, run_end = [index], parameters[index].device, end
        else:
            run.append(index)
            run_end = max(run_end, end)
            lowest = min(run)
            for member in run:
                units[member] = lowest
    return units
