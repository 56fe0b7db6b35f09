"""What the converters of weights share: checked arrays, blocks of gates, refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from recur.cells import Cell, GRUCell, GRUv3Cell, LSTMCell, RNNCell
from recur.errors import FormatError, ShapeError, StateError
from recur.recurrent import Recur
from recur.tape import peek

GATES = {RNNCell: 1, LSTMCell: 4, GRUCell: 3, GRUv3Cell: 3}


def floats(name: str, array: Any, shape: Sequence[int | None]) -> np.ndarray:
    """`array` as float64 if it is, else float32.  Raises `ShapeError` unless it fits `shape`.

    `None` in `shape` stands for any size.
    """
    array = np.asarray(array)
    if (
        array.dtype.kind not in "fiu"
        or array.ndim != len(shape)
        or any(n not in (None, m) for n, m in zip(shape, array.shape, strict=True))
    ):
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise ShapeError(
            f"{name} is {array.dtype} of shape {array.shape}, expected floats of shape ({wanted})."
        )
    return array.astype(np.float64 if array.dtype == np.float64 else np.float32, copy=False)


def blocks(array: np.ndarray, order: Sequence[int], axis: int = 0) -> np.ndarray:
    """The blocks of gates along `axis` in another order: block k becomes old block `order[k]`."""
    parts = np.split(array, len(order), axis)
    return np.concatenate([parts[k] for k in order], axis)


def sum_of_biases(
    title: str, outer: np.ndarray, inner: np.ndarray, recurrent_bias: bool | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """(b, bh) of a `GRUCell` from the two biases of a library, both (3 n,) in blocks r, z, n.

    Those of r and z only ever occur as a sum; that of n inside the reset product is `bh`, which
    cannot be added to the other one.  `recurrent_bias=None` keeps it unless it is zero.
    Raises `FormatError` for recurrent_bias=False if it is not zero.
    """
    n = len(outer) // 3
    b, bh = outer + inner, inner[2 * n :]
    b[2 * n :] = outer[2 * n :]
    if recurrent_bias is None:
        recurrent_bias = bool(bh.any())
    if not recurrent_bias and bh.any():
        raise FormatError(
            f"{title}: the candidate has a bias inside the reset product, which a GRU without "
            "recurrent_bias cannot hold, and which must not be added to the other one. Pass "
            "recurrent_bias=True."
        )
    return b, bh.copy() if recurrent_bias else None


def weights(cell: Cell) -> dict[str, np.ndarray]:
    """The weights of one of the four cells as plain arrays, those that there are.

    Raises `StateError` for any other cell, and for a recurrent matrix that is no array.
    """
    if type(cell) not in GATES:
        raise StateError(
            f"{cell!r}: no other library has this cell; RNNCell, LSTMCell, GRUCell and GRUv3Cell "
            "can be converted."
        )
    names = ("Wi", "Wh", "b", "bh", "Whh", "peephole")
    held = {name: getattr(cell, name, None) for name in names}
    found = {name: np.asarray(peek(w)) for name, w in held.items() if w is not None}
    if found["Wh"].ndim != 2:
        raise StateError(f"{cell.title}: Wh is a {type(held['Wh']).__name__}, not an array.")
    return found


def check_start(layer: Recur, path: str, remedy: str) -> None:
    """Raises `StateError` if the layer starts from other numbers than zeros."""
    init = layer.init if isinstance(layer.init, tuple) else (layer.init,)
    if any(np.asarray(peek(part)).any() for part in init):
        raise StateError(
            f"{path}: {layer!r} starts from an initial state that is not zero. {remedy}"
        )
