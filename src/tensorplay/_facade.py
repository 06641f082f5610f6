"""Makes ``tensorplay.X`` and ``torch.X`` one and the same module, except where this package has its own.

Two pieces, neither of which knows a name of torch's:

* an import finder: ``import tensorplay.nn.functional`` binds that name in ``sys.modules`` to torch's
  module itself. Nothing is executed twice and torch's modules stay as they are.
* :func:`overlay`, for the modules that this package does define: what they lack, torch's module of
  the same path supplies. One more overlay is one file that says::

      from tensorplay import _facade

      __getattr__, __dir__ = _facade.overlay(__name__)
"""

import importlib
import pkgutil
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import CodeType, ModuleType
from typing import Any


def overlay(name: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Lets the module ``name`` of this package fall back to torch's module of the same path.

    Names found in torch are looked up at each access, so that what torch changes at run time is
    never stale. Submodules of this package come before torch's; those that nobody has imported yet
    are imported on access. A module that defines ``__all__`` keeps it; without one,
    ``from ... import *`` gives what it gives for torch's module.

    Args:
        name: the calling module's ``__name__``.

    Returns:
        The ``__getattr__`` and the ``__dir__`` that the module is to define.
    """
    overlaid = _finder.overlays[name] = _Overlay(sys.modules[name])
    if _finder not in sys.meta_path:
        # First, because the path-based finder would follow `tensorplay.nn.__path__` into torch's
        # folder and execute its files a second time under our name.
        sys.meta_path.insert(0, _finder)
    # Only now: meanwhile other threads may already ask for `tensorplay.nn`.
    importlib.import_module("torch")
    _bind_what_import_would_spoil(overlaid.torch_name)
    return overlaid.getattr, overlaid.dir


class _Overlay:
    """A module of this package, with torch's module of the same path under it."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.torch_name = _torch_name(module.__name__)
        self.own_submodules = frozenset(
            found.name for found in pkgutil.iter_modules(vars(module).get("__path__", ()))
        )

    def getattr(self, attribute: str) -> Any:
        submodule = f"{self.module.__name__}.{attribute}"
        if attribute in self.own_submodules:
            return importlib.import_module(submodule)
        is_dunder = attribute.startswith("__") and attribute.endswith("__")
        # Tools probe modules for `__wrapped__` and the like; that must not import anything.
        if not is_dunder or self.torch_name in sys.modules:
            torch_module = self._torch_module()
            try:
                return getattr(torch_module, attribute)
            except AttributeError:
                if attribute == "__all__":
                    return [public for public in vars(torch_module) if not public.startswith("_")]
            if not is_dunder and self._is_in_a_file(attribute):
                return importlib.import_module(submodule)
        raise AttributeError(
            _missing_part(f"{self.torch_name}.{attribute}")
            or f"module {self.module.__name__!r} has no attribute {attribute!r}",
            name=attribute,
            obj=self.module,
        )

    def dir(self) -> list[str]:
        return sorted({*vars(self.module), *self.own_submodules, *dir(self._torch_module())})

    def _is_in_a_file(self, submodule: str) -> bool:
        # As opposed to torch's folders of headers and libraries, which importlib takes for packages.
        spec = _locate(f"{self.torch_name}.{submodule}")
        return spec is not None and spec.has_location

    def _torch_module(self) -> ModuleType:
        # Not before it is needed: some of torch's modules are slow to import, and warn.
        if self.torch_name not in sys.modules:
            importlib.import_module(self.torch_name)
            _bind_what_import_would_spoil(self.torch_name)
        return sys.modules[self.torch_name]


class _TorchFinder(MetaPathFinder):
    """Finds torch's modules under ``tensorplay``, and leaves this package's own to the next finder.

    Finders run under the interpreter's one import lock: importing anything in ``find_spec`` would
    deadlock with another thread that is importing torch.
    """

    def __init__(self) -> None:
        self.overlays: dict[str, _Overlay] = {}

    def is_own(self, fullname: str) -> bool:
        parent, _, child = fullname.rpartition(".")
        if parent in self.overlays:
            return child in self.overlays[parent].own_submodules
        # Below one of our packages that overlays nothing, as opposed to one of torch's.
        return sys.modules.get(parent) is not sys.modules.get(_torch_name(parent))

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002  # the caller's protocol
        target: ModuleType | None = None,  # noqa: ARG002  # the caller's protocol
    ) -> ModuleSpec | None:
        if not fullname.startswith("tensorplay."):
            return None
        torch_name = _torch_name(fullname)
        if missing := _missing_part(torch_name):
            raise ImportError(missing, name=fullname)
        if self.is_own(fullname):
            return None
        if torch_name in sys.modules:
            torch_spec = sys.modules[torch_name].__spec__  # None where torch made it by hand
        else:
            torch_spec = _locate(torch_name)
            if torch_spec is None:
                return None
        # The origin and whether it is a package matter to `python -m` only.
        return ModuleSpec(
            fullname,
            _TorchLoader(torch_name),
            origin=torch_spec.origin if torch_spec else None,
            is_package=bool(torch_spec and torch_spec.submodule_search_locations),
        )


