"""Shapes, indexing and joining: operations that move numbers and leave them as they are."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import EllipsisType, NoneType
from typing import Any

import numpy as np

from recur import _kernels, tape
from recur.errors import ShapeError
from recur.ops.table import Unary, add_row, any_traced, as_numpy, operation, sources, unbroadcast
from recur.tape import Node, Op, Param, Sweep, Tensor, peek, record_one, traced, value

_BASIC = (int, slice, NoneType, EllipsisType)


@operation(
    lambda g, shape, newshape, order="C": g.reshape(shape, order=order),
    keeps="s",
    numpy=(np.reshape,),
    view=True,
)
def reshape(x: Any, shape: int | Sequence[int], order: str = "C") -> Any:
    """x with another shape; order "F" reads and fills column by column, as Julia does."""
    return np.reshape(x, shape, order=order)  # type: ignore[call-overload]


def _transpose_gradient(g: np.ndarray, axes: Sequence[int] | None = None) -> np.ndarray:
    if axes is None:
        return g.transpose()
    return g.transpose(np.argsort([a % g.ndim for a in axes]))


@operation(_transpose_gradient, numpy=(np.transpose,), view=True)
def transpose(x: Any, axes: Sequence[int] | None = None) -> Any:
    """x with its axes permuted, reversed by default."""
    return np.transpose(x, axes)


@operation(
    lambda g, shape, _: unbroadcast(g, shape), keeps="s", numpy=(np.broadcast_to,), view=True
)
def broadcast_to(x: Any, shape: int | Sequence[int]) -> Any:
    """x repeated to `shape` by NumPy's rules. Gradient: summed over the axes repeated."""
    return np.broadcast_to(x, shape)


_ASTYPE = Unary("astype", lambda g, _: g)  # the sweep gives each gradient its operand's dtype


def astype(x: Any, dtype: Any) -> Any:
    """x in another floating-point dtype; the gradient returns in the dtype of x."""
    if tape.current() is None or (source := traced(x)) is None:
        return np.asarray(peek(x)).astype(dtype)
    if np.dtype(dtype).kind != "f":
        raise TypeError(
            f"astype: {np.dtype(dtype)} carries no gradient. Convert recur.value(t) instead."
        )
    return record_one(_ASTYPE, (source,), peek(x).astype(dtype), None)


add_row(_ASTYPE, astype, *([np.astype] if hasattr(np, "astype") else []))


def _repeat_gradient(
    g: np.ndarray, shape: tuple[int, ...], repeats: Any, axis: int | None = None
) -> np.ndarray:
    flat = shape if axis is not None else (int(np.prod(shape, dtype=np.intp)),)
    along = 0 if axis is None else axis % len(shape)
    moved = np.zeros((flat[along], *flat[:along], *flat[along + 1 :]), g.dtype)
    np.add.at(moved, np.repeat(np.arange(flat[along]), repeats), np.moveaxis(g, along, 0))
    return np.moveaxis(moved, 0, along).reshape(shape)


@operation(_repeat_gradient, keeps="s", numpy=(np.repeat,))
def repeat(x: Any, repeats: Any, axis: int | None = None) -> Any:
    """Each entry `repeats` times along an axis, of the flat array by default. Gradient: summed."""
    return np.repeat(x, repeats, axis=axis)


def _is_basic(key: Any) -> bool:
    """Whether indexing with `key` gives a view: integers, slices, None and `...` only."""
    if type(key) is tuple:
        return all(type(k) in _BASIC or isinstance(k, np.integer) for k in key)
    return type(key) in _BASIC or isinstance(key, np.integer)


def _frozen(key: Any) -> Any:
    """A copy of an index whose arrays the caller may write into later."""
    if type(key) is tuple:
        return tuple(map(_frozen, key))
    return np.array(peek(key)) if isinstance(key, np.ndarray | list | tape.Operand) else key


_GETITEM = _kernels.GetItem("getitem")


def getitem(x: Any, key: Any) -> Any:
    """x[key] by NumPy's rules: integers, slices, None, `...`, arrays of integers or booleans.

    Gradient: g, added at the places that were read.
    """
    scope = tape.current()
    if scope is not None and (y := _GETITEM.record_view(x, key, scope, Tensor)) is not None:
        return y
    if scope is None or (source := traced(x)) is None:
        return value(x)[key]
    if _is_basic(key):
        y = peek(x)[key]
        if type(x) is Param:
            y = y.copy(order="K")
    else:
        key = _frozen(key)
        y = peek(x)[key]
    return record_one(_GETITEM, (source,), y, key)


add_row(_GETITEM, getitem)


class _Concatenate(Op):
    __slots__ = ()

    def backward(self, sweep: Sweep, node: Node, grads: dict[int, np.ndarray]) -> None:
        assert node.inputs is not None
        axis, sizes = node.saved
        parts = np.split(grads[0], np.cumsum(sizes)[:-1], axis=axis)
        for source, part in zip(node.inputs, parts, strict=True):
            sweep.add(source, part)


_CONCATENATE = _Concatenate("concatenate")


def concatenate(xs: Sequence[Any], axis: int = 0) -> Any:
    """The arrays joined along an axis they have. Gradient: each gets its part of g.

    Raises `ShapeError` if they differ on another axis.
    """
    xs = list(xs)
    inputs = sources(xs)
    arrays = [np.asarray(peek(x)) for x in xs]
    shape = _common_shape("concatenate", arrays, axis)
    sizes = [a.shape[axis] for a in arrays]
    shape[axis] = int(np.sum(sizes))
    joined = np.concatenate(arrays, axis=axis, out=_features_first(shape, arrays))
    if tape.current() is None or not any_traced(inputs):
        return joined
    return record_one(_CONCATENATE, inputs, joined, (axis, sizes))


