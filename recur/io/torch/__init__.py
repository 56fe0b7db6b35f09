"""Weights of PyTorch: `state_dict`s of RNN, LSTM, GRU, their cells, Linear and Embedding.

`read` gives the arrays of a `.pt` or `.safetensors` file without PyTorch, `layers_from_torch` the
layers that they make, `layers_to_torch` the way back, `save` writes it to a file.
`cell_from_torch` and `cell_to_torch` convert one cell's arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from recur.files import AnyPath
from recur.io import safetensors
from recur.io.torch import pickled
from recur.io.torch.cells import cell_from_torch, cell_to_torch
from recur.io.torch.models import layers_from_torch, layers_to_torch

__all__ = [
    "cell_from_torch",
    "cell_to_torch",
    "layers_from_torch",
    "layers_to_torch",
    "read",
    "save",
]


def read(path: AnyPath) -> dict[str, np.ndarray]:
    """The arrays of a `.safetensors` or `.pt` file by name; containers join names with dots.

    A `.pt` file, of the zip format (PyTorch 1.6) or the one before it, is a pickle.  It is
    interpreted here by a reader that builds arrays and plain containers and nothing else: no code
    in it is run or imported.  What is no array (epoch numbers, options) is left out.  Tensors that
    share memory share it here too.  bfloat16 comes as float32.

    Raises `FormatError` if the file is damaged, hostile, or holds other objects than tensors and
    plain containers, as `torch.save(model)` writes; `OSError` if it cannot be opened.
    """
    with open(path, "rb") as file:
        if file.read(9)[8:] == b"{":
            return safetensors.read(file)[0]
        return pickled.read(file, str(path))


def save(layers: Mapping[str, Any], path: AnyPath) -> None:
    """Write `layers_to_torch(layers)` to a safetensors file.

    In Python with PyTorch: `model.load_state_dict(safetensors.torch.load_file(path))`.
    Raises as `layers_to_torch`, and `OSError`; an old file stays whole until the new one is.
    """
    safetensors.write(path, layers_to_torch(layers), {"format": "pt"})
