"""The plain tree of Julia values that the readers of Flux files give.

| Julia                                  | here                                                    |
|----------------------------------------|---------------------------------------------------------|
| `Int32`, `Int64`, `Float64`, `Bool`    | `int`, `float`, `bool`                                  |
| other numbers                          | a NumPy scalar of that type                             |
| `String`, `Char`, `nothing`            | `str`, `str`, `None`                                    |
| `Symbol`                               | `Symbol`, a `str`                                       |
| `Array` of numbers                     | an `ndarray` of the same shape, in Fortran order        |
| `Vector` of anything else              | a `list`                                                |
| `Array` of anything else, 2-D and more | an `ndarray` of objects                                 |
| `Tuple`                                | a `tuple`                                               |
| `Dict`                                 | a `dict`; with keys that do not hash here (arrays), one |
|                                        | with the two lists `keys` and `values`                  |
| struct, `NamedTuple`, function         | `Struct`, with its `Type` and, where known, field names |
| type                                   | `Type`                                                  |

A value that Julia stored once and referred to several times is one Python object.  Trees may hold
cycles (a struct that refers to itself); walk them with a visited set.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recur.errors import FormatError

Task = Generator["Task", Any, Any]
"""A step of reading: yields the tasks whose results it needs, returns its own."""


def run(task: Task) -> Any:
    """Run `task` and all the tasks that it asks for.

    The stack of waiting tasks is a list, so a file may nest deeper than Python's own stack.
    """
    waiting: list[Task] = [task]
    value = None
    while waiting:
        try:
            child = waiting[-1].send(value)
        except StopIteration as stop:
            waiting.pop()
            value = stop.value
        else:
            waiting.append(child)
            value = None
    return value


class Symbol(str):
    """A Julia `Symbol`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Symbol({super().__repr__()})"


class Undefined:
    """The one value `undefined`: a field or an element that Julia never assigned."""

    def __repr__(self) -> str:
        return "undefined"


undefined = Undefined()


class Type:
    """A Julia type: its module path with its name, and its parameters.

    Parameters are other `Type`s, ints, `Symbol`s and tuples.  Types compare by identity, since a
    damaged file may hold one that refers to itself.
    """

    __slots__ = ("anonymous", "params", "path")

    def __init__(
        self, path: Sequence[str], params: Iterable[Any] = (), anonymous: bool = False
    ) -> None:
        path = tuple(path)
        self.path = path[1:] if len(path) > 1 and path[0] == "Main" else path
        self.params = list(params)
        self.anonymous = anonymous

    @property
    def name(self) -> str:
        """The last part of the path: `LSTMCell`, `#tanh`."""
        return self.path[-1] if self.path else ""

    @property
    def package(self) -> str:
        """The package that defines the type; empty for Base, Core and the user's own types."""
        root = self.path[0] if len(self.path) > 1 else ""
        return "" if root in ("Base", "Core") else root

    def __str__(self) -> str:
        return ".".join(self.path)

    def __repr__(self) -> str:
        return f"Type({self!s}{{{len(self.params)}}})" if self.params else f"Type({self!s})"


class Struct:
    """A Julia struct, NamedTuple or function: its `type`, its `fields`, its field `names`.

    `names` is None where the file does not hold them and the type is not a known one.  `s["cell"]`
    reads by name, `s[0]` by position.
    """

    __slots__ = ("fields", "names", "type")

    def __init__(
        self, type: Type, fields: Iterable[Any] = (), names: Sequence[str] | None = None
    ) -> None:
        self.type = type
        self.fields = list(fields)
        self.names = None if names is None else tuple(names)

    def __getitem__(self, key: str | int) -> Any:
        if isinstance(key, str):
            if self.names is None or key not in self.names:
                raise KeyError(key)
            return self.fields[self.names.index(key)]
        return self.fields[key]

    def get(self, name: str, default: Any = None) -> Any:
        """The field `name`, or `default` where the struct has none of that name."""
        return self[name] if name in self else default

    def __contains__(self, name: object) -> bool:
        return self.names is not None and name in self.names

    def __len__(self) -> int:
        return len(self.fields)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names or map(str, range(len(self.fields))))

    def items(self) -> Iterator[tuple[str, Any]]:
        """Pairs of field name (or position, from 0) and value."""
        return zip(self, self.fields, strict=False)

    def __repr__(self) -> str:
        return f"Struct({self.type!s}, {list(self) if self.names else len(self.fields)})"


