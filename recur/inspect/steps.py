"""A history of few steps: a box for each, with an arrow wherever gradient flows."""

from __future__ import annotations

from collections.abc import Sequence

from recur.inspect.history import Call, Loss
from recur.inspect.picture import Point
from recur.inspect.sheet import (
    CUT,
    GRADIENT,
    INK,
    LEARNED,
    PALE_INK,
    REACHED_FILL,
    UNREACHED_FILL,
    UNUSED,
    VALUE,
    Sheet,
    continues,
)

HALF_W, HALF_H = 17.0, 13.0  # of a box
GRADIENT_Y, VALUE_Y = -5.0, 6.0  # where a row's two lines run, from its middle
BESIDE = 4.0  # how far both lines between rows are from the middle of a column


class Steps(Sheet):
    """One box a step.  Lines are drawn first, so that boxes lie over them."""

    column_width = 84.0
    row_height = 74.0
    lane_height = 54.0
    most_lanes = 12
    start_room = 52.0

    def draw(self) -> None:
        self.axis(1)
        for row, layer in enumerate(self.layers):
            calls = self.history.calls[layer]
            for i in range(len(calls)):
                self._sequence_frame(row, calls[i])
                self._start(row, calls, i)
                self._inside(row, calls[i])
            if "cut" in self.history.after.get(layer, ()):
                self._cut(self.x(calls[-1].end - 1) + HALF_W + 14, row)
        for number, (loss, lane) in enumerate(
            zip(self.history.losses, self.lanes, strict=True), start=1
        ):
            self._loss(loss, lane, number)
        for row, call in self.place.values():
            self._inputs(row, call)
        for row, call in self.place.values():
            self._boxes(row, call)

    # ------------------------------------------------------------ one row

    def _boxes(self, row: int, call: Call) -> None:
        y = self.y(row)
        for step in range(call.column, call.end):
            x, reached = self.x(step), call.reached_at(step)
            stroke, fill = (GRADIENT, REACHED_FILL) if reached else (UNUSED, UNREACHED_FILL)
            words = f"{self.names[row]}, step {step + 1}"
            words += "" if reached else ": no loss reached it"
            self.picture.box(
                x - HALF_W,
                y - HALF_H,
                2 * HALF_W,
                2 * HALF_H,
                round=5,
                fill=fill,
                stroke=stroke,
                width=1.5,
                title=words,
            )
            self.picture.text(x, y + 4, str(step + 1), anchor="middle")

    def _sequence_frame(self, row: int, call: Call) -> None:
        """A frame around the steps of one call."""
        if call.steps > 1:
            x, y = self.x(call.column) - HALF_W - 7, self.y(row) - HALF_H - 7
            width = self.x(call.end - 1) + HALF_W + 7 - x
            self.picture.box(
                x, y, width, 2 * HALF_H + 14, round=9, stroke="#d5dae0", fill="#fbfcfd"
            )

    def _start(self, row: int, calls: Sequence[Call], i: int) -> None:
        """What lies between a call and where its state comes from."""
        call, y = calls[i], self.y(row)
        if call.backwards:
            self._start_from_the_right(row, call)
            return
        edge = self.x(call.column) - HALF_W
        if call.at_start:
            self._from_init(row, call, edge)
            return
        if continues(calls, i):
            self._link(self.x(calls[i - 1].end - 1) + HALF_W, edge, y, call.reached[0])
            return
        others = [other for other in call.state_from if self.row_of(other) != row]
        for other in others:
            self._hand_over(other, edge, y, call.reached[0])
        if i:
            before = self.x(calls[i - 1].end - 1) + HALF_W
            if not others:
                self._value_line(before, edge, y)
            middle = edge - (self.column_width - 2 * HALF_W) / 2
        else:
            middle = edge - 14
            if call.earlier:
                self._link(edge - 34, edge, y, call.reached[0])
                self.picture.text(
                    edge - 36, y - 10, "earlier scope", size=10, anchor="middle", fill=PALE_INK
                )
            elif not others:
                self._value_line(edge - 30, edge, y)
                self.value_mark(edge - 34, y + VALUE_Y, 5, "the state came in as a value")
        if "cut" in call.marks:
            self._cut(middle, row)

    def _start_from_the_right(self, row: int, call: Call) -> None:
        edge = self.x(call.end - 1) + HALF_W
        if call.at_start:
            self._from_init(row, call, edge)
        else:
            self._value_line(edge, edge + 20, self.y(row))
            self.value_mark(edge + 24, self.y(row) + VALUE_Y, 5, "the state came in as a value")

    def _from_init(self, row: int, call: Call, edge: float) -> None:
        y = self.y(row)
        side = 1 if call.backwards else -1
        x = edge + 24 * side
        kind = "a parameter" if call.learned else "a constant"
        self._value_line(x, edge, y)
        if call.learned:
            colour = LEARNED if call.reached[0] else UNUSED
            tip = (x - 7 * side, y + GRADIENT_Y)
            self.picture.arrow((edge, y + GRADIENT_Y), tip, colour, 2.0)
        self.init_mark(x, y, call.learned, 7, f"{self.names[row]} starts from init, {kind}")
        self.picture.text(x, y - 13, "init", size=10, anchor="middle", fill=PALE_INK)
        if "cut" in call.marks:
            self._cut(x + 15 * side, row)

    def _inside(self, row: int, call: Call) -> None:
        for step in range(call.column + 1, call.end):
            left, right = self.x(step - 1) + HALF_W, self.x(step) - HALF_W
            if step in call.cut_columns:
                self._value_line(left, right, self.y(row))
                self._cut((left + right) / 2, row)
            elif call.backwards:
                self._link(right, left, self.y(row), call.reached_at(step))
            else:
                self._link(left, right, self.y(row), call.reached_at(step))

    def _link(self, before: float, edge: float, y: float, reached: bool) -> None:
        """The value's line and the gradient's arrow from the box at `edge` to the one before."""
        self._value_line(before, edge, y)
        colour = GRADIENT if reached else UNUSED
        self.picture.arrow(
            (edge, y + GRADIENT_Y), (before + 1, y + GRADIENT_Y), colour, 2.0 if reached else 1.2
        )

    def _value_line(self, before: float, edge: float, y: float) -> None:
        self.picture.line([(before, y + VALUE_Y), (edge, y + VALUE_Y)], VALUE, 1.2)

    def _cut(self, x: float, row: int) -> None:
        y = self.y(row)
        self.cut_mark(x, y, 19)
        self.picture.text(x, y - 23, "cut", size=10, anchor="middle", fill=CUT)

    # ------------------------------------------------------------ between rows

    def _hand_over(self, other: Call, edge: float, y: float, reached: bool) -> None:
        """The state of another layer, which this one goes on from."""
        from_x, from_y = self.x(other.end - 1) + HALF_W, self.y(self.row_of(other))
        self.picture.line([(from_x, from_y + VALUE_Y), (edge, y + VALUE_Y)], VALUE, 1.2)
        colour = GRADIENT if reached else UNUSED
        start, tip = (edge, y + GRADIENT_Y), (from_x + 1, from_y + GRADIENT_Y)
        self.picture.arrow(start, tip, colour, 2.0)

    def _inputs(self, row: int, call: Call) -> None:
        """What the steps of a call take from other layers."""
        for other in call.input_from:
            other_row = self.row_of(other)
            if other_row == row:
                continue
            for step in range(call.column, call.end):
                across = min(max(step, other.column), other.end - 1)
                self._rung(row, step, other_row, across, call.reached_at(step))

    def _rung(self, row: int, step: int, other_row: int, other_step: int, reached: bool) -> None:
        side = HALF_H if other_row < row else -HALF_H
        near = (self.x(step), self.y(row) + side)
        far = (self.x(other_step), self.y(other_row) - side)
        colour, width = (GRADIENT, 2.0) if reached else (UNUSED, 1.2)
        if abs(other_row - row) == 1:
            self.picture.line([(far[0] + BESIDE, far[1]), (near[0] + BESIDE, near[1])], VALUE, 1.2)
            start, tip = (near[0] - BESIDE, near[1]), (far[0] - BESIDE, far[1])
            self.picture.arrow(start, tip, colour, width)
            return
        # Past the boxes of the rows between, which have no part in it.
        turn = 9.0 if side > 0 else -9.0
        value, gradient = (self._detour(near, far, beside, turn) for beside in (1, -1))
        self.picture.line(value, VALUE, 1.2)
        self.picture.line(gradient[:-1], colour, width)
        self.picture.arrow(gradient[-2], gradient[-1], colour, width)

    def _detour(self, near: Point, far: Point, beside: int, turn: float) -> list[Point]:
        """A way from box to box that leaves the column to its right (1) or left (-1)."""
        end, out = 3 * BESIDE * beside, (HALF_W + 5) * beside
        return [
            (near[0] + end, near[1]),
            (near[0] + out, near[1] + turn),
            (far[0] + out, far[1] - turn),
            (far[0] + end, far[1]),
        ]

    def _loss(self, loss: Loss, lane: int, number: int) -> None:
        x, y = self.x(loss.column), self.loss_y(lane)
        bus = y + 17
        steps = {
            (step, self.row_of(call))
            for call in loss.calls
            for step in filter(call.reached_at, range(call.column, call.end))
        }
        if steps:
            columns = [self.x(step) for step, _ in steps] + [x]
            self.picture.line([(x, y), (x, bus)], GRADIENT, 2.0)
            self.picture.line([(min(columns), bus), (max(columns), bus)], GRADIENT, 2.0)
        for step, row in sorted(steps):
            self.picture.arrow(
                (self.x(step), bus), (self.x(step), self.y(row) - HALF_H), GRADIENT, 2.0
            )
        self.picture.disc(x, y, 12, fill="#ffffff", stroke=INK, width=1.5, title=f"loss {number}")
        words = "L" if len(self.history.losses) == 1 else f"L{number}"
        self.picture.text(x, y + 4, words, size=11, anchor="middle", bold=True)
