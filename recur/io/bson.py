"""Read the files of BSON.jl: bytes to documents, documents to Julia values.

The container is BSON 1.x (bsonspec.org), of which BSON.jl writes nine element types.  Its documents
describe Julia values by a `tag`; `_backrefs` of the top document lists the values that are referred
to more than once.  Nothing in a file is ever run: types are names, and the code that Julia stores
with an anonymous function is never looked at.

Both passes keep their own stacks, so nesting may be as deep as the file is long.  Memory is bounded
by the file: every length is checked against the document around it, arrays are read once into
memory that they own, and a value that is referred to a thousand times exists once.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO

import numpy as np

from recur.errors import FormatError
from recur.io import julia
from recur.io._source import Source
from recur.io.julia import Struct, Symbol, Task, Type

Document = dict[str, Any]


def read(file: BinaryIO) -> Any:
    """The Julia values in `file`, an open binary file, by variable name (see `recur.io.julia`).

    Raises `FormatError` if the file is damaged, cut short, or not BSON.
    """
    source = Source(file)
    return _Raiser(parse(source), source.size).top()


# ---- bytes to documents ----------------------------------------------------------------------

_INT32, _INT64, _DOUBLE = struct.Struct("<i"), struct.Struct("<q"), struct.Struct("<d")


def parse(source: Source) -> Document:
    """The one document of a BSON file: dicts, lists and plain values; binary as uint8 arrays."""
    if source.size < 5 or _INT32.unpack(source.take(0, 4))[0] != source.size:
        raise FormatError(
            "this is not a complete BSON file: its first four bytes must give its size, "
            f"{source.size} bytes. It is another kind of file, or it was cut short."
        )
    return _Parser(source).document()


class _Parser:
    """A cursor over the bytes, one method a basic type."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._window = b""
        self._base = 0
        self._at = 0

    def document(self) -> Document:
        end = self._length(5, self._source.size)
        top: Document = {}
        open_: list[tuple[Any, int]] = [(top, end)]
        while open_:
            container, end = open_[-1]
            kind = self._bytes(1, end)[0]
            if kind == 0:
                if self._at != end:
                    raise FormatError(
                        f"the BSON document that should end at byte {end} ends at {self._at}: "
                        "the file is damaged."
                    )
                open_.pop()
                continue
            name = self._name(end)
            if kind in (0x03, 0x04):
                value: Any = {} if kind == 0x03 else []
                open_.append((value, self._length(5, end)))
            else:
                value = self._value(kind, end)
            if type(container) is dict:
                container[julia.text(name)] = value
            else:
                container.append(value)
        return top

    def _value(self, kind: int, end: int) -> Any:
        match kind:
            case 0x01:
                return _DOUBLE.unpack(self._bytes(8, end))[0]
            case 0x02:
                return self._string(end)
            case 0x05:
                return self._binary(end)
            case 0x08:
                return self._bytes(1, end) != b"\0"
            case 0x0A:
                return None
            case 0x10:
                return _INT32.unpack(self._bytes(4, end))[0]
            case 0x12:
                return _INT64.unpack(self._bytes(8, end))[0]
        raise FormatError(
            f"BSON element type 0x{kind:02x} at byte {self._at}: BSON.jl never writes it. The file "
            "is damaged, or another program wrote it."
        )

    def _string(self, end: int) -> str:
        count = _INT32.unpack(self._bytes(4, end))[0]
        if not 1 <= count <= end - self._at:
            raise self._bad_length(count, end)
        data = self._bytes(count, end)
        if data[-1]:
            raise FormatError(f"the string that ends at byte {self._at} has no end mark.")
        return julia.text(data[:-1])

    def _binary(self, end: int) -> np.ndarray[Any, Any]:
        count = _INT32.unpack(self._bytes(4, end))[0]
        self._bytes(1, end)  # the subtype: BSON.jl always writes 0
        if not 0 <= count <= end - self._at:
            raise self._bad_length(count, end)
        data = self._source.array(self._at, count)
        self._at += count
        return data

    def _length(self, least: int, end: int) -> int:
        """Where the document that starts here ends."""
        start = self._at
        count = _INT32.unpack(self._bytes(4, end))[0]
        if not least <= count <= end - start:
            raise self._bad_length(count, end)
        return int(start + count)

    def _bad_length(self, count: int, end: int) -> FormatError:
        return FormatError(
            f"the length {count} just before byte {self._at} does not fit in the document that "
            f"ends at byte {end}: the file is damaged or was cut short."
        )

    def _bytes(self, count: int, end: int) -> bytes:
        if count > end - self._at:
            raise FormatError(f"a value at byte {self._at} runs past its document's end, {end}.")
        offset = self._at - self._base
        if not 0 <= offset <= len(self._window) - count:
            if count > 64:
                data = self._source.take(self._at, count)
                self._at += count
                return data
            self._refill(count)
            offset = 0
        self._at += count
        return self._window[offset : offset + count]

    def _name(self, end: int) -> bytes:
        """A zero-terminated element name."""
        parts = []
        while self._at < end:
            offset = self._at - self._base
            if not 0 <= offset < len(self._window):
                self._refill(1)
                offset = 0
            stop = self._window.find(b"\0", offset)
            if stop >= 0:
                self._at += stop + 1 - offset
                parts.append(self._window[offset:stop])
                if self._at <= end:
                    return b"".join(parts)
                break
            parts.append(self._window[offset:])
            self._at += len(self._window) - offset
        raise FormatError(f"an element name runs past its document's end at byte {end}.")

    def _refill(self, count: int) -> None:
        """Make the window start here, with at least `count` bytes."""
        self._base = self._at
        self._window = self._source.window(self._at)
        if len(self._window) < count:
            self._window = self._source.take(self._at, count)


