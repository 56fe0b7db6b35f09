"""The part of HDF5 that JLD2.jl writes: objects by address, their data, the global heap.

Every byte range that is followed is paid for from an allowance of a few times the file's size, so a
small file whose parts point at each other cannot cost much time or memory.
"""

from __future__ import annotations

import math
import zlib

import numpy as np
from numpy.typing import NDArray

from recur.errors import FormatError
from recur.io._hdf5_headers import Cursor, Layout, Object, read_message
from recur.io._source import Source

_CHECKED = 1024
"""Header blocks up to this many bytes have their checksum verified.  Longer ones hold array data in
line; the sum costs Python 0.2 µs a byte, and data outside headers has none at all."""

_DEFLATE_RATIO = 1032
"""Deflate cannot shrink data by more than this."""


class Hdf5:
    """An HDF5 file whose superblock (version 2) starts at `base`, to which addresses are relative.

    `checksums=False` skips their verification (for tests that damage a file behind them).
    """

    def __init__(self, source: Source, base: int, checksums: bool = True) -> None:
        self._source = source
        self._base = base
        self._checksums = checksums
        self._allowance = 4 * source.size + (1 << 16)
        self._heaps: dict[int, dict[int, tuple[int, int]]] = {}
        block = Cursor(self._take(0, 48), 8)
        version, offsets, lengths, _ = (block.uint(1) for _ in range(4))
        if (version, offsets, lengths) not in ((2, 8, 8), (3, 8, 8)):
            raise FormatError(
                f"HDF5 superblock version {version} with {8 * offsets}-bit addresses: JLD2 writes "
                "version 2 with 64-bit addresses."
            )
        if block.uint(8) != base:
            raise FormatError("the HDF5 base address is wrong: the file is damaged.")
        self._verify(block.data)
        block.at += 16
        self.root = block.uint(8)

    def spend(self, count: int) -> None:
        """Pay for `count` bytes of work."""
        self._allowance -= count
        if self._allowance < 0:
            raise FormatError(
                "the parts of this file overlap or point at each other so often that reading it "
                "would take far more than its size: it is damaged or was made to do harm."
            )

    def _take(self, address: int, count: int) -> bytes:
        self.spend(count)
        return self._source.take(self._base + address, count)

    def _verify(self, block: bytes) -> None:
        if self._checksums and len(block) <= _CHECKED:
            stored = int.from_bytes(block[-4:], "little")
            if lookup3(block[:-4]) != stored:
                raise FormatError("a header fails its checksum: the file is damaged.")

    def object(self, address: int) -> Object:
        """The header at `address`, with its continuations."""
        start = Cursor(self._take(address, 16))
        if start.bytes(4) != b"OHDR" or start.uint(1) != 2:
            raise FormatError(
                f"there is no HDF5 object header (version 2) at address {address}: the file is "
                "damaged, or another program than JLD2 wrote it."
            )
        flags = start.uint(1)
        skip = 6 + (16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0)
        width = 1 << (flags & 3)
        size = Cursor(self._take(address + skip, width)).uint(width)
        blocks = [(address, skip + width, skip + width + size + 4)]
        result = Object()
        seen = {address}
        while blocks:
            address, skip, count = blocks.pop(0)
            block = self._take(address, count)
            self._verify(block)
            body = Cursor(block[:-4], skip)
            order = 2 if flags & 4 else 0
            while body.at + 4 + order <= len(body.data):
                kind, length, message_flags = body.uint(1), body.uint(2), body.uint(1)
                body.at += order
                message = Cursor(body.bytes(length))
                if kind == 0x10:
                    address, count = message.uint(8), message.uint(8)
                    if address in seen or count < 8:
                        raise FormatError("a header is continued by itself: the file is damaged.")
                    seen.add(address)
                    if self._take(address, 4) != b"OCHK":
                        raise FormatError("a continued header is missing: the file is damaged.")
                    blocks.append((address, 4, count))
                else:
                    read_message(result, kind, message_flags, message)
        return result

    def data(self, obj: Object, itemsize: int, count: int) -> NDArray[np.uint8]:
        """The bytes of the `count` elements of a dataset; the array owns its memory."""
        layout = obj.layout
        if layout is None:
            raise FormatError("a dataset does not say where its data is: the file is damaged.")
        expected = itemsize * count
        if layout.chunk is not None:
            return self._chunk(obj, layout, itemsize, count)
        if obj.filters:
            raise FormatError("a filtered dataset without chunks: JLD2 never writes one.")
        size = layout.size if layout.inline is None else len(layout.inline)
        if size != expected:
            raise FormatError(
                f"a dataset has {size} bytes where {count} elements of {itemsize} bytes are needed."
            )
        if layout.inline is not None:
            return np.frombuffer(layout.inline, np.uint8).copy()
        return self._stored(layout.address, expected) if expected else np.empty(0, np.uint8)

    def _stored(self, address: int, count: int) -> NDArray[np.uint8]:
        self.spend(count)
        return self._source.array(self._base + address, count)

    def _chunk(self, obj: Object, layout: Layout, itemsize: int, count: int) -> NDArray[np.uint8]:
        chunk = layout.chunk or ()
        if math.prod(chunk) != itemsize * count or chunk[-1] != itemsize:
            raise FormatError(
                "an array is stored in several chunks; JLD2 writes one. Save it again in Julia "
                "with jldsave."
            )
        if not obj.filters:
            return self._stored(layout.address, itemsize * count)
        if itemsize * count > _DEFLATE_RATIO * (layout.size + 1):
            raise FormatError("a compressed array claims more data than its bytes can hold.")
        data = self._stored(layout.address, layout.size)
        for number in reversed(obj.filters):
            data = _unfilter(number, data, itemsize, count)
        return data

    def heap(self, address: int, index: int) -> bytes:
        """The bytes of object `index` of the global heap collection at `address`."""
        if address not in self._heaps:
            self._heaps[address] = self._collection(address)
        try:
            start, size = self._heaps[address][index]
        except KeyError:
            raise FormatError("a string or list points at a heap object that is missing.") from None
        return self._take(start, size)

    def _collection(self, address: int) -> dict[int, tuple[int, int]]:
        head = Cursor(self._take(address, 16))
        if head.bytes(4) != b"GCOL" or head.uint(4) & 0xFF != 1:
            raise FormatError(f"there is no global heap at address {address}: damaged file.")
        end = address + head.uint(8)
        found: dict[int, tuple[int, int]] = {}
        at = address + 16
        while at + 16 <= end:
            head = Cursor(self._take(at, 16))
            index, _, size = head.uint(2), head.uint(6), head.uint(8)
            if index == 0:
                break
            if size > end - at - 16:
                raise FormatError("a heap object runs past its heap: the file is damaged.")
            found[index] = (at + 16, size)
            at += 16 + (size + 7) // 8 * 8
        return found


