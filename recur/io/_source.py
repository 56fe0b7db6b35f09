"""Bounded reading of one file: small pieces through a block cache, arrays straight into memory.

A reader of a binary format asks for byte ranges.  Ranges that describe structure are short and lie
close together, so they come from cached blocks.  The bytes of an array are read once, from the file
into the memory that the array will own: a 300 MB file costs 300 MB and one pass, every array is
aligned and writable, and the file may be deleted or replaced afterwards.  A memory map would save
the copy, but a file that shrinks under a map kills the process.
"""

from __future__ import annotations

from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from recur.errors import FormatError

BLOCK = 1 << 16
"""Bytes of one cached block."""

CACHED_BLOCKS = 64


class Source:
    """Byte ranges of a seekable binary file whose size is fixed when the reader starts."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = file.seek(0, 2)
        self._blocks: dict[int, bytes] = {}

    def check(self, start: int, count: int) -> None:
        """Raise `FormatError` unless the `count` bytes from `start` lie inside the file."""
        if start < 0 or count < 0 or start + count > self.size:
            raise FormatError(
                f"the file points at bytes {start} to {start + count}, but it holds only "
                f"{self.size}: it is damaged or was cut short."
            )

    def take(self, start: int, count: int) -> bytes:
        """The `count` bytes from `start`, through the block cache."""
        self.check(start, count)
        number, offset = divmod(start, BLOCK)
        if offset + count <= BLOCK:
            return self._block(number)[offset : offset + count]
        return self.array(start, count).tobytes()

    def window(self, start: int) -> bytes:
        """Some bytes from `start` on: at least one, at most one block."""
        self.check(start, 1)
        number, offset = divmod(start, BLOCK)
        return self._block(number)[offset:]

    def array(self, start: int, count: int) -> NDArray[np.uint8]:
        """The `count` bytes from `start` as an array that owns its memory."""
        self.check(start, count)
        number, offset = divmod(start, BLOCK)
        if offset + count <= BLOCK and number in self._blocks:
            return np.frombuffer(self._blocks[number], np.uint8, count, offset).copy()
        data = np.empty(count, np.uint8)
        self._file.seek(start)
        view, done = data.data, 0
        while done < count:
            got = self._file.readinto(view[done:])  # type: ignore[attr-defined]
            if not got:
                raise FormatError("the file became shorter while it was being read.")
            done += got
        return data

    def _block(self, number: int) -> bytes:
        block = self._blocks.get(number)
        if block is None:
            if len(self._blocks) == CACHED_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
            start = number * BLOCK
            block = self.array(start, min(BLOCK, self.size - start)).tobytes()
            self._blocks[number] = block
        return block
