"""``detach_copy``: a state dict whose tensors own exactly their bytes."""

import io
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from tensorplay.distributed.optim import detach_copy
from tests.reference.training import make_model, require_equal


def owned_nbytes(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.untyped_storage().nbytes(), tensor.numel() * tensor.element_size()


def saved_nbytes(value: Any) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return len(file.getvalue())


BUCKET = torch.arange(1000.0)

VIEWS: dict[str, torch.Tensor] = {
    "slice": BUCKET[10:20],
    "matrix": BUCKET[:12].view(3, 4),
    "transposed": BUCKET[:12].view(3, 4).T,
    "channels_last": BUCKET[:36].view(1, 3, 4, 3).permute(0, 3, 1, 2),
    "scalar": BUCKET[5],
    "empty": BUCKET[:0],
    "with gaps": BUCKET[::2],
    "expanded": BUCKET[:1].expand(7),
    "complex": torch.view_as_complex(BUCKET[:20].view(10, 2)),
    "conjugated": torch.view_as_complex(BUCKET[:20].view(10, 2)).conj(),
    "parameter": nn.Parameter(BUCKET[3:5]),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_a_view_becomes_a_tensor_that_owns_exactly_its_bytes(kind: str) -> None:
    copied = detach_copy({kind: VIEWS[kind]})[kind]
    require_equal(VIEWS[kind].detach(), copied)
    held, needed = owned_nbytes(copied)
    assert held == needed
    assert not copied.requires_grad


@pytest.mark.parametrize("kind", ["matrix", "transposed", "channels_last", "complex"])
def test_strides_are_kept(kind: str) -> None:
    assert detach_copy([VIEWS[kind]])[0].stride() == VIEWS[kind].stride()


def test_the_copy_is_a_snapshot() -> None:
    tensor = torch.ones(3)
    copied = detach_copy({"a": tensor})
    tensor.zero_()
    assert torch.equal(copied["a"], torch.ones(3))


def test_a_models_state_dict_keeps_its_type_and_metadata() -> None:
    state = make_model().state_dict()
    copied = detach_copy(state)
    assert type(copied) is OrderedDict
    assert copied._metadata == state._metadata  # type: ignore[attr-defined] # mypy can't see that it has this
    require_equal(dict(state), dict(copied))
    make_model(seed=1).load_state_dict(copied)


class Pair(NamedTuple):
    left: Any
    right: Any


def test_nested_containers_are_fresh_and_other_values_are_passed_on() -> None:
    secret = object()
    state: Any = {
        "state": {
            0: {"step": torch.tensor(3.0), "history": [torch.ones(2), (torch.ones(1), None)]}
        },
        "param_groups": [{"lr": 0.1, "params": [0], "secret": secret, "shape": torch.Size([2])}],
        "pair": Pair(torch.ones(1), "right"),
        "counts": defaultdict(int, {"a": 1}),
    }
    copied = detach_copy(state)
    assert copied["param_groups"] == state["param_groups"]
    assert copied["param_groups"][0]["secret"] is secret
    assert type(copied["param_groups"][0]["shape"]) is torch.Size
    assert copied["pair"] == Pair(torch.ones(1), "right")
    assert copied["counts"]["missing"] == 0
    assert state["counts"] == {"a": 1}
    copied["state"][0]["history"][1][0].zero_()
    copied["param_groups"][0]["params"].append(1)
    assert state["state"][0]["history"][1][0] == 1
    assert state["param_groups"][0]["params"] == [0]


def test_tied_weights_stay_tied() -> None:
    weight = nn.Parameter(BUCKET[:12].view(3, 4))
    state = {"in": weight, "out": weight.detach(), "other": BUCKET[:12]}
    copied = detach_copy(state)
    assert copied["in"].data_ptr() == copied["out"].data_ptr()
    assert copied["in"] is not copied["out"]
    assert copied["other"].data_ptr() != copied["in"].data_ptr(), "another shape is another tensor"


def test_a_tensor_and_its_conjugate_are_not_confused() -> None:
    tensor = torch.tensor([1 + 2j])
    copied = detach_copy([tensor, tensor.conj()])
    require_equal([torch.tensor([1 + 2j]), torch.tensor([1 - 2j])], copied)


def test_tensors_without_plain_memory() -> None:
    sparse = torch.eye(3).to_sparse()
    sparse_copy, meta_a, meta_b = detach_copy(
        [sparse, torch.ones(2, device="meta"), torch.ones(2, device="meta")]
    )
    assert torch.equal(sparse_copy.to_dense(), torch.eye(3))
    assert meta_a.is_meta
    assert meta_a is not meta_b


def test_the_file_has_only_the_bytes_of_its_tensors() -> None:
    bucket = torch.zeros(100_000)
    head = OrderedDict(weight=bucket[:100].view(10, 10), bias=bucket[100:110])
    assert saved_nbytes(head) > 400_000
    assert saved_nbytes(detach_copy(head)) < 4_000
