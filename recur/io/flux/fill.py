"""Fill a model that was built in Python with the arrays of a Flux file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from recur.cells import Cell, GRUv3Cell
from recur.errors import FormatError
from recur.io.flux.build import initial_state, state_of
from recur.io.flux.old import cell_of_dense_gates
from recur.io.flux.values import array, bias, field, is_state, plain, told
from recur.io.julia import Struct, Type, undefined
from recur.layers import BatchNorm, Dense, Embedding, LayerNorm, Scale
from recur.module import Module, buffers, load_state_dict, named_params
from recur.module.walking import join
from recur.recurrent import Recur
from recur.tape import Param

_DICT = Type(("Base", "Dict"))

Found = Iterator[tuple[str, np.ndarray]]


def fill(model: Any, source: Any, resume: bool) -> None:
    """Copy the arrays of `source` (a model, a tree of `Flux.state`) into `model`.

    Raises `FormatError` for another structure, `StateError`, `ShapeError` for other names or
    shapes; the model then is as it was.
    """
    states: list[tuple[Recur, Any]] = []
    arrays = dict(_arrays(model, source, "", states, 0))
    load(model, arrays)
    if resume:
        for recur, state in states:
            recur.state = state


def fill_in_order(model: Any, arrays: Sequence[np.ndarray]) -> None:
    """Copy the arrays of a list `params(m)` into `model`, in order."""
    weights = list(named_params(model))
    starts = {path: value for path, value in buffers(model).items() if _is_start(path)}
    every = _with_starts(weights, list(starts))
    without = [path for path in weights if not _is_start(path)]
    places = next((p for p in (every, without, weights) if len(p) == len(arrays)), None)
    if places is None:
        raise FormatError(
            f"the file holds a list of {len(arrays)} arrays; the model has {len(without)} "
            f"parameters, {len(every)} with initial states. Nothing was changed."
        )
    load(model, dict(zip(places, arrays, strict=True)))


def load(model: Any, arrays: dict[str, np.ndarray]) -> None:
    """`load_state_dict`, with Flux's shapes of initial states, and zeros where it has none."""
    held = {path: p.value for path, p in named_params(model).items()} | buffers(model)
    for path, old in held.items():
        new = arrays.get(path)
        if _is_start(path) and new is None:
            arrays[path] = np.zeros(old.shape, old.dtype)
        elif _is_start(path) and new is not None and new.size == old.size:
            arrays[path] = new.reshape(old.shape)
        elif new is not None and old.ndim == 2 and _has_spare_block(new.shape, old.shape):
            arrays[path] = new[: len(old)]
    load_state_dict(model, arrays)


def _has_spare_block(new: tuple[int, ...], old: tuple[int, ...]) -> bool:
    """Whether `new` is the Wh of a GRUv3 of Flux 0.15 and later, whose last third is never used."""
    n = old[1]
    return old == (2 * n, n) and new == (3 * n, n)


def _is_start(path: str) -> bool:
    parts = path.split(".")
    return "init" in parts[-2:]


def _with_starts(weights: list[str], starts: list[str]) -> list[str]:
    """All paths in Flux's order: an initial state follows the weights of its cell."""
    places = list(weights)
    for start in starts:
        owner = start[: start.rindex("init")]
        after = [i for i, path in enumerate(places) if path.startswith(owner)]
        places.insert(after[-1] + 1 if after else len(places), start)
    return places


# ---- a model and its source side by side -----------------------------------------------------


def _arrays(
    layer: Any, source: Any, path: str, states: list[tuple[Recur, Any]], depth: int
) -> Found:
    """The arrays of `source` by the paths that they have in `layer`."""
    source = plain(source)
    if depth > 100:
        raise FormatError("the model nests too deeply.")
    if isinstance(layer, Recur):
        yield from _recur(layer, source, path, states)
    elif isinstance(layer, Cell):
        yield from _cell(layer, source, path)
    elif type(layer) in _FIELDS:
        yield from _fields(layer, source, path)
    elif isinstance(layer, Param):
        found = array(source)
        if found is None:
            raise _mismatch(path, "an array", source)
        yield path, found
    else:
        for name, child, part in _children(layer, source, path):
            yield from _arrays(child, part, join(path, name), states, depth + 1)


def _recur(layer: Recur, source: Any, path: str, states: list[tuple[Recur, Any]]) -> Found:
    inner = field(source, "cell")
    inner = source if inner is undefined else inner
    place = join(path, "cell")
    if not isinstance(layer.cell, Cell):
        yield from _arrays(layer.cell, inner, place, states, 0)
        return
    yield from _cell(layer.cell, inner, place)
    start = state_of(field(source, "init"))
    start = initial_state(inner) if start is None else start
    if start is not None:
        yield from _start(layer, start, join(path, "init"))
    state = state_of(field(source, "state"))
    if state is not None:
        states.append((layer, state))


