"""Writes the files of BSON.jl and JLD2.jl byte by byte, for the tests of `recur.io.flux`.

Values are described once, by the classes below, and written by `bson_file` or `jld2_file`.  Nothing
here uses the readers under test.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np


class Sym(str):
    """A Symbol."""


class NT(dict):
    """A NamedTuple."""


class I32(int):
    """An Int32, as 32-bit Julia writes its Ints."""


@dataclass(eq=False)
class T:
    """A type: dotted path and parameters."""

    path: str
    params: tuple = ()


@dataclass(eq=False)
class S:
    """A struct; a function is one without fields.  Mutable ones keep their identity in a file."""

    type: T
    fields: dict = field(default_factory=dict)
    mutable: bool = False


@dataclass(eq=False)
class Char:
    """A Char, which is a primitive type of 32 bits."""

    value: str

    def bits(self) -> bytes:
        return self.value.encode().ljust(4, b"\0")[::-1]


def fn(path: str) -> S:
    """A named function: `fn("NNlib.relu")`."""
    module, _, name = path.rpartition(".")
    return S(T(f"{module}.#{name}"))


_NUMBERS = {
    "float16": "Float16",
    "float32": "Float32",
    "float64": "Float64",
    "int8": "Int8",
    "int32": "Int32",
    "int64": "Int64",
    "uint8": "UInt8",
    "uint32": "UInt32",
    "bool": "Bool",
}


def type_of(value: Any) -> T:
    """The Julia type of a value."""
    if isinstance(value, S):
        return value.type
    if isinstance(value, np.ndarray):
        return T("Core.Array", (element_type(value), value.ndim))
    if isinstance(value, NT):
        names = tuple(Sym(name) for name in value)
        return T("Core.NamedTuple", (names, type_of(tuple(value.values()))))
    if isinstance(value, tuple):
        return T("Core.Tuple", tuple(map(type_of, value)))
    if isinstance(value, np.generic):
        return T(f"Core.{_NUMBERS[value.dtype.name]}")
    for kind, name in (
        (T, "DataType"),
        (Char, "Char"),
        (Sym, "Symbol"),
        (str, "String"),
        (bool, "Bool"),
        (I32, "Int32"),
        (int, "Int64"),
        (float, "Float64"),
        (type(None), "Nothing"),
    ):
        if isinstance(value, kind):
            return T(f"Core.{name}")
    if isinstance(value, list):
        return T("Core.Array", (T("Core.Any"), 1))
    raise TypeError(type(value))


def element_type(array: np.ndarray) -> T:
    if array.dtype.kind == "c":
        part = "Float32" if array.dtype.itemsize == 8 else "Float64"
        return T("Base.Complex", (T(f"Core.{part}"),))
    return T(f"Core.{_NUMBERS[array.dtype.name]}")


# ---- BSON ------------------------------------------------------------------------------------


def bson_bytes(doc: Any) -> bytes:
    """A BSON document of plain dicts, lists, bytes, numbers and strings."""
    body = b""
    for name, value in enumerate(doc) if isinstance(doc, list) else doc.items():
        body += _element(str(name), value)  # a generator in a join would recurse in C
    return struct.pack("<i", len(body) + 5) + body + b"\0"


def _element(name: str, value: Any) -> bytes:
    if isinstance(value, dict):
        kind, data = 0x03, bson_bytes(value)
    elif isinstance(value, list):
        kind, data = 0x04, bson_bytes(value)
    elif isinstance(value, bytes):
        kind, data = 0x05, struct.pack("<iB", len(value), 0) + value
    elif isinstance(value, str):
        data = value.encode() + b"\0"
        kind, data = 0x02, struct.pack("<i", len(data)) + data
    elif isinstance(value, bool):
        kind, data = 0x08, bytes([value])
    elif isinstance(value, I32):
        kind, data = 0x10, struct.pack("<i", value)
    elif isinstance(value, int):
        kind, data = 0x12, struct.pack("<q", value)
    elif isinstance(value, float):
        kind, data = 0x01, struct.pack("<d", value)
    elif value is None:
        kind, data = 0x0A, b""
    else:
        raise TypeError(type(value))
    return bytes([kind]) + name.encode() + b"\0" + data


class Bson:
    """Lowers values to documents as BSON.jl does.

    `word` is the class of Julia's Int (I32 for a 32-bit Julia), `root` what stands before a type's
    module path (older files begin it with Main), `rng` shuffles the keys of every document, whose
    order in real files is that of a hash table.
    """

    def __init__(self, word=int, root=(), rng=None, share=True) -> None:
        self.word, self.root, self.rng, self.share = word, list(root), rng, share
        self.backrefs: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.repeated: set[int] = set()

    def document(self, variables: dict[str, Any]) -> dict[str, Any]:
        counts: dict[int, int] = {}
        self._count(list(variables.values()), counts)
        self.repeated = {key for key, count in counts.items() if count > 1 and self.share}
        top = {name: self.lower(value) for name, value in variables.items()}
        if self.backrefs:
            top["_backrefs"] = self.backrefs
        return top

    def _count(self, value: Any, counts: dict[int, int]) -> None:
        if isinstance(value, (np.ndarray, list)) or (isinstance(value, S) and value.mutable):
            counts[id(value)] = counts.get(id(value), 0) + 1
            if counts[id(value)] > 1:
                return
        if isinstance(value, S):
            value = list(value.fields.values())
        for item in value.values() if isinstance(value, dict) else _children(value):
            self._count(item, counts)

    def lower(self, value: Any) -> Any:
        if id(value) not in self.repeated:
            return self._lower(value)
        if id(value) not in self.numbers:
            self.backrefs.append(None)
            self.numbers[id(value)] = len(self.backrefs)
            self.backrefs[self.numbers[id(value)] - 1] = self._lower(value)
        return self._doc(tag="backref", ref=self.word(self.numbers[id(value)]))

    def _doc(self, **items: Any) -> dict[str, Any]:
        keys = list(items)
        if self.rng is not None:
            self.rng.shuffle(keys)
        return {key: items[key] for key in keys}

    def _lower(self, value: Any) -> Any:
        if isinstance(value, T):
            params = [self.lower(p) for p in value.params]
            return self._doc(tag="datatype", name=self.root + value.path.split("."), params=params)
        if isinstance(value, S):
            data = [self.lower(item) for item in value.fields.values()]
            return self._doc(tag="struct", type=self.lower(value.type), data=data)
        if isinstance(value, Char):
            return self._doc(tag="struct", type=self.lower(type_of(value)), data=value.bits())
        if isinstance(value, Sym):
            return self._doc(tag="symbol", name=str(value))
        if isinstance(value, NT):
            data = [self.lower(item) for item in value.values()]
            return self._doc(tag="struct", type=self.lower(type_of(value)), data=data)
        if isinstance(value, dict):
            return {name: self.lower(item) for name, item in value.items()}
        if isinstance(value, tuple):
            return self._doc(tag="tuple", data=[self.lower(item) for item in value])
        if isinstance(value, list):
            return [self.lower(item) for item in value]
        if isinstance(value, np.ndarray):
            if value.dtype == np.uint8 and value.ndim == 1:
                return value.tobytes()
            if value.dtype == object:
                data = [self.lower(item) for item in value.ravel(order="F")]
                kind = T("Core.Any")
            else:
                data, kind = value.tobytes(order="F"), element_type(value)
            size = [self.word(n) for n in value.shape]
            return self._doc(tag="array", type=self.lower(kind), size=size, data=data)
        if isinstance(value, np.generic):
            return self._doc(tag="struct", type=self.lower(type_of(value)), data=value.tobytes())
        if isinstance(value, int) and not isinstance(value, bool):
            return self.word(value)
        return value


def _children(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []


def bson_file(**variables: Any) -> bytes:
    """A file of BSON.jl with these variables."""
    return bson_bytes(Bson().document(variables))


# ---- JLD2 ------------------------------------------------------------------------------------

BASE = 512
UNDEFINED = (1 << 64) - 1


def lookup3(data: bytes) -> int:
    """Jenkins' lookup3, written from the published description with explicit 32-bit steps."""

    def rot(x: int, k: int) -> int:
        return ((x << k) | (x >> (32 - k))) & 0xFFFFFFFF

    def sub(x: int, y: int) -> int:
        return (x - y) & 0xFFFFFFFF

    def add(x: int, y: int) -> int:
        return (x + y) & 0xFFFFFFFF

    a = b = c = (0xDEADBEEF + len(data)) & 0xFFFFFFFF
    while len(data) > 12:
        x, y, z = struct.unpack("<3I", data[:12])
        a, b, c = add(a, x), add(b, y), add(c, z)
        a, c = sub(a, c) ^ rot(c, 4), add(c, b)
        b, a = sub(b, a) ^ rot(a, 6), add(a, c)
        c, b = sub(c, b) ^ rot(b, 8), add(b, a)
        a, c = sub(a, c) ^ rot(c, 16), add(c, b)
        b, a = sub(b, a) ^ rot(a, 19), add(a, c)
        c, b = sub(c, b) ^ rot(b, 4), add(b, a)
        data = data[12:]
    if data:
        x, y, z = struct.unpack("<3I", data.ljust(12, b"\0"))
        a, b, c = add(a, x), add(b, y), add(c, z)
        c = sub(c ^ b, rot(b, 14))
        a = sub(a ^ c, rot(c, 11))
        b = sub(b ^ a, rot(a, 25))
        c = sub(c ^ b, rot(b, 16))
        a = sub(a ^ c, rot(c, 4))
        b = sub(b ^ a, rot(a, 14))
        c = sub(c ^ b, rot(b, 24))
    return c