# Field names of the structs that BSON.jl writes by position only: (package, type, field count).
# Where an era renamed a field and kept its place (Dense's W to weight), the newer name stands.
_FIELDS: dict[tuple[str, str, int], tuple[str, ...]] = {
    ("Flux", "Chain", 1): ("layers",),
    ("Flux", "Dense", 3): ("weight", "bias", "σ"),
    ("Flux", "Recur", 3): ("cell", "init", "state"),
    ("Flux", "Recur", 2): ("cell", "state"),
    ("Flux", "RNN", 1): ("cell",),
    ("Flux", "LSTM", 1): ("cell",),
    ("Flux", "GRU", 1): ("cell",),
    ("Flux", "GRUv3", 1): ("cell",),
    ("Flux", "Recurrence", 1): ("cell",),
    ("Flux", "RNNCell", 2): ("d", "h"),
    ("Flux", "RNNCell", 5): ("σ", "Wi", "Wh", "b", "state0"),
    ("Flux", "RNNCell", 4): ("σ", "Wi", "Wh", "bias"),
    ("Flux", "LSTMCell", 6): ("forget", "input", "output", "cell", "h", "c"),
    ("Flux", "LSTMCell", 5): ("Wi", "Wh", "b", "h", "c"),
    ("Flux", "LSTMCell", 4): ("Wi", "Wh", "b", "state0"),
    ("Flux", "LSTMCell", 3): ("Wi", "Wh", "bias"),
    ("Flux", "GRUCell", 4): ("Wi", "Wh", "b", "state0"),
    ("Flux", "GRUCell", 3): ("Wi", "Wh", "b"),
    ("Flux", "GRUv3Cell", 5): ("Wi", "Wh", "b", "Wh_h̃", "state0"),
    ("Flux", "GRUv3Cell", 4): ("Wi", "Wh", "b", "Wh_h̃"),
    ("Flux", "Embedding", 1): ("weight",),
    ("Flux", "Embedding", 2): ("weight", "padding_idx"),
    ("Flux", "Parallel", 2): ("connection", "layers"),
    ("Flux", "SkipConnection", 2): ("layers", "connection"),
    ("Flux", "Dropout", 2): ("p", "active"),
    ("Flux", "Dropout", 3): ("p", "dims", "active"),
    ("Flux", "Dropout", 4): ("p", "dims", "active", "rng"),
    ("Flux", "Diagonal", 2): ("α", "β"),
    ("Flux", "Scale", 3): ("scale", "bias", "σ"),
    ("Flux", "LayerNorm", 1): ("diag",),
    ("Flux", "LayerNorm", 5): ("λ", "diag", "ϵ", "size", "affine"),
    ("Flux", "BatchNorm", 8): ("λ", "β", "γ", "μ", "σ²", "ϵ", "momentum", "active"),
    ("Flux", "BatchNorm", 11): (
        *("λ", "β", "γ", "μ", "σ²", "ϵ", "momentum"),
        *("affine", "track_stats", "active", "chs"),
    ),
    ("Tracker", "TrackedArray", 3): ("tracker", "data", "grad"),
    ("Flux", "TrackedArray", 3): ("tracker", "data", "grad"),
    ("Tracker", "TrackedReal", 1): ("tracker",),
    ("Flux", "TrackedReal", 1): ("tracker",),
    ("Tracker", "TrackedTuple", 2): ("data", "tracker"),
    ("Flux", "TrackedTuple", 2): ("data", "tracker"),
    ("Tracker", "Tracked", 4): ("ref", "f", "isleaf", "grad"),
    ("Flux", "Tracked", 4): ("ref", "f", "isleaf", "grad"),
    ("Zygote", "Params", 2): ("order", "params"),
    ("Zygote", "Buffer", 2): ("data", "freeze"),
    ("Tracker", "Params", 2): ("order", "params"),
    ("Flux", "Params", 2): ("order", "params"),
    ("Optimisers", "Restructure", 3): ("model", "offsets", "length"),
    ("LinearAlgebra", "Adjoint", 1): ("parent",),
    ("LinearAlgebra", "Transpose", 1): ("parent",),
    ("", "Complex", 2): ("re", "im"),
    ("", "Pair", 2): ("first", "second"),
    ("", "RefValue", 1): ("x",),
    ("", "TypeVar", 3): ("name", "lb", "ub"),
}


_GPU_ARRAYS = {"CuArray", "ROCArray", "MtlArray", "oneArray", "CLArray"}


def check_storage(type: Type) -> None:
    """Raise `FormatError` for an array that lay in the memory of a GPU."""
    if type.name in _GPU_ARRAYS and type.package:
        raise FormatError(
            f"the file holds a {type.name}: it was saved from a GPU, and the numbers stayed there. "
            "In Julia, move the model to the CPU before saving it: model = cpu(model)."
        )


def field_names(type: Type, count: int) -> tuple[str, ...] | None:
    """The names of the `count` fields of `type`, where they are known."""
    if type.name == "NamedTuple" and type.params:
        names = type.params[0]
        if isinstance(names, tuple) and len(names) == count:
            return tuple(str(name) for name in names)
    return _FIELDS.get((type.package, type.name, count))


