"""A history of many steps: a band for each stretch that gradient crosses without a cut."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from recur.inspect.history import Call, History, Loss
from recur.inspect.sheet import (
    GRADIENT,
    INK,
    PALE_INK,
    REACHED_FILL,
    UNREACHED_FILL,
    UNUSED,
    VALUE,
    Sheet,
    brought_in,
    continues,
)

HALF = 12.0  # half the height of a band
CURTAIN = "#eef4ff"  # where gradient crosses from row to row
WIDEST, TOGETHER = 28.0, 1080.0  # a column, and all of them


class Band(NamedTuple):
    """Steps [start, stop) of one row between which history is whole, and what lies before them."""

    start: int
    stop: int
    reached: bool
    before: str  # "cut", "init", "learned", "value", "handed", "nothing", "linked"
    backwards: bool = False  # what lies before is then at the right


class Bands(Sheet):
    """Stretches of steps as bands, with the gradient's way as one long arrow in each."""

    row_height = 56.0
    lane_height = 40.0
    most_lanes = 6
    start_room = 30.0
    shows_values = False

    def __init__(self, history: History, names: dict[Any, str], with_legend: bool) -> None:
        self.column_width = min(WIDEST, TOGETHER / max(history.columns, 1))
        super().__init__(history, names, with_legend)

    def draw(self) -> None:
        self.axis(_nice(40 / self.column_width))
        self._curtains()
        self._losses()
        for row, layer in enumerate(self.layers):
            bands = _bands(self.history.calls[layer])
            for band in bands:
                self._band(row, band)
            for band in bands:
                self._mark(row, band)
            if "cut" in self.history.after.get(layer, ()):
                self.cut_mark(self._edge(self.history.calls[layer][-1].end), self.y(row), HALF + 5)
        for row, call in self.place.values():
            for other in call.state_from:
                if self.row_of(other) != row:
                    start = (self._edge(call.column), self.y(row))
                    tip = (self._edge(other.end), self.y(self.row_of(other)))
                    self.picture.arrow(start, tip, GRADIENT if call.reached[0] else UNUSED, 2.0)

    def _edge(self, column: float) -> float:
        """The left side of a column."""
        return self.x(column - 0.5)

    def _band(self, row: int, band: Band) -> None:
        y = self.y(row)
        left, right = self._edge(band.start), self._edge(band.stop)
        fill = REACHED_FILL if band.reached else UNREACHED_FILL
        n = band.stop - band.start
        steps = f"{n} step{'s' * (n != 1)}"
        title = f"{self.names[row]}, steps {band.start + 1} to {band.stop}"
        self.picture.box(left, y - HALF, right - left, 2 * HALF, fill=fill, title=title)
        colour = GRADIENT if band.reached else UNUSED
        begin, end = (right, left) if band.backwards else (left, right)
        if right - left > 8:
            inward = 1 if end > begin else -1
            tip = (begin + 3 * inward, y + 5)
            self.picture.arrow((end - inward, y + 5), tip, colour, 1.6, head=6)
        if right - left > 9 + 6 * len(steps):
            self.picture.text(
                (left + right) / 2, y - 1, steps, size=10, anchor="middle", fill=PALE_INK
            )

    def _mark(self, row: int, band: Band) -> None:
        """What lies before a band, at the end where it begins."""
        y, left, right = self.y(row), self._edge(band.start), self._edge(band.stop)
        begin = right if band.backwards else left
        if band.before == "cut":
            self.cut_mark(begin, y, HALF + 5, min(2.0, 0.5 * (right - left)))
        elif band.before in ("init", "learned"):
            self.init_mark(begin, y, band.before == "learned", 5)
        elif band.before == "value":
            self.value_mark(begin, y, 4)
        elif band.before == "nothing":
            self.picture.line([(begin, y - HALF), (begin, y + HALF)], VALUE, 1.2)

    # ------------------------------------------------------------ between rows

    def _curtains(self) -> None:
        """Between two rows, the columns in which gradient goes from one to the other."""
        columns: dict[tuple[int, int], set[int]] = {}
        for row, call in self.place.values():
            for other in call.input_from:
                other_row = self.row_of(other)
                if other_row != row:
                    reached = filter(call.reached_at, range(call.column, call.end))
                    columns.setdefault((row, other_row), set()).update(reached)
        for (row, other_row), steps in columns.items():
            side = HALF if other_row < row else -HALF
            self._curtain(steps, self.y(row) + side, self.y(other_row) - side)

    def _curtain(self, columns: Iterable[int], start: float, tip: float) -> None:
        for first, stop in _runs(columns):
            left, right = self._edge(first), self._edge(stop)
            self.picture.box(left, min(start, tip), right - left, abs(tip - start), fill=CURTAIN)
            arrows = max(1, round((right - left) / 90))
            for i in range(arrows):
                x = left + (right - left) * (i + 0.5) / arrows
                self.picture.arrow((x, start), (x, tip), GRADIENT, 1.2, head=5)

    def _losses(self) -> None:
        losses = self.history.losses
        columns = sorted({loss.column for loss in losses})
        apart = min((b - a for a, b in itertools.pairwise(columns)), default=99)
        labelled = apart * self.column_width >= 26 and len(columns) == len(losses)
        for number, (loss, lane) in enumerate(zip(losses, self.lanes, strict=True), start=1):
            self._loss(loss, lane, f"L{number}" if labelled else "", number)
        if losses and not labelled:
            x = self.x(columns[-1]) + 8
            words = f"{len(losses)} losses"
            x = min(x, self.picture.width - 6.2 * len(words) - 4)
            self.picture.text(x, self.loss_y(0) - 12, words, size=11, fill=PALE_INK)

    def _loss(self, loss: Loss, lane: int, label: str, number: int) -> None:
        x, y = self.x(loss.column), self.loss_y(lane)
        by_row: dict[int, set[int]] = {}
        for call in loss.calls:
            reached = filter(call.reached_at, range(call.column, call.end))
            by_row.setdefault(self.row_of(call), set()).update(reached)
        for row, columns in by_row.items():
            tip = self.y(row) - HALF
            if len(columns) == 1:
                width = min(1.2, 0.4 * self.column_width)
                self.picture.arrow((x, y), (x, tip), GRADIENT, width, head=3 + 2 * bool(label))
                continue
            bus = y + 13
            left, right = self._edge(min(columns)), self._edge(max(columns) + 1)
            self.picture.line([(x, y), (x, bus)], GRADIENT, 1.6)
            inset = min(2.0, (right - left) / 4)
            self.picture.line([(left + inset, bus), (max(right - inset, x), bus)], GRADIENT, 1.6)
            self._curtain(columns, bus, tip)
        r = 10.0 if label else min(3.0, max(0.8, 0.35 * self.column_width))
        self.picture.disc(x, y, r, fill="#ffffff", stroke=INK, width=1.2, title=f"loss {number}")
        if label:
            self.picture.text(x, y + 4, label, size=10, anchor="middle", bold=True)