def _fixed(size: int, signed: bool) -> bytes:
    return struct.pack("<B3BIHH", 0x30, 8 * signed, 0, 0, size, 0, 8 * size)


_FLOATS = {
    2: struct.pack("<B3BIHHBBBBI", 0x31, 0x20, 0x0F, 0, 2, 0, 16, 10, 5, 0, 10, 0xF),
    4: struct.pack("<B3BIHHBBBBI", 0x31, 0x20, 0x1F, 0, 4, 0, 32, 23, 8, 0, 23, 0x7F),
    8: struct.pack("<B3BIHHBBBBI", 0x31, 0x20, 0x3F, 0, 8, 0, 64, 52, 11, 0, 52, 0x3FF),
}
_REFERENCE = struct.pack("<B3BI", 0x37, 0, 0, 0, 8)
_STRING = struct.pack("<B3BI", 0x39, 0x11, 1, 0, 16) + _fixed(1, False)
_REFERENCES = struct.pack("<B3BI", 0x39, 0, 0, 0, 16) + _REFERENCE


def _number(dtype: np.dtype) -> bytes:
    if dtype.kind == "b":
        return struct.pack("<B3BIHH", 0x34, 0, 0, 0, 1, 0, 8)
    return (
        _FLOATS[dtype.itemsize] if dtype.kind == "f" else _fixed(dtype.itemsize, dtype.kind == "i")
    )


