"""The rooms of recur: each module stands on a floor and imports only from lower ones.

A folder is one module; inside it what reads lies below what uses it, so its files form no cycle.
Packages that are not dependencies are imported inside functions.  No module outgrows LIMIT lines of
code; one that does becomes a folder of the same name.
"""

from __future__ import annotations

import ast
import graphlib
import importlib.util
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

FLOORS = {
    **dict.fromkeys(["errors", "files", "_version", "_kernels"], 0),
    "tape": 1,
    "ops": 2,
    "module": 3,
    **dict.fromkeys(["gradients", "cells", "losses", "optim"], 4),
    **dict.fromkeys(["recurrent", "layers"], 5),
    **dict.fromkeys(["regularise", "extra_cells", "compress"], 6),
    **dict.fromkeys(["data", "streaming", "io", "inspect"], 7),
    "train": 8,
    "serve": 9,
    "__init__": 10,
    "command": 11,
    "__main__": 12,
}
DEPENDENCIES = {"numpy", "scipy"}
OPTIONAL = {
    *("tqdm", "matplotlib"),
    *("starlette", "uvicorn", "websockets", "prometheus_client"),
    *("redis", "ray", "torch", "onnx", "onnxruntime", "h5py", "mpi4py", "sklearn"),
}
LIMIT = 400


def sources() -> dict[str, str]:
    """The text of every module of the installed package by its dotted name below `recur`."""
    spec = importlib.util.find_spec("recur")
    assert spec is not None and spec.submodule_search_locations
    root = Path(next(iter(spec.submodule_search_locations)))
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if len(parts) > 1 and parts[-1] == "__init__":
            parts = parts[:-1]
        found[".".join(parts)] = path.read_text(encoding="utf-8")
    return found


def room(name: str) -> str:
    return name.split(".")[0]


Import = tuple[ast.Import | ast.ImportFrom, bool | None]


def imports(tree: ast.Module) -> Iterator[Import]:
    """Every import with whether it runs when the module is imported, None if only type checkers
    see it."""

    def walk(node: ast.AST, at_import: bool | None) -> Iterator[Import]:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, at_import
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            at_import = False
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for child in node.body:
                yield from walk(child, None)
            for child in node.orelse:
                yield from walk(child, at_import)
            return
        for child in ast.iter_child_nodes(node):
            yield from walk(child, at_import)

    return walk(tree, True)