# ---- documents to Julia values ---------------------------------------------------------------


class _Open:
    """Marks a shared value whose making has begun but which cannot be referred to yet."""


_OPEN = _Open()


class _Raiser:
    """Makes Julia values of documents; each shared document once."""

    def __init__(self, top: Document, size: int) -> None:
        backrefs = top.pop("_backrefs", [])
        self._backrefs = backrefs if isinstance(backrefs, list) else []
        self._made: dict[int, Any] = {}
        self._top = top
        self._unfilled = size  # elements that arrays without data may still have

    def top(self) -> Any:
        return julia.run(self._value(self._top))

    def _value(self, doc: Any) -> Task:
        """The value of `doc`, which may be a reference to a shared document."""
        if not _is_reference(doc):
            return (yield self._raise(doc, _ignore))
        number = doc["ref"]
        if type(number) is not int or not 1 <= number <= len(self._backrefs):
            raise FormatError(f"a reference names shared value {number!r}, which is missing.")
        if number in self._made:
            value = self._made[number]
            if value is _OPEN:
                raise FormatError(
                    f"shared value {number} holds itself where Julia could not have put it."
                )
            return value
        shared = self._backrefs[number - 1]
        if _is_reference(shared):
            raise FormatError(f"shared value {number} is only a reference: the file is damaged.")
        self._made[number] = _OPEN
        value = yield self._raise(shared, partial(self._made.__setitem__, number))
        self._made[number] = value
        return value

    def _raise(self, doc: Any, publish: Callable[[Any], None]) -> Task:
        if type(doc) is list:
            result: list[Any] = []
            publish(result)
            yield from self._items(doc, result)
            return result
        if type(doc) is not dict:
            return doc
        tag = _tag(doc)
        if tag in _LEAVES:
            return _LEAVES[tag](doc)
        if tag in _MAKERS:
            return (yield _MAKERS[tag](self, doc, publish))
        table: dict[str, Any] = {}
        publish(table)
        for name, value in doc.items():
            table[name] = (yield self._value(value)) if type(value) in _NESTED else value
        return table

    def _items(self, docs: Any, into: Any) -> Task:
        """Append the values of `docs` to the list `into`."""
        for doc in _list(docs):
            into.append((yield self._value(doc)) if type(doc) in _NESTED else doc)

    def _type(self, doc: Any) -> Task:
        value = yield self._value(doc)
        if not isinstance(value, Type):
            raise FormatError("a Julia type is missing where the file must give one.")
        return value

    # One maker for each tag.  `publish` makes a value known to references inside itself.

    def _tuple(self, doc: Document, publish: Callable[[Any], None]) -> Task:
        items: list[Any] = []
        yield from self._items(doc.get("data"), items)
        return tuple(items)

    def _datatype(self, doc: Document, publish: Callable[[Any], None]) -> Task:
        result = Type(_path(doc.get("name")))
        publish(result)
        yield from self._items(doc.get("params", []), result.params)
        return result

    def _unionall(self, doc: Document, publish: Callable[[Any], None]) -> Task:
        return (yield self._value(doc.get("body")))

    def _array(self, doc: Document, publish: Callable[[Any], None]) -> Task:
        element = yield self._type(doc.get("type"))
        shape = yield self._value(doc.get("size"))
        shape = tuple(_list(shape))
        data = doc.get("data")
        if type(data) is dict:
            data = yield self._value(data)  # BSON.jl may share the bytes, too
        if isinstance(data, np.ndarray) and data.size == 0:
            data = data if 0 in shape or julia.number_dtype(element) is not None else []
        if isinstance(data, np.ndarray):
            return _number_array(element, shape, data)
        docs = _list(data)
        count = julia.count_of(shape, len(docs) or self._unfilled)
        if len(docs) not in (0, count):
            raise FormatError(f"an array of size {shape} has {len(docs)} elements.")
        elements = np.empty(count, object)
        result = elements.reshape(shape, order="F")
        publish(result)
        if not docs and count:
            self._unfilled -= count
            elements.fill((yield julia.ghost(element, {})))
        for i, item in enumerate(docs):
            elements[i] = (yield self._value(item)) if type(item) in _NESTED else item
        return result

    def _struct(self, doc: Document, publish: Callable[[Any], None]) -> Task:
        kind = yield self._type(doc.get("type"))
        julia.check_storage(kind)
        data = doc.get("data")
        if type(data) is dict:
            data = yield self._value(data)
        if isinstance(data, np.ndarray):
            return _primitive(kind, data)
        docs = _list(data)
        if kind.name in ("Dict", "IdDict") and len(docs) == 2:
            return (yield self._dict(docs, publish))
        result = Struct(kind, names=julia.field_names(kind, len(docs)))
        publish(result)
        yield from self._items(docs, result.fields)
        if kind.name == "Undef" and kind.package == "BSON":
            return julia.undefined
        return result

    def _dict(self, docs: list[Any], publish: Callable[[Any], None]) -> Task:
        table: dict[Any, Any] = {}
        publish(table)
        keys = yield self._value(docs[0])
        values = yield self._value(docs[1])
        julia.fill(table, keys, values)
        return table


