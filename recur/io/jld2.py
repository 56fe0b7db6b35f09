"""Read the files of JLD2.jl (format 0.1.0 to 0.2.0): HDF5 objects to Julia values.

A variable is a dataset.  A struct, tuple or NamedTuple is a scalar dataset whose datatype is a
committed compound; the attribute `julia_type` of that datatype names the Julia type.  Members that
are arrays or mutable are references to other objects, the rest is in line.  Fields of zero size are
not stored at all: where the type or the attribute `field_names` tells of them, they are put back.

Nothing in a file is ever run.  Reading keeps its own stack, and its work is bounded by a small
multiple of the file's size (see `recur.io._hdf5`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, BinaryIO

import numpy as np

from recur.errors import FormatError
from recur.io import julia
from recur.io._hdf5 import Hdf5
from recur.io._hdf5_headers import (
    Committed,
    Compound,
    Datatype,
    Number,
    Object,
    Opaque,
    Reference,
    Text,
    Vlen,
)
from recur.io._source import Source
from recur.io.julia import Struct, Symbol, Task, Type

BASE = 512
"""Where the HDF5 file starts behind the text that names the format."""

HEADER = b"HDF5-based Julia Data Format, version "

Publish = Callable[[Any], None]


def read(file: BinaryIO, checksums: bool = True) -> dict[str, Any]:
    """The Julia values in `file`, an open binary file, by variable name (see `recur.io.julia`).

    Groups are dicts.  Raises `FormatError` if the file is damaged, cut short, or not JLD2.
    """
    source = Source(file)
    if source.size < BASE + 48 or not source.take(0, BASE).startswith(HEADER):
        raise FormatError("this is not a complete JLD2 file: its header text is missing.")
    if source.take(BASE, 8) != b"\x89HDF\r\n\x1a\n":
        raise FormatError("there is no HDF5 signature behind the JLD2 header: the file is damaged.")
    reader = _Reader(Hdf5(source, BASE, checksums), source.size)
    return julia.run(reader.root())


class _Datatype:
    """A committed datatype: its HDF5 form, its Julia type, and what its attributes tell."""

    def __init__(self, form: Datatype) -> None:
        self.form = form
        self.type = Type(())
        self.written: Type | None = None  # the type as which custom serialisation stored it
        self.members: list[int] = []  # addresses of the members' datatypes, 0 where not committed
        self.names: list[str] = []  # all field names and datatypes, stored or not (format 0.2.0)
        self.types: list[int] = []
        self.empty = False


class _Open:
    """Marks an object whose reading has begun but which cannot be referred to yet."""


_OPEN = _Open()


class _Reader:
    """Makes Julia values of objects; each object once, known by its address."""

    def __init__(self, file: Hdf5, size: int) -> None:
        self._file = file
        self._made: dict[int, Any] = {}
        self._datatypes: dict[int, _Datatype] = {}
        self._ghosts: dict[Type, Any] = {}
        self._unfilled = size  # elements that arrays without data may still have

    def root(self) -> Task:
        root = yield self._value(self._file.root)
        if type(root) is not dict:
            raise FormatError("the root of the file is not a group: the file is damaged.")
        root.pop("_types", None)
        return root

    # ---- objects -----------------------------------------------------------------------------

    def _value(self, address: int) -> Task:
        """The value of the object at `address`."""
        if address == 0:
            return julia.undefined
        made = self._made.get(address, self)
        if made is _OPEN:
            raise FormatError(
                f"the object at address {address} holds itself where Julia could not have put it."
            )
        if made is not self:
            return made
        self._made[address] = _OPEN
        value = yield self._read(address, partial(self._made.__setitem__, address))
        self._made[address] = value
        return value

    def _read(self, address: int, publish: Publish) -> Task:
        obj = self._file.object(address)
        if obj.links is not None:
            group: dict[str, Any] = {}
            publish(group)
            for name, target in obj.links.items():
                if not (address == self._file.root and name == "_types"):
                    group[name] = yield self._value(target)
            return group
        if obj.datatype is None:
            raise FormatError(f"the object at address {address} has no datatype: damaged file.")
        if obj.space is None:
            return (yield self._datatype(address)).type
        kind = yield self._resolve(obj.datatype)
        shape = _shape(obj)
        if shape is None:
            return (yield self._empty(obj, kind, publish))
        form = kind.form
        if shape == ():
            data = self._file.data(obj, form.size, 1).tobytes()
            return (yield self._decode(form, kind, data, 0, publish))
        return (yield self._array(obj, kind, shape, publish))

    def _resolve(self, datatype: Datatype | Committed) -> Task:
        if isinstance(datatype, Committed):
            return (yield self._datatype(datatype.address))
        return _Datatype(datatype)

    def _attribute(self, obj: Object, name: str) -> Task:
        """The values of an attribute as a list, empty if there is none."""
        attribute = obj.attributes.get(name)
        if attribute is None or attribute.space.shape is None:
            return []
        kind = yield self._resolve(attribute.datatype)
        size = kind.form.size
        count = julia.count_of(attribute.space.shape, len(attribute.data) // max(size, 1))
        values = []
        for i in range(count):
            values.append((yield self._decode(kind.form, kind, attribute.data, i * size, _ignore)))
        return values

    def _addresses(self, obj: Object, name: str) -> list[int]:
        """The object addresses in an attribute that holds references."""
        attribute = obj.attributes.get(name)
        if attribute is None or not isinstance(attribute.datatype, Reference):
            return []
        data = attribute.data[: len(attribute.data) // 8 * 8]
        return [int(address) for address in np.frombuffer(data, "<u8")]

    # ---- arrays ------------------------------------------------------------------------------

    def _empty(self, obj: Object, kind: _Datatype, publish: Publish) -> Task:
        """A value without data: an empty array, an array of ghosts, a ghost, an empty string."""
        dims = yield self._attribute(obj, "dimensions")
        if not dims:
            if isinstance(kind.form, Text):
                return ""
            return (yield julia.ghost(kind.type, self._ghosts))
        shape = tuple(dims[::-1])
        count = julia.count_of(shape, self._unfilled)
        self._unfilled -= count
        dtype = kind.form.dtype if isinstance(kind.form, Number) else None
        if dtype is None and kind.type.path:
            dtype = julia.number_dtype(kind.type)
        if dtype is not None and count == 0:
            return np.empty(shape, dtype, order="F")
        elements: list[Any] = []
        if count:
            of = yield self._attribute(obj, "julia_type")
            element = yield julia.ghost(of[0] if of else kind.type, self._ghosts)
            elements = [element] * count
        return _shaped(elements, shape)

    def _array(
        self, obj: Object, kind: _Datatype, shape: tuple[int, ...], publish: Publish
    ) -> Task:
        form = kind.form
        count = julia.count_of(shape, (1 << 58) if form.size else 0)
        data = self._file.data(obj, form.size, count)
        dtype = _dtype(form)
        if dtype is not None:
            numbers = julia.as_numbers(data, dtype).astype(dtype.newbyteorder("="), copy=False)
            return numbers.reshape(shape, order="F")
        self._file.spend(data.size)
        raw = data.tobytes()
        elements: list[Any] = []
        if len(shape) == 1 and kind.written is None:
            publish(elements)
        for i in range(count):
            elements.append((yield self._decode(form, kind, raw, i * form.size, _ignore)))
        return _shaped(elements, shape)

    # ---- single values -----------------------------------------------------------------------

    def _decode(
        self, form: Datatype, kind: _Datatype, data: bytes, at: int, publish: Publish
    ) -> Task:
        """The value of the bytes of `data` from `at`, which have the HDF5 datatype `form`."""
        piece = data[at : at + form.size]
        if len(piece) != form.size:
            raise FormatError("a value is longer than its data: the file is damaged.")
        match form:
            case Number():
                value: Any = _scalar(piece, form.dtype)
            case Text():
                value = julia.text(piece)
            case Opaque():
                value = yield self._opaque(kind, piece)
            case Reference():
                value = yield self._value(int.from_bytes(piece, "little"))
            case Vlen():
                value = yield self._sequence(form, kind, piece)
            case Compound():
                value = yield self._compound(form, kind, piece, publish)
        if kind.written is not None:
            if kind.type.name in ("Dict", "IdDict"):
                return _dict(value)
            if kind.type.name in ("Tuple", "NTuple") and isinstance(value, (list, np.ndarray)):
                return tuple(value)
        return value

    def _opaque(self, kind: _Datatype, piece: bytes) -> Task:
        if kind.empty:
            return (yield julia.ghost(kind.type, self._ghosts))
        if kind.type.name == "Char" and len(piece) == 4:
            return julia.character(int.from_bytes(piece, "little"))
        return piece

    def _sequence(self, form: Vlen, kind: _Datatype, piece: bytes) -> Task:
        count = int.from_bytes(piece[:4], "little")
        address = int.from_bytes(piece[4:12], "little")
        data = self._file.heap(address, int.from_bytes(piece[12:], "little")) if count else b""
        if count * form.base.size != len(data):
            raise FormatError("a string or list has another length than its data: damaged file.")
        if form.text:
            value = julia.text(data)
            return Symbol(value) if kind.type.name == "Symbol" else value
        base, items = _Datatype(form.base), []
        for i in range(count):
            items.append((yield self._decode(form.base, base, data, i * form.base.size, _ignore)))
        return items

    def _compound(self, form: Compound, kind: _Datatype, piece: bytes, publish: Publish) -> Task:
        shape_type = kind.written or kind.type
        if shape_type.name == "DataType" and not shape_type.package:
            value = Type(())
            publish(value)
            yield self._fill_type(value, form, piece)
            return value
        julia.check_storage(shape_type)
        result = Struct(shape_type)
        sequence = shape_type.name in ("Tuple", "NTuple") and not shape_type.package
        if not sequence and kind.written is None:
            publish(result)
        stored: dict[str, Any] = {}
        addresses = kind.members if len(kind.members) == len(form.names) else [0] * len(form.names)
        for name, offset, member, address in zip(
            form.names, form.offsets, form.members, addresses, strict=True
        ):
            member_kind = (yield self._datatype(address)) if address else _Datatype(member)
            stored[name] = yield self._decode(member, member_kind, piece, offset, _ignore)
        names = yield self._restore(kind, shape_type, stored)
        self._file.spend(len(names))
        if sequence:
            return tuple(stored[name] for name in names)
        if shape_type.name == "Complex" and set(names) == {"re", "im"} and _is_complex(stored):
            return complex(stored["re"], stored["im"])
        if shape_type.name == "UnionAll" and "body" in stored:
            return stored["body"]
        if shape_type.name == "Union" and "datatype" in stored:
            return Type(("Core", "Union"), stored["datatype"])
        result.names = tuple(names)
        result.fields = [stored[name] for name in names]
        return result

    def _restore(self, kind: _Datatype, type: Type, stored: dict[str, Any]) -> Task:
        """Add the fields of zero size to `stored`; returns all names in Julia's order."""
        ghosts: dict[str, Any] = {}
        names: Sequence[str] = list(stored)
        params = type.params
        if kind.names and len(kind.names) == len(kind.types):
            names = kind.names
            for name, address in zip(kind.names, kind.types, strict=True):
                if name not in stored:
                    ghosts[name] = (yield self._datatype(address)).type if address else None
        elif type.name == "Tuple" and params:
            names = [str(i + 1) for i in range(len(params))]
            ghosts = dict(zip(names, params, strict=True))
        elif type.name == "NamedTuple" and len(params) == 2 and isinstance(params[0], tuple):
            names = [str(name) for name in params[0]]
            types = params[1].params if isinstance(params[1], Type) else []
            ghosts = dict(zip(names, types, strict=False))
        else:
            extra = julia.ghost_field(type, names)
            if extra is not None:
                names = [*names, extra[0]]
                ghosts = dict([extra])
        if len(set(names)) != len(names) or not set(stored) <= set(names):
            names, ghosts = list(stored), {}
        for name in names:
            if name not in stored:
                stored[name] = yield julia.ghost(ghosts.get(name), self._ghosts)
        return names

    # ---- datatypes and types -----------------------------------------------------------------

    def _datatype(self, address: int) -> Task:
        """The committed datatype at `address`."""
        if address in self._datatypes:
            return self._datatypes[address]
        obj = self._file.object(address)
        if obj.datatype is None or isinstance(obj.datatype, Committed):
            raise FormatError(f"there is no datatype at address {address}: the file is damaged.")
        kind = self._datatypes[address] = _Datatype(obj.datatype)
        kind.empty = "empty" in obj.attributes
        kind.members = self._addresses(obj, "field_datatypes")
        names = yield self._attribute(obj, "field_names")
        kind.names = names if all(isinstance(name, str) for name in names) else []
        kind.types = self._addresses(obj, "field_types")
        if kind.names and len(kind.names) == len(kind.types) and isinstance(kind.form, Compound):
            known = dict(zip(kind.names, kind.types, strict=True))
            kind.members = [known.get(name, 0) for name in kind.form.names]
        attribute = obj.attributes.get("julia_type")
        if attribute is None:
            return kind
        if attribute.datatype == Committed(address):  # the datatype of types describes itself
            kind.type.path = ("Core", "DataType")
            return kind
        described = yield self._resolve(attribute.datatype)
        yield self._fill_type(kind.type, described.form, attribute.data)
        written = yield self._attribute(obj, "written_type")
        if written and isinstance(written[0], Type):
            kind.written = written[0]
        return kind

    def _fill_type(self, target: Type, form: Datatype, data: bytes) -> Task:
        """Give `target` the name and the parameters that `data` describes."""
        if not isinstance(form, Compound) or form.names[:2] != ["name", "parameters"]:
            raise FormatError("a Julia type is described in an unknown way: the file is damaged.")
        values = []
        for offset, member in zip(form.offsets[:2], form.members[:2], strict=True):
            values.append((yield self._decode(member, _Datatype(member), data, offset, _ignore)))
        name, params = values
        if not isinstance(name, str) or not isinstance(params, list):
            raise FormatError("a Julia type is described in an unknown way: the file is damaged.")
        made = Type(name.split("."), params)
        if made.name == "NTuple" and len(params) == 2 and type(params[0]) is int:
            if 0 <= params[0] <= _LONGEST_TUPLE:
                made = Type(("Core", "Tuple"), params[1:] * params[0])
        target.path, target.params = made.path, made.params