def _bands(calls: Sequence[Call]) -> list[Band]:
    """The steps of one row, cut up wherever history ends or losses no longer reach."""
    bands: list[Band] = []
    for i, call in enumerate(calls):
        before = _before(calls, i)
        bounds = [call.column, *sorted(call.cut_columns), call.end]
        for start, stop in itertools.pairwise(bounds):
            first = stop == call.end if call.backwards else start == call.column
            kind = before if first else "cut"
            reached = call.reached_at(start)
            last = bands[-1] if bands else None
            if kind == "linked" and last is not None and last.reached == reached:
                bands[-1] = last._replace(stop=stop)
            else:
                bands.append(Band(start, stop, reached, kind, call.backwards))
    return bands


def _before(calls: Sequence[Call], i: int) -> str:
    call = calls[i]
    if call.at_start:
        return "learned" if call.learned else "init"
    if call.backwards:
        return "value"
    if continues(calls, i) and calls[i - 1].end == call.column:
        return "linked"
    if "cut" in call.marks:
        return "cut"
    if call.state_from or call.earlier:
        return "handed"
    return "value" if brought_in(calls, i) else "nothing"


def _runs(columns: Iterable[int]) -> list[tuple[int, int]]:
    """Unbroken runs [first, stop) of numbers."""
    runs: list[tuple[int, int]] = []
    for column in sorted(columns):
        if runs and runs[-1][1] == column:
            runs[-1] = (runs[-1][0], column + 1)
        else:
            runs.append((column, column + 1))
    return runs


def _nice(least: float) -> int:
    """The first of 1, 2, 5, 10, 20, 50… that is at least this."""
    scale = 1
    while True:
        for digit in (1, 2, 5):
            if digit * scale >= least:
                return digit * scale
        scale *= 10
