"""`draw`: a picture of what a tape has recorded."""

from __future__ import annotations

from typing import Any

from recur.errors import TapeError
from recur.inspect.bands import Bands
from recur.inspect.history import History
from recur.inspect.picture import Picture
from recur.inspect.sheet import Sheet
from recur.inspect.steps import Steps
from recur.module import walk
from recur.recurrent import Recur
from recur.tape import Tape

MOST_BOXES = 24  # steps, above which stretches of them are drawn as bands


def draw(tape: Tape, model: Any = None, *, legend: bool = True) -> Picture:
    """A picture of the recurrent steps on a tape, and of where the gradients of its losses went.

    tape   a `Tape(log=True)`, open or ended
    model  what the recurrent layers are parts of: rows are then named by their paths
    legend whether the marks are explained below

    Steps run from left to right, layers lie above one another, the first at the bottom, losses on
    top.  Blue arrows are gradient; where one is missing, none flows.  A red line is a `truncate`;
    a filled disc is an `init` that is learned, an empty one an `init` that is not; a square is a
    state that came in as a value.  A step that no loss reached is grey.  Up to 24 steps have a box
    each; longer histories are bands, one for each stretch that gradient crosses without a cut.

    Notebooks show the picture; `.save("x.svg")` and `.save("x.png")` write it, `.svg` is its text.

    Raises `TapeError` if the tape kept no log or no recurrent layer was stepped.
    """
    if not isinstance(tape, Tape):
        raise TypeError(f"draw: expected a Tape(log=True), got a {type(tape).__name__}.")
    if tape.events is None:
        raise TapeError(
            "draw: this tape kept no log, and without one the past is gone. Open it as "
            "recur.Tape(log=True)."
        )
    history = History(tape.events)
    if not history.calls:
        raise TapeError("draw: no recurrent layer was stepped on this tape.")
    names = {}
    for path, part in walk(model) if model is not None else ():
        if isinstance(part, Recur) and path:
            names[part] = f"{path}: {part.title}"
    kind: type[Sheet] = Steps if history.columns <= MOST_BOXES else Bands
    sheet = kind(history, names, legend)
    sheet.draw()
    return sheet.picture
