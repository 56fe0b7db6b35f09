"""Going through everything that a model is made of."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from recur.errors import StateError
from recur.module.base import Module, attributes, label
from recur.tape import Node, Op, Param, Tape, Tensor

# Never entered and never listed.  The exact types go first: they are what long lists hold.
_PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, np.dtype}
    | {np.ndarray, np.float32, np.float64, np.int64, np.bool_, np.ufunc, Tensor}
)
_CLOSED = (
    *(np.ndarray, np.generic, np.dtype, Tensor, Tape, Node, Op, type, types.ModuleType),
    *(types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType, types.CodeType),
    *(types.BuiltinFunctionType, types.FrameType, str, bytes, int, float, complex),
    np.random.Generator,
)


def walk(root: Any) -> Iterator[tuple[str, Any]]:
    """Everything below `root` with its path, each object once, in the order of its parts.

    Goes into modules (their `fields`), lists, tuples, deques, dicts, attributes and slots of any
    object, `functools.partial`, the closure and the defaults of a function, the object of a bound
    method.  Lists parameters and everything it goes into; never looks into classes, Python modules,
    arrays, tensors, tapes, generators.  Cycles and depth do no harm.

    Raises `StateError` for a layer or parameter that is only in a set, which has no order.
    """
    for path, obj, first in visit(root):
        if first:
            yield path, obj


def visit(root: Any) -> Iterator[tuple[str, Any, bool]]:
    """Like `walk`, but objects met again come again, with False, and are not gone into."""
    seen: dict[int, Any] = {}  # holds the objects: an id may not be used again meanwhile
    unordered: list[tuple[str, Any]] = []  # what sets hold, with the path of the set
    stack = [("", root)]
    while stack:
        path, obj = stack.pop()
        kind = type(obj)
        if kind is not Param and not isinstance(obj, Module):  # most are: the long look comes last
            if kind in _PLAIN or isinstance(obj, _CLOSED):
                continue
        if id(obj) in seen:
            yield path, obj, False
            continue
        seen[id(obj)] = obj
        yield path, obj, True
        if kind is not Param and isinstance(obj, (set, frozenset)):
            unordered.extend((path, part) for part in obj if type(part) not in _PLAIN)
        elif kind is not Param:
            above = f"{path}." if path else ""
            parts = [(f"{above}{n}", x) for n, x in children(obj) if type(x) not in _PLAIN]
            parts.reverse()
            stack += parts
    if unordered:
        _refuse_unordered(unordered, seen)


def _refuse_unordered(unordered: list[tuple[str, Any]], seen: dict[int, Any]) -> None:
    """Raises for a layer or parameter that only a set leads to: in another order at each run."""
    while unordered:
        path, obj = unordered.pop()
        if type(obj) in _PLAIN or isinstance(obj, _CLOSED) or id(obj) in seen:
            continue
        seen[id(obj)] = obj
        if isinstance(obj, (Module, Param)):
            what = label(obj) if isinstance(obj, Module) else f"the parameter {obj.name}"
            raise StateError(
                f"{path or 'model'}: a set holds {what}. A set has no order, and layers are "
                "listed, saved and loaded in order. Use a list or a dict. Nothing was changed."
            )
        inside = obj if isinstance(obj, (set, frozenset)) else (part for _, part in children(obj))
        unordered.extend((path, part) for part in inside)


def join(path: str, name: str | int) -> str:
    return f"{path}.{name}" if path else str(name)


def children(obj: Any) -> Iterable[tuple[str | int, Any]]:
    """The parts of one object by name; see `walk`."""
    if isinstance(obj, Module):
        return obj.fields()
    if type(obj) is types.FunctionType:
        return _parts_of_function(obj)
    if isinstance(obj, (dict, types.MappingProxyType)):
        return [(str(key), part) for key, part in obj.items()]
    if isinstance(obj, (list, tuple, deque)):
        return zip(getattr(obj, "_fields", range(len(obj))), obj, strict=True)
    if isinstance(obj, types.MethodType):
        return [("__self__", obj.__self__), ("__func__", obj.__func__)]
    if isinstance(obj, functools.partial):
        return [("func", obj.func), ("args", obj.args), ("keywords", obj.keywords)]
    return attributes(obj)


def _parts_of_function(function: types.FunctionType) -> list[tuple[str, Any]]:
    parts: list[tuple[str, Any]] = []
    cells = function.__closure__
    if cells:
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
            with suppress(ValueError):  # a variable that has no value yet
                parts.append((name, cell.cell_contents))
    parts += [("__defaults__", function.__defaults__), ("__kwdefaults__", function.__kwdefaults__)]
    return [*parts, *vars(function).items()]
