"""Peers that `make bench` compares with if they are installed."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.step.candidates import CANDIDATES
from benchmarks.step.megatron_on_cpu import recompile_for_cpu_
from benchmarks.step.report import COLOURS

MEANT_FOR_CUDA = """
import torch

def flag():
    return torch.zeros(1, device='cuda')

def buffer(numel):
    return torch.zeros(numel, device=torch.cuda.current_device())

def scale(gradient, factor):
    assert gradient.type() == 'torch.cuda.FloatTensor'
    return gradient * factor
"""


@pytest.mark.parametrize("name", ["deepspeed-1", "deepspeed-2", "megatron", "oss"])
def test_peer_that_cannot_be_imported_is_missing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = CANDIDATES[name].needs
    assert needs is not None
    monkeypatch.setitem(sys.modules, needs.partition(".")[0], None)
    monkeypatch.setitem(sys.modules, needs, None)
    why = CANDIDATES[name].why_missing()
    assert why is not None
    assert why.startswith("ModuleNotFoundError")


def test_each_library_has_a_colour_of_its_own() -> None:
    families = {candidate.family for candidate in CANDIDATES.values() if candidate.trains}
    assert families == set(COLOURS)
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_code_meant_for_cuda_runs_on_the_cpu_once_recompiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meant_for_cuda.py").write_text(MEANT_FOR_CUDA, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("meant_for_cuda")
    gradient = torch.ones(3)
    with pytest.raises(AssertionError):
        module.scale(gradient, 0.5)
    recompile_for_cpu_(module)
    assert module.scale(gradient, 0.5).tolist() == [0.5, 0.5, 0.5]
    assert {module.flag().device.type, module.buffer(4).device.type} == {"cpu"}
