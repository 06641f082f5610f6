"""``functional_adam`` is one function by every name that published code imports it by."""

import importlib
import importlib.util
import inspect
import pickle
import pydoc
import subprocess
import sys
import types

import pytest
import torch

from tensorplay.distributed import optim
from tests.functional.variants import CLASSES

NAMES = [f"functional_{name}" for name in CLASSES]
FORMS = {
    "package": "from tensorplay.distributed.optim import functional_adam as f",
    "module": "from tensorplay.distributed.optim.functional_adam import functional_adam as f",
    "as": "import tensorplay.distributed.optim.functional_adam as m; f = m.functional_adam",
    "dotted": "import tensorplay.distributed.optim.functional_adam as _\n"
    "import tensorplay; f = tensorplay.distributed.optim.functional_adam",
    "star": "from tensorplay.distributed.optim import *; f = functional_adam",
    "importlib": "import importlib; f = importlib.import_module("
    "'tensorplay.distributed.optim.functional_adam').functional_adam",
}


@pytest.mark.parametrize("first", ["package", "module", "as"])
def test_every_form_gives_the_same_function_whichever_comes_first(first: str) -> None:
    lines = [FORMS[first], *(form for key, form in FORMS.items() if key != first)]
    program = "\n".join(
        [
            "import sys, types; found = []",
            *(f"{line}\nfound.append(f)" for line in lines),
            "assert len(set(map(id, found))) == 1",
            "assert isinstance(f, types.FunctionType)",
            "assert 'torch.distributed.optim' not in sys.modules",
        ]
    )
    finished = subprocess.run(  # noqa: S603 - our own interpreter, our own program
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize("name", NAMES)
def test_the_package_and_the_module_give_the_function(name: str) -> None:
    module = importlib.import_module(f"tensorplay.distributed.optim.{name}")
    assert isinstance(module, types.ModuleType)
    assert getattr(module, name) is getattr(optim, name)
    assert isinstance(getattr(optim, name), types.FunctionType)


@pytest.mark.parametrize("name", NAMES)
def test_the_function_pickles_by_name(name: str) -> None:
    assert pickle.loads(pickle.dumps(getattr(optim, name))) is getattr(optim, name)


@pytest.mark.parametrize("name", NAMES)
def test_help_shows_the_signature_and_the_pure_form(name: str) -> None:
    text = pydoc.plain(pydoc.render_doc(getattr(optim, name)))
    assert f"{name}(params: list[torch.Tensor]" in text
    assert f"{name}.update(grads, state, params" in text


@pytest.mark.parametrize("name", CLASSES)
def test_the_signature_is_torchs_with_defaults_and_inplace(name: str) -> None:
    torchs = inspect.signature(getattr(importlib.import_module(f"torch.optim.{name}"), name))
    ours = inspect.signature(getattr(optim, f"functional_{name}"))
    assert list(ours.parameters) == [*torchs.parameters, "inplace"]
    assert all(
        ours.parameters[key].kind is parameter.kind for key, parameter in torchs.parameters.items()
    )


def test_the_module_can_be_found() -> None:
    assert importlib.util.find_spec("tensorplay.distributed.optim.functional_adam") is not None


def test_the_module_survives_a_reload_of_the_package() -> None:
    function = optim.functional_adam
    assert importlib.reload(optim).functional_adam is function


def test_torchs_own_submodules_of_that_name_are_left_alone() -> None:
    program = """
import torch, types, torch.distributed.optim.functional_adam as theirs
import tensorplay.distributed.optim.functional_adam
from tensorplay.distributed.optim import functional_adam
assert torch.distributed.optim.functional_adam is theirs
assert isinstance(functional_adam, types.FunctionType)
"""
    finished = subprocess.run(  # noqa: S603 - our own interpreter, our own program
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr


def test_the_articles_line_runs() -> None:
    from tensorplay.distributed.optim.functional_adam import functional_adam

    param = torch.zeros(2)
    state = [torch.zeros(2)], [torch.zeros(2)], [], [torch.zeros(())]
    functional_adam([param], [torch.ones(2)], *state, lr=0.1)
    torch.testing.assert_close(param, torch.full((2,), -0.1))