def targets(node: ast.Import | ast.ImportFrom, name: str, modules: dict[str, str]) -> list[str]:
    """The full dotted names that an import statement of module `name` reaches."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        base = importlib.util.resolve_name("." * node.level + base, package_of(name, modules))
    return [
        f"{base}.{alias.name}" if is_module(f"{base}.{alias.name}", modules) else base
        for alias in node.names
    ]


def package_of(name: str, modules: dict[str, str]) -> str:
    """What `__package__` is inside module `name`."""
    if name == "__init__":
        return "recur"
    is_folder = any(other.startswith(f"{name}.") for other in modules)
    return f"recur.{name}" if is_folder else f"recur.{name}".rpartition(".")[0]


def is_module(full: str, modules: dict[str, str]) -> bool:
    name = full.removeprefix("recur.")
    return full.startswith("recur.") and (name in modules or name == "_kernels")


def stray_imports(modules: dict[str, str]) -> list[str]:
    """What each module imports against the rules, one line each."""
    found = []
    inner: dict[str, dict[str, set[str]]] = {}
    for name, text in modules.items():
        if room(name) not in FLOORS:
            found.append(f"{name}: not in the table of floors")
            continue
        for node, at_import in imports(ast.parse(text)):
            for target in targets(node, name, modules):
                top, _, rest = target.partition(".")
                place = f"{name}, line {node.lineno}"
                if top != "recur":
                    found += stray_package(place, top, at_import)
                elif room(rest or "__init__") == room(name):
                    if at_import is None:
                        continue  # a name for type checkers makes no cycle
                    inner.setdefault(room(name), {}).setdefault(name, set()).add(rest)
                elif FLOORS.get(room(rest or "__init__"), 99) >= FLOORS[room(name)]:
                    found.append(f"{place}: imports {target}, which is not on a lower floor")
    for folder, graph in inner.items():
        try:
            graphlib.TopologicalSorter(graph).prepare()
        except graphlib.CycleError as error:
            found.append(f"{folder}: its files import each other in a cycle, {error.args[1]}")
    return found


def stray_package(place: str, package: str, at_import: bool | None) -> list[str]:
    if package in sys.stdlib_module_names or package in DEPENDENCIES:
        return []
    if package not in OPTIONAL:
        return [f"{place}: imports {package}, which is neither a dependency nor an extra"]
    if at_import:
        return [f"{place}: imports {package} outside a function; it is an extra"]
    return []


def lines_of_code(text: str) -> int:
    """Lines that hold code: not blank, no comment, no docstring."""
    lines: set[int] = set()
    quiet = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in quiet and token.string:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def test_every_module_imports_only_from_lower_floors_and_extras_only_inside_functions():
    assert stray_imports(sources()) == []


def test_no_module_outgrows_its_limit_of_lines_of_code():
    sizes = {name: lines_of_code(text) for name, text in sources().items()}
    assert sizes, "no module found"
    assert {name: size for name, size in sizes.items() if size > LIMIT} == {}


# The rules themselves, on invented packages: each stray import must be seen.

FOLDER = {"io": "from recur.io.bson import read", "io.bson": "from recur import errors"}


@pytest.mark.parametrize(
    ("modules", "complaint"),
    [
        ({"tape": "import recur.ops"}, "not on a lower floor"),
        ({"tape": "from recur import ops", "ops": ""}, "not on a lower floor"),
        ({"tape": "from . import ops", "ops": ""}, "not on a lower floor"),
        ({"tape": "from .ops import tanh", "ops": ""}, "not on a lower floor"),
        ({"tape": "def f():\n    from recur.ops import tanh"}, "not on a lower floor"),
        ({"layers": "from recur.recurrent import Recur"}, "not on a lower floor"),
        ({"tape": "from recur import Chain"}, "imports recur, which is not on a lower floor"),
        ({"tape": "import recur"}, "imports recur, which is not on a lower floor"),
        ({"io": "", "io.bson": "from ..train import save"}, "not on a lower floor"),
        ({"io": "", "io.bson": "from recur.inspect import summary"}, "not on a lower floor"),
        ({"helpers": ""}, "not in the table"),
        ({"tape": "import torch"}, "outside a function"),
        ({"tape": "class A:\n    from torch import nn"}, "outside a function"),
        ({"tape": "try:\n    import tqdm\nexcept ImportError:\n    pass"}, "outside a function"),
        ({"tape": "def f():\n    import pandas"}, "neither a dependency nor an extra"),
        (
            {"io": "", "io.a": "from .b import x", "io.b": "from recur.io import a"},
            "in a cycle",
        ),
        ({"io": "from .a import x", "io.a": "from recur.io import y"}, "in a cycle"),
    ],
)
def test_a_stray_import_is_seen(modules, complaint):
    (line,) = stray_imports(modules)
    assert complaint in line


@pytest.mark.parametrize(
    "modules",
    [
        {"ops": "import math\nimport numpy as np\nfrom recur import errors"},
        {"ops": "from .tape import Tape"},
        {"ops": "from recur import _kernels", "errors": ""},
        {"io": "def f():\n    import h5py"},
        {"io": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"},
        {"__init__": "from .tape import Tape\nfrom recur.train import train", "train": ""},
        {"__main__": "import recur\nfrom .train import train\nfrom recur import Chain"},
        FOLDER,
        {
            "io": "",
            "io.a": "if TYPE_CHECKING:\n    from recur.io.b import X",
            "io.b": "from recur.io.a import Y",
        },
    ],
)
def test_a_lawful_import_passes(modules):
    assert stray_imports({"errors": "", "tape": "", **modules}) == []


def test_docstrings_comments_and_blank_lines_are_no_code():
    assert lines_of_code('"""Two\nlines."""\n\n# comment\n') == 0
    assert lines_of_code("def f():\n    'doc'\n\n    return 1  # comment\n") == 2
    assert lines_of_code('x = """two\nlines"""\n') == 2
