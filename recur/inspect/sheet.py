"""What both ways of drawing a history share: where things stand, colours, labels and the legend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from recur.inspect.history import Call, History, Loss
from recur.inspect.picture import Picture

GRADIENT = "#1f6feb"
UNUSED = "#c3c8ce"  # recorded, but no loss came this way
VALUE = "#8b929a"
CUT = "#d1242f"
LEARNED = "#1a7f37"
REACHED_FILL = "#dbe9ff"
UNREACHED_FILL = "#f4f5f6"
INK = "#222222"
PALE_INK = "#666c73"

LETTER = 6.6  # width of a letter at size 12, roughly
LEGEND_LINE = 20


class Sheet:
    """A picture being drawn: layers are rows, the first at the bottom; steps run to the right.

    A subclass sets the measures and draws rows, links between them, and losses.
    """

    column_width: float
    row_height: float
    lane_height: float
    most_lanes: int
    start_room: float  # between the names of the layers and the first step
    shows_values = True  # whether states that go on have a line of their own

    def __init__(self, history: History, names: dict[Any, str], with_legend: bool) -> None:
        self.history = history
        self.layers = list(history.calls)
        self.names = [names.get(layer, layer.title) for layer in self.layers]
        self.lanes = _lanes(history.losses, self.most_lanes)
        lanes = 1 + max(self.lanes, default=-1)
        letters = max(map(len, self.names), default=0)
        self.left = 16 + LETTER * letters + self.start_room
        self.top = 16 + self.lane_height * lanes
        self.bottom = self.top + self.row_height * len(self.layers)
        right = self.left + self.column_width * history.columns + 24
        legend = self.legend() if with_legend else []
        wide = max(right, 560.0) if legend else right
        places, lines = _flow([words for _, words in legend], wide)
        below = 36 + LEGEND_LINE * lines if legend else 24
        self.picture = Picture(wide, self.bottom + below, self._title())
        self.place = {
            id(call): (row, call)
            for row, layer in enumerate(self.layers)
            for call in history.calls[layer]
        }
        for (mark, words), (x, line) in zip(legend, places, strict=True):
            y = self.bottom + 40 + LEGEND_LINE * line
            mark(x, y)
            self.picture.text(x + 30, y + 4, words, size=11, fill=PALE_INK)
        for row, name in enumerate(self.names):
            self.picture.text(12, self.y(row) + 4, name, bold=True)

    def _title(self) -> str:
        layers, steps, losses = len(self.layers), self.history.columns, len(self.history.losses)
        return (
            f"{layers} recurrent layer{'s' * (layers != 1)}, {steps} step{'s' * (steps != 1)}, "
            f"{losses} loss{'es' * (losses != 1)}"
        )

    def x(self, column: float) -> float:
        """The middle of a column."""
        return self.left + self.column_width * (column + 0.5)

    def y(self, row: int) -> float:
        """The middle of a row."""
        return self.bottom - self.row_height * (row + 0.5)

    def row_of(self, call: Call) -> int:
        return self.place[id(call)][0]

    def loss_y(self, lane: int) -> float:
        """The middle of a lane of losses, the lowest of which is lane 0."""
        return self.top - self.lane_height * (lane + 0.5)

    def axis(self, every: int) -> None:
        """Numbers of steps, from 1."""
        y = self.bottom + 14
        for step in range(1, self.history.columns + 1):
            if step == 1 or step % every == 0:
                x = self.x(step - 1)
                self.picture.text(x, y, str(step), size=10, anchor="middle", fill=PALE_INK)
        self.picture.text(self.left - 8, y, "step", size=10, anchor="end", fill=PALE_INK)

    def draw(self) -> None:
        """Draws rows, links and losses."""
        raise NotImplementedError

    # ------------------------------------------------------------ marks

    def init_mark(self, x: float, y: float, learned: bool, r: float, title: str = "") -> None:
        """Where a sequence starts from `init`: filled if it is a parameter."""
        fill, stroke = (LEARNED, LEARNED) if learned else ("#ffffff", VALUE)
        self.picture.disc(x, y, r, fill=fill, stroke=stroke, width=1.5, title=title)

    def value_mark(self, x: float, y: float, r: float, title: str = "") -> None:
        """Where a state came in as a plain value."""
        self.picture.box(
            x - r, y - r, 2 * r, 2 * r, fill="#ffffff", stroke=VALUE, width=1.5, title=title
        )

    def cut_mark(self, x: float, y: float, half: float, width: float = 2.0) -> None:
        self.picture.line([(x, y - half), (x, y + half)], CUT, width)

    def legend(self) -> list[tuple[Callable[[float, float], None], str]]:
        """The marks that this picture has, each with what it means."""
        calls = list(self.history.all_calls())
        entries: list[tuple[Callable[[float, float], None], str, bool]] = [
            (
                lambda x, y: self.picture.arrow((x + 24, y), (x, y), GRADIENT, 2.0),
                "gradient flows back",
                bool(self.history.losses),
            ),
            (
                lambda x, y: self.picture.line([(x, y), (x + 24, y)], VALUE, 1.2),
                "the value goes on",
                self.shows_values,
            ),
            (
                lambda x, y: self.cut_mark(x + 12, y, 8),
                "truncate: the value passes, gradient does not",
                any("cut" in marks for marks in self._all_marks(calls))
                or any(call.cuts for call in calls),
            ),
            (
                lambda x, y: self.init_mark(x + 12, y, True, 6),
                "starts from init, a parameter",
                any(call.at_start and call.learned for call in calls),
            ),
            (
                lambda x, y: self.init_mark(x + 12, y, False, 6),
                "starts from init, a constant",
                any(call.at_start and not call.learned for call in calls)
                or any("reset" in marks for marks in self._all_marks(calls)),
            ),
            (
                lambda x, y: self.value_mark(x + 12, y, 5),
                "starts from a state given as a value",
                any(
                    brought_in(calls, 0) or any(c.backwards and not c.at_start for c in calls)
                    for calls in self.history.calls.values()
                ),
            ),
            (
                lambda x, y: self.picture.box(
                    x + 4, y - 6, 18, 12, round=3, fill=UNREACHED_FILL, stroke=UNUSED
                ),
                "no loss reached this step",
                not all(all(call.reached) for call in calls),
            ),
        ]
        return [(mark, words) for mark, words, there in entries if there]

    def _all_marks(self, calls: Sequence[Call]) -> list[list[str]]:
        return [call.marks for call in calls] + list(self.history.after.values())


def brought_in(calls: Sequence[Call], i: int) -> bool:
    """Whether the state of a row's i-th call was given as a value by no earlier call of the row."""
    call = calls[i]
    return i == 0 and not (call.at_start or call.state_from or call.earlier)


def continues(calls: Sequence[Call], i: int) -> bool:
    """Whether history leads from a row's i-th call to the one before it."""
    return i > 0 and calls[i - 1] in calls[i].state_from


def _lanes(losses: Sequence[Loss], most: int) -> list[int]:
    """For each loss the lowest lane in which it has room between its first and last step."""
    ends: list[int] = []
    lanes = []
    for loss in losses:
        first = min([call.column for call in loss.calls] + [loss.column])
        lane = next((lane for lane, end in enumerate(ends) if end < first), len(ends))
        lane = min(lane, most - 1)
        ends[lane : lane + 1] = [loss.column]
        lanes.append(lane)
    return lanes


def _flow(words: Sequence[str], width: float) -> tuple[list[tuple[float, int]], int]:
    """Places for entries of these lengths, side by side in as many lines as it takes."""
    places: list[tuple[float, int]] = []
    x, line = 16.0, 0
    for entry in words:
        wide = 30 + 6 * len(entry) + 22
        if places and x + wide > width:
            x, line = 16.0, line + 1
        places.append((x, line))
        x += wide
    return places, line + bool(words)