def _common_shape(name: str, arrays: list[np.ndarray], but_for: int | None = None) -> list[int]:
    """The shape that all have, on every axis but one."""

    def rest(array: np.ndarray) -> list[int]:
        shape = list(array.shape)
        if but_for is not None:
            del shape[but_for]
        return shape

    fit = bool(arrays)
    if but_for is not None:
        fit = fit and all(-a.ndim <= but_for < a.ndim for a in arrays)
    if not fit or any(rest(a) != rest(arrays[0]) for a in arrays):
        where = "" if but_for is None else f", except on axis {but_for}"
        shapes = ", ".join(str(a.shape) for a in arrays) or "no arrays"
        raise ShapeError(f"{name}: {shapes} were given, expected one common shape{where}.")
    return list(arrays[0].shape)


def _features_first(shape: list[int], arrays: list[np.ndarray]) -> np.ndarray:
    return np.empty(shape, np.result_type(*arrays), order="F")


add_row(_CONCATENATE, concatenate, np.concatenate)


_STACK = _kernels.Stack("stack")


def stack(xs: Sequence[Any], axis: int = 0) -> Any:
    """The arrays joined along a new axis; axis=-1 makes a sequence (F, B, T) of steps (F, B).

    Laid out features first, whatever the axis. Gradient: each gets its slice of g.

    Raises `ShapeError` if their shapes differ.
    """
    xs = list(xs)
    scope = tape.current()
    if scope is not None and xs and axis in (-1, np.ndim(peek(xs[0]))):
        steps = _STACK.record_steps(xs, scope, Tensor)
        if steps is not None:
            return steps
    inputs = sources(xs)
    arrays = [np.asarray(peek(x)) for x in xs]
    shape = _common_shape("stack", arrays)
    shape.insert(axis % (len(shape) + 1), len(arrays))
    stacked = np.stack(arrays, axis=axis, out=_features_first(shape, arrays))
    if scope is None or not any_traced(inputs):
        return stacked
    return record_one(_STACK, inputs, stacked, axis)


add_row(_STACK, stack, np.stack)


# Built from the rows above.


@as_numpy(np.split)
def split(x: Any, indices_or_sections: Any, axis: int = 0) -> list[Any]:
    """Equal parts along an axis, or parts between indices, as NumPy's; the gates of a cell."""
    n = np.shape(peek(x))[axis]
    if isinstance(indices_or_sections, int | np.integer):
        if n % indices_or_sections:
            raise ShapeError(
                f"split: axis {axis} has size {n}, which {indices_or_sections} does not divide. "
                "Give the indices of the cuts instead."
            )
        cuts = [i * n // indices_or_sections for i in range(indices_or_sections + 1)]
    else:
        cuts = [0, *indices_or_sections, n]
    before = (slice(None),) * (axis % len(np.shape(peek(x))))
    return [getitem(x, (*before, slice(start, stop))) for start, stop in itertools.pairwise(cuts)]


@as_numpy(np.take)
def take(x: Any, indices: Any, axis: int | None = None) -> Any:
    """x[..., indices, ...] along an axis, of the flat array by default."""
    if axis is None:
        return getitem(reshape(x, -1), indices)
    return getitem(x, (*(slice(None),) * (axis % np.ndim(peek(x))), indices))


@as_numpy(np.flip)
def flip(x: Any, axis: int | Sequence[int] | None = None) -> Any:
    """x read backwards along the axes given, all by default."""
    ndim = np.ndim(peek(x))
    axes = range(ndim) if axis is None else [axis] if isinstance(axis, int) else axis
    flipped = {a % ndim for a in axes}
    return getitem(x, tuple(slice(None, None, -1 if i in flipped else 1) for i in range(ndim)))


@as_numpy(np.ravel)
def ravel(x: Any, order: str = "C") -> Any:
    """x as one axis."""
    return reshape(x, -1, order=order)


@as_numpy(np.expand_dims)
def expand_dims(x: Any, axis: int) -> Any:
    """x with a new axis of size 1."""
    shape = list(np.shape(peek(x)))
    shape.insert(axis % (len(shape) + 1), 1)
    return reshape(x, shape)


@as_numpy(np.squeeze)
def squeeze(x: Any, axis: int | tuple[int, ...] | None = None) -> Any:
    """x without its axes of size 1, or without those given."""
    return reshape(x, np.squeeze(np.empty(np.shape(peek(x)), bool), axis=axis).shape)


@as_numpy(np.swapaxes)
def swapaxes(x: Any, axis1: int, axis2: int) -> Any:
    """x with two axes exchanged."""
    axes = list(range(np.ndim(peek(x))))
    axes[axis1], axes[axis2] = axes[axis2], axes[axis1]
    return transpose(x, axes)


@as_numpy(np.moveaxis)
def moveaxis(x: Any, source: int, destination: int) -> Any:
    """x with one axis moved to another place."""
    axes = list(range(np.ndim(peek(x))))
    axis = axes.pop(source)
    axes.insert(destination % (len(axes) + 1), axis)
    return transpose(x, axes)


def vcat(*xs: Any) -> Any:
    """Arrays under each other: joined along the features. Julia's vcat."""
    return concatenate(xs, axis=0)


def hcat(*xs: Any) -> Any:
    """Arrays beside each other, vectors as columns: joined along the batch. Julia's hcat."""
    return concatenate([expand_dims(x, 1) if np.ndim(peek(x)) == 1 else x for x in xs], axis=1)
