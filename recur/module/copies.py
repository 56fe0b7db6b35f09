"""Copies of a model: in another dtype, or from one flat vector of parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import numpy as np

from recur import ops
from recur.errors import ShapeError, StateError
from recur.module.base import Module
from recur.module.parameters import modules, named_params, params
from recur.module.walking import walk
from recur.tape import Param, current, peek, traced

Model = TypeVar("Model")


def f32(model: Model) -> Model:
    """A copy in float32: parameters, buffers and recurrent states.

    Raises `StateError` if a layer cannot be copied because only a function's closure holds it.
    """
    return _converted(model, np.dtype(np.float32))


def f64(model: Model) -> Model:
    """A copy in float64, otherwise as `f32`."""
    return _converted(model, np.dtype(np.float64))


def _converted(model: Any, dtype: np.dtype) -> Any:
    if isinstance(model, np.ndarray):
        return model.astype(dtype)
    new: dict[int, Any] = {}
    for _, obj in walk(model):
        if type(obj) is Param:
            new[id(obj)] = obj.like(obj.value.astype(dtype))
        elif isinstance(obj, Module):
            for part in obj.__getstate__().values():
                new.update((id(a), a.astype(dtype)) for a in _floats(part))
    return _copied(model, new)


def _floats(x: Any, inside: frozenset[int] = frozenset()) -> Iterator[np.ndarray]:
    """The arrays of floating-point numbers in tuples, lists and dicts."""
    x = x if type(x) is Param else peek(x)
    if isinstance(x, np.ndarray) and x.dtype.kind == "f":
        yield x
    elif isinstance(x, (tuple, list, dict)) and id(x) not in inside:
        for part in x.values() if isinstance(x, dict) else x:
            yield from _floats(part, inside | {id(x)})


def _copied(model: Any, new: dict[int, Any]) -> Any:
    """A deep copy in which `new` holds, by the id of the old, what takes its place."""
    own = params(model)  # keeps what the ids in `new` stand for
    made = copy.deepcopy(model, new)
    for path, p in named_params(made).items():
        if p in own:
            raise StateError(
                f"{path}: only a function holds this parameter, and functions are not copied. Make "
                "the function a Module with the layer as an attribute."
            )
    return made


def destructure(
    model: Model, order: Literal["F", "C"] = "F", keep_state: bool = False
) -> tuple[np.ndarray, Callable[[Any], Model]]:
    """All parameters as one vector, and a function that makes the model anew from such a vector.

    The vector (n,) is new; parameters follow each other in the order of `params`, each column by
    column as in Flux, or row by row with `order="C"`.  `rebuild(flat)` shares no memory with
    anything; recurrent layers are at their start, or with `keep_state` have the state that they
    had.  Inside a scope gradient flows through `rebuild` into a recorded `flat`.

    `rebuild` raises `ShapeError` for a vector of another length.
    """
    if order not in ("F", "C"):
        raise ValueError(f'destructure: order is {order!r}, expected "F" or "C".')
    template = _copied(model, {})
    if not keep_state:
        for _, layer in modules(template):
            layer.load_running_state({})
    weights = params(template)
    total = sum(p.size for p in weights)

    def rebuild(flat: Any) -> Model:
        if np.shape(peek(flat)) != (total,):
            raise ShapeError(
                f"rebuild: the vector has shape {np.shape(peek(flat))}, expected ({total},)."
            )
        recorded = current() is not None and traced(flat) is not None
        parts: dict[int, Any] = {}
        start = 0
        for p in weights:
            part = (flat if recorded else np.asarray(peek(flat)))[start : start + p.size]
            parts[id(p)] = _recorded(p, part, order) if recorded else _plain(p, part, order)
            start += p.size
        return copy.deepcopy(template, parts)

    if not weights:
        return np.zeros(0, np.float32), rebuild
    return np.concatenate([p.value.ravel(order) for p in weights]), rebuild


def _plain(p: Param, part: np.ndarray, order: Literal["F", "C"]) -> Param:
    return p.like(part.reshape(p.shape, order=order).astype(p.dtype))


def _recorded(p: Param, part: Any, order: str) -> Any:
    if order == "F":
        return ops.astype(ops.reshape(part, p.shape[::-1]).T, p.dtype)
    return ops.astype(ops.reshape(part, p.shape), p.dtype)
