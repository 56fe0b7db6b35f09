"""The losses that are made of entries: one for each element, or for each column of classes."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

import numpy as np

from recur import _kernels, ops
from recur.errors import ShapeError, check_shape
from recur.ops import identity, mean, sum
from recur.tape import Node, Op, Sweep, current, peek, record, traced

Agg = Callable[[Any], Any]
Slope = Callable[[], np.ndarray]
# What a loss computes: its entries, and the slopes of each entry in yhat and in y when asked.
Parts = tuple[np.ndarray, Slope, Slope]


def mse(yhat: Any, y: Any, *, agg: Agg = mean, mask: Any = None) -> Any:
    """Mean squared error: agg((yhat - y)^2)."""
    return _by_element("mse", _squared, yhat, y, agg, mask)


def mae(yhat: Any, y: Any, *, agg: Agg = mean, mask: Any = None) -> Any:
    """Mean absolute error: agg(|yhat - y|); the slope at 0 is 0."""
    return _by_element("mae", _absolute, yhat, y, agg, mask)


def msle(yhat: Any, y: Any, *, agg: Agg = mean, mask: Any = None, eps: float | None = None) -> Any:
    """Mean squared logarithmic error: agg((log(yhat + eps) - log(y + eps))^2).

    `eps` defaults to the rounding unit of yhat's dtype, here and below.
    """
    return _by_element("msle", _squared_log, yhat, y, agg, mask, eps=eps)


def huber(yhat: Any, y: Any, *, agg: Agg = mean, mask: Any = None, delta: float = 1.0) -> Any:
    """Huber's loss: with d = |yhat - y|, agg(d^2 / 2 if d <= delta else delta (d - delta / 2)).

    Source: Huber, Robust estimation of a location parameter, 1964.
    """
    return _by_element("huber", _huber, yhat, y, agg, mask, delta=delta)


huber_loss = huber


def binarycrossentropy(
    yhat: Any, y: Any, *, agg: Agg = mean, mask: Any = None, eps: float | None = None
) -> Any:
    """Binary cross entropy: agg(-y log(yhat + eps) - (1 - y) log(1 - yhat + eps)), yhat in [0, 1].

    A factor y or 1 - y that is 0 makes its term 0.  `logitbinarycrossentropy` is more accurate.
    """
    return _by_element("binarycrossentropy", _binary, yhat, y, agg, mask, eps=eps)


def logitbinarycrossentropy(yhat: Any, y: Any, *, agg: Agg = mean, mask: Any = None) -> Any:
    """Binary cross entropy of sigmoid(yhat): agg((1 - y) yhat - log(sigmoid(yhat)))."""
    return _by_element("logitbinarycrossentropy", _logit_binary, yhat, y, agg, mask)


def poisson_loss(yhat: Any, y: Any, *, agg: Agg = mean, mask: Any = None) -> Any:
    """Negative log likelihood of counts y at rates yhat, less log(y!): agg(yhat - y log(yhat))."""
    return _by_element("poisson_loss", _poisson, yhat, y, agg, mask)


def hinge_loss(yhat: Any, y: Any, *, agg: Agg = mean, mask: Any = None) -> Any:
    """Hinge loss: agg(max(0, 1 - yhat y)), y is 1 or -1; the slope at the kink is 0."""
    return _by_element("hinge_loss", _hinge, yhat, y, agg, mask)


def squared_hinge_loss(yhat: Any, y: Any, *, agg: Agg = mean, mask: Any = None) -> Any:
    """Squared hinge loss: agg(max(0, 1 - yhat y)^2), y is 1 or -1."""
    return _by_element("squared_hinge_loss", _squared_hinge, yhat, y, agg, mask)


def crossentropy(
    yhat: Any,
    y: Any,
    *,
    dims: int = 0,
    agg: Agg = mean,
    mask: Any = None,
    eps: float | None = None,
) -> Any:
    """Cross entropy of probabilities: agg(-sum(y log(yhat + eps), dims)); 0 log(...) is 0.

    y     probabilities or one-hot columns of yhat's shape, or integer classes, 0-based, of its
          shape without axis `dims`
    mask  the shape of the integer classes

    Raises `IndexError` for a class outside yhat's axis `dims`.  `logitcrossentropy` of the logits
    is more accurate than this after softmax.
    """
    return _by_class("crossentropy", _cross, yhat, y, dims, agg, mask, eps=eps)


def logitcrossentropy(
    yhat: Any, y: Any, *, dims: int = 0, agg: Agg = mean, mask: Any = None
) -> Any:
    """Cross entropy of softmax(yhat): agg(-sum(y logsoftmax(yhat), dims)).

    y, mask and errors as for `crossentropy`.
    """
    return _by_class("logitcrossentropy", _logit_cross, yhat, y, dims, agg, mask)


def kldivergence(
    yhat: Any,
    y: Any,
    *,
    dims: int = 0,
    agg: Agg = mean,
    mask: Any = None,
    eps: float | None = None,
) -> Any:
    """Kullback-Leibler divergence: agg(sum(y log(y) - y log(yhat + eps), dims)).

    y, mask and errors as for `crossentropy`.
    """
    return _by_class("kldivergence", _divergence, yhat, y, dims, agg, mask, eps=eps)


def label_smoothing(y: Any, alpha: float, dims: int | None = 0) -> Any:
    """Softened targets: y (1 - alpha) + alpha / n, n the classes on axis `dims`.

    y      one-hot columns or probabilities.  `dims=None`: numbers between 0 and 1 for binary
           classification, where n is 2
    alpha  between 0 and 1, both excluded (ValueError)
    """
    if not 0 < alpha < 1:
        raise ValueError(f"label_smoothing: alpha is {alpha}, expected a number between 0 and 1.")
    y = joined("label_smoothing", y)
    if np.asarray(peek(y)).dtype.kind != "f":
        y = np.asarray(peek(y)).astype(np.float32)
    return y * (1 - alpha) + alpha / (2 if dims is None else np.shape(peek(y))[dims])


# The table: each loss entry by entry, with its slopes in p (yhat) and in t (y).


def _squared(p: np.ndarray, t: np.ndarray) -> Parts:
    d = p - t
    return d * d, lambda: 2 * d, lambda: -2 * d


def _absolute(p: np.ndarray, t: np.ndarray) -> Parts:
    d = p - t
    return np.abs(d), lambda: np.sign(d), lambda: -np.sign(d)


def _squared_log(p: np.ndarray, t: np.ndarray, eps: float) -> Parts:
    d = np.log((p + eps) / (t + eps))
    return d * d, lambda: 2 * d / (p + eps), lambda: -2 * d / (t + eps)


def _huber(p: np.ndarray, t: np.ndarray, delta: float) -> Parts:
    d = p - t
    size = np.abs(d)
    entries = np.where(size <= delta, d * d / 2, delta * (size - delta / 2))
    return entries, lambda: np.clip(d, -delta, delta), lambda: np.clip(-d, -delta, delta)


def _binary(p: np.ndarray, t: np.ndarray, eps: float) -> Parts:
    yes, no = p + eps, 1 - p + eps
    entries = -_xlogy(t, yes) - _xlogy(1 - t, no)
    return (
        entries,
        lambda: _xdivy(1 - t, no) - _xdivy(t, yes),
        lambda: np.log(no) - np.log(yes),
    )


def _logit_binary(p: np.ndarray, t: np.ndarray) -> Parts:
    entries = np.maximum(p, 0) - p * t + np.log1p(np.exp(-np.abs(p)))
    return entries, lambda: ops.sigmoid(p) - t, lambda: -p


def _poisson(p: np.ndarray, t: np.ndarray) -> Parts:
    return p - _xlogy(t, p), lambda: 1 - _xdivy(t, p), lambda: -np.log(p)


def _hinge(p: np.ndarray, t: np.ndarray) -> Parts:
    gap = 1 - p * t
    return np.maximum(gap, 0), lambda: -t * (gap > 0), lambda: -p * (gap > 0)


def _squared_hinge(p: np.ndarray, t: np.ndarray) -> Parts:
    gap = np.maximum(1 - p * t, 0)
    return gap * gap, lambda: -2 * gap * t, lambda: -2 * gap * p


# Here p is (N, C); t is (N, C), or (N,) integer classes.


def _cross(p: np.ndarray, t: np.ndarray, eps: float) -> Parts:
    if t.ndim == 1:
        rows = np.arange(len(t))
        chosen = p[rows, t] + eps

        def slope() -> np.ndarray:
            d = np.zeros_like(p)
            d[rows, t] = -1 / chosen
            return d

        return -np.log(chosen), slope, _no_slope
    q = p + eps
    return -_xlogy(t, q).sum(axis=1), lambda: -_xdivy(t, q), lambda: -np.log(q)


def _logit_cross(p: np.ndarray, t: np.ndarray) -> Parts:
    p, t = np.ascontiguousarray(p), np.ascontiguousarray(t)
    entries, slope = _kernels.softmax_cross_entropy(p, t)
    return entries, lambda: slope, lambda: -_log_softmax(p)


def _divergence(p: np.ndarray, t: np.ndarray, eps: float) -> Parts:
    entries, p_slope, t_slope = _cross(p, t, eps)
    if t.ndim == 1:
        return entries, p_slope, t_slope
    return entries + _xlogy(t, t).sum(axis=1), p_slope, lambda: np.log(t) + 1 + t_slope()


def _no_slope() -> np.ndarray:
    raise AssertionError("integer classes take no gradient")


def _log_softmax(p: np.ndarray) -> np.ndarray:
    p = p - p.max(axis=1, keepdims=True)
    return p - np.log(np.exp(p).sum(axis=1, keepdims=True))


def _xlogy(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x log(y), 0 where x is 0."""
    return x * np.log(y, out=np.zeros_like(y), where=x != 0)


