"""Specs for plans, made without tensors."""

import torch
from hypothesis import strategies as st

from tensorplay.distributed.optim._core.parameter_spec import ParameterSpec


def make_spec(
    index: int,
    numel: int,
    *,
    trainable: bool = True,
    dtype: torch.dtype = torch.float32,
    memory_unit: int | None = None,
    owns_storage: bool = True,
) -> ParameterSpec:
    return ParameterSpec(
        index=index,
        shape=(numel,),
        stride=(1,),
        dtype=dtype,
        device=torch.device("cpu"),
        trainable=trainable,
        memory_unit=index if memory_unit is None else memory_unit,
        owns_storage=owns_storage,
    )


# One in four is frozen, one in four lives in the memory of an earlier one.
_KINDS = [
    (dtype, trainable, shared)
    for dtype in (torch.float32, torch.bfloat16, torch.bool)
    for trainable in (True, True, True, False)
    for shared in (False, False, False, True)
]


@st.composite
def spec_lists(draw: st.DrawFn, max_size: int = 16) -> list[ParameterSpec]:
    """Parameters of all sizes, some empty, some frozen, some that share memory, of several dtypes."""
    specs: list[ParameterSpec] = []
    sizes = st.integers(0, 5000)
    for numel, (dtype, trainable, shared) in draw(
        st.lists(st.tuples(sizes, st.sampled_from(_KINDS)), max_size=max_size)
    ):
        index = len(specs)
        unit = specs[numel % index].memory_unit if shared and index else index
        specs.append(
            make_spec(
                index,
                numel,
                trainable=trainable,
                dtype=dtype,
                memory_unit=unit,
                owns_storage=unit == index,
            )
        )
    return specs
