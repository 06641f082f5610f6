"""``tensorplay`` is ``torch`` under one more name, except for the modules it defines itself."""

import contextlib
import importlib
import importlib.util
import inspect
import io
import json
import pickle
import pkgutil
import pydoc
import rlcompleter
import subprocess
import sys
import textwrap
import threading
import types
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional
import torch.utils.data

import tensorplay as tp
import tensorplay.distributed
from tensorplay import _facade
from tensorplay._version import __version__

# What Python gives every module of its own, and what this package means to differ in.
NOT_SHARED = {name for name in dir(tp) if name in vars(types.ModuleType("m"))} | {
    *("__annotations__", "__builtins__", "__cached__", "__file__", "__getattr__", "__path__"),
    *("__version__", "distributed"),
}


def in_fresh_process(program: str, *, options: tuple[str, ...] = ()) -> dict[str, object]:
    """Returns what ``program`` leaves in its variable ``facts``, as told by a new interpreter."""
    code = textwrap.dedent(program) + "\nimport json; print(json.dumps(facts))\n"
    result = subprocess.run(  # noqa: S603  # our own interpreter, our own program
        [sys.executable, *options, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    facts: dict[str, object] = json.loads(result.stdout.splitlines()[-1])
    return facts


def our_modules(package: types.ModuleType = tensorplay.distributed) -> list[str]:
    return [
        found.name
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
        if not found.name.endswith("__main__")
    ]


# Identity


@pytest.mark.parametrize("module", [torch, torch.distributed], ids=lambda module: module.__name__)
def test_every_public_attribute_is_torchs(module: types.ModuleType) -> None:
    ours = importlib.import_module(module.__name__.replace("torch", "tensorplay", 1))
    public = {name for name in dir(module) if not name.startswith("_")} - NOT_SHARED
    own = {found.name for found in pkgutil.iter_modules(ours.__path__)}
    different = {name for name in public - own if getattr(ours, name) is not getattr(module, name)}
    assert not different


def test_every_submodule_that_torch_has_loaded_is_torchs() -> None:
    ours = {"tensorplay.distributed", *our_modules()}
    different = [
        name
        for name, module in list(sys.modules.items())
        if name.startswith("torch.")
        and (alias := name.replace("torch", "tensorplay", 1)) not in ours
        and importlib.import_module(alias) is not module
    ]
    assert not different


def test_import_statements_of_all_forms() -> None:
    import tensorplay.nn.functional as F
    import tensorplay.optim.lr_scheduler
    from tensorplay.nn.parallel import DistributedDataParallel
    from tensorplay.utils.data import DataLoader

    from tensorplay import optim
    from tensorplay.distributed import ReduceOp, rpc

    assert F is torch.nn.functional
    assert tensorplay.optim.lr_scheduler is torch.optim.lr_scheduler
    assert optim is torch.optim
    assert ReduceOp is torch.distributed.ReduceOp
    assert rpc is torch.distributed.rpc
    assert DistributedDataParallel is torch.nn.parallel.DistributedDataParallel
    assert DataLoader is torch.utils.data.DataLoader


def test_star_import_gives_what_it_gives_for_torch() -> None:
    ours: dict[str, object] = {}
    torchs: dict[str, object] = {}
    exec("from tensorplay import *", ours)  # noqa: S102  # not allowed inside a function otherwise
    exec("from torch import *", torchs)  # noqa: S102
    del ours["__builtins__"], torchs["__builtins__"]
    assert ours.keys() == torchs.keys()
    assert all(ours[name] is torchs[name] for name in ours)


def test_star_import_of_a_module_without_all_gives_its_public_names() -> None:
    names: dict[str, object] = {}
    exec("from tensorplay.distributed import *", names)  # noqa: S102
    assert names["all_reduce"] is torch.distributed.all_reduce
    assert "_Backend" not in names


def test_modules_that_are_objects_made_by_hand_are_shared() -> None:
    assert importlib.import_module("tensorplay.ops") is torch.ops
    assert importlib.import_module("tensorplay.backends.cudnn") is torch.backends.cudnn


def test_version_is_this_packages() -> None:
    assert tp.__version__ == __version__


def test_what_torch_changes_later_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "changed_later", 1, raising=False)
    assert tp.changed_later == 1
    monkeypatch.setattr(torch, "changed_later", 2)
    assert tp.changed_later == 2


def test_packages_of_algorithms_hold_modules_of_both() -> None:
    import torch.distributed.algorithms.ddp_comm_hooks as torchs_hooks
    import torch.distributed.algorithms.model_averaging.averagers as torchs_averagers

    from tensorplay.distributed.algorithms.ddp_comm_hooks import DDPCommHookType, default_hooks
    from tensorplay.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
        PostLocalSGDState,
    )
    from tensorplay.distributed.algorithms.model_averaging import averagers

    assert default_hooks is torchs_hooks.default_hooks
    assert DDPCommHookType is torchs_hooks.DDPCommHookType
    assert PostLocalSGDState.__module__.startswith("tensorplay.")
    assert averagers.PeriodicModelAverager is not torchs_averagers.PeriodicModelAverager
    assert set(averagers.__all__) == set(torchs_averagers.__all__)


