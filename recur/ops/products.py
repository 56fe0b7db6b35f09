"""Matrix products, whose weight gradients wait in a sink to become one product."""

from __future__ import annotations

from typing import Any

import numpy as np

from recur import _kernels, tape
from recur.errors import ShapeError
from recur.ops.arrays import reshape
from recur.ops.elementwise import multiply
from recur.ops.table import add_row, any_traced, as_numpy, constant, sources, unbroadcast
from recur.tape import (
    Node,
    Op,
    Param,
    Sweep,
    Tensor,
    peek,
    record_one,
    restore,
    save,
    traced,
)


def _rows(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Features-first x, (F,), (F, B) or (F, B, T), as C-contiguous rows (N, F)."""
    return np.ascontiguousarray(x.T, dtype).reshape(-1, x.shape[0])


def _columns(rows: np.ndarray, like: tuple[int, ...]) -> np.ndarray:
    """Rows (N, F) as a features-first array with the batch and time axes of `like`."""
    return rows.reshape(*like[:0:-1], rows.shape[1]).T


class _Affine(Op):
    __slots__ = ()

    def backward(self, sweep: Sweep, node: Node, grads: dict[int, np.ndarray]) -> None:
        assert node.inputs is not None
        weight, x, bias = node.inputs
        saved_weight, rows, dtype = node.saved
        dy = _rows(grads[0], dtype)
        if x is not None:
            W = np.ascontiguousarray(restore(saved_weight))
            dx = _kernels.affine_backward_x(W, dy)
            sweep.add(x, _columns(dx, x.shape), own=True)
        sweep.post(weight, dy, rows)
        sweep.post(bias, dy)


_AFFINE = _Affine("affine")


def affine(W: Any, x: Any, b: Any = None) -> Any:
    """y = W x + b for every sample and step.

    W (out, in), b (out,) or None.  x (in,), (in, B) or (in, B, T) gives y (out,), (out, B) or
    (out, B, T), computed in the dtype of W and laid out features first.  Outside a scope a
    sample's y does not depend on the other samples, bit for bit, as long as x is no sequence.
    Gradients: W gets g x' and b gets g, both summed over samples and steps (one product for all
    calls that a loss reaches); x gets W' g.

    Raises `ShapeError` if the sizes do not fit.
    """
    weight, values = peek(W), np.asarray(peek(x))
    if not isinstance(weight, np.ndarray):
        weight = np.asarray(weight)
    _check_affine(weight, values, b)
    scope = tape.current()
    inputs = (None, None, None) if scope is None else sources((W, x, b))
    dtype = weight.dtype
    if not any_traced(inputs):
        rows = _rows(values, dtype)
        if values.ndim < 3:
            return _columns(packed_affine(W, b).apply(rows), values.shape)
        return _columns(_affine_forward(weight, rows, b), values.shape)
    rows = _rows(values, dtype)
    if inputs[1] is None and inputs[0] is not None and np.may_share_memory(rows, values):
        rows = rows.copy()  # the caller's array, which the weight's gradient needs unchanged
    y = _columns(_affine_forward(weight, rows, b), values.shape)
    kept_weight = None if inputs[1] is None else save(W)
    return record_one(_AFFINE, inputs, y, (kept_weight, rows, dtype))


add_row(_AFFINE, affine)


def _affine_forward(W: np.ndarray, rows: np.ndarray, b: Any) -> np.ndarray:
    bias = None if b is None else np.ascontiguousarray(peek(b), W.dtype)
    return _kernels.affine_forward(np.ascontiguousarray(W), rows, bias)


def packed_affine(W: Any, b: Any) -> _kernels.AffineKernel:
    """The packed form of W and b; a Param keeps it until either is written."""
    if type(W) is not Param or not (b is None or type(b) is Param):
        return _pack(peek(W), peek(b))
    key = (W.version, None if b is None else b.version)
    held = W.packed
    if held is None or held[0] != key or held[1] is not b:
        held = W.packed = (key, b, _pack(peek(W), peek(b)))
    return held[2]


def _pack(W: Any, b: Any) -> _kernels.AffineKernel:
    W = np.ascontiguousarray(W)
    return _kernels.AffineKernel(W, None if b is None else np.ascontiguousarray(b, W.dtype))


def _check_affine(W: np.ndarray, x: np.ndarray, b: Any) -> None:
    if W.ndim != 2 or W.dtype.kind != "f":
        raise ShapeError(
            f"affine: W is an array of {W.dtype} of shape {W.shape}, expected a floating-point "
            "matrix (out, in). Nothing was changed."
        )
    if not 1 <= x.ndim <= 3:
        raise ShapeError(
            f"affine: x has shape {x.shape}, expected (in,), (in, B) or (in, B, T). "
            "Nothing was changed."
        )
    if x.shape[0] != W.shape[1]:
        raise ShapeError(
            f"affine: x has {x.shape[0]} features on axis 0, expected {W.shape[1]}, the columns "
            f"of W {W.shape}. Nothing was changed."
        )
    if b is not None and np.shape(peek(b)) != W.shape[:1]:
        raise ShapeError(
            f"affine: b has shape {np.shape(peek(b))}, expected {W.shape[:1]}, the rows of "
            f"W {W.shape}. Nothing was changed."
        )


class _MatMul(Op):
    __slots__ = ()

    def backward(self, sweep: Sweep, node: Node, grads: dict[int, np.ndarray]) -> None:
        assert node.inputs is not None
        left, right = node.inputs
        a, b = restore(node.saved[0]), restore(node.saved[1])
        g = grads[0]
        if left is not None:
            _left_gradient(sweep, left, g, b)
        if right is not None:
            _right_gradient(sweep, right, g, a)


_MATMUL = _MatMul("matmul")


def _left_gradient(sweep: Sweep, a: Tensor | Param, g: np.ndarray, b: np.ndarray) -> None:
    """d(a @ b) with respect to a: g b', through a sink for a matrix times columns."""
    if a.ndim == 2 and b.ndim <= 2:
        dtype = a.dtype
        if b.ndim == 1:
            sweep.post(a, _rows(g, dtype), _rows(b, dtype))
        else:
            sweep.post(a, np.ascontiguousarray(g.T, dtype), np.ascontiguousarray(b.T, dtype))
    elif b.ndim == 1:
        sweep.add(a, np.multiply(g[..., None], b), own=True)
    elif a.ndim == 1:
        sweep.add(a, unbroadcast((b @ g[..., None])[..., 0], a.shape), own=True)
    else:
        sweep.add(a, unbroadcast(g @ b.swapaxes(-1, -2), a.shape), own=True)