# Fields that may have zero size (functions), which JLD2 leaves out: the type parameter that holds
# their type.
_GHOSTS: dict[tuple[str, str], tuple[str, int]] = {
    ("Flux", "Dense"): ("σ", 0),
    ("Flux", "RNNCell"): ("σ", 0),
    ("Flux", "Parallel"): ("connection", 0),
    ("Flux", "SkipConnection"): ("connection", 1),
    ("Flux", "Scale"): ("σ", 2),
    ("Flux", "LayerNorm"): ("λ", 0),
    ("Flux", "BatchNorm"): ("λ", 0),
}


def ghost_field(type: Type, names: Sequence[str]) -> tuple[str, Any] | None:
    """The field that a known `type` has besides the stored `names`, and the field's type."""
    name, place = _GHOSTS.get((type.package, type.name), ("", 0))
    if not name or name in names or len(type.params) <= place:
        return None
    return name, type.params[place]


_NUMBERS: dict[str, np.dtype[Any]] = {
    name: np.dtype(code)
    for name, code in {
        "Bool": "?",
        "Int8": "<i1",
        "Int16": "<i2",
        "Int32": "<i4",
        "Int64": "<i8",
        "UInt8": "<u1",
        "UInt16": "<u2",
        "UInt32": "<u4",
        "UInt64": "<u8",
        "Float16": "<f2",
        "Float32": "<f4",
        "Float64": "<f8",
    }.items()
}
_COMPLEX: dict[str, np.dtype[Any]] = {
    "Float32": np.dtype("<c8"),
    "Float64": np.dtype("<c16"),
}


def number_dtype(type: Any) -> np.dtype[Any] | None:
    """The NumPy type of the Julia number type `type`, or None if NumPy has none."""
    if not isinstance(type, Type) or type.package:
        return None
    if type.name == "Complex" and len(type.params) == 1 and isinstance(type.params[0], Type):
        return _COMPLEX.get(type.params[0].name)
    return _NUMBERS.get(type.name)


def as_numbers(data: NDArray[np.uint8], dtype: np.dtype[Any]) -> NDArray[Any]:
    """`data` seen as numbers of `dtype`, without a copy.

    A Bool is one byte; any bit set counts as true, since NumPy trusts that a Bool byte is 0 or 1.
    """
    if dtype == np.bool_:
        np.not_equal(data, 0, out=data.view(np.bool_))
    return data.view(dtype)


def count_of(shape: Sequence[Any], limit: int) -> int:
    """How many elements an array of `shape` has; at most `limit`, or `FormatError`."""
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in shape) or len(shape) > 32:
        raise FormatError(f"an array has the impossible size {tuple(shape)[:40]}.")
    count = math.prod(shape)
    if count > limit or math.prod(n or 1 for n in shape) >= 1 << 59:
        raise FormatError(
            f"an array of size {tuple(shape)} cannot be in this file: it holds too few bytes."
        )
    return count


def character(bits: int) -> str:
    """The Julia `Char` whose four bytes, highest first, are the UTF-8 code of one character."""
    return bits.to_bytes(4, "big").rstrip(b"\0").decode("utf-8", "backslashreplace") or "\0"


def text(data: bytes) -> str:
    """A Julia `String`; bytes that are not UTF-8, which Julia allows, become `\\xNN`."""
    return data.decode("utf-8", "backslashreplace")


def fill(table: dict[Any, Any], keys: Any, values: Any) -> None:
    """Put the `values` of a Julia Dict under its `keys` into `table`.

    Keys that do not hash here, or not as in Julia (arrays, structs), make it a dict of two lists.
    """
    if not isinstance(keys, (list, np.ndarray)) or not isinstance(values, (list, np.ndarray)):
        raise FormatError("a Dict lacks its list of keys or of values.")
    if len(keys) != len(values):
        raise FormatError("a Dict has another number of keys than of values.")
    keys = keys.tolist() if isinstance(keys, np.ndarray) else keys
    if all(isinstance(key, (str, int, float)) for key in keys):
        table.update(zip(keys, values, strict=True))
    else:
        table.update(keys=keys, values=values)


def ghost(type: Any, made: dict[Type, Any]) -> Task:
    """The only value of a zero-size `type`: a function, `nothing`, `()`, a struct of such.

    `made` keeps what was built so far, because types share their parameters and a tree of them may
    be far larger than the file.
    """
    if not isinstance(type, Type):
        return undefined
    if type in made:
        return made[type]
    result: Any
    if type.name == "Nothing" and not type.package:
        result = None
    elif type.name == "Tuple" and not type.package:
        made[type] = undefined  # a type that holds itself has no value
        items = []
        for param in type.params:
            items.append((yield ghost(param, made)))
        result = tuple(items)
    elif type.name == "NamedTuple" and len(type.params) == 2:
        result = Struct(type)
        made[type] = result
        result.fields = list((yield ghost(type.params[1], made)) or ())
        result.names = field_names(type, len(result.fields))
    else:
        result = Struct(type)
    made[type] = result
    return result