def _xdivy(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x / y, 0 where x is 0."""
    return np.divide(x, y, out=np.zeros_like(y), where=x != 0)


# The two ways in.


def _by_element(
    name: str,
    loss: Callable[..., Parts],
    yhat: Any,
    y: Any,
    agg: Agg,
    mask: Any,
    **options: Any,
) -> Any:
    yhat, y = joined(name, yhat), joined(name, y)
    p, t = _in_one_dtype(name, peek(yhat), peek(y))
    if t.ndim == 0 and traced(y) is None:
        t = np.broadcast_to(t, p.shape)
    if t.shape != p.shape:
        check_shape(name, "y", t.shape, p.shape, _hint(t.shape, p.shape))
    if p.flags.f_contiguous:
        t = np.asarray(t, order="F")  # else the results would not have p's layout
    chosen = None if mask is None else _mask(name, mask, (p.shape[1:], p.shape))
    layout = _Elements(p.shape, chosen)
    return _finish(name, loss, layout, (yhat, y), (p, t), agg, _with_eps(options, p.dtype))


def _by_class(
    name: str,
    loss: Callable[..., Parts],
    yhat: Any,
    y: Any,
    dims: int,
    agg: Agg,
    mask: Any,
    **options: Any,
) -> Any:
    yhat, y = joined(name, yhat), joined(name, y)
    p, t = np.asarray(peek(yhat)), np.asarray(peek(y))
    if not -p.ndim <= dims < p.ndim:
        raise ShapeError(f"{name}: yhat has shape {p.shape}, and no axis {dims} (dims).")
    entries = tuple(np.delete(p.shape, dims).tolist())
    chosen = None if mask is None else _mask(name, mask, (entries,))
    if t.dtype.kind in "iu" and t.shape == entries:
        p, _ = _in_one_dtype(name, p, p)
        t = _classes(name, t, p.shape[dims], chosen)
    else:
        if t.shape != p.shape:
            hint = f"Integer classes have shape {entries}." if t.dtype.kind in "iu" else ""
            check_shape(name, "y", t.shape, p.shape, hint or _hint(t.shape, p.shape))
        p, t = _in_one_dtype(name, p, t)
    layout = _Columns(p.shape, dims, chosen)
    return _finish(name, loss, layout, (yhat, y), (p, t), agg, _with_eps(options, p.dtype))


def joined(name: str, x: Any) -> Any:
    """One array of a list of steps, time on the last axis."""
    if not isinstance(x, (list, tuple)):
        return x
    if not x:
        raise ShapeError(f"{name}: an empty list of steps has no loss.")
    shapes = [np.shape(peek(step)) for step in x]
    if len(set(shapes)) > 1:
        odd = next(i for i, shape in enumerate(shapes) if shape != shapes[0])
        raise ShapeError(
            f"{name}: step {odd} of the list has shape {shapes[odd]}, step 0 has {shapes[0]}. "
            "Pad the steps to one shape and pass mask=. Nothing was changed."
        )
    if any(traced(step) is not None for step in x):
        return ops.stack(x, axis=-1)
    # Laid out by steps, as recorded results are: features lie together.
    return np.array([np.asarray(peek(step)).T for step in x]).T


def _in_one_dtype(name: str, p: Any, t: Any) -> tuple[np.ndarray, np.ndarray]:
    """Both in the dtype of p, or of what p and t promote to if p holds no floats."""
    p, t = np.asarray(p), np.asarray(t)
    for what, array in (("yhat", p), ("y", t)):
        if array.dtype.kind not in "biuf":
            raise TypeError(f"{name}: {what} holds {array.dtype}, expected real numbers.")
    dtype = p.dtype
    if dtype.kind != "f":
        dtype = np.result_type(t.dtype if t.dtype.kind == "f" else np.float64)
        p = p.astype(dtype)
    return p, t if t.dtype == dtype else t.astype(dtype)


def _with_eps(options: dict[str, Any], dtype: np.dtype) -> dict[str, Any]:
    if options.get("eps", 0.0) is None:
        options["eps"] = float(np.finfo(dtype).eps)
    return options


def _hint(shape: tuple[int, ...], expected: tuple[int, ...]) -> str:
    if shape == expected[1:] and expected[0] == 1:
        return "Give y the feature axis of yhat: y[None]."
    return "y must have the shape of yhat, features on axis 0; it is never broadcast."


def _mask(name: str, mask: Any, shapes: tuple[tuple[int, ...], ...]) -> np.ndarray:
    mask = np.asarray(peek(joined(name, mask)))
    if mask.dtype != np.bool_:
        raise TypeError(
            f"{name}: mask has dtype {mask.dtype}, expected bool: True at the steps that count. "
            "For weights, multiply the entries of agg=identity."
        )
    if mask.shape not in shapes:
        check_shape(name, "mask", mask.shape, shapes[0], "It has no feature axis.")
    return mask


def _classes(name: str, t: np.ndarray, n: int, chosen: np.ndarray | None) -> np.ndarray:
    wrong = (t < 0) | (t >= n)
    if chosen is not None:
        wrong &= chosen
    if wrong.any():
        place = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise IndexError(
            f"{name}: y holds class {t[place]} at {place}, expected 0 to {n - 1}. "
            "Nothing was changed. Padded steps are left out with mask=."
        )
    return t.astype(np.int64, copy=False)


class _Elements:
    """Entries are the elements of yhat; with a mask only the chosen ones, as rows (N, F)."""

    def __init__(self, shape: tuple[int, ...], mask: np.ndarray | None) -> None:
        self.shape = self.entries_shape = shape
        self.mask = mask

    def pack(self, array: np.ndarray) -> np.ndarray:
        return array if self.mask is None else array.T[self.mask.T]

    def unpack(self, packed: np.ndarray) -> np.ndarray:
        if self.mask is None:
            return packed
        array = np.zeros(self.shape[::-1], packed.dtype)
        array[self.mask.T] = packed
        return array.T

    pack_entries = pack
    unpack_entries = unpack

    def spread(self, entry_gradient: np.ndarray) -> np.ndarray:
        """Entries' gradients as factors of the packed slopes."""
        return entry_gradient


class _Columns:
    """Entries are the columns of yhat along `dims`; packed, the columns are rows (N, C)."""

    def __init__(self, shape: tuple[int, ...], dims: int, mask: np.ndarray | None) -> None:
        self.shape, self.dims = shape, dims
        self.entries_shape = tuple(np.delete(shape, dims).tolist())
        self.mask = mask

    def pack(self, array: np.ndarray) -> np.ndarray:
        if array.shape == self.entries_shape:
            return self.pack_entries(array)
        rows = np.moveaxis(array, self.dims, 0).T
        return rows.reshape(-1, self.shape[self.dims]) if self.mask is None else rows[self.mask.T]

    def unpack(self, packed: np.ndarray) -> np.ndarray:
        shape = (*self.entries_shape[::-1], self.shape[self.dims])
        if self.mask is None:
            rows = packed.reshape(shape)
        else:
            rows = np.zeros(shape, packed.dtype)
            rows[self.mask.T] = packed
        return np.moveaxis(rows.T, 0, self.dims)

    def pack_entries(self, entries: np.ndarray) -> np.ndarray:
        return entries.T.reshape(-1) if self.mask is None else entries.T[self.mask.T]

    def unpack_entries(self, packed: np.ndarray) -> np.ndarray:
        if self.mask is None:
            return packed.reshape(self.entries_shape[::-1]).T
        entries = np.zeros(self.entries_shape[::-1], packed.dtype)
        entries[self.mask.T] = packed
        return entries.T

    def spread(self, entry_gradient: np.ndarray) -> np.ndarray:
        return entry_gradient[:, None]


def _finish(
    name: str,
    loss: Callable[..., Parts],
    layout: _Elements | _Columns,
    given: tuple[Any, Any],
    arrays: tuple[np.ndarray, np.ndarray],
    agg: Agg,
    options: dict[str, Any],
) -> Any:
    """Computes the entries, makes one number of them, and records the node."""
    if not callable(agg):
        raise TypeError(f"{name}: agg is {agg!r}, expected a function such as mean, sum, identity.")
    entries, *slopes = loss(layout.pack(arrays[0]), layout.pack(arrays[1]), **options)
    scale: float | None = None
    if any(agg is known for known in _SUMS):
        scale, result = 1.0, entries.sum()
    elif any(agg is known for known in _MEANS):
        scale = 1.0 / max(entries.size, 1)
        result = entries.mean() if entries.size else entries.dtype.type(0)
    else:
        result = layout.unpack_entries(entries)
    inputs = tuple(map(traced, given)) if current() is not None else (None, None)
    if any(x is not None for x in inputs):
        # The slopes are computed now: the caller may write into y before backward.
        wanted = tuple(
            None if x is None else np.asarray(slope())
            for x, slope in zip(inputs, slopes, strict=True)
        )
        (result,) = record(_Loss(name), inputs, [np.asarray(result)], (layout, scale, wanted))
    if scale is None and agg is not identity:
        return agg(result)
    return result


def aggregated(entries: Any, agg: Agg) -> Any:
    """One number of the entries, plain or recorded."""
    if any(agg is known for known in _SUMS):
        return sum(entries)
    if any(agg is known for known in _MEANS):
        return mean(entries)
    return entries if agg is identity else agg(entries)


class _Loss(Op):
    """Hands on the slopes times the gradient of the one number, or of each entry."""

    __slots__ = ()

    def backward(self, sweep: Sweep, node: Node, grads: dict[int, np.ndarray]) -> None:
        assert node.inputs is not None
        layout, scale, slopes = node.saved
        g = grads[0]
        factor = layout.spread(layout.pack_entries(g)) if scale is None else g * g.dtype.type(scale)
        for x, slope in zip(node.inputs, slopes, strict=True):
            if slope is not None:
                out = np.empty_like(slope) if sweep.keep_graph else slope
                sweep.add(x, layout.unpack(np.multiply(slope, factor, out=out)), own=True)


_MEANS = (mean, np.mean)
_SUMS = (sum, np.sum, builtins.sum)  # Flux's scripts say agg=sum, which here is the built-in