_COMPLEX: dict[str, np.dtype[Any]] = {"<f4": np.dtype("<c8"), "<f8": np.dtype("<c16")}

_LONGEST_TUPLE = 10
"""JLD2 stores longer tuples of one type as arrays."""


def _ignore(value: Any) -> None:
    """The `publish` of a value that nothing refers to."""


def _shape(obj: Object) -> tuple[int, ...] | None:
    """The Julia size of a dataset; () for a scalar, None for one without data."""
    if obj.space is None or obj.space.shape is None or "dimensions" in obj.attributes:
        return None
    return obj.space.shape[::-1]


def _dtype(form: Datatype) -> np.dtype[Any] | None:
    """The NumPy type of array elements, or None where each must be decoded."""
    if isinstance(form, Number):
        return form.dtype
    if isinstance(form, Compound) and form.names == ["re", "im"]:
        re, im = form.members
        if isinstance(re, Number) and re == im and form.size == 2 * re.size:
            return _COMPLEX.get(re.dtype.str)
    return None


def _scalar(piece: bytes, dtype: np.dtype[Any]) -> Any:
    """One number: Int32, Int64, Float64 and Bool as Python's own, others as NumPy scalars."""
    if dtype == np.bool_:
        return piece != b"\0"
    value = np.frombuffer(piece, dtype)[0]
    if (dtype.kind == "i" and dtype.itemsize >= 4) or dtype == np.float64:
        return value.item()
    return value.astype(dtype.newbyteorder("="))


def _is_complex(stored: dict[str, Any]) -> bool:
    return all(isinstance(part, (float, np.floating)) for part in stored.values())


def _shaped(elements: list[Any], shape: tuple[int, ...]) -> Any:
    """A list for a vector, an object array in Fortran order for more dimensions."""
    if len(shape) == 1:
        return elements
    flat = np.empty(len(elements), object)
    for i, element in enumerate(elements):
        flat[i] = element
    return flat.reshape(shape, order="F")


def _dict(value: Any) -> Any:
    """The dict that JLD2 stored as a vector of pairs, perhaps inside a struct of its own."""
    if isinstance(value, Struct) and len(value) == 1:
        value = value[0]
    if not isinstance(value, list) or not all(
        isinstance(pair, Struct) and len(pair) == 2 for pair in value
    ):
        raise FormatError("a Dict is stored in an unknown way.")
    table: dict[Any, Any] = {}
    julia.fill(table, [pair[0] for pair in value], [pair[1] for pair in value])
    return table