def _unfilter(number: int, data: NDArray[np.uint8], itemsize: int, count: int) -> NDArray[np.uint8]:
    if number == 1:
        return _inflate(data, itemsize * count)
    if number == 2:
        if data.size != itemsize * count:
            raise FormatError("shuffled data has the wrong size: the file is damaged.")
        return np.ascontiguousarray(data.reshape(itemsize, count).T).reshape(-1)
    name = {307: "bzip2", 32001: "Blosc", 32004: "LZ4", 32015: "Zstandard"}.get(number, "unknown")
    raise FormatError(
        f"an array is compressed with HDF5 filter {number} ({name}); deflate is read. Save the "
        "file again in Julia without compression, or with compress=true."
    )


def _inflate(data: NDArray[np.uint8], expected: int) -> NDArray[np.uint8]:
    result = np.empty(expected, np.uint8)
    inflater = zlib.decompressobj()
    done, pending = 0, data.data
    try:
        while not inflater.eof:
            piece = inflater.decompress(pending, 1 << 20)
            pending = inflater.unconsumed_tail  # type: ignore[assignment]
            if done + len(piece) > expected or not (piece or pending or inflater.eof):
                break
            result[done : done + len(piece)] = np.frombuffer(piece, np.uint8)
            done += len(piece)
    except zlib.error as error:
        raise FormatError(f"an array cannot be decompressed ({error}): damaged file.") from None
    if done != expected or not inflater.eof:
        raise FormatError("a compressed array has the wrong size: the file is damaged.")
    return result


# ---- checksum --------------------------------------------------------------------------------


def lookup3(data: bytes) -> int:
    """Bob Jenkins' lookup3 hash (`hashlittle`, May 2006, public domain), with which HDF5 sums."""
    mask = 0xFFFFFFFF
    a = b = c = (0xDEADBEEF + len(data)) & mask
    whole = max(len(data) - 1, 0) // 12 * 12
    words = np.frombuffer(data[:whole], "<u4").tolist()
    for i in range(0, len(words), 3):
        a, b, c = (a + words[i]) & mask, (b + words[i + 1]) & mask, (c + words[i + 2]) & mask
        for turn in (4, 6, 8, 16, 19, 4):
            a = (a - c) & mask
            a ^= (c << turn | c >> (32 - turn)) & mask
            c = (c + b) & mask
            a, b, c = b, c, a
    tail = data[whole:]
    if not tail:
        return c
    tail += bytes(12 - len(tail))
    a = (a + int.from_bytes(tail[0:4], "little")) & mask
    b = (b + int.from_bytes(tail[4:8], "little")) & mask
    c = (c + int.from_bytes(tail[8:12], "little")) & mask
    for turn in (14, 11, 25, 16, 4, 14, 24):
        c ^= b
        c = (c - (b << turn | b >> (32 - turn))) & mask
        a, b, c = b, c, a
    return b
