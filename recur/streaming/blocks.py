"""The memory of many streams: columns of numbers in blocks that never move."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

Name: TypeAlias = "str | int"


class Piece(NamedTuple):
    """Some slots that lie in one block.

    rows  their places in the block: a slice, or indices
    at    their places in the whole selection
    """

    block: dict[Name, np.ndarray]
    rows: Any
    at: Any


class Places:
    """Some slots, sorted out by block: what every access needs to know, found out once."""

    __slots__ = ("count", "index", "pieces")

    def __init__(self, index: np.ndarray, pieces: list[Piece]) -> None:
        self.index = index
        self.count = len(index)
        self.pieces = pieces

    @property
    def whole(self) -> Piece | None:
        """The piece, if the slots follow one another in one block."""
        first = self.pieces[0] if len(self.pieces) == 1 else None
        return first if first is not None and isinstance(first.rows, slice) else None


class Blocks:
    """Slots, each with one row in every column; rows of a column lie packed in each block.

    columns  {name: (shape of a row, dtype)}
    first    slots of the first block; every further block doubles the total

    Slots that were given back are used again.  What they held stays until it is overwritten.
    """

    def __init__(self, columns: dict[Name, tuple[tuple[int, ...], np.dtype]], first: int) -> None:
        self.columns = dict(columns)
        self._first = first
        self._starts: list[int] = []  # the first slot of every block
        self._blocks: list[dict[Name, np.ndarray]] = []
        self._capacity = 0
        self._used = 0  # slots from here on were never used
        self._free: list[int] = []

    @property
    def capacity(self) -> int:
        """How many slots there is memory for."""
        return self._capacity

    def take(self) -> int:
        """A slot that nobody uses; its row holds anything."""
        if self._free:
            return self._free.pop()
        if self._used == self._capacity:
            self._grow()
        self._used += 1
        return self._used - 1

    def give_back(self, slot: int) -> None:
        """Lets the slot be taken again."""
        self._free.append(slot)

    def _grow(self) -> None:
        size = self._capacity or self._first
        block = {
            name: np.empty((size, *shape), dtype) for name, (shape, dtype) in self.columns.items()
        }
        self._blocks.append(block)
        self._starts.append(self._capacity)
        self._capacity += size

    def add_column(self, name: Name, shape: tuple[int, ...], dtype: np.dtype) -> None:
        """A new column; its rows hold anything."""
        self.columns[name] = shape, dtype
        for block in self._blocks:
            block[name] = np.empty((len(block["step"]), *shape), dtype)

    def places(self, index: np.ndarray) -> Places:
        """What accesses to these slots need; index (n,) int64, without repeats."""
        if len(index) == 0:
            return Places(index, [])
        if len(self._blocks) == 1:
            return Places(index, [Piece(self._blocks[0], _rows(index), slice(None))])
        number = np.searchsorted(self._starts, index, side="right") - 1
        found = []
        for n in np.unique(number).tolist():
            at = np.flatnonzero(number == n)
            rows = index[at] - self._starts[n]
            found.append(Piece(self._blocks[n], _rows(rows), _rows(at)))
        return Places(index, found)

    def one(self, slot: int) -> tuple[dict[Name, np.ndarray], int]:
        """The block of a slot, and its row there."""
        n = len(self._starts) - 1
        while self._starts[n] > slot:
            n -= 1
        return self._blocks[n], slot - self._starts[n]

    def get(self, name: Name, places: Places, out: np.ndarray | None = None) -> np.ndarray:
        """The rows of a column at these places: a copy, or a view if they are one stretch."""
        if len(places.pieces) == 1:
            block, rows, _ = places.pieces[0]
            if isinstance(rows, slice) and out is None:
                return block[name][rows]
            return np.take(block[name], _indices(rows), 0, out, "clip")
        shape, dtype = self.columns[name]
        if out is None:
            out = np.empty((places.count, *shape), dtype)
        for block, rows, at in places.pieces:
            out[at] = block[name][rows]
        return out

    def put(self, name: Name, places: Places, new: Any) -> None:
        """Writes rows, (n, ...) or one for all."""
        for block, rows, at in places.pieces:
            scalar = not isinstance(new, np.ndarray) or new.ndim == 0
            block[name][rows] = new if scalar else new[at]

    def add(self, name: Name, places: Places, n: int) -> None:
        """Adds `n` to a column of numbers."""
        for block, rows, _ in places.pieces:
            block[name][rows] += n

    def each(self, name: Name) -> Iterator[tuple[int, np.ndarray]]:
        """The first slot and the column of every block, up to the last slot that was ever used."""
        for start, block in zip(self._starts, self._blocks, strict=True):
            yield start, block[name][: max(self._used - start, 0)]


def _rows(index: np.ndarray) -> Any:
    """Indices as a slice, if they follow one another."""
    first, n = int(index[0]), len(index)
    if int(index[-1]) - first == n - 1 and (n < 3 or bool((np.diff(index) == 1).all())):
        return slice(first, first + n)
    return index


def _indices(rows: Any) -> Any:
    return np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows


def hashes(rows: np.ndarray) -> np.ndarray:
    """A hash of each row, (n,) uint64, never 0; rows (n, ...) of any dtype."""
    n = len(rows)
    if n == 0:
        return np.empty(0, np.uint64)
    words = np.ascontiguousarray(rows).reshape(n, -1).view(np.uint8)
    padded = np.zeros((n, -(-max(words.shape[1], 1) // 4) * 4), np.uint8)
    padded[:, : words.shape[1]] = words
    values = padded.view(np.uint32).astype(np.uint64)
    with np.errstate(over="ignore"):
        mixed = (values + np.uint64(1)) * _odd(values.shape[1])
        mixed ^= mixed >> np.uint64(29)
        total = (mixed * np.uint64(0xBF58476D1CE4E5B9)).sum(axis=1, dtype=np.uint64)
        total ^= total >> np.uint64(32)
    return total | np.uint64(1)


def _odd(n: int) -> np.ndarray:
    """n odd numbers of 64 bits, always the same."""
    steps = np.arange(1, n + 1, dtype=np.uint64)
    return (steps * np.uint64(0x9E3779B97F4A7C15)) | np.uint64(1)


def rows_of(state: Sequence[np.ndarray], at: int) -> list[np.ndarray]:
    """Row `at` of each part, (1, size), copied."""
    return [part[at : at + 1].copy() for part in state]