def _size(datatype: bytes) -> int:
    return struct.unpack_from("<I", datatype, 4)[0]


def _compound(names: list[str], members: list[bytes]) -> bytes:
    size = sum(map(_size, members))
    width = 1 if size < 256 else 2 if size < 65536 else 4
    out, offset = struct.pack("<BHBI", 0x36, len(names), 0, size), 0
    for name, member in zip(names, members, strict=True):
        out += name.encode() + b"\0" + offset.to_bytes(width, "little") + member
        offset += _size(member)
    return out


@dataclass(eq=False)
class Committed:
    """A datatype stored as an object: its address and its HDF5 form."""

    address: int
    form: bytes


class Jld2:
    """Writes values as JLD2 does.

    `version` is the format ("0.1.0", "0.1.1", "0.2.0"), `compact` the size below which arrays lie
    inside their header, `compress` stores arrays as one deflated chunk whose sizes have `width`
    bytes (JLD2 writes 8; recent HDF5 libraries insist on the least), `attribute` is the version of
    attribute messages.
    """

    def __init__(self, version="0.1.1", compact=8192, compress=False, width=8, attribute=2) -> None:
        self.version, self.compact, self.compress, self.width = version, compact, compress, width
        self.attribute_version = attribute
        self.data = bytearray(48)  # the superblock comes last
        self.types: dict[Any, Committed] = {}
        self.type_addresses: list[int] = []
        self.made: dict[int, int] = {}
        self.keep: list[Any] = []
        self.heap_at = self.heap_used = 0
        self.heap_index = 1
        self.datatype_type: Committed | None = None

    # -- pieces --

    def place(self, data: bytes) -> int:
        address = len(self.data)
        self.data += data
        return address

    def heap(self, data: bytes, count: int) -> bytes:
        """A variable-length element: the data goes to the global heap."""
        if not data:
            return bytes(16)
        need = 16 + (len(data) + 7) // 8 * 8
        if not self.heap_at or self.heap_used + need > 4096:
            size = max(4096, need + 16)
            head = b"GCOL" + struct.pack("<IQ", 1, size)
            self.heap_at = self.place(head.ljust(size, b"\0"))
            self.heap_used, self.heap_index = 16, 1
        at = self.heap_at + self.heap_used
        self.data[at : at + 16] = struct.pack("<HHIQ", self.heap_index, 1, 0, len(data))
        self.data[at + 16 : at + 16 + len(data)] = data
        self.heap_used += need
        self.heap_index += 1
        size = struct.unpack_from("<Q", self.data, self.heap_at + 8)[0]
        if size - self.heap_used >= 16:  # object 0 is the free space; the HDF5 library wants it
            free = struct.pack("<QQ", 0, size - self.heap_used)
            self.data[at + need : at + need + 16] = free
        return struct.pack("<IQI", count, self.heap_at, self.heap_index - 1)

    def text(self, value: str) -> bytes:
        return self.heap(value.encode(), len(value.encode()))

    def references(self, addresses: list[int]) -> bytes:
        return self.heap(struct.pack(f"<{len(addresses)}Q", *addresses), len(addresses))

    def header(self, messages: list[tuple[int, int, bytes]]) -> int:
        body = b"".join(struct.pack("<BHB", k, len(m), f) + m for k, f, m in messages)
        width = 0 if len(body) < 256 else 1 if len(body) < 65536 else 2
        head = b"OHDR" + bytes([2, width]) + len(body).to_bytes(1 << width, "little") + body
        return self.place(head + struct.pack("<I", lookup3(head)))

    def attribute(self, name: str, datatype: bytes | Committed, space: bytes, data: bytes):
        shared = isinstance(datatype, Committed)
        version = max(self.attribute_version, 2 if shared else 1)  # 1 knows no shared datatypes
        kind = struct.pack("<BBQ", 3, 2, datatype.address) if shared else datatype
        label = name.encode() + b"\0"
        out = struct.pack("<BBHHH", version, shared, len(label), len(kind), len(space))
        out += b"\1" if version == 3 else b""
        for part in (label, kind, space):
            out += part + (bytes(-len(part) % 8) if version == 1 else b"")
        return (0x0C, 0, out + data)

    # -- types --

    def commit(self, form: bytes, kind: T, attributes=()) -> Committed:
        """Store a datatype with its `julia_type`."""
        described = self._datatype_type()
        space = _space(())
        head = self.attribute("julia_type", described, space, self.describe(kind))
        address = self.header([(0x03, 0x40, form), head, *attributes])
        self.type_addresses.append(address)
        return Committed(address, form)

    def _datatype_type(self) -> Committed:
        if self.datatype_type is None:
            form = _compound(["name", "parameters"], [_STRING, _REFERENCES])
            name = self.text("Core.DataType") + bytes(16)
            self.datatype_type = Committed(len(self.data), form)
            head = self.attribute("julia_type", self.datatype_type, _space(()), name)
            assert self.header([(0x03, 0x40, form), head]) == self.datatype_type.address
            self.type_addresses.append(self.datatype_type.address)
        return self.datatype_type

    def describe(self, kind: T) -> bytes:
        params = [self.parameter(param) for param in kind.params]
        return self.text(kind.path) + (self.references(params) if params else bytes(16))

    def parameter(self, param: Any) -> int:
        if not isinstance(param, T):
            return self.write(param)
        if "#" in param.path:
            return self.committed(S(param)).address
        return self.write(param)

    def committed(self, value: Any) -> Committed:
        """The committed datatype of a value's type."""
        kind = type_of(value)
        key = (_key(kind), tuple(value.fields) if isinstance(value, S) else ())
        if key not in self.types:
            self.types[key] = self._commit(value, kind)
        return self.types[key]

    def _commit(self, value: Any, kind: T) -> Committed:
        if is_ghost(value):
            empty = self.attribute("empty", _fixed(1, False), _space(()), b"\1")
            return self.commit(_opaque(1), kind, [empty])
        if isinstance(value, Sym):
            return self.commit(_STRING, kind)
        if isinstance(value, Char):
            return self.commit(_opaque(4), kind)
        fields = fields_of(value)
        parts = {name: self.member(item) for name, item in fields.items() if not is_ghost(item)}
        names = list(parts)
        forms = [p.form if isinstance(p, Committed) else p for p in parts.values()]
        addresses = [p.address if isinstance(p, Committed) else 0 for p in parts.values()]
        attributes = []
        if self.version == "0.2.0":
            known = dict(zip(names, addresses, strict=True))
            types = [
                known[name] if name in known else self.committed(item).address
                for name, item in fields.items()
            ]
            labels = b"".join(self.text(name) for name in fields)
            space = _space((len(fields),))
            attributes = [
                self.attribute("field_names", _STRING, space, labels),
                self.attribute("field_types", _REFERENCE, space, _pack(types)),
            ]
        elif any(addresses):
            space = _space((len(names),))
            attributes = [self.attribute("field_datatypes", _REFERENCE, space, _pack(addresses))]
        return self.commit(_compound(names, forms), kind, attributes)

    def member(self, value: Any) -> bytes | Committed:
        """The datatype of a value inside a struct: in line, or a reference."""
        if isinstance(value, (np.ndarray, list, T)) or (isinstance(value, S) and value.mutable):
            return _REFERENCE
        if isinstance(value, Sym):
            return self.committed(value)
        if isinstance(value, str):
            return _STRING
        if isinstance(value, (bool, int, float, np.generic)):
            return _number(_dtype(value))
        return self.committed(value)

    # -- values --

    def inline(self, value: Any) -> bytes:
        form = self.member(value)
        if form is _REFERENCE:
            return struct.pack("<Q", self.write(value))
        return self.plain(value)

    def plain(self, value: Any) -> bytes:
        """The bytes of a value whose datatype says all about it."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Char):
            return value.bits()
        if isinstance(value, (bool, int, float, np.generic)):
            return np.array(value, _dtype(value)).tobytes()
        items = fields_of(value)
        return b"".join(self.inline(item) for item in items.values() if not is_ghost(item))

    def write(self, value: Any) -> int:
        """Store a value as an object of its own; returns its address."""
        tracked = isinstance(value, (np.ndarray, list)) or (isinstance(value, S) and value.mutable)
        if tracked and id(value) in self.made:
            return self.made[id(value)]
        if isinstance(value, S) and value.mutable and not is_ghost(value):
            return self._cyclic(value)
        if isinstance(value, (np.ndarray, list)):
            address = self._array(value)
        elif isinstance(value, T):
            address = self.dataset(self._datatype_type(), _space(()), self.describe(value))
        elif is_ghost(value):
            address = self.dataset(self.committed(value), _space(None), b"")
        elif isinstance(value, str) and not isinstance(value, Sym):
            data = value.encode()
            address = self.dataset(
                struct.pack("<B3BI", 0x33, 0x11, 0, 0, len(data)), _space(()), data
            )
        elif isinstance(value, (bool, int, float, np.generic)):
            address = self.dataset(_number(_dtype(value)), _space(()), self.plain(value))
        else:
            address = self.dataset(self.committed(value), _space(()), self.plain(value))
        if tracked:
            self.made[id(value)] = address
        self.keep.append(value)
        return address

    def _cyclic(self, value: S) -> int:
        """A mutable struct: its header comes first, so that its fields may refer back to it."""
        kind = self.committed(value)
        size = _size(kind.form)
        shared = struct.pack("<BBQ", 3, 2, kind.address)
        at = len(self.data)
        messages = [(0x01, 0, _space(())), (0x03, 2, shared), (0x05, 0, b"\3\x09")]
        layout = struct.pack("<BBH", 4, 0, size)
        self.made[id(value)] = address = self.header([*messages, (0x08, 0, layout + bytes(size))])
        end = len(self.data)
        data = self.plain(value)
        tail = bytes(self.data[end:])
        del self.data[at:]
        self.header([*messages, (0x08, 0, layout + data)])
        self.data += tail
        self.keep.append(value)
        return address

    def _array(self, value: np.ndarray | list) -> int:
        shape = value.shape if isinstance(value, np.ndarray) else (len(value),)
        if isinstance(value, np.ndarray) and value.dtype != object:
            if value.size == 0:
                dims = np.array(shape[::-1], "<i8")
                extra = [
                    self.attribute(
                        "dimensions", _fixed(8, True), _space(dims.shape), dims.tobytes()
                    )
                ]
                return self.dataset(_number(value.dtype), _space(None), b"", extra)
            if value.dtype.kind == "c":
                part = _FLOATS[value.dtype.itemsize // 2]
                key = ("complex", value.dtype.itemsize)
                if key not in self.types:
                    form = _compound(["re", "im"], [part, part])
                    self.types[key] = self.commit(form, element_type(value))
                form: Any = self.types[key]
            else:
                form = _number(value.dtype)
            return self.dataset(form, _space(shape[::-1]), value.tobytes(order="F"))
        items = value if isinstance(value, list) else list(value.ravel(order="F"))
        if items and all(is_ghost(item) for item in items):
            dims = np.array(shape[::-1], "<i8")
            kind = self.committed(items[0])
            extra = [
                self.attribute("dimensions", _fixed(8, True), _space(dims.shape), dims.tobytes())
            ]
            return self.dataset(kind, _space(None), b"", extra)
        data = _pack([self.write(item) for item in items])
        anything = struct.pack("<Q", self.write(T("Core.Any")))
        extra = [self.attribute("julia_type", _REFERENCE, _space(()), anything)]
        return self.dataset(_REFERENCE, _space(shape[::-1]), data, extra)

    def dataset(self, datatype: bytes | Committed, space: bytes, data: bytes, extra=()) -> int:
        shared = isinstance(datatype, Committed)
        kind = struct.pack("<BBQ", 3, 2, datatype.address) if shared else datatype
        messages = [(0x01, 0, space), (0x03, 2 * shared, kind), (0x05, 0, b"\3\x09"), *extra]
        size = _size(datatype.form if shared else datatype)
        dims = struct.unpack_from(f"<{space[1]}Q", space, 4)
        if self.compress and dims and kind is not _REFERENCE:
            stored = zlib.compress(data)
            messages.append((0x0B, 0, struct.pack("<BBHHHI", 2, 1, 1, 0, 1, 5)))
            layout = struct.pack("<BBBBB", 4, 2, 2, len(dims) + 1, self.width)
            layout += b"".join(n.to_bytes(self.width, "little") for n in (*dims, size))
            layout += struct.pack("<BQIQ", 1, len(stored), 0, self.place(stored))
        elif len(data) < (self.compact if dims else 8192):
            layout = struct.pack("<BBH", 4, 0, len(data)) + data
        else:
            layout = struct.pack("<BBQQ", 4, 1, self.place(data), len(data))
        return self.header([*messages, (0x08, 0, layout)])

    # -- groups and the file --

    def group(self, links: dict[str, int]) -> int:
        messages = [(0x02, 0, struct.pack("<BBQQ", 0, 0, UNDEFINED, UNDEFINED)), (0x0A, 0, b"\0\0")]
        for name, address in links.items():
            label = name.encode()
            messages.append(
                (0x06, 0, struct.pack("<BBBB", 1, 16, 1, len(label)) + label + _pack([address]))
            )
        messages.append((0x00, 0, bytes(16)))
        return self.header(messages)

    def file(self, variables: dict[str, Any]) -> bytes:
        links = {}
        for name, value in variables.items():
            if isinstance(value, dict) and not isinstance(value, NT):
                links[name] = self.group({k: self.write(v) for k, v in value.items()})
            else:
                links[name] = self.write(value)
        if self.type_addresses:
            names = {f"{i + 1:08d}": address for i, address in enumerate(self.type_addresses)}
            links = {"_types": self.group(names), **links}
        return self.finish(self.group(links))

    def finish(self, root: int) -> bytes:
        text = f"HDF5-based Julia Data Format, version {self.version}\0 (Julia 1.10.0 64-bit LE)\0"
        block = b"\x89HDF\r\n\x1a\n" + struct.pack("<BBBB", 2, 8, 8, 0)
        block += struct.pack("<QQQQ", BASE, UNDEFINED, BASE + len(self.data), root)
        self.data[:48] = block + struct.pack("<I", lookup3(block))
        return text.encode().ljust(BASE, b"\0") + bytes(self.data)


def jld2_file(**variables: Any) -> bytes:
    """A file of JLD2.jl with these variables."""
    return Jld2().file(variables)


def is_ghost(value: Any) -> bool:
    """Whether Julia gives the value's type zero size."""
    if isinstance(value, S):
        return not value.mutable and all(map(is_ghost, value.fields.values()))
    if isinstance(value, NT):
        return all(map(is_ghost, value.values()))
    return value is None or (isinstance(value, tuple) and all(map(is_ghost, value)))


def fields_of(value: Any) -> dict[str, Any]:
    if isinstance(value, S):
        return value.fields
    if isinstance(value, NT):
        return value
    return {str(i + 1): item for i, item in enumerate(value)}


def _key(value: Any) -> Any:
    if isinstance(value, T):
        return (value.path, tuple(map(_key, value.params)))
    return tuple(map(_key, value)) if isinstance(value, tuple) else value


def _dtype(value: Any) -> np.dtype:
    if isinstance(value, np.generic):
        return value.dtype
    kinds = ((bool, "?"), (I32, "<i4"), (int, "<i8"), (float, "<f8"))
    return np.dtype(next(code for kind, code in kinds if isinstance(value, kind)))


def _opaque(size: int) -> bytes:
    return struct.pack("<B3BI", 0x35, 0, 0, 0, size)


def _space(shape: tuple[int, ...] | None) -> bytes:
    dims = shape or ()
    kind = 2 if shape is None else 1 if shape else 0
    return struct.pack("<BBBB", 2, len(dims), 0, kind) + _pack(list(dims))


def _pack(numbers: list[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)
