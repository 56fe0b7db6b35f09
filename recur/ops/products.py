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
        saved_weight, rows, dtype, packed = node.saved
        dy = _rows(grads[0], dtype)
        if x is not None:
            dx = _input_gradient(restore(saved_weight), dy, packed)
            sweep.add(x, _columns(dx, x.shape), own=True)
        sweep.post(weight, dy, rows)
        sweep.post(bias, dy)


_AFFINE = _Affine("affine")


def affine(W: Any, x: Any, b: Any = None) -> Any:
    """y = W x + b for every sample and step.

    W (out, in), b (out,) or None.  x (in,), (in, B) or (in, B, T) gives y (out,), (out, B) or
    (out, B, T), computed in the dtype of W and laid out features first.  A sample's y does not
    depend on the other samples and steps, bit for bit.
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
    rows = _rows(values, dtype)
    if not any_traced(inputs):
        if values.ndim < 3:  # one of many steps
            return _columns(packed_affine(W, b).apply(rows), values.shape)
        return _columns(_forward(W, rows, b)[0], values.shape)
    if inputs[1] is None and inputs[0] is not None and np.may_share_memory(rows, values):
        rows = rows.copy()  # the caller's array, which the weight's gradient needs unchanged
    product, packed = _forward(W, rows, b)
    kept_weight = None if inputs[1] is None else save(W)
    y = _columns(product, values.shape)
    return record_one(_AFFINE, inputs, y, (kept_weight, rows, dtype, packed))


add_row(_AFFINE, affine)


# Fewer rows than these would wait for the packing of a matrix, which a parameter therefore keeps.
FEW_ROWS = 64


def _forward(W: Any, rows: np.ndarray, b: Any) -> tuple[np.ndarray, _kernels.AffineKernel | None]:
    """rows @ W.T + b, and the packed weights if they are kept; the same bits either way."""
    if len(rows) < FEW_ROWS and type(W) is Param and (b is None or type(b) is Param):
        packed = packed_affine(W, b)
        return packed.apply(rows), packed
    weight = np.ascontiguousarray(peek(W))
    bias = None if b is None else np.ascontiguousarray(peek(b), weight.dtype)
    return _kernels.affine_forward(weight, rows, bias), None


def _input_gradient(
    W: np.ndarray, dy: np.ndarray, packed: _kernels.AffineKernel | None
) -> np.ndarray:
    """dy @ W."""
    if packed is not None:
        return packed.backward_x(dy)
    return _kernels.affine_backward_x(np.ascontiguousarray(W), dy)


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
        a, b, packed = restore(node.saved[0]), restore(node.saved[1]), node.saved[2]
        g = grads[0]
        if left is not None:
            _left_gradient(sweep, left, g, b)
        if right is not None:
            _right_gradient(sweep, right, g, a, packed)


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


def _right_gradient(
    sweep: Sweep, b: Tensor | Param, g: np.ndarray, a: np.ndarray, packed: Any
) -> None:
    """d(a @ b) with respect to b: a' g, through a sink for rows times a parameter."""
    if type(b) is Param and b.ndim == 2 and a.ndim <= 2:
        if a.ndim == 1:
            a, g = a[None], g[None]
        sweep.post(b, np.ascontiguousarray(a, b.dtype), np.ascontiguousarray(g, b.dtype))
    elif a.ndim == 1:
        column = a if b.ndim == 1 else a[:, None]
        sweep.add(b, column * (g if b.ndim == 1 else g[..., None, :]), own=True)
    elif packed is not None and b.ndim == 1:
        sweep.add(b, packed.backward_x(_rows(g, a.dtype))[0], own=True)
    elif b.ndim == 1:
        rows = a.reshape(-1, a.shape[-1])
        sweep.add(b, g.reshape(-1) @ rows, own=True)
    elif a.ndim == b.ndim == 2 and _kernels_take(a, b):
        sweep.add(b, _input_gradient(a, _rows(g, a.dtype), packed).T, own=True)
    elif a.ndim == b.ndim == 2:
        sweep.add(b, (g.T @ a).T, own=True)
    else:
        sweep.add(b, unbroadcast(a.swapaxes(-1, -2) @ g, b.shape), own=True)


def _kernels_take(a: np.ndarray, b: Any) -> bool:
    return a.dtype == b.dtype and a.dtype in (np.float32, np.float64)


def _product(left: Any, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, Any]:
    """a @ b, and a's packed form if it is kept; two matrices give a result features first.

    The products of recurrent steps run in the kernels: BLAS would wake threads of its own.
    """
    if a.ndim == 2 and 1 <= b.ndim <= 2 and a.shape[1] == b.shape[0] and _kernels_take(a, b):
        if b.ndim == 2:
            rows, packed = _forward(left, _rows(b, a.dtype), None)
            return rows.T, packed
        if type(left) is Param:
            rows, packed = _forward(left, _rows(b, a.dtype), None)
            return rows[0], packed
    if a.ndim == b.ndim == 2:
        return (b.T @ a.T).T, None
    return a @ b, None


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
        product, packed = _product(a, x, y)
    except ValueError as error:
        raise ShapeError(
            f"matmul: shapes {np.shape(x)} and {np.shape(y)} do not fit: {error}. For a sequence "
            "(in, B, T) use recur.ops.affine(W, x)."
        ) from error
    saved = (
        save(a) if right is not None else None,
        save(b) if left is not None else None,
        packed,
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