# What does not exist


def test_an_unknown_name_is_an_attribute_error_naming_this_package() -> None:
    assert not hasattr(tp, "no_such_name")
    with pytest.raises(AttributeError, match=r"^module 'tensorplay' has no attribute 'no_such_n"):
        _ = tp.no_such_name


@pytest.mark.parametrize("name", ["tensorplay.nope", "tensorplay.nn.nope", "tensorplay._C.nope"])
def test_an_unknown_module_is_named_as_it_was_asked_for(name: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=f"^No module named '{name}'"):
        importlib.import_module(name)


def test_torchs_folders_of_headers_are_no_attributes() -> None:
    assert not hasattr(tp, "include")


def test_without_distributed_support_names_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    monkeypatch.delattr(torch.distributed, "init_process_group")
    with pytest.raises(AttributeError, match="has no distributed support"):
        _ = tensorplay.distributed.init_process_group
    with pytest.raises(ImportError, match="has no distributed support"):
        exec("from tensorplay.distributed import init_process_group", {})  # noqa: S102
    assert not tensorplay.distributed.is_available()


def test_without_rpc_its_import_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed.rpc, "is_available", lambda: False)
    monkeypatch.delitem(sys.modules, "tensorplay.distributed.rpc", raising=False)
    with pytest.raises(ImportError, match="has no RPC"):
        importlib.import_module("tensorplay.distributed.rpc")


# This package's own modules


def test_our_own_modules_are_reached_by_attribute_and_by_import() -> None:
    for name in our_modules():
        module = importlib.import_module(name)
        reached: object = tp
        for part in name.split(".")[1:]:
            reached = getattr(reached, part)
        assert reached is module
        assert module.__name__ == name


def test_one_more_overlay_is_two_lines(tmp_path: Path) -> None:
    package = tmp_path / "nn"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from tensorplay import _facade\n"
        "__getattr__, __dir__ = _facade.overlay(__name__)\n"
        "Linear = 'our Linear'\n"
    )
    (package / "utils.py").write_text("ours = True\n")
    (package / "fresh.py").write_text("")
    facts = in_fresh_process(
        f"""
        import torch.nn.utils, tensorplay as tp
        from tensorplay import _facade
        tp.__path__.append({str(tmp_path)!r})
        tp.__getattr__, tp.__dir__ = _facade.overlay("tensorplay")  # lists the submodules again
        facts = {{
            "its names win": tp.nn.Linear,
            "its submodules win": tp.nn.utils.ours,
            "other names are torch's": tp.nn.Module is torch.nn.Module,
            "dir shows both": {{"fresh", "Module", "utils"}} <= set(dir(tp.nn)),
        }}
        import tensorplay.nn.functional as F
        from tensorplay.nn import fresh, modules
        facts["other submodules are torch's"] = F is torch.nn.functional
        facts["torch's are as before"] = torch.nn.Linear is modules.Linear
        """
    )
    assert facts == {
        "its names win": "our Linear",
        "its submodules win": True,
        "other names are torch's": True,
        "dir shows both": True,
        "other submodules are torch's": True,
        "torch's are as before": True,
    }


# What importing does, and leaves alone


def test_import_loads_no_module_beyond_torchs_and_its_own() -> None:
    facts = in_fresh_process(
        """
        import sys, torch
        before = set(sys.modules)
        torchs = {id(module) for module in sys.modules.values()}
        import tensorplay
        added = {name: sys.modules[name] for name in set(sys.modules) - before}
        # Further names for modules that torch has loaded are no modules.
        facts = sorted(name for name, module in added.items() if id(module) not in torchs)
        """,
        options=("-W", "error"),
    )
    assert facts == ["tensorplay", "tensorplay._facade", "tensorplay._version"]


def test_torchs_modules_are_left_as_they_are() -> None:
    facts = in_fresh_process(
        """
        import importlib, sys, torch, torch.nn.functional
        def state():
            return {
                name: (module, dict(vars(module)))
                for name, module in sys.modules.items() if name.split(".")[0] == "torch"
            }
        before = state()
        for name in before:
            importlib.import_module(name.replace("torch", "tensorplay", 1))
        def differs(name):
            module, attributes = before[name]
            now = vars(module)
            return now.keys() != attributes.keys() or any(
                now[key] is not attributes[key] for key in now
            )
        facts = [name for name in before if differs(name)]
        """
    )
    assert facts == []


