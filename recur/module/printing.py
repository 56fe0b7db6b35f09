"""A model as a tree with the sizes of its parts."""

from __future__ import annotations

from typing import Any

import numpy as np

from recur.module.base import Module, label
from recur.module.parameters import buffers, named_params


def summary(model: Any) -> str:
    """The layers as a tree: parameters, bytes, what is not trained, recurrent state, and totals.

    What is met again is marked `shared` and counted once.  Nothing is changed.
    """
    lines: list[tuple[str, str]] = []
    _tree(model, "", "", lines, set())
    width = min(max(len(text) for text, _ in lines), 60)
    shown = [f"{text:<{width}}  {note}".rstrip() for text, note in lines]
    weights, fixed = list(named_params(model).values()), list(buffers(model).values())
    total = f"Total: {_arrays(weights, 'parameter')}"
    if fixed:
        total += f"; not trained: {_arrays(fixed, 'number')}"
    return "\n".join([*shown, total])


def _tree(obj: Any, name: str, indent: str, lines: list[tuple[str, str]], seen: set[int]) -> None:
    head = indent + (f"{name} = " if name else "")
    comma = "," if indent else ""
    if id(obj) in seen and named_params(obj):
        lines.append((head + label(obj) + comma, "shared"))
    elif isinstance(obj, Module) and id(obj) not in seen and _leaves(obj, set()) > 1:
        seen.add(id(obj))
        lines.append((f"{head}{type(obj).__name__}(", _own(obj)))
        for part_name, part in obj.parts():
            _tree(part, part_name, indent + "  ", lines, seen)
        lines.append((f"{indent}){comma}", ""))
    else:
        seen.add(id(obj))
        lines.append((head + label(obj) + comma, _whole(obj)))


def _leaves(obj: Any, seen: set[int]) -> int:
    """How many layers without layers inside there are."""
    if not isinstance(obj, Module) or id(obj) in seen:
        return 0 if isinstance(obj, Module) else 1
    seen.add(id(obj))
    parts = obj.parts()
    return sum(_leaves(part, seen) for _, part in parts) if parts else 1


def _own(module: Module) -> str:
    """What an opened layer holds besides its parts."""
    inside = {id(p) for _, part in module.parts() for p in named_params(part).values()}
    return _note(
        [p for p in named_params(module).values() if id(p) not in inside],
        list(module.buffers().values()),
        module.describe_state(),
    )


def _whole(obj: Any) -> str:
    state = obj.describe_state() if isinstance(obj, Module) else None
    return _note(list(named_params(obj).values()), list(buffers(obj).values()), state)


def _note(weights: list[Any], fixed: list[np.ndarray], state: str | None) -> str:
    notes = []
    if weights:
        notes.append(f"{_counted(weights, 'parameter')}, {_size(weights)}")
    if fixed:
        notes.append(f"{_counted(fixed, 'number')} not trained")
    if state:
        notes.append(state)
    return ", ".join(notes)


def _counted(arrays: list[Any], unit: str) -> str:
    n = sum(a.size for a in arrays)
    return f"{n:,} {unit}" if n == 1 else f"{n:,} {unit}s"


def _arrays(arrays: list[Any], unit: str) -> str:
    many = "1 array" if len(arrays) == 1 else f"{len(arrays)} arrays"
    return f"{_counted(arrays, unit)} in {many}, {_size(arrays)}"


def _size(arrays: list[Any]) -> str:
    size = float(sum(a.nbytes for a in arrays))
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
