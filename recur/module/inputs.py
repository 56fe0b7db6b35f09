"""What a layer does with its input before it computes: the checks, and one dtype."""

from __future__ import annotations

from typing import Any

import numpy as np

from recur import ops
from recur.errors import ShapeError
from recur.tape import Tensor, current, peek, traced


def features(layer: Any, x: Any, n: int, dtype: np.dtype, strict: bool = False) -> Any:
    """`x`, (n,), (n, B) or (n, B, T), in the dtype of the layer's weights.

    Raises `ShapeError` for another number of axes or features, for what holds no real numbers, and
    with `strict` for another dtype.
    """
    array = peek(x)
    if not isinstance(array, np.ndarray):
        x = array = np.asarray(array)
    if not 1 <= array.ndim <= 3:
        raise ShapeError(
            f"{layer!r}: x has shape {array.shape}, expected ({n},), ({n}, batch) or "
            f"({n}, batch, time). Nothing was changed."
        )
    if array.shape[0] != n:
        raise ShapeError(
            f"{layer!r}: x has {array.shape[0]} features on axis 0, expected {n}. "
            "Nothing was changed."
        )
    return converted(layer, x, dtype, strict)


def converted(layer: Any, x: Any, dtype: np.dtype, strict: bool = False) -> Any:
    """`x`, an array or a Tensor, in `dtype`; the errors of `features`."""
    array = peek(x)
    if array.dtype == dtype:
        return x
    if array.dtype.kind not in "biuf":
        raise ShapeError(
            f"{layer!r}: x holds {array.dtype}, expected numbers. Nothing was changed."
        )
    if strict:
        raise ShapeError(
            f"{layer!r}: x is {array.dtype}, expected {dtype} (strict_dtype=True). Nothing was "
            f"changed. Convert it with x.astype(np.{dtype}), or build the layer without "
            "strict_dtype."
        )
    if current() is not None and type(x) is Tensor and traced(x) is not None:
        return ops.astype(x, dtype)
    return array.astype(dtype)