def _right_gradient(sweep: Sweep, b: Tensor | Param, g: np.ndarray, a: np.ndarray) -> None:
    """d(a @ b) with respect to b: a' g, through a sink for rows times a parameter."""
    if type(b) is Param and b.ndim == 2 and a.ndim <= 2:
        if a.ndim == 1:
            a, g = a[None], g[None]
        sweep.post(b, np.ascontiguousarray(a, b.dtype), np.ascontiguousarray(g, b.dtype))
    elif a.ndim == 1:
        column = a if b.ndim == 1 else a[:, None]
        sweep.add(b, column * (g if b.ndim == 1 else g[..., None, :]), own=True)
    elif b.ndim == 1:
        rows = a.reshape(-1, a.shape[-1])
        sweep.add(b, g.reshape(-1) @ rows, own=True)
    elif a.ndim == b.ndim == 2:
        sweep.add(b, (g.T @ a).T, own=True)
    else:
        sweep.add(b, unbroadcast(a.swapaxes(-1, -2) @ g, b.shape), own=True)


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a @ b; two matrices give a result laid out features first."""
    if a.ndim == b.ndim == 2:
        return (b.T @ a.T).T
    return a @ b


def matmul(a: Any, b: Any) -> Any:
    """a @ b by NumPy's rules: matrices on the last two axes, leading axes broadcast.

    a may also be any object with `shape`, `@` and `.T` (a structured matrix), a constant.
    For a sequence (F, B, T) NumPy's rule is not the one meant: use `affine(W, x)`.
    Gradients: g b' and a' g.  Those of weights wait and become one product.

    Raises `ShapeError` if the sizes do not fit.
    """
    scope = tape.current()
    if _is_structured(a):
        return _structured_product(a, b)
    left = right = None
    if scope is not None:
        left, right = traced(a), traced(b)
    if left is None and right is None:
        return peek(a) @ peek(b)
    a = a if left is not None else constant(a)
    b = b if right is not None else constant(b)
    x, y = peek(a), peek(b)
    try:
        product = _product(x, y)
    except ValueError as error:
        raise ShapeError(
            f"matmul: shapes {np.shape(x)} and {np.shape(y)} do not fit: {error}. For a sequence "
            "(in, B, T) use recur.ops.affine(W, x)."
        ) from error
    saved = (
        save(a) if right is not None else None,
        save(b) if left is not None else None,
    )
    return record_one(_MATMUL, (left, right), product, saved)


add_row(_MATMUL, matmul, np.matmul)


def _is_structured(a: Any) -> bool:
    if isinstance(a, np.ndarray | tape.Operand | list | tuple | float | int | np.generic):
        return False
    return hasattr(a, "shape") and hasattr(a, "T") and hasattr(a, "__matmul__")


class _StructuredProduct(Op):
    __slots__ = ()

    def backward(self, sweep: Sweep, node: Node, grads: dict[int, np.ndarray]) -> None:
        assert node.inputs is not None
        sweep.add(node.inputs[0], np.asarray(node.saved.T @ grads[0]), own=False)


_STRUCTURED = _StructuredProduct("structured_product")


def _structured_product(a: Any, b: Any) -> Any:
    if tape.current() is None or (source := traced(b)) is None:
        return a @ peek(b)
    return record_one(_STRUCTURED, (source,), a @ peek(b), a)


@as_numpy(np.dot)
def dot(a: Any, b: Any) -> Any:
    """a @ b for vectors and matrices, a * b for numbers."""
    if np.ndim(peek(a)) == 0 or np.ndim(peek(b)) == 0:
        return multiply(a, b)
    if np.ndim(peek(a)) > 2 or np.ndim(peek(b)) > 2:
        raise TypeError("dot: more than two axes; use matmul, or recur.ops.affine for sequences.")
    return matmul(a, b)


@as_numpy(np.outer)
def outer(a: Any, b: Any) -> Any:
    """a_i b_j of two vectors."""
    return multiply(reshape(a, (-1, 1)), reshape(b, (1, -1)))
