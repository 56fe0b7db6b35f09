"""What HDF5 object headers say: the messages, datatypes and layouts that JLD2.jl writes.

The names follow the HDF5 File Format Specification, version 3.0 (The HDF Group).  What JLD2 never
writes (B-trees, fractal heaps, many chunks, virtual data) is refused by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from recur.errors import FormatError
from recur.io.julia import Task, run, text

UNDEFINED = (1 << 64) - 1
"""The address of something that is not there."""


@dataclass(slots=True)
class Number:
    size: int
    dtype: np.dtype[Any]


@dataclass(slots=True)
class Text:
    """A string of fixed length."""

    size: int


@dataclass(slots=True)
class Opaque:
    size: int


@dataclass(slots=True)
class Reference:
    """The address of an object."""

    size: int = 8


@dataclass(slots=True)
class Vlen:
    """A sequence on the global heap: u32 length, u64 address, u32 index."""

    size: int
    base: Datatype
    text: bool


@dataclass(slots=True)
class Compound:
    size: int
    names: list[str] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    members: list[Datatype] = field(default_factory=list)


Datatype = Number | Text | Opaque | Reference | Vlen | Compound


@dataclass(slots=True)
class Committed:
    """A datatype that is stored as an object of its own."""

    address: int


@dataclass(slots=True)
class Dataspace:
    """`shape` is None for the null dataspace and () for a scalar."""

    shape: tuple[int, ...] | None


@dataclass(slots=True)
class Layout:
    """Where the data of a dataset is: in line, or `size` bytes at `address`, perhaps filtered."""

    inline: bytes | None = None
    address: int = UNDEFINED
    size: int = 0
    chunk: tuple[int, ...] | None = None


@dataclass(slots=True)
class Attribute:
    datatype: Datatype | Committed
    space: Dataspace
    data: bytes


@dataclass(slots=True)
class Object:
    """What the header of a group, a dataset or a committed datatype says."""

    datatype: Datatype | Committed | None = None
    space: Dataspace | None = None
    layout: Layout | None = None
    filters: list[int] = field(default_factory=list)
    attributes: dict[str, Attribute] = field(default_factory=dict)
    links: dict[str, int] | None = None


class Cursor:
    """A position in some bytes; reading past their end raises `FormatError`."""

    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data = data
        self.at = at

    def bytes(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise FormatError("a header ends in the middle of a value: the file is damaged.")
        self.at += count
        return self.data[self.at - count : self.at]

    def uint(self, width: int) -> int:
        return int.from_bytes(self.bytes(width), "little")

    def string(self) -> str:
        """A name that ends with a zero byte."""
        stop = self.data.find(b"\0", self.at)
        if stop < 0:
            raise FormatError("a name in a header has no end: the file is damaged.")
        return text(self.bytes(stop + 1 - self.at)[:-1])


# ---- messages -------------------------------------------------------------------------------


def read_message(to: Object, kind: int, flags: int, body: Cursor) -> None:
    """Add what one header message says to `to`."""
    match kind:
        case 0x01:
            to.space = _dataspace(body)
        case 0x02:
            _link_info(body)
            to.links = {} if to.links is None else to.links
        case 0x03:
            to.datatype = _datatype_or_committed(body, bool(flags & 2))
        case 0x06:
            name, address = _link(body)
            to.links = {} if to.links is None else to.links
            to.links[name] = address
        case 0x08:
            to.layout = _layout(body)
        case 0x0B:
            to.filters = _filters(body)
        case 0x0C:
            name, attribute = _attribute(body)
            to.attributes[name] = attribute
        case 0x00 | 0x04 | 0x05 | 0x0A | 0x0D | 0x0E | 0x12 | 0x15 | 0x16:
            pass  # space, fill values, times and counts say nothing about the data
        case _ if flags & 8:
            raise FormatError(f"HDF5 header message 0x{kind:02x}, which JLD2 never writes.")


def _dataspace(body: Cursor) -> Dataspace:
    version, rank, _flags = body.uint(1), body.uint(1), body.uint(1)
    if version == 1:
        body.bytes(5)
        kind = 1
    elif version == 2:
        kind = body.uint(1)
    else:
        raise FormatError(f"HDF5 dataspace version {version}: the file is damaged.")
    dims = tuple(body.uint(8) for _ in range(rank))
    if kind > 2:
        raise FormatError(f"HDF5 dataspace type {kind}: the file is damaged.")
    return Dataspace(None if kind == 2 else dims)


def _link_info(body: Cursor) -> None:
    body.bytes(1)
    if body.uint(1) & 1:
        body.bytes(8)
    if body.uint(8) != UNDEFINED:
        raise FormatError("a group with its links in a heap: JLD2 never writes one.")


def _link(body: Cursor) -> tuple[str, int]:
    body.bytes(1)
    flags = body.uint(1)
    if flags & 8 and body.uint(1) != 0:
        raise FormatError("a soft or external link: only objects in the file itself are read.")
    body.bytes((8 if flags & 4 else 0) + (1 if flags & 16 else 0))
    name = text(body.bytes(body.uint(1 << (flags & 3))))
    return name, body.uint(8)


def _layout(body: Cursor) -> Layout:
    version, kind = body.uint(1), body.uint(1)
    if version not in (3, 4):
        raise FormatError(f"HDF5 data layout version {version}, which JLD2 never writes.")
    if kind == 0:
        return Layout(inline=body.bytes(body.uint(2)))
    if kind == 1:
        return Layout(address=body.uint(8), size=body.uint(8))
    if kind != 2 or version != 4:
        raise FormatError("virtual or B-tree data: JLD2 writes arrays in one piece.")
    flags, rank, width = body.uint(1), body.uint(1), body.uint(1)
    chunk = tuple(body.uint(width) for _ in range(rank))
    if body.uint(1) != 1 or not chunk:
        raise FormatError(
            "an array is stored in several chunks; JLD2 writes one. Save it again in Julia with "
            "jldsave."
        )
    size = math.prod(chunk)
    if flags & 2:
        size = body.uint(8)
        if body.uint(4):
            raise FormatError("a compressed array skips some of its filters: damaged file.")
    return Layout(address=body.uint(8), size=size, chunk=chunk)


def _filters(body: Cursor) -> list[int]:
    version, count = body.uint(1), body.uint(1)
    if version not in (1, 2):
        raise FormatError(f"HDF5 filter pipeline version {version}: the file is damaged.")
    if version == 1:
        body.bytes(6)
    numbers = []
    for _ in range(count):
        number = body.uint(2)
        named = version == 1 or number >= 256
        name = body.uint(2) if named else 0
        body.bytes(2)
        values = body.uint(2)
        body.bytes((name + 7) // 8 * 8 if version == 1 else name)
        body.bytes(4 * values + (4 if version == 1 and values % 2 else 0))
        numbers.append(number)
    return numbers


def _attribute(body: Cursor) -> tuple[str, Attribute]:
    version, flags = body.uint(1), body.uint(1)
    if not 1 <= version <= 3:
        raise FormatError(f"HDF5 attribute version {version}: the file is damaged.")
    sizes = [body.uint(2) for _ in range(3)]
    if version == 3:
        body.bytes(1)
    parts = []
    for size in sizes:
        parts.append(body.bytes(size))
        if version == 1:
            body.bytes(-size % 8)
    name, datatype, space = parts
    attribute = Attribute(
        _datatype_or_committed(Cursor(datatype), bool(flags & 1) and version > 1),
        _dataspace(Cursor(space)),
        body.bytes(len(body.data) - body.at),
    )
    return text(name.rstrip(b"\0")), attribute


def _datatype_or_committed(body: Cursor, committed: bool) -> Datatype | Committed:
    if not committed:
        return run(_datatype(body))
    version, kind = body.uint(1), body.uint(1)
    if version not in (2, 3) or (version == 3 and kind != 2):
        raise FormatError("a datatype is shared in a way that JLD2 never uses.")
    return Committed(body.uint(8))


def _datatype(body: Cursor) -> Task:
    """One datatype; compounds and sequences hold others, to any depth."""
    first = body.uint(1)
    version, kind = first >> 4, first & 15
    bits = body.uint(3)
    size = body.uint(4)
    if size == 0 and kind != 3:
        raise FormatError("a datatype has no size: the file is damaged.")
    match kind:
        case 0 | 4:
            body.bytes(4)
            letter = "?" if kind == 4 and size == 1 else "i" if bits & 8 else "u"
            return _number(letter, size, bits)
        case 1:
            body.bytes(12)
            return _number("f", size, bits)
        case 3:
            return Text(size)
        case 5:
            body.bytes((bits & 0xFF) + (-(bits & 0xFF)) % 8)
            return Opaque(size)
        case 6:
            return (yield _compound(body, version, bits & 0xFFFF, size))
        case 7:
            if bits & 15 or size != 8:
                raise FormatError("a region reference: JLD2 never writes one.")
            return Reference()
        case 9:
            if size != 16:
                raise FormatError("a variable-length datatype of the wrong size: damaged file.")
            base = yield _datatype(body)
            return Vlen(size, base, bool(bits & 1))
    raise FormatError(f"HDF5 datatype class {kind}, which JLD2 never writes.")


def _number(letter: str, size: int, bits: int) -> Number | Opaque:
    order = ">" if bits & 1 else "<"
    if size not in {"f": (2, 4, 8), "?": (1,)}.get(letter, (1, 2, 4, 8)):
        return Opaque(size)  # Int128 and the like
    return Number(size, np.dtype("?" if letter == "?" else f"{order}{letter}{size}"))


def _compound(body: Cursor, version: int, count: int, size: int) -> Task:
    if version < 3:
        raise FormatError(f"HDF5 compound datatype version {version}: JLD2 writes version 3.")
    width = 1 if size < 1 << 8 else 2 if size < 1 << 16 else 4  # HDF5 itself would use 3 of these 4
    result = Compound(size)
    filled = 0
    for _ in range(count):
        name = body.string()
        offset = body.uint(width)
        member = yield _datatype(body)
        if offset < filled or offset + member.size > size:
            raise FormatError(f"member {name!r} of a compound overlaps another: damaged file.")
        filled = offset + member.size
        result.names.append(name)
        result.offsets.append(offset)
        result.members.append(member)
    return result
