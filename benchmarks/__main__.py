"""Runs a benchmark by name: ``python -m benchmarks NAME [OPTION ...]``; without a name, lists all.

A benchmark is a module or package in this folder that defines ``main(argv: list[str]) -> None``;
the first line of its docstring is what the list says about it.
"""

import ast
import importlib
import sys
from pathlib import Path


def find_benchmarks() -> dict[str, str]:
    """What each benchmark measures, by name, read from the sources: nothing is imported."""
    folder = Path(__file__).parent
    sources = {
        **{path.stem: path for path in folder.glob("*.py")},
        **{path.parent.name: path for path in folder.glob("*/__init__.py")},
    }
    found = {}
    for name, path in sorted(sources.items()):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            if name == "__main__":
                continue
            summary = (ast.get_docstring(tree) or "").partition("\n")[0]
            found[name] = summary
    return found


def main(argv: list[str]) -> None:
    benchmarks = find_benchmarks()
    if argv and argv[0] in benchmarks:
        importlib.import_module(f"benchmarks.{argv[0]}").main(argv[1:])
        return
    width = max(map(len, benchmarks), default=0)
    listing = "\n".join(f"  {name:<{width}}  {what}" for name, what in benchmarks.items())
    usage = f"usage: python -m benchmarks NAME [OPTION ...]   (NAME --help says more)\n\n{listing}"
    if argv and argv[0] not in {"-h", "--help"}:
        sys.exit(f"there is no benchmark {argv[0]!r}\n{usage}")
    print(usage)


if __name__ == "__main__":
    main(sys.argv[1:])
