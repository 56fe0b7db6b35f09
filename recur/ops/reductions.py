"""Reductions over axes, and the softmax family."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np

from recur.ops.table import operation

Axis: TypeAlias = int | tuple[int, ...] | None


def _axes(ndim: int, axis: Axis) -> tuple[int, ...]:
    """The axes reduced over, counted from the front."""
    if axis is None:
        return tuple(range(ndim))
    return tuple(a % ndim for a in (axis if isinstance(axis, tuple) else (axis,)))


def _expand(g: np.ndarray, shape: tuple[int, ...], axis: Axis, keepdims: bool) -> np.ndarray:
    """A reduced array with its reduced axes put back at size 1."""
    if keepdims:
        return g
    axes = _axes(len(shape), axis)
    return g.reshape([1 if i in axes else n for i, n in enumerate(shape)])


def _count(shape: tuple[int, ...], axis: Axis) -> int:
    return int(np.prod([shape[i] for i in _axes(len(shape), axis)], dtype=np.intp))


# Numbers from which writing a gradient out costs more than the view of it that NumPy can make.
_SHOWN = 1 << 15


def _spread(g: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """`g` at every place of `shape`: a new array, features first in memory, or a view if large."""
    if math.prod(shape) >= _SHOWN:
        return np.broadcast_to(g, shape)
    out = np.empty(shape, g.dtype, order="F")
    out[...] = g
    return out


def _sum_gradient(
    g: np.ndarray, shape: tuple[int, ...], axis: Axis = None, *, keepdims: bool = False
) -> np.ndarray:
    return _spread(_expand(g, shape, axis, keepdims), shape)


@operation(_sum_gradient, keeps="s", numpy=(np.sum,))
def sum(x: Any, axis: Axis = None, *, keepdims: bool = False) -> Any:
    """The sum over the axes given, all by default. Gradient: g, broadcast back."""
    return np.sum(x, axis=axis, keepdims=keepdims)


def _mean_gradient(
    g: np.ndarray, shape: tuple[int, ...], axis: Axis = None, *, keepdims: bool = False
) -> np.ndarray:
    return _spread(_expand(g, shape, axis, keepdims) / _count(shape, axis), shape)


@operation(_mean_gradient, keeps="s", numpy=(np.mean,))
def mean(x: Any, axis: Axis = None, *, keepdims: bool = False) -> Any:
    """The mean over the axes given, all by default. Gradient: g / n, broadcast back."""
    return np.mean(x, axis=axis, keepdims=keepdims)


def _var_gradient(
    g: np.ndarray, x: np.ndarray, axis: Axis = None, *, ddof: float = 0, keepdims: bool = False
) -> np.ndarray:
    scale = 2 / (_count(x.shape, axis) - ddof)
    centred = x - x.mean(axis=axis, keepdims=True)
    return _expand(g, x.shape, axis, keepdims) * scale * centred


@operation(_var_gradient, keeps="x", numpy=(np.var,))
def var(x: Any, axis: Axis = None, *, ddof: float = 0, keepdims: bool = False) -> Any:
    """sum((x - mean)**2) / (n - ddof); NumPy's ddof=0, Flux's `var` has ddof=1.

    Gradient: 2 g (x - mean) / (n - ddof).
    """
    return np.var(x, axis=axis, ddof=ddof, keepdims=keepdims)


def _std_gradient(
    g: np.ndarray,
    x: np.ndarray,
    y: np.ndarray,
    axis: Axis = None,
    *,
    ddof: float = 0,
    keepdims: bool = False,
) -> np.ndarray:
    y = _expand(y, x.shape, axis, keepdims)
    slope = np.divide(_expand(g, x.shape, axis, keepdims), y, where=y != 0, out=np.zeros_like(y))
    return slope * (x - x.mean(axis=axis, keepdims=True)) / (_count(x.shape, axis) - ddof)


@operation(_std_gradient, keeps="xy", numpy=(np.std,))
def std(x: Any, axis: Axis = None, *, ddof: float = 0, keepdims: bool = False) -> Any:
    """The square root of `var`. Gradient: g (x - mean) / ((n - ddof) y), and 0 where y is 0."""
    return np.std(x, axis=axis, ddof=ddof, keepdims=keepdims)


def _extreme_gradient(
    g: np.ndarray,
    x: np.ndarray,
    y: np.ndarray,
    axis: Axis = None,
    *,
    keepdims: bool = False,
) -> np.ndarray:
    tied = x == _expand(y, x.shape, axis, keepdims)
    return tied * (_expand(g, x.shape, axis, keepdims) / tied.sum(axis=axis, keepdims=True))


@operation(_extreme_gradient, keeps="xy", numpy=(np.max, np.amax))
def max(x: Any, axis: Axis = None, *, keepdims: bool = False) -> Any:
    """The largest over the axes given. Gradient: g, shared evenly among those that tie."""
    return np.max(x, axis=axis, keepdims=keepdims)


@operation(_extreme_gradient, keeps="xy", numpy=(np.min, np.amin))
def min(x: Any, axis: Axis = None, *, keepdims: bool = False) -> Any:
    """The smallest over the axes given. Gradient: g, shared evenly among those that tie."""
    return np.min(x, axis=axis, keepdims=keepdims)


def _prod_gradient(
    g: np.ndarray, x: np.ndarray, axis: Axis = None, *, keepdims: bool = False
) -> np.ndarray:
    axes = _axes(x.ndim, axis)
    kept = tuple(i for i in range(x.ndim) if i not in axes)
    moved = x.transpose(*kept, *axes)
    flat = moved.reshape(*moved.shape[: len(kept)], -1)
    ones = np.ones_like(flat[..., :1])
    # The product of all others: what lies before times what lies behind, so zeros do no harm.
    before = np.cumprod(np.concatenate([ones, flat[..., :-1]], axis=-1), axis=-1)
    behind = np.cumprod(np.concatenate([ones, flat[..., :0:-1]], axis=-1), axis=-1)[..., ::-1]
    others = (before * behind).reshape(moved.shape).transpose(np.argsort([*kept, *axes]))
    return _expand(g, x.shape, axis, keepdims) * others


@operation(_prod_gradient, keeps="x", numpy=(np.prod,))
def prod(x: Any, axis: Axis = None, *, keepdims: bool = False) -> Any:
    """The product over the axes given. Gradient: g times the product of all others."""
    return np.prod(x, axis=axis, keepdims=keepdims)


def _cumsum_gradient(g: np.ndarray, shape: tuple[int, ...], axis: int | None = None) -> np.ndarray:
    along = -1 if axis is None else axis
    return np.flip(np.cumsum(np.flip(g, along), axis=along), along).reshape(shape)


@operation(_cumsum_gradient, keeps="s", numpy=(np.cumsum,))
def cumsum(x: Any, axis: int | None = None) -> Any:
    """The running sum along an axis, of the flat array by default. Gradient: the same backwards."""
    return np.cumsum(x, axis=axis)


def _shifted(x: Any, dims: Axis) -> tuple[Any, Any]:
    """x less its maximum (so that exp cannot overflow), and that maximum."""
    top = np.max(x, axis=dims, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    return x - top, top


def _softmax(x: Any, dims: Axis) -> Any:
    e = np.exp(_shifted(x, dims)[0])
    return e / np.sum(e, axis=dims, keepdims=True)


def _softmax_gradient(g: np.ndarray, y: np.ndarray, dims: Axis = 0) -> np.ndarray:
    return y * (g - np.sum(g * y, axis=dims, keepdims=True))


@operation(_softmax_gradient, keeps="y")
def softmax(x: Any, dims: Axis = 0) -> Any:
    """e ** x / sum(e ** x), over the features by default. Gradient: y (g - sum(g y))."""
    return _softmax(x, dims)


def _logsoftmax_gradient(g: np.ndarray, y: np.ndarray, dims: Axis = 0) -> np.ndarray:
    return g - np.exp(y) * np.sum(g, axis=dims, keepdims=True)


@operation(_logsoftmax_gradient, keeps="y")
def logsoftmax(x: Any, dims: Axis = 0) -> Any:
    """x - log(sum(e ** x)), over the features by default. Gradient: g - e ** y sum(g)."""
    x, _ = _shifted(x, dims)
    return x - np.log(np.sum(np.exp(x), axis=dims, keepdims=True))


def _logsumexp_gradient(
    g: np.ndarray, x: np.ndarray, dims: Axis = None, *, keepdims: bool = False
) -> np.ndarray:
    return _expand(g, x.shape, dims, keepdims) * _softmax(x, dims)


@operation(_logsumexp_gradient, keeps="x")
def logsumexp(x: Any, dims: Axis = None, *, keepdims: bool = False) -> Any:
    """log(sum(e ** x)), over all axes by default, as in NNlib. Gradient: g softmax(x)."""
    x, top = _shifted(x, dims)
    with np.errstate(divide="ignore"):  # -inf everywhere: the logarithm of 0 is meant
        y = np.log(np.sum(np.exp(x), axis=dims, keepdims=True)) + top
    return y if keepdims else np.squeeze(y, axis=dims)
