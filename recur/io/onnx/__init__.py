"""Weights and models of ONNX.

`save` writes a model, `load` builds one; `to_onnx` and `from_onnx` do the same with an
`onnx.ModelProto`.  They need the extra `onnx`.  `cell_to_onnx` and `cell_from_onnx` convert one
cell's arrays and need NumPy alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from recur.errors import FormatError
from recur.files import AnyPath, write_atomically
from recur.io.onnx.cells import cell_from_onnx, cell_to_onnx
from recur.io.onnx.read import from_onnx
from recur.io.onnx.write import import_onnx, initial_states, to_onnx
from recur.layers import Chain

__all__ = [
    "cell_from_onnx",
    "cell_to_onnx",
    "from_onnx",
    "initial_states",
    "load",
    "save",
    "to_onnx",
]


def save(model: Any, path: AnyPath, *, lengths: bool = False) -> None:
    """Write `to_onnx(model)` to a file.  Raises as `to_onnx`; an old file stays until then."""
    write_atomically(path, to_onnx(model, lengths=lengths).SerializeToString())


def load(
    path: AnyPath,
    *,
    constants: Mapping[str, Any] | None = None,
    recurrent_bias: bool | None = None,
) -> Chain:
    """The model in an ONNX file, as `from_onnx` builds it.

    Raises `FormatError` also if the file is damaged, `OSError` if it cannot be opened.
    """
    onnx = import_onnx()
    with open(path, "rb") as file:
        content = file.read()
    try:
        proto = onnx.load_model_from_string(content)
        folder = os.path.dirname(os.path.abspath(path))
        onnx.external_data_helper.load_external_data_for_model(proto, folder)
    except Exception as error:  # protobuf's errors share no base class but this
        raise FormatError(f"{os.fspath(path)}: not an ONNX model, or damaged: {error}") from None
    try:
        return from_onnx(proto, constants=constants, recurrent_bias=recurrent_bias)
    except FormatError as error:
        raise FormatError(f"{os.fspath(path)}: {error}") from None
