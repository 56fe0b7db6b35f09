"""Which of a file's variables is the model, and what stands in for it: lists, Restructure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from recur.errors import FormatError
from recur.io.flux.values import array, field, is_lost, is_state, kind, plain, told
from recur.io.julia import Struct, Type

_NAMED_TUPLE = Type(("Core", "NamedTuple"))


def select(tree: dict[str, Any], name: str | None) -> Any:
    """The variable `name`, or the only one that is a model, in one form or another.

    `name` may go on inside the variable, with dots: fields by name, the others by position from 0.
    Raises `FormatError` if there is no such value, or no telling which is meant.
    """
    if name is not None:
        return _at(tree, name)
    variables = dict(_variables(tree))
    for rank in ("model", "restructure", "state", "parameters"):
        found = [n for n, value in variables.items() if _rank(value) == rank]
        if len(found) == 1:
            return variables[found[0]]
        if found:
            raise FormatError(
                f"the file holds several models: {', '.join(found)}. Choose one with "
                f"name={found[0]!r}."
            )
    structs = [value for value in variables.values() if isinstance(value, Struct)]
    if len(structs) == 1:
        return structs[0]
    shown = ", ".join(f"{n} ({told(value)})" for n, value in list(variables.items())[:10])
    raise FormatError(
        f"no variable of the file is a model of Flux: {shown or 'it holds none'}. read(path) gives "
        "what there is."
    )


def layers_inside(tree: dict[str, Any]) -> list[str]:
    """The places of up to ten layers of Flux that lie inside other values."""
    places: list[str] = []
    pending: list[tuple[str, Any]] = list(_variables(tree))
    seen: set[int] = set()
    while pending and len(places) < 10:
        place, value = pending.pop(0)
        if id(value) in seen or isinstance(value, np.ndarray):
            continue
        seen.add(id(value))
        value = plain(value)
        known = kind(value)
        if known is not None and (known != "Recur" or kind(field(value, "cell")) is not None):
            places.append(place)
        elif isinstance(value, Struct):
            pending += [(f"{place}.{n}", x) for n, x in value.items()]
        elif isinstance(value, (list, tuple)):
            pending += [(f"{place}.{i}", x) for i, x in enumerate(value)]
    return places


def model_of(tree: dict[str, Any], value: Any) -> Any:
    """`value`, or the model that it stands for: that of a Restructure, that of its parameters."""
    if isinstance(value, Struct) and value.type.name == "Restructure":
        return _refilled(value, _flat_vector(tree, value))
    arrays = parameters(value)
    return value if arrays is None else layers_of(arrays)


def _variables(tree: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The variables of a file by name; those in groups of a JLD2 file as group.name."""
    pending = [("", tree)]
    seen: set[int] = set()
    while pending:
        path, group = pending.pop(0)
        seen.add(id(group))
        for name, value in group.items():
            place = f"{path}{name}"
            if isinstance(value, dict) and value and id(value) not in seen:
                pending.append((f"{place}.", value))
            else:
                yield place, value


def _rank(value: Any) -> str | None:
    if isinstance(value, Struct) and value.type.name == "Restructure":
        return "restructure"
    if kind(value) is not None:
        return "state" if is_state(value) else "model"
    return "parameters" if parameters(value) is not None else None


def _at(tree: Any, name: str) -> Any:
    value = tree
    if isinstance(tree, dict) and name in tree:
        return tree[name]
    walked: list[str] = []
    for part in name.replace("/", ".").split("."):
        value, found = _step(plain(value), part)
        if not found:
            held = _names(value)
            raise FormatError(
                f"there is nothing named {part!r} in {'.'.join(walked) or 'the file'}, which holds "
                f"{', '.join(held[:20]) or 'nothing'}."
            )
        walked.append(part)
    return value


def _step(value: Any, part: str) -> tuple[Any, bool]:
    """(what `value` holds under the name or position `part`, True), or (value, False)."""
    if isinstance(value, (dict, Struct)) and part in value:
        return value[part], True
    held = value.fields if isinstance(value, Struct) else value
    if isinstance(held, (list, tuple)) and part.isdecimal() and int(part) < len(held):
        return held[int(part)], True
    return value, False


def _names(value: Any) -> list[str]:
    if isinstance(value, (dict, Struct)):
        return [str(name) for name in value]
    return [str(i) for i in range(len(value))] if isinstance(value, (list, tuple)) else []


# ---- lists of parameters ---------------------------------------------------------------------


def parameters(value: Any) -> list[np.ndarray] | None:
    """The arrays of `params(m)`, in order, or None if `value` is no such list."""
    value = plain(value)
    if isinstance(value, Struct) and value.type.name == "Params" and len(value):
        value = plain(value[0])  # the order; the set beside it has none
        if isinstance(value, Struct) and value.type.name == "Buffer" and len(value):
            value = plain(value[0])
    if not isinstance(value, (list, tuple)) or not value:
        return None
    arrays = [array(item) for item in value]
    return None if any(a is None for a in arrays) else [a for a in arrays if a is not None]


