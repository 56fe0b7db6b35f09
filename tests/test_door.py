"""`import recur` opens the rooms that every program needs, and the others by the first of their
names."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import recur

LATER = {
    "compress",
    "data",
    "extra_cells",
    "inspect",
    "io",
    "losses",
    "optim",
    "regularise",
    "streaming",
}


def run(code: str) -> str:
    """What a new Python prints."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout


def test_import_recur_leaves_rare_rooms_and_what_they_import_closed():
    rooms = run(
        "import sys, recur\n"
        "print(*{name.split('.')[1] for name in sys.modules if name.startswith('recur.')},\n"
        "      *{'sqlite3', 'ssl', 'matplotlib'} & set(sys.modules))"
    )
    opened = set(rooms.split())
    assert {"recurrent", "layers", "gradients"} <= opened
    assert not opened & (LATER | {"train", "serve", "command", "sqlite3", "ssl", "matplotlib"})


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("from recur import WeightDrop", "WeightDrop"),
        ("import recur; WeightDrop = recur.regularise.WeightDrop", "WeightDrop"),
        ("import recur.streaming; from recur import Stream", "Stream"),
        ("import recur.inspect.gradcheck; from recur import gradcheck", "gradcheck"),
        ("from recur import *", "StreamPool"),
        ("import recur; mse = recur.losses.mse", "mse"),
        ("import recur; load = recur.load", "load"),
        ("import recur.train; train = recur.train", "train"),
        ("import recur; from recur.train.loop import History; train = recur.train", "train"),
        ("from recur import train", "train"),
        ("import recur.compress; compress = recur.compress", "compress"),
        ("import recur.io.flux; load = recur.io.flux.load", "load"),
        ("import recur, pickle; Zoneout = pickle.loads(pickle.dumps(recur.Zoneout))", "Zoneout"),
    ],
)
def test_a_name_of_a_closed_room_opens_it(code, name):
    assert run(f"{code}\nprint({name}.__name__)").strip() == name


def test_every_public_name_is_there_and_listed_before_it_is_used():
    code = "import recur\nprint(*set(recur.__all__) - set(dir(recur)))"
    assert run(code).split() == []
    assert [name for name in recur.__all__ if not hasattr(recur, name)] == []


def public() -> Iterator[tuple[str, object]]:
    """What users may call, by name: that of each `__all__`, and the methods of its classes."""
    rooms = [name for _, name, _ in pkgutil.walk_packages(recur.__path__, "recur.")]
    for room in map(importlib.import_module, ["recur", *rooms]):
        for name in getattr(room, "__all__", ()):
            member = getattr(room, name)
            if not callable(member) or not getattr(member, "__module__", "").startswith("recur"):
                continue
            yield f"{room.__name__}.{name}", member
            if inspect.isclass(member):
                for method in dir(member):
                    found = getattr(member, method, None)
                    if not method.startswith("_") and (
                        callable(found) or isinstance(found, property)
                    ):
                        yield f"{room.__name__}.{name}.{method}", found


def test_every_public_name_and_method_has_a_docstring():
    described = dict(public())
    assert {"recur.Chain.run", "recur.io.flux.load", "recur.Tensor.shape"} <= set(described)
    assert [name for name, member in described.items() if not inspect.getdoc(member)] == []


def test_a_name_that_recur_does_not_have_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'recur' has no attribute 'nonsense'"):
        recur.nonsense  # noqa: B018


def test_type_checkers_and_python_read_the_same_names():
    tree = ast.parse(Path(recur.__file__).read_text(encoding="utf-8"))
    (branch,) = (n for n in tree.body if isinstance(n, ast.If))
    checked = {
        alias.name for n in branch.body if isinstance(n, ast.ImportFrom) for alias in n.names
    }
    assert checked == set(recur._ROOM_OF)


def test_a_file_names_layers_of_rooms_that_are_closed(tmp_path):
    model = recur.Chain(
        recur.WeightDrop(recur.LSTM(3, 4)), recur.Recur(recur.extra_cells.MGUCell(4, 2))
    )
    recur.save(model, tmp_path / "m.safetensors")
    code = f"import recur\nprint(repr(recur.load({str(tmp_path / 'm.safetensors')!r})))"
    assert run(code).strip() == repr(model)