_NESTED = (dict, list)

_MAKERS: dict[str, Callable[[_Raiser, Document, Callable[[Any], None]], Task]] = {
    "tuple": _Raiser._tuple,
    "svec": _Raiser._tuple,
    "datatype": _Raiser._datatype,
    "unionall": _Raiser._unionall,
    "array": _Raiser._array,
    "struct": _Raiser._struct,
}


_LEAVES: dict[str, Callable[[Document], Any]] = {
    "symbol": lambda doc: Symbol(_string(doc.get("name"))),
    "ref": lambda doc: Struct(Type(("Core", "Module")), [Symbol(".".join(_path(doc.get("path"))))]),
    "jl_anonymous": lambda doc: Type(("#anonymous",), anonymous=True),
    "jl_bottom_type": lambda doc: Type(("Core", "Union{}")),
}


def _ignore(value: Any) -> None:
    """The `publish` of a value that nothing refers to."""


def _tag(doc: Any) -> str:
    tag = doc.get("tag") if type(doc) is dict else None
    return tag if type(tag) is str else ""


def _is_reference(doc: Any) -> bool:
    return _tag(doc) == "backref" and "ref" in doc


def _list(doc: Any) -> list[Any]:
    if type(doc) is not list:
        raise FormatError("a list is missing where the file must give one.")
    return doc


def _string(doc: Any) -> str:
    if type(doc) is not str:
        raise FormatError("a name is missing where the file must give one.")
    return doc


def _path(doc: Any) -> list[str]:
    return [_string(part) for part in _list(doc)]


def _number_array(element: Type, shape: tuple[Any, ...], data: np.ndarray[Any, Any]) -> Any:
    """The array of `shape` whose elements are the bytes `data`; it keeps their memory.

    Elements that NumPy has no type for (tuples, Int128, structs of bits) become raw `V` elements.
    """
    count = julia.count_of(shape, data.size)
    dtype = julia.number_dtype(element)
    if dtype is None:
        dtype = np.dtype(f"V{data.size // count if count else 1}")
    if count * dtype.itemsize != data.size:
        raise FormatError(
            f"an array of {element} has size {shape}, but {data.size} bytes where "
            f"{count * dtype.itemsize} are needed."
        )
    return julia.as_numbers(data, dtype).reshape(shape, order="F")


def _primitive(kind: Type, data: np.ndarray[Any, Any]) -> Any:
    """The number or character with the bits `data`."""
    dtype = julia.number_dtype(kind)
    if dtype is not None and dtype.itemsize == data.size:
        return julia.as_numbers(data, dtype)[0]
    if kind.name == "Char" and data.size == 4:
        return julia.character(int.from_bytes(data.tobytes(), "little"))
    return data.tobytes()
