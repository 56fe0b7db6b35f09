"""The memory of many streams: columns of numbers in blocks that never move."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from recur._kernels import NOTE, SlotStepper, gather_rows, mark_rows, scatter_rows

# Slots that step at once: what a step of them gathers stays in the second cache.
CHUNK = 512

Name: TypeAlias = "str | int"


class Places:
    """Some slots: what every access needs to know, found out once.

    index  (count,) int64
    block  the block that holds them one after the other, and
    rows   the stretch of it that they are; None if there is no such block
    """

    __slots__ = ("block", "count", "index", "rows")

    def __init__(
        self, index: np.ndarray, block: dict[Name, np.ndarray] | None, rows: slice | None
    ) -> None:
        self.index = index
        self.count = len(index)
        self.block = block
        self.rows = rows


Columns: TypeAlias = dict[Name, tuple[tuple[int, ...], np.dtype]]


def slot_columns(parts: Sequence[Any]) -> Columns:
    """The columns of a pool's slots: every part of a state by its number, and what is noted."""
    columns: Columns = {i: ((part.size,), part.dtype) for i, part in enumerate(parts)}
    return columns | {
        "note": ((), NOTE),
        "epoch": ((), np.dtype(np.int64)),
        "due": ((), np.dtype(np.int64)),
        "saved": ((), np.dtype(np.int64)),
        "tag": ((16,), np.dtype(np.uint8)),
    }


class Blocks:
    """Slots, each with one row in every column; rows of a column lie packed in each block.

    columns  {name: (shape of a row, dtype)}; the fields of a record are columns of their own, too
    first    slots of the first block; every further block doubles the total

    Slots that were given back are used again.  What they held stays until it is overwritten.
    """

    def __init__(self, columns: Columns, first: int) -> None:
        self.columns: Columns = dict(columns)
        self._fields: dict[Name, Name] = {}  # of records, by the record's column
        for name, (_, dtype) in columns.items():
            for field in dtype.names or ():
                self._fields[field] = name
                self.columns[field] = (), dtype[field]
        self._first = first
        self._starts: list[int] = []  # the first slot of every block
        self._begins = np.empty(0, np.int64)  # the same as an array
        self._blocks: list[dict[Name, np.ndarray]] = []
        self._arrays: dict[Name, tuple[np.ndarray, ...]] = {}  # of every column, block by block
        self.stepper: SlotStepper | None = None  # steps in these arrays: see `stepper_of`
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
            name: np.empty((size, *shape), dtype)
            for name, (shape, dtype) in self.columns.items()
            if name not in self._fields
        }
        block |= {field: block[record][field] for field, record in self._fields.items()}
        self._blocks.append(block)
        self._starts.append(self._capacity)
        self._begins = np.array(self._starts, np.int64)
        self._capacity += size
        self._line_up()

    def _line_up(self) -> None:
        self.stepper = None
        self._arrays = {name: tuple(b[name] for b in self._blocks) for name in self.columns}

    def add_column(self, name: Name, shape: tuple[int, ...], dtype: np.dtype) -> None:
        """A new column; its rows hold anything."""
        self.columns[name] = shape, dtype
        for block in self._blocks:
            block[name] = np.empty((len(block["step"]), *shape), dtype)
        self._line_up()

    def places(self, index: np.ndarray) -> Places:
        """What accesses to these slots need; index (n,) int64, without repeats."""
        n = len(index)
        if n == 0:
            return Places(index, None, None)
        first, last = int(index[0]), int(index[-1])
        if last - first == n - 1 and (n < 3 or bool((index[1:] - index[:-1] == 1).all())):
            block, row = self.one(first)
            if row + n <= len(block["step"]):
                return Places(index, block, slice(row, row + n))
        return Places(index, None, None)

    @staticmethod
    def part(places: Places, some: slice) -> Places:
        """A stretch of a selection."""
        if places.rows is None:
            return Places(places.index[some], None, None)
        first, n = places.rows.start, places.count
        rows = slice(first + min(some.start, n), first + min(some.stop, n))
        return Places(places.index[some], places.block, rows)

    def one(self, slot: int) -> tuple[dict[Name, np.ndarray], int]:
        """The block of a slot, and its row there."""
        n = len(self._starts) - 1
        while self._starts[n] > slot:
            n -= 1
        return self._blocks[n], slot - self._starts[n]

    def get(self, name: Name, places: Places, out: np.ndarray | None = None) -> np.ndarray:
        """The rows of a column at these places: a copy, or a view if they are one stretch."""
        if places.block is not None and out is None:
            return places.block[name][places.rows]
        if out is None:
            shape, dtype = self.columns[name]
            out = np.empty((places.count, *shape), dtype)
        if places.count == 0:
            return out
        return gather_rows(self._arrays[name], self._begins, places.index, out)

    def put(self, name: Name, places: Places, new: Any) -> None:
        """Writes rows, (n, ...) or one for all."""
        if places.block is not None:
            places.block[name][places.rows] = new
        elif places.count:
            shape, dtype = self.columns[name]
            if not _is_rows(new, (places.count, *shape), dtype):
                rows = np.empty((places.count, *shape), dtype)
                rows[...] = new
                new = rows
            scatter_rows(self._arrays[name], self._begins, places.index, new)

    def mark(self, places: Places, now: float, digests: np.ndarray | None) -> None:
        """Notes that these slots were stepped: see `mark_rows`."""
        if places.count:
            mark_rows(self._arrays["note"], self._begins, places.index, now, digests)

    def stepper_of(self, kernels: list[Any], n: int, **watched: Any) -> SlotStepper:
        """Steps the states, which are the columns 0 to n - 1, and notes all about it."""
        states = tuple(self._arrays[i] for i in range(n))
        answers, notes = self._arrays["answer"], self._arrays["note"]
        return SlotStepper(kernels, self._begins, states, answers, notes, CHUNK, **watched)

    def each(self, name: Name) -> Iterator[tuple[int, np.ndarray]]:
        """The first slot and the column of every block, up to the last slot that was ever used."""
        for start, block in zip(self._starts, self._blocks, strict=True):
            yield start, block[name][: max(self._used - start, 0)]


def _is_rows(new: Any, shape: tuple[int, ...], dtype: np.dtype) -> bool:
    return (
        isinstance(new, np.ndarray)
        and new.shape == shape
        and new.dtype == dtype
        and new.flags.c_contiguous
    )


def rows_of(state: Sequence[np.ndarray], at: int) -> list[np.ndarray]:
    """Row `at` of each part, (1, size), copied."""
    return [part[at : at + 1].copy() for part in state]