def test_a_function_named_like_its_module_stays_a_function() -> None:
    spawn = torch.multiprocessing.spawn
    rendezvous = torch.distributed.rendezvous
    importlib.import_module("tensorplay.multiprocessing.spawn")
    importlib.import_module("tensorplay.distributed.rendezvous")
    assert torch.multiprocessing.spawn is spawn
    assert tensorplay.distributed.rendezvous is rendezvous


def test_submodules_that_torch_does_not_load_are_imported_on_access() -> None:
    facts = in_fresh_process(
        """
        import sys, tensorplay as tp
        facts = {"before": "torch.distributed.fsdp" in sys.modules}
        facts["class"] = tp.distributed.fsdp.FullyShardedDataParallel.__module__.split(".")[0]
        import torch.distributed.fsdp
        facts["same"] = tp.distributed.fsdp is torch.distributed.fsdp
        """
    )
    assert facts == {"before": False, "class": "torch", "same": True}


def test_reload_keeps_one_finder_and_the_same_objects() -> None:
    importlib.reload(tp)
    importlib.reload(tensorplay.distributed)
    assert sum(type(finder).__module__ == _facade.__name__ for finder in sys.meta_path) == 1
    assert tp.nn is torch.nn


def test_threads_may_import_at_the_same_time() -> None:
    facts = in_fresh_process(
        """
        import importlib, sys, threading, time
        names = [
            "tensorplay.nn.functional", "tensorplay.distributed.fsdp", "tensorplay.distributed.fsdp.api",
            "tensorplay.optim.adam", "tensorplay.multiprocessing.spawn", "tensorplay",
        ]
        found, errors = {}, []
        def load(name):
            try:
                found[name] = importlib.import_module(name)
            except BaseException as error:
                errors.append(repr(error))
        threads = [threading.Thread(target=load, args=(name,)) for name in ["tensorplay", *names]]
        threads[0].start()
        while not any(type(finder).__module__ == "tensorplay._facade" for finder in sys.meta_path):
            time.sleep(0.0001)  # until then nobody can know that tensorplay has submodules of torch's
        was_early = "torch" not in sys.modules or not hasattr(sys.modules["torch"], "nn")
        for thread in threads[1:]: thread.start()
        for thread in threads: thread.join()
        facts = errors or [
            was_early,
            found["tensorplay.distributed.fsdp"] is sys.modules["torch.distributed.fsdp"],
            callable(found["tensorplay"].multiprocessing.spawn),
        ]
        """
    )
    assert facts == [True, True, True]


def test_threads_see_the_same_objects() -> None:
    seen: list[object] = []
    threads = [threading.Thread(target=lambda: seen.append(tp.nn.Linear)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [torch.nn.Linear] * 8


# Tools


def test_pickles_are_torchs_and_load_where_only_torch_is() -> None:
    data = pickle.dumps([tp.nn.Linear(2, 2), tp.relu, tp.float32])
    assert b"tensorplay" not in data
    assert type(pickle.loads(data)[0]) is torch.nn.Linear


def test_a_pickle_that_names_our_module_finds_torchs_class() -> None:
    assert pickle.loads(b"ctensorplay.nn\nLinear\n.") is torch.nn.Linear


def test_saved_weights_load_without_unpickling_code() -> None:
    buffer = io.BytesIO()
    model = tp.nn.Linear(2, 2)
    tp.save(model.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert torch.equal(loaded["weight"], model.weight)


def test_dir_and_completion_show_torchs_names_and_ours() -> None:
    assert {*dir(torch), "examples", "__version__"} <= set(dir(tp))
    assert rlcompleter.Completer({"tp": tp}).complete("tp.Tens", 0) == "tp.Tensor("


def test_help_renders() -> None:
    assert "Every name and every submodule" in pydoc.render_doc(tp)
    assert "torch.nn" in pydoc.render_doc(tp.nn)


def test_getmodule_names_torchs_module() -> None:
    assert inspect.getmodule(tp.nn.Linear) is torch.nn.modules.linear


def test_find_spec_answers_without_importing() -> None:
    name = "utils.benchmark.examples"
    assert importlib.util.find_spec(f"tensorplay.{name}") is not None
    assert f"torch.{name}" not in sys.modules


def test_code_that_uses_our_names_compiles() -> None:
    def double_gelu(x: torch.Tensor) -> torch.Tensor:
        return tp.mul(tp.nn.functional.gelu(x), 2)

    x = torch.randn(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about itself
        compiled = torch.compile(double_gelu, fullgraph=True, backend="eager")
        assert torch.equal(compiled(x), double_gelu(x))
        assert torch.equal(torch.jit.script(double_gelu)(x), double_gelu(x))


def test_torchs_programs_run_by_our_name() -> None:
    result = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tensorplay.distributed.run", "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "--nproc-per-node" in result.stdout


def test_spawned_processes_receive_what_our_names_made() -> None:
    with contextlib.closing(tp.multiprocessing.get_context("spawn").Pool(1)) as pool:
        assert pool.apply(tp.nn.Linear, (2, 3)).weight.shape == (3, 2)
