"""The safetensors format: named arrays and a few strings in one file, and nothing that runs.

    8 bytes    length n of the header, little-endian
    n bytes    the header: JSON, {name: {"dtype", "shape", "data_offsets"}, "__metadata__": {..}}
    the rest   the arrays, C order, little-endian, one after the other without holes

Nothing in a file is believed before it is checked against the file's own size, so a damaged or
hostile file costs no more memory than it has bytes, give or take the constant factor of a Python
object over its description.

Source: github.com/huggingface/safetensors, the section "Format" of its README.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from recur.errors import FormatError
from recur.files import AnyPath, atomic_writer

HEADER_LIMIT = 100_000_000  # the format's own
_DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",  # NumPy has no bfloat16: read as float32, which holds each value exactly
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "u1",
    "BOOL": "?",
}
_CODES = {np.dtype(name): code for code, name in _DTYPES.items() if code != "BF16"}
_METADATA = "__metadata__"


@dataclass(frozen=True)
class Entry:
    """One array of a file: its dtype as the format names it, its shape, its bytes' place."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """What a file holds: its arrays by name, in the order of the header, and its strings."""

    entries: dict[str, Entry]
    metadata: dict[str, str]
    offset: int  # of the first array's first byte


def read(source: AnyPath | BinaryIO) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays of a file by name, new and writable, and its metadata.

    `source` is a path or a binary file that can seek.  bfloat16 arrays come as float32.

    Raises FormatError if the file is damaged, cut short or not a safetensors file; OSError as
    `open` does.
    """
    with _opened(source) as (file, name):
        header = _read_header(file, name)
        by_place = sorted(header.entries.items(), key=lambda item: item[1].start)
        file.seek(header.offset)
        found = {key: _read_array(file, entry, key, name) for key, entry in by_place}
    return {key: found[key] for key in header.entries}, header.metadata


def read_header(source: AnyPath | BinaryIO) -> Header:
    """What a file holds, checked against its size, without its arrays.  Errors as `read`."""
    with _opened(source) as (file, name):
        return _read_header(file, name)


def write(
    path: AnyPath, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    """Write arrays and metadata to `path`; an old file stays until all of the new one is there.

    The header keeps the order of `arrays`; the data lies by falling item size, so that each array
    is aligned for readers that map the file.

    Raises TypeError for a dtype that the format does not have, ValueError for a name or a string
    that cannot be written; `path` is then as it was.
    """
    arrays = {_checked_name(name): np.asarray(array) for name, array in arrays.items()}
    codes = {name: _code(name, array.dtype) for name, array in arrays.items()}
    by_size = sorted(arrays, key=lambda name: -arrays[name].itemsize)
    places, end = {}, 0
    for name in by_size:
        places[name] = [end, end := end + arrays[name].nbytes]
    header: dict[str, Any] = {}
    if metadata:
        header[_METADATA] = _checked_metadata(metadata)
    for name, array in arrays.items():
        place = {"shape": list(array.shape), "data_offsets": places[name]}
        header[name] = {"dtype": codes[name], **place}
    text = _encoded(json.dumps(header, separators=(",", ":"), ensure_ascii=False), "a name")
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_LIMIT:
        raise ValueError(
            f"{path}: the header has {len(text)} bytes, expected at most {HEADER_LIMIT}. "
            "Nothing was written."
        )
    with atomic_writer(path) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in by_size:
            array = arrays[name]
            little = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
            file.write(little.reshape(-1).view(np.uint8).data)


def _checked_name(name: str) -> str:
    if not isinstance(name, str) or name == _METADATA:
        raise ValueError(f"{name!r} cannot name an array in a safetensors file. Rename it.")
    return name


def _checked_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    for key, text in metadata.items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise ValueError(
                f"metadata {key!r}: {text!r} is not a string by a string. Convert it, "
                "for example with json.dumps."
            )
        _encoded(key + text, f"metadata {key!r}")
    return dict(metadata)


def _encoded(text: str, what: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} holds half of a surrogate pair: {error}") from None


def _code(name: str, dtype: np.dtype) -> str:
    code = _CODES.get(dtype.newbyteorder("<"))
    if code is None:
        raise TypeError(
            f"{name}: a safetensors file cannot hold dtype {dtype}. Convert it, for example to "
            "float32. Nothing was written."
        )
    return code


@contextmanager
def _opened(source: AnyPath | BinaryIO) -> Iterator[tuple[BinaryIO, str]]:
    if isinstance(source, str | os.PathLike):
        with open(source, "rb") as file:
            yield file, os.fspath(source)
    elif not hasattr(source, "seek"):
        raise TypeError(
            f"a {type(source).__name__} was given, expected the path of a file, or a binary file."
        )
    else:
        yield source, str(getattr(source, "name", "the file"))


def _read_header(file: BinaryIO, name: str) -> Header:
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if size < 10 or length > min(size - 8, HEADER_LIMIT):
        raise FormatError(
            f"{name}: not a whole safetensors file: it has {size} bytes, and its first eight "
            f"announce a header of {length} (at most {HEADER_LIMIT}). Was it cut short?"
        )
    try:
        text = file.read(length).decode()
        if len(text) == 0 or text[0] != "{":
            raise FormatError("it does not start with '{'")
        entries, metadata = _HeaderText(text).parse()
        _check_places(entries, size - 8 - length)
    except UnicodeDecodeError:
        raise FormatError(f"{name}: the safetensors header is not UTF-8 text.") from None
    except FormatError as error:
        raise FormatError(f"{name}: damaged safetensors header: {error}.") from None
    return Header(entries, metadata, 8 + length)


def _check_places(entries: dict[str, Entry], size: int) -> None:
    """Raise FormatError unless the arrays fill the `size` bytes after the header exactly."""
    end = 0
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        dtype = np.dtype(_DTYPES[entry.dtype])
        # NumPy refuses even an empty array if its other sizes multiply past this.
        if math.prod(n for n in entry.shape if n) * dtype.itemsize >= 2**63:
            raise FormatError(f"array {key!r} of shape {list(entry.shape)} is too large")
        nbytes = math.prod(entry.shape) * dtype.itemsize
        if entry.end - entry.start != nbytes:
            raise FormatError(
                f"array {key!r} takes the bytes {entry.start} to {entry.end}, but "
                f"{entry.dtype} of shape {list(entry.shape)} needs {nbytes}"
            )
        if entry.start != end:
            fault = "overlaps the array before it" if entry.start < end else "leaves a hole"
            raise FormatError(f"array {key!r} starts at byte {entry.start}, not {end}: it {fault}")
        end = entry.end
    if end != size:
        raise FormatError(f"its arrays take {end} bytes, the file has {size} for them")


def _read_array(file: BinaryIO, entry: Entry, key: str, name: str) -> np.ndarray:
    array = np.empty(entry.shape, _DTYPES[entry.dtype])
    rest = array.reshape(-1).view(np.uint8).data
    while len(rest):
        count = file.readinto(rest)  # type: ignore[attr-defined]
        if not count:
            raise FormatError(f"{name}: the file ends inside array {key!r}. Did it change?")
        rest = rest[count:]
    if entry.dtype == "BOOL" and array.view(np.uint8).max(initial=0) > 1:
        raise FormatError(f"{name}: array {key!r} holds bytes that are neither true nor false.")
    if entry.dtype == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


class _HeaderText:
    """Reads exactly the JSON that a header may be, in one pass.

    A general JSON reader would build whatever the text describes (a million nested lists) before
    anyone could look at it, and would let a repeated name win in silence.
    """

    _SPACE = re.compile(r"[ \t\n\r]*")
    _NUMBER = re.compile(r"(?:0|[1-9][0-9]{0,18})(?![0-9.eE])", re.ASCII)
    _decode = json.JSONDecoder().raw_decode

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def parse(self) -> tuple[dict[str, Entry], dict[str, str]]:
        entries: dict[str, Entry] = {}
        metadata: dict[str, str] = {}
        for name in self.names("the header"):
            if name == _METADATA:
                metadata = {key: self.string() for key in self.names(_METADATA)}
            else:
                entries[name] = self.entry(name)
        self.space()
        if self.at < len(self.text):
            raise self.fault("the end of the header")
        return entries, metadata

    def entry(self, name: str) -> Entry:
        dtype, shape, place = "", None, None
        for field in self.names(f"array {name!r}"):
            if field == "dtype":
                dtype = self.string()
            elif field == "shape":
                shape = self.numbers(64)
            elif field == "data_offsets":
                place = self.numbers(2)
            else:
                raise FormatError(f"array {name!r} has an unknown field {field!r}")
        if not dtype or shape is None or place is None or len(place) != 2:
            raise FormatError(f"array {name!r} lacks its dtype, shape or data_offsets")
        if dtype not in _DTYPES:
            raise FormatError(f"array {name!r} has dtype {dtype!r}, expected one of {[*_DTYPES]}")
        return Entry(dtype, tuple(shape), *place)

    def names(self, of: str) -> Iterator[str]:
        """Walks one object: yields each name when its value is next to be read."""
        seen: set[str] = set()
        self.take("{")
        while not self.has("}"):
            if seen:
                self.take(",")
            name = self.string()
            if name in seen:
                raise FormatError(f"{of} names {name!r} twice")
            seen.add(name)
            self.take(":")
            yield name
        self.take("}")

    def numbers(self, limit: int) -> list[int]:
        """A list of at most `limit` whole numbers below 2**63."""
        found: list[int] = []
        self.take("[")
        while not self.has("]"):
            if found:
                self.take(",")
            self.space()
            match = self._NUMBER.match(self.text, self.at)
            if match is None or len(found) == limit or (number := int(match[0])) >= 2**63:
                raise self.fault(f"at most {limit} whole numbers")
            found.append(number)
            self.at = match.end()
        self.take("]")
        return found

    def string(self) -> str:
        if not self.has('"'):
            raise self.fault("a string")
        try:
            string, self.at = self._decode(self.text, self.at)
            string.encode()
        except ValueError:  # not JSON, or half of a surrogate pair
            raise self.fault("a whole string") from None
        return string

    def has(self, sign: str) -> bool:
        self.space()
        return self.text.startswith(sign, self.at)

    def take(self, sign: str) -> None:
        if not self.has(sign):
            raise self.fault(repr(sign))
        self.at += 1

    def space(self) -> None:
        match = self._SPACE.match(self.text, self.at)
        assert match is not None
        self.at = match.end()

    def fault(self, expected: str) -> FormatError:
        found = self.text[self.at : self.at + 20]
        return FormatError(f"at character {self.at} stands {found!r}, expected {expected}")