class _TorchLoader(Loader):
    """Loads a module by putting torch's in its place."""

    def __init__(self, torch_name: str) -> None:
        self.torch_name = torch_name

    def exec_module(self, module: ModuleType) -> None:
        # Waits if another thread is importing torch; importlib itself would go on to the submodule.
        importlib.import_module("torch")
        # A module may replace itself in `sys.modules` while it executes. Returning torch's from
        # `create_module` instead would let importlib write our name into its `__spec__`.
        sys.modules[module.__name__] = importlib.import_module(self.torch_name)
        _bind_what_import_would_spoil(self.torch_name)

    def get_code(self, fullname: str) -> CodeType | None:  # noqa: ARG002  # the caller's protocol
        """What ``python -m`` executes."""
        spec = _locate(self.torch_name)
        get_code = getattr(spec and spec.loader, "get_code", None)
        code: CodeType | None = get_code(self.torch_name) if get_code else None
        return code


_finder = _TorchFinder()


def _torch_name(name: str) -> str:
    return "torch" + name.removeprefix("tensorplay")


def _bind_what_import_would_spoil(torch_name: str) -> None:
    """Binds our names for those loaded submodules of torch's that importlib must not load by them.

    Having loaded a module, importlib sets it as an attribute of its parent, and under our names
    that parent is torch's: ``import tensorplay.multiprocessing.spawn`` would replace torch's
    *function* ``spawn`` by the module that holds it. What is in ``sys.modules`` already, importlib
    leaves alone. It also refuses to load what has no package above it, as the modules inside
    torch's C extension.
    """
    prefix = torch_name + "."
    parent = vars(sys.modules[torch_name]) if torch_name in sys.modules else {}
    for name, module in list(sys.modules.items()):
        if not name.startswith(prefix) or "." in name[len(prefix) :]:
            continue
        if "__path__" in parent and parent.get(name[len(prefix) :]) is module:
            continue
        # While another thread is half-way through it, an import must still find its way to wait.
        if getattr(getattr(module, "__spec__", None), "_initializing", False):
            continue
        alias = "tensorplay" + name.removeprefix("torch")
        if not _finder.is_own(alias):
            sys.modules.setdefault(alias, module)
            _bind_what_import_would_spoil(name)


def _locate(torch_name: str) -> ModuleSpec | None:
    """Finds the file of a module of torch's without importing anything, its parents neither."""
    parent = torch_name.rpartition(".")[0]
    if parent in sys.modules:
        path = getattr(sys.modules[parent], "__path__", None)
    else:
        parent_spec = _locate(parent) if parent else None
        path = parent_spec.submodule_search_locations if parent_spec else None
    return PathFinder.find_spec(torch_name, path) if path or not parent else None


def _missing_part(torch_name: str) -> str | None:
    """Says what this build of torch lacks for a module, or None."""

    def lacks(part: str) -> bool:
        is_available = getattr(sys.modules.get(part), "is_available", None)
        return is_available is not None and not is_available()

    for part, support in (
        ("torch.distributed", "distributed support"),
        ("torch.distributed.rpc", "RPC"),
    ):
        if (
            f"{torch_name}.".startswith(f"{part}.")
            and torch_name != "torch.distributed"
            and lacks(part)
        ):
            return (
                f"tensorplay{torch_name.removeprefix('torch')} is not available: this build of "
                f"PyTorch has no {support} ({part}.is_available() is False)"
            )
    return None
