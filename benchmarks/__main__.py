"""``python -m benchmarks NAME [ARGS ...]`` runs a benchmark; without a name, lists them."""

import ast
import importlib
import pkgutil
import sys
from pathlib import Path


def describe() -> dict[str, str]:
    """The first line of each benchmark's docstring, by name; imports none of them."""
    folder = Path(__file__).parent
    names = sorted(
        module.name for module in pkgutil.iter_modules([str(folder)]) if module.name[0] != "_"
    )
    return {
        name: (ast.get_docstring(ast.parse((folder / f"{name}.py").read_text())) or "").split("\n")[
            0
        ]
        for name in names
    }


def main(argv: list[str]) -> int:
    benchmarks = describe()
    if argv and argv[0] in benchmarks:
        importlib.import_module(f"benchmarks.{argv[0]}").main(argv[1:])
        return 0
    print(__doc__)
    for name, summary in benchmarks.items():
        print(f"  {name:<16} {summary}")
    return int(bool(argv) and argv[0] not in {"-h", "--help"})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
