"""Say what a Flux file holds: its tree, the version of Flux that wrote it, what cannot be built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from recur.io.flux.values import field, is_state, kind, plain, told
from recur.io.julia import Struct, Type

_LONGEST = 400
_DEEPEST = 40


def tree_lines(tree: dict[str, Any]) -> list[str]:
    """The tree, one line a value, indented; what was shown before is only named."""
    lines: list[str] = []
    seen: dict[int, str] = {}
    pending = [(name, value, 0, name) for name, value in reversed(list(tree.items()))]
    while pending:
        name, value, depth, path = pending.pop()
        if len(lines) == _LONGEST:
            lines.append(f"... and more, at {path}")
            break
        shared = seen.get(id(value))
        tracked = isinstance(value, (np.ndarray, Struct, dict, list)) and _size(value) > 0
        if shared is not None and tracked:
            lines.append(f"{'  ' * depth}{name}: the same as {shared}")
            continue
        if tracked:
            seen[id(value)] = path
        lines.append(f"{'  ' * depth}{name}: {_told(value)}")
        if depth < _DEEPEST:
            inner = [(n, x, depth + 1, f"{path}.{n}") for n, x in _inside(value)]
            pending.extend(reversed(inner))
    return lines


def _size(value: Any) -> int:
    return value.size if isinstance(value, np.ndarray) else len(value)


def _told(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape}"
    if isinstance(value, Struct):
        return "NamedTuple" if is_state(value) else str(value.type).replace("#", "")
    if isinstance(value, Type):
        return f"the type {value}"
    return told(value)


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Struct):
        yield from value.items()
    elif isinstance(value, dict):
        yield from ((str(name), x) for name, x in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((str(i), x) for i, x in enumerate(value))


# ---- the version of Flux ---------------------------------------------------------------------

# Versions as (major, minor, patch) without the 0 in front.
Version = tuple[int, int]
_FIRST, _LAST = (3, 0), (99, 0)


def era(tree: dict[str, Any]) -> str | None:
    """Which versions of Flux write such values, "0.12.0 to 0.13.6", or None if nothing tells."""
    low, high = _FIRST, _LAST
    for value in _structs(tree):
        for first, last in _evidence(value):
            low, high = max(low, first), min(high, last)
    if (low, high) == (_FIRST, _LAST):
        return None
    if low > high:
        return "several versions at once"
    start = f"0.{low[0]}.{low[1]}" if low != _FIRST else "0.3"
    return f"{start} to 0.{high[0]}.{high[1]}" if high != _LAST else f"{start} and later"


def _structs(tree: dict[str, Any]) -> Iterator[Struct]:
    pending: list[Any] = [tree]
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        if id(value) in seen or isinstance(value, np.ndarray):
            continue
        seen.add(id(value))
        if isinstance(value, Struct):
            yield value
        pending.extend(x for _, x in _inside(value))


# Initial states as vectors beside the weights; as `state0`; that with all type parameters; none.
_OLD = (5, 0), (11, 6)
_STATE0 = (12, 0), (14, 25)
_NAMED = (13, 7), (14, 25)
_STATELESS = (15, 0), _LAST


def _evidence(value: Struct) -> Iterator[tuple[Version, Version]]:
    name, fields = value.type.name, len(value)
    if name == "TrackedArray":
        yield (3, 0), (9, 0)
    if is_state(value):
        yield from _state_evidence(value)
    if value.type.package != "Flux":
        return
    if name == "Recur":
        yield _OLD if fields == 3 else ((3, 0), (14, 25))
    elif name in ("RNN", "LSTM", "GRU", "GRUv3", "Recurrence"):
        yield ((16, 1), _LAST) if len(value.type.params) == 2 else _STATELESS
    elif name == "Embedding" and fields == 2:
        yield (16, 11), _LAST
    elif name == "Dense" and value.names is not None and "W" in value:
        yield (3, 0), (11, 6)
    elif name in _CELL_FIELDS:
        yield from _cell_evidence(value)


# How many fields the cell of each era has.
_CELL_FIELDS = {
    "RNNCell": (5, 5, 4),
    "LSTMCell": (5, 4, 3),
    "GRUCell": (4, 4, 3),
    "GRUv3Cell": (0, 5, 4),
}


def _cell_evidence(value: Struct) -> Iterator[tuple[Version, Version]]:
    old, state0, stateless = _CELL_FIELDS[value.type.name]
    names = value.names or ()
    if "bias" in names or (len(value) == stateless and "state0" not in names):
        yield _STATELESS
    elif len(value) == state0 and not (state0 == old and _starts_as_vector(value)):
        params = len(value.type.params) - (value.type.name in ("RNNCell", "GRUv3Cell"))
        yield _NAMED if params == 4 else ((12, 0), (13, 6)) if params == 3 else _STATE0
    elif len(value) == old:
        yield _OLD


def _starts_as_vector(cell: Struct) -> bool:
    start = plain(field(cell, "state0", "h"))
    return isinstance(start, np.ndarray) and start.ndim == 1


def _state_evidence(value: Struct) -> Iterator[tuple[Version, Version]]:
    yield (13, 15), _LAST
    if kind(value) in ("Cell", "GRUv3Cell"):
        yield _STATE0 if "state0" in value else _STATELESS
