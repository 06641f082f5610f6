"""The model's own state while its parameters live in buckets: saved, loaded, copied, moved."""

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tensorplay.distributed.optim import ZeroRedundancyOptimizer, detach_copy
from tests.launch import run_ranks
from tests.reference.ddp import ADAMW, MODES, make_twins, require_twins_equal, train
from tests.reference.training import make_model, require_equal, set_gradients, values_of

BODY_BYTES, HEAD_BYTES = 200 * 200 * 4, 20 * 4


def make_body_and_head() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(200, 200, bias=False), nn.Linear(20, 1, bias=False))


def saved_nbytes(value: Any) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return len(file.getvalue())


def in_buckets(model: nn.Module) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **ADAMW
    )


def _file_sizes() -> dict[str, int]:
    model = make_body_and_head()
    in_buckets(model)
    head = model[1].state_dict()  # type: ignore[index] # mypy takes it for any attribute of a module
    return {
        "whole": saved_nbytes(model.state_dict()),
        "head": saved_nbytes(head),
        "copy of the head": saved_nbytes(detach_copy(head)),
        "copy of the whole": saved_nbytes(detach_copy(model.state_dict())),
    }


def test_a_part_of_the_model_is_saved_without_its_bucket() -> None:
    slack = 4_000  # the file format's own
    for sizes in run_ranks(2, _file_sizes):
        assert sizes["head"] > BODY_BYTES, "nothing to fix: the bucket isn't in the file"
        assert sizes["copy of the head"] < HEAD_BYTES + slack
        assert sizes["copy of the whole"] < BODY_BYTES + HEAD_BYTES + slack


def _tied_weights_in_a_file() -> None:
    model = nn.Sequential(nn.Linear(30, 30, bias=False), nn.Linear(30, 30, bias=False))
    model[1].weight = model[0].weight
    in_buckets(model)
    file = io.BytesIO()
    torch.save(detach_copy(model.state_dict()), file)
    assert len(file.getvalue()) < 1.5 * 30 * 30 * 4
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded["0.weight"].data_ptr() == loaded["1.weight"].data_ptr()


def test_tied_weights_are_in_the_file_once() -> None:
    run_ranks(2, _tied_weights_in_a_file)


def _optimizer_state_owns_its_memory() -> None:
    model = make_model()
    optimizer = in_buckets(model)
    set_gradients(model.parameters(), 0)
    optimizer.step()
    optimizer.consolidate_state_dict()
    if dist.get_rank() == 0:
        for state in optimizer.state_dict()["state"].values():
            for tensor in state.values():
                nbytes = tensor.numel() * tensor.element_size()
                assert tensor.untyped_storage().nbytes() == nbytes


def test_the_optimizers_state_dict_needs_no_copy() -> None:
    run_ranks(2, _optimizer_state_owns_its_memory)


def _loaded_in_place(resident: bool) -> None:
    plain, sharded = make_twins(make_model_for_ddp, resident)
    for trainer in (plain, sharded):
        train(*trainer, steps=2)
        early = detach_copy(trainer.module.state_dict())
        addresses = [p.data_ptr() for p in trainer.module.parameters()]
        train(*trainer, steps=2, first=2)
        trainer.module.load_state_dict(early)
        assert addresses == [p.data_ptr() for p in trainer.module.parameters()]
        train(*trainer, steps=2, first=4)
    require_twins_equal(plain, sharded)


def make_model_for_ddp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 3))


@MODES
def test_a_loaded_state_dict_is_written_into_the_parameters(resident: bool) -> None:
    run_ranks(2, _loaded_in_place, resident)


def _deep_copied() -> None:
    model = make_model()
    optimizer = in_buckets(model)
    other = copy.deepcopy(model)
    other_optimizer = in_buckets(other)
    before = values_of(other.parameters())
    set_gradients(model.parameters(), 0)
    optimizer.step()
    require_equal(before, values_of(other.parameters()))
    set_gradients(other.parameters(), 0)
    other_optimizer.step()
    require_equal(values_of(model.parameters()), values_of(other.parameters()))


def test_a_deep_copy_is_a_model_of_its_own() -> None:
    run_ranks(2, _deep_copied)


def _pickled_whole() -> None:
    model = make_model()
    optimizer = in_buckets(model)
    set_gradients(model.parameters(), 0)
    optimizer.step()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    require_equal(values_of(model.parameters()), values_of(loaded.parameters()))


def test_a_whole_module_can_be_pickled() -> None:
    run_ranks(2, _pickled_whole)


def make_convolution() -> nn.Module:
    torch.manual_seed(0)
    return nn.Conv2d(3, 4, 3)


def _moved_to_channels_last(resident: bool) -> None:
    model = make_convolution()
    optimizer = ZeroRedundancyOptimizer(
        model.named_parameters(), torch.optim.SGD, lr=0.1, parameters_as_bucket_view=resident
    )
    model.to(memory_format=torch.channels_last)  # replaces the storage of the weight
    before = values_of(model.parameters())
    set_gradients(model.parameters(), 0)
    if resident:
        with pytest.raises(RuntimeError, match=r"'weight'.*was replaced.*build the optimizer aft"):
            optimizer.step()
        require_equal(before, values_of(model.parameters()))
        return
    plain_model = make_convolution().to(memory_format=torch.channels_last)
    plain = torch.optim.SGD(plain_model.parameters(), lr=0.1)
    set_gradients(plain_model.parameters(), 0)
    optimizer.step()
    plain.step()
    require_equal(values_of(plain_model.parameters()), values_of(model.parameters()))


@MODES
def test_a_memory_format_chosen_too_late_is_an_error_only_in_bucket_view(resident: bool) -> None:
    run_ranks(2, _moved_to_channels_last, resident)
