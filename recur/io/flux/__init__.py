"""Read trained Flux.jl models from `.bson` and `.jld2` files, without Julia.

`load` builds the model that a file holds, `load_into` fills one that was built in Python, `read`
gives the stored values as they are, `describe` tells what they are; `save_npz` writes a model's
arrays for Julia.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO, Literal

import numpy as np

from recur.errors import FormatError
from recur.files import AnyPath, atomic_writer
from recur.io import bson, jld2
from recur.io.flux.build import Builder
from recur.io.flux.fill import fill, fill_in_order
from recur.io.flux.find import layers_inside, model_of, parameters, select
from recur.io.flux.npz import named_arrays
from recur.io.flux.old import gru_from_dense
from recur.io.flux.outline import era, tree_lines

__all__ = ["describe", "gru_from_dense", "load", "load_into", "read", "save_npz"]

_SAVE_AGAIN = (
    "In Julia, load it and save it again: "
    'using JLD2, Flux; jldsave("model.jld2"; model_state = Flux.state(cpu(model)))'
)

_OTHER_KINDS = (
    (
        b"7JL",
        "it was written by Julia's own serialize (a .jls file), which only Julia of the same "
        f"version reads. {_SAVE_AGAIN}",
    ),
    (b"Julia data file (HDF5)", f"it is an old .jld file (JLD.jl, not JLD2.jl). {_SAVE_AGAIN}"),
    (
        b"\x89HDF",
        "it is a plain HDF5 file, not one of JLD2.jl. Models of Keras are read by recur.io.keras; "
        f"for an old .jld file: {_SAVE_AGAIN}",
    ),
    (
        b"PK\x03\x04",
        "it is a zip archive: NumPy (.npz), PyTorch (.pt) or Keras (.keras), not a file of BSON.jl "
        "or JLD2.jl.",
    ),
    (b"\x93NUMPY", "it is one NumPy array; read it with numpy.load."),
    (
        b"version https://git-lfs",
        "it is a Git LFS pointer, not the file itself. Fetch the file with `git lfs pull`.",
    ),
)


def read(path: AnyPath) -> dict[str, Any]:
    """The Julia values in the `.bson` or `.jld2` file `path`, by variable name.

    The values are those of `recur.io.julia`: arrays have Julia's shape, own their memory and may be
    written to; what Julia shared is shared.  The kind of file is told from its bytes, not its name.

    Raises `FormatError` if the file is damaged, or of a kind that is not read; `OSError` if it
    cannot be opened.
    """
    with open(path, "rb", buffering=0) as file, _naming(path):
        return _read(file)


def load(
    path: AnyPath,
    name: str | None = None,
    resume: bool = False,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    *,
    learn_init: bool = False,
    layout: Literal["fbt", "ftb"] = "fbt",
) -> Any:
    """The model that the Flux file `path` holds, written by any Flux from 0.3 to 0.16.

    name        the variable that holds the model, or a part of it: "model.layers.0"; not needed
                where the file holds one model
    resume      Recurs go on from the running state that was saved with them (before Flux 0.15);
                else they start from their initial state
    functions   callables for what a file cannot hold, by place: {"layers.2": np.abs}.  `Flux.state`
                and lists `params(m)` hold no activations: {"layers.1.act": recur.relu}
    learn_init  the initial states, which Flux learned before 0.15, are parameters; else they are
                constants
    layout      "ftb" to call the model as Flux 0.15 and later do: (features, time, batch)

    What Julia shared is shared, so tied weights stay tied.  Flux before 0.15 adds epsilon to the
    deviation in LayerNorm, recur to the variance: outputs differ by some 1e-5 of their size.

    Raises `FormatError` if the file is damaged or of a kind that is not read, or if it holds a
    layer or a function that has no counterpart here: the message lists every such place.
    """
    tree = read(path)
    with _naming(path):
        return _build(tree, name, Builder(functions, resume, learn_init, layout))


def load_into(model: Any, path: AnyPath, name: str | None = None, resume: bool = False) -> Any:
    """Fill a model that was built in Python with the arrays of the Flux file `path`; returns it.

    The file may hold the model, its `Flux.state`, or the list `params(m)`; `name` and `resume` as
    in `load`.  Layers of the model take the arrays of their counterparts: containers part by part,
    a class of your own by the names of its attributes, or in order where the file has no names.
    Recurrent layers are put at their start, which becomes zeros if the file holds none.

    Raises `FormatError`, `StateError` or `ShapeError` if the two do not fit, and changes nothing.
    """
    tree = read(path)
    with _naming(path):
        source = select(tree, name)
        arrays = parameters(source)
        if arrays is None:
            fill(model, model_of(tree, source), resume)
        else:
            fill_in_order(model, arrays)
    return model


def save_npz(model: Any, path: AnyPath, flux: str = "0.16") -> None:
    """Write the arrays of `model` to an `.npz` file, with the names of `Flux.state` joined by dots.

    Arrays are in Fortran order, so NPZ.jl reads them without a transpose; positions count from 1:
    `layers.1.cell.Wi`.  In Julia, with a model of the same make:

        using NPZ; import Functors
        w = npzread("model.npz")
        model = Functors.fmap_with_path((p, x) -> get(w, join(p.keys, "."), x), model)

    flux  the version that will read it.  Before 0.15 initial states are saved as `state0`; later
          ones have none

    An old file stays whole until the new one is.  Raises `StateError` for what the layers of that
    version cannot hold: peepholes, inner biases, hard_sigmoid gates, initial states.
    """
    try:
        minor = [int(part) for part in flux.split(".")[:2]][1]
    except (ValueError, IndexError):
        raise ValueError(f'save_npz: flux is {flux!r}, expected a version, "0.16".') from None
    arrays = named_arrays(model, stateless=minor >= 15)
    with atomic_writer(path) as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def describe(path: AnyPath) -> str:
    """What the Flux file `path` holds, as text to read.

    That is its kind, its tree with shapes, the versions of Flux that write such a tree, and the
    model that `load` builds, or why it builds none.  Raises as `read`.
    """
    tree = read(path)
    with open(path, "rb") as file:
        head = file.read(128).split(b"\0")[0]
    kind = head.decode("ascii", "replace") if head.startswith(jld2.HEADER) else "BSON"
    try:
        loads = f"load builds: {_build(tree, None, Builder())!r}"
    except FormatError as error:
        loads = f"load builds nothing: {error}"
    written = era(tree)
    lines = [kind, *tree_lines(tree)]
    lines.append(f"written by: {f'Flux {written}' if written else 'nothing tells which Flux'}")
    return "\n".join([*lines, loads])


def _build(tree: dict[str, Any], name: str | None, builder: Builder) -> Any:
    try:
        return builder.model(model_of(tree, select(tree, name)))
    except FormatError as error:
        places = [place for place in layers_inside(tree) if "." in place]
        if name is not None or not places:
            raise
        raise FormatError(
            f"{error} Parts that may load on their own: {', '.join(f'name={p!r}' for p in places)}."
        ) from None


@contextmanager
def _naming(path: AnyPath) -> Iterator[None]:
    """Put the file's name before the message of a `FormatError`."""
    try:
        yield
    except FormatError as error:
        raise FormatError(f"{os.fspath(path)}: {error}") from None


def _read(file: BinaryIO) -> dict[str, Any]:
    head = file.read(64)
    if head.startswith(jld2.HEADER):
        return jld2.read(file)
    if not head:
        raise FormatError("the file is empty.")
    for start, reason in _OTHER_KINDS:
        if head.startswith(start):
            raise FormatError(f"this file is not read: {reason}")
    tree = bson.read(file)
    if not isinstance(tree, dict):
        raise FormatError("the file holds no variables by name.")
    if _is_jlso(tree):
        raise FormatError(
            "this file is not read: it is a JLSO file (as MLJ.save writes), whose values are "
            f"serialized by Julia inside. {_SAVE_AGAIN}"
        )
    return tree


def _is_jlso(tree: dict[str, Any]) -> bool:
    metadata = tree.get("metadata")
    return "objects" in tree and isinstance(metadata, dict) and "compression" in metadata