def layers_of(arrays: Sequence[np.ndarray]) -> Struct:
    """The Chain whose parameters these are, told by their shapes, as a tree of `Flux.state`.

    Raises `FormatError` where the shapes leave a choice.
    """
    layers: list[Struct] = []
    rest = list(arrays)
    n_out = None
    while rest:
        matrix, *others = rest
        if n_out is not None and matrix.ndim == 2 and matrix.shape[1] != n_out:
            raise _no_chain(
                arrays,
                rest,
                f"takes {matrix.shape[1]} features, and the layer before gives {n_out}",
            )
        recurrent = _recurrent(rest)
        layer = recurrent or _dense(rest)
        if layer is None:
            raise _no_chain(arrays, rest, "and those after it do not tell which layers they are of")
        n_out = others[0].shape[1] if recurrent else len(matrix)
        layers.append(layer)
    return _named(layers=tuple(layers))


def _no_chain(arrays: Sequence[np.ndarray], rest: Sequence[np.ndarray], reason: str) -> FormatError:
    shapes = ", ".join(str(a.shape) for a in arrays[:12])
    return FormatError(
        f"the file holds a list of {len(arrays)} arrays, of sizes {shapes}. Array "
        f"{len(arrays) - len(rest)} {reason}. Build the model in Python and fill it with "
        "load_into(model, path)."
    )


def _recurrent(rest: list[np.ndarray]) -> Struct | None:
    """Take the arrays of a recurrent layer off the front of `rest`, if they are one's."""
    if len(rest) < 2 or rest[0].ndim != 2 or rest[1].ndim != 2 or 0 in rest[1].shape:
        return None
    (rows, _), (inner, n) = rest[0].shape, rest[1].shape
    third = rows == 3 * n and _is_third(rest, n)
    if n == 1 or not (third or (rows == inner and rows in (n, 3 * n, 4 * n))):
        return None
    held: dict[str, Any] = {"Wi": rest.pop(0), "Wh": rest.pop(0)}
    if rest and rest[0].shape == (rows,):
        held["b"] = rest.pop(0)
    else:
        held["b"] = False
    if third:
        held["Wh_h̃"] = rest.pop(0)
    parts = 2 if rows == 4 * n else 1
    if len(rest) >= parts and all(a.shape in ((n,), (n, 1)) for a in rest[:parts]):
        start = tuple(rest.pop(0) for _ in range(parts))
        held["state0"] = start if parts == 2 else start[0]
    if rows == n:
        held["σ"] = ()
    return _named(cell=_named(**held))


def _is_third(rest: list[np.ndarray], n: int) -> bool:
    """Whether the fourth array is the Wh_h̃ of a GRUv3, rather than the next layer's."""
    after = [a.shape for a in rest[4:6]]
    if len(rest) < 4 or rest[3].shape != (n, n):
        return False
    if len(rest[1]) == 2 * n:
        return True
    # Flux 0.15 and later, where a GRUv3 has the shapes of a GRU, and neither a start: a Dense would
    # go on with its bias, an RNN with Wh and its bias.
    return len(rest[1]) == 3 * n and after[:1] != [(n,)] and after != [(n, n), (n,)]


def _dense(rest: list[np.ndarray]) -> Struct | None:
    if len(rest) < 2 or rest[0].ndim != 2 or rest[1].shape != rest[0].shape[:1]:
        return None
    return _named(weight=rest.pop(0), bias=rest.pop(0), σ=())


def _named(**fields: Any) -> Struct:
    return Struct(_NAMED_TUPLE, fields.values(), tuple(fields))


# ---- Optimisers.Restructure ------------------------------------------------------------------


def _flat_vector(tree: dict[str, Any], restructure: Struct) -> np.ndarray:
    length = restructure.get("length")
    flat = [
        found
        for _, value in _variables(tree)
        if (found := array(value, 1)) is not None and len(found) == length
    ]
    if len(flat) != 1:
        raise FormatError(
            f"the file holds an Optimisers.Restructure, which needs its vector of {length} "
            f"parameters, and {len(flat) or 'no'} such vectors. Save both into one file: "
            "flat, re = Optimisers.destructure(model); jldsave(file; flat, re)."
        )
    return flat[0]


def _refilled(restructure: Struct, flat: np.ndarray) -> Any:
    """The model of a Restructure, its arrays taken from the flat vector."""
    made: dict[int, Any] = {}

    def fill(value: Any, offset: Any, depth: int) -> Any:
        if depth > 100:
            raise FormatError("the model of an Optimisers.Restructure nests too deeply.")
        old = array(value)
        if old is not None and type(offset) is int:
            if not 0 <= offset <= len(flat) - old.size:
                raise FormatError("an Optimisers.Restructure points outside its vector.")
            return flat[offset : offset + old.size].reshape(old.shape, order="F")
        if is_lost(offset) or id(value) in made:
            return made.get(id(value), value)
        if isinstance(value, (tuple, list)):
            parts = _offsets(offset, [str(i) for i in range(len(value))])
            return type(value)(fill(x, o, depth + 1) for x, o in zip(value, parts, strict=True))
        if not isinstance(value, Struct):
            return value
        result = made[id(value)] = Struct(value.type, value.fields, value.names)
        parts = _offsets(offset, list(value))
        result.fields = [fill(x, o, depth + 1) for x, o in zip(value.fields, parts, strict=True)]
        return result

    return fill(plain(restructure.get("model")), restructure.get("offsets"), 0)


def _offsets(offset: Any, names: list[str]) -> list[Any]:
    """The offsets of the parts `names`; None where a part has no parameters."""
    if isinstance(offset, Struct) and offset.names is not None:
        return [offset.get(name) for name in names]
    held = offset.fields if isinstance(offset, Struct) else offset
    if isinstance(held, (list, tuple)) and len(held) == len(names):
        return list(held)
    return [None] * len(names)