def _start(layer: Recur, start: Any, path: str) -> Found:
    parts = start if isinstance(start, tuple) else (start,)
    names = layer.cell.state_names
    if len(parts) != len(names):
        raise FormatError(
            f"{path}: the file holds {len(parts)} parts of an initial state, expected "
            f"{', '.join(names)}. Nothing was changed."
        )
    if len(names) == 1:
        yield path, parts[0]
    else:
        for name, part in zip(names, parts, strict=True):
            yield join(path, name), part


def _cell(cell: Cell, source: Any, path: str) -> Found:
    if not isinstance(source, Struct):
        raise _mismatch(path, f"the weights of {cell!r}", source)
    old = cell_of_dense_gates(source)
    if isinstance(old, str):
        raise FormatError(f"{path}: {old}. Nothing was changed.")
    if old is not None:
        found: dict[str, Any] = old[1]
    else:
        found = {name: array(field(source, name), 2) for name in ("Wi", "Wh")}
        rows = 0 if found["Wi"] is None else len(found["Wi"])
        b = bias(field(source, "bias", "b"), rows)
        found["b"] = np.zeros(rows) if b is None and getattr(cell, "b", None) is not None else b
        if isinstance(cell, GRUv3Cell):
            found["Whh"] = array(field(source, "Wh_h̃"), 2)
    for name in ("Wi", "Wh", "b", "Whh"):
        if isinstance(getattr(cell, name, None), Param):
            if not isinstance(found.get(name), np.ndarray):
                raise _mismatch(join(path, name), f"the {name} of {cell!r}", source)
            yield join(path, name), found[name]


# Our name of each array, and Flux's names for it in the order to look for them.
_FIELDS: dict[type, dict[str, tuple[str, ...]]] = {
    Dense: {"weight": ("weight", "W"), "bias": ("bias", "b")},
    Embedding: {"weight": ("weight",)},
    Scale: {"scale": ("scale", "α"), "bias": ("bias", "β")},
    LayerNorm: {"scale": ("scale", "α"), "bias": ("bias", "β")},
    BatchNorm: {"scale": ("γ",), "bias": ("β",), "mean": ("μ",), "var": ("σ²",)},
}


def _fields(layer: Module, source: Any, path: str) -> Found:
    inner = field(source, "diag") if isinstance(layer, LayerNorm) else source
    for ours, theirs in _FIELDS[type(layer)].items():
        held = getattr(layer, ours)
        if held is None:
            continue
        value = field(inner, *theirs)
        found = array(value)
        if found is None and ours == "bias" and value in (False, None):
            found = np.zeros(held.shape)
        if found is None:
            raise _mismatch(join(path, ours), f"the {ours} of {layer!r}", source)
        yield join(path, ours), found


def _children(layer: Any, source: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """The parts of `layer` that hold parameters, each with the part of `source` that fills it."""
    parts = [(name, child) for name, child in _parts(layer) if _holds_arrays(child)]
    if not parts:
        return
    if isinstance(source, dict):
        source = Struct(_DICT, source.values(), [str(name) for name in source])
    fields = source.fields if isinstance(source, Struct) else source
    if not isinstance(fields, (list, tuple)):
        raise _mismatch(path, f"the parts of {type(layer).__name__}", source)
    names = source.names if isinstance(source, Struct) and source.names else None
    if names is not None and all(name in names for name, _ in parts):
        for name, child in parts:
            yield name, child, source[name]
        return
    all_parts = list(_parts(layer))
    if len(fields) == len(all_parts):
        for (name, child), part in zip(all_parts, fields, strict=True):
            if _holds_arrays(child):
                yield name, child, part
        return
    raise FormatError(
        f"{path or 'the model'}: the file has {len(fields)} parts here"
        f"{' (' + ', '.join(names) + ')' if names else ''}, the model has "
        f"{', '.join(name for name, _ in all_parts)}. Nothing was changed."
    )


def _parts(layer: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(layer, Module):
        yield from layer.fields()
    elif isinstance(layer, dict):
        yield from ((str(name), child) for name, child in layer.items())
    elif isinstance(layer, (list, tuple)):
        yield from ((str(i), child) for i, child in enumerate(layer))


def _holds_arrays(part: Any) -> bool:
    return bool(named_params(part)) or bool(buffers(part))


def _mismatch(path: str, wanted: str, source: Any) -> FormatError:
    held = "a part of Flux.state" if is_state(source) else told(source)
    return FormatError(
        f"{path or 'the model'}: expected {wanted}, the file has {held}. Nothing was changed."
    )
