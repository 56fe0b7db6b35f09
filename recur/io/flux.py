"""Read trained Flux.jl models from `.bson` and `.jld2` files, without Julia.

`read` gives the stored values as they are.
"""

from __future__ import annotations

import os
from typing import Any, BinaryIO

from recur.errors import FormatError
from recur.io import bson, jld2

__all__ = ["read"]

_SAVE_AGAIN = (
    "In Julia, load it and save it again: "
    'using JLD2, Flux; jldsave("model.jld2"; model_state = Flux.state(cpu(model)))'
)

_OTHER_KINDS = (
    (
        b"7JL",
        f"it was written by Julia's own serialize (a .jls file), which only Julia of the "
        f"same version reads. {_SAVE_AGAIN}",
    ),
    (b"Julia data file (HDF5)", f"it is an old .jld file (JLD.jl, not JLD2.jl). {_SAVE_AGAIN}"),
    (
        b"\x89HDF",
        "it is a plain HDF5 file, not one of JLD2.jl. Keras models are read by recur.io.keras.",
    ),
    (
        b"PK\x03\x04",
        "it is a zip archive: NumPy (.npz), PyTorch (.pt) or Keras (.keras), not a "
        "file of BSON.jl or JLD2.jl.",
    ),
    (b"\x93NUMPY", "it is one NumPy array; read it with numpy.load."),
    (
        b"version https://git-lfs",
        "it is a Git LFS pointer, not the file itself. Fetch the file with `git lfs pull`.",
    ),
)


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The Julia values in the `.bson` or `.jld2` file `path`, by variable name.

    The values are those of `recur.io.julia`: arrays have Julia's shape, own their memory and may be
    written to; what Julia shared is shared.  The kind of file is told from its bytes, not its name.

    Raises `FormatError` if the file is damaged, or of a kind that is not read; `OSError` if it
    cannot be opened.
    """
    with open(path, "rb", buffering=0) as file:
        try:
            return _read(file)
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
