"""`Picture`: a drawing of a few kinds of shapes, as SVG text or as pixels."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from recur.files import write_atomically

Point = tuple[float, float]
FONT = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"


@dataclass(frozen=True)
class Shape:
    """A closed or open line through `points`, filled or drawn or both."""

    points: tuple[Point, ...]
    closed: bool
    fill: str | None
    stroke: str | None
    width: float
    dash: tuple[float, ...]

    def svg(self) -> str:
        points = " ".join(f"{_short(x)},{_short(y)}" for x, y in self.points)
        style = f' fill="{self.fill or "none"}"'
        if self.stroke:
            style += f' stroke="{self.stroke}" stroke-width="{_short(self.width)}"'
        if self.dash:
            style += f' stroke-dasharray="{" ".join(map(_short, self.dash))}"'
        return f'<{"polygon" if self.closed else "polyline"} points="{points}"{style}/>'

    def paint(self, axes: Any, points_per_pixel: float) -> None:
        from matplotlib.patches import Polygon

        width = self.width * points_per_pixel
        patch = Polygon(
            self.points,
            closed=self.closed,
            fill=self.fill is not None,
            facecolor=self.fill or "none",
            edgecolor=self.stroke or "none",
            linewidth=width if self.stroke else 0,
        )
        if self.dash:
            patch.set_linestyle((0, tuple(part * points_per_pixel / width for part in self.dash)))
        axes.add_patch(patch)


@dataclass(frozen=True)
class Box:
    """A rectangle with round corners; as high as it is wide and round enough, a disc."""

    x: float
    y: float
    w: float
    h: float
    round: float
    fill: str | None
    stroke: str | None
    width: float
    title: str

    def svg(self) -> str:
        edge = f' stroke="{self.stroke}" stroke-width="{_short(self.width)}"' if self.stroke else ""
        box = (
            f'<rect x="{_short(self.x)}" y="{_short(self.y)}" width="{_short(self.w)}" '
            f'height="{_short(self.h)}" rx="{_short(self.round)}" '
            f'fill="{self.fill or "none"}"{edge}'
        )
        return f"{box}><title>{escape(self.title)}</title></rect>" if self.title else f"{box}/>"

    def paint(self, axes: Any, points_per_pixel: float) -> None:
        from matplotlib.patches import Circle, FancyBboxPatch

        style: dict[str, Any] = {
            "facecolor": self.fill or "none",
            "edgecolor": self.stroke or "none",
            "linewidth": self.width * points_per_pixel if self.stroke else 0,
        }
        if self.w == self.h == 2 * self.round:
            middle = (self.x + self.round, self.y + self.round)
            axes.add_patch(Circle(middle, self.round, **style))
            return
        corners = f"round,pad=0,rounding_size={self.round}" if self.round else "square,pad=0"
        axes.add_patch(FancyBboxPatch((self.x, self.y), self.w, self.h, boxstyle=corners, **style))


@dataclass(frozen=True)
class Text:
    """One line of words; `y` is its base line."""

    x: float
    y: float
    words: str
    size: float
    anchor: str
    fill: str
    bold: bool

    def svg(self) -> str:
        weight = ' font-weight="bold"' if self.bold else ""
        return (
            f'<text x="{_short(self.x)}" y="{_short(self.y)}" font-size="{_short(self.size)}" '
            f'text-anchor="{self.anchor}" fill="{self.fill}"{weight}>{escape(self.words)}</text>'
        )

    def paint(self, axes: Any, points_per_pixel: float) -> None:
        axes.text(
            self.x,
            self.y,
            self.words.replace("$", r"\$"),
            fontsize=self.size * points_per_pixel,
            horizontalalignment={"start": "left", "middle": "center", "end": "right"}[self.anchor],
            verticalalignment="baseline",
            color=self.fill,
            fontweight="bold" if self.bold else "normal",
        )


class Picture:
    """A drawing, `width` by `height` pixels; x runs to the right and y down.

    `picture.svg` is its text, notebooks show it, and `save("x.svg")` or `save("x.png")` write it.
    """

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width = width
        self.height = height
        self.title = title
        self.shapes: list[Shape | Box | Text] = []
        self.box(0, 0, width, height, fill="#ffffff")

    # ------------------------------------------------------------ drawing

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        *,
        round: float = 0,
        fill: str | None = None,
        stroke: str | None = None,
        width: float = 1,
        title: str = "",
    ) -> None:
        """Adds a rectangle whose upper left corner is (x, y)."""
        self.shapes.append(Box(x, y, w, h, round, fill, stroke, width, title))

    def disc(self, x: float, y: float, r: float, **style: Any) -> None:
        """Adds a disc around (x, y); `style` as for `box`."""
        self.box(x - r, y - r, 2 * r, 2 * r, round=r, **style)

    def line(
        self,
        points: Sequence[Point],
        stroke: str,
        width: float = 1.0,
        dash: tuple[float, ...] = (),
    ) -> None:
        """Adds a line through `points`."""
        self.shapes.append(Shape(tuple(points), False, None, stroke, width, dash))

    def arrow(
        self, start: Point, tip: Point, stroke: str, width: float = 1.0, head: float = 6.0
    ) -> None:
        """A straight arrow."""
        (x0, y0), (x1, y1) = start, tip
        length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5 or 1.0
        ux, uy = (x1 - x0) / length, (y1 - y0) / length
        foot = (x1 - ux * head, y1 - uy * head)
        self.line([start, foot], stroke, width)
        half = head * 0.5
        left = (foot[0] - uy * half, foot[1] + ux * half)
        right = (foot[0] + uy * half, foot[1] - ux * half)
        self.shapes.append(Shape((tip, left, right), True, stroke, None, 0, ()))

    def polygon(self, points: Sequence[Point], fill: str) -> None:
        """Adds a filled polygon without an edge."""
        self.shapes.append(Shape(tuple(points), True, fill, None, 0, ()))

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 12,
        anchor: str = "start",
        fill: str = "#222222",
        bold: bool = False,
    ) -> None:
        """Adds a line of text at (x, y)."""
        self.shapes.append(Text(x, y, words, size, anchor, fill, bold))

    # ------------------------------------------------------------ showing

    @property
    def svg(self) -> str:
        """The picture as SVG 1.1, complete in itself."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        w, h = _short(self.width), _short(self.height)
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" '
            f'viewBox="0 0 {w} {h}" role="img" aria-label={quoteattr(self.title)} '
            f'font-family="{FONT}">'
        )
        yield f"<title>{escape(self.title)}</title>"
        yield from (shape.svg() for shape in self.shapes)
        yield "</svg>"

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"<picture {self.width:g} x {self.height:g}: {self.title}>"

    def save(self, path: str | os.PathLike[str], *, scale: float = 2.0) -> None:
        """Writes the picture as its name says: `.svg`, or `.png`, which needs matplotlib.

        scale  pixels of a PNG for each of the picture's own

        Raises `ValueError` for another ending, `ImportError` without matplotlib.
        """
        ending = os.path.splitext(os.fspath(path))[1].lower()
        if ending == ".svg":
            write_atomically(path, self.svg.encode())
        elif ending == ".png":
            figure = self._figure()
            write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=72 * scale))
        else:
            raise ValueError(f"save: {os.fspath(path)!r} ends in neither .svg nor .png.")

    def _figure(self) -> Any:
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(
                'a PNG is drawn by matplotlib: pip install "recur[cli]". An .svg needs nothing.'
            ) from error
        figure = Figure(figsize=(self.width / 72, self.height / 72))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set_xlim(0, self.width)
        axes.set_ylim(self.height, 0)
        for shape in self.shapes:
            shape.paint(axes, 1.0)  # at 72 dots an inch a point is a pixel
        return figure


def _short(x: float) -> str:
    return f"{round(x, 2):g}" if abs(x) < 1e5 else f"{x:.0f}"
