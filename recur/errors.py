"""The errors that recur raises, and the shape check that phrases most of them.

Every message names the layer with its sizes, the axis, what was expected, what came, and what to
do about it.  Each class also derives from the built-in exception that a caller who has never heard
of recur would catch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


class RecurError(Exception):
    """The base of every error that recur raises on purpose."""


class ShapeError(RecurError, ValueError):
    """An array has the wrong number of axes, or a wrong size on one of them."""


class StateError(RecurError, ValueError):
    """A recurrent state does not fit the layer or the call."""


class BatchSizeError(StateError):
    """A carried state holds another batch size than the input."""


class TapeError(RecurError, RuntimeError):
    """A scope, a tape or a recorded value is used in a way that would give wrong gradients."""


class GraphUsedError(TapeError):
    """A backward sweep reached steps that an earlier sweep has already used up."""


class UnknownParameter(RecurError, KeyError):
    """What was asked for by path is not a parameter of the model."""

    __str__ = Exception.__str__  # KeyError would print the repr of the message


class FormatError(RecurError, ValueError):
    """A file or a byte string is damaged, cut short, hostile, or of a kind that is not read."""


class StreamError(RecurError):
    """A live stream cannot do what was asked; the base of the five errors below."""


class UnknownStream(StreamError, KeyError):
    """No stream of this name is open."""

    __str__ = Exception.__str__  # KeyError would print the repr of the message


class Expired(StreamError):
    """The stream was closed after its idle time.

    at         when, in seconds since the epoch; None if that is not known
    last_step  how many steps it had taken; None if that is not known
    """

    def __init__(
        self, message: str = "", *, at: float | None = None, last_step: int | None = None
    ) -> None:
        super().__init__(message)
        self.at = at
        self.last_step = last_step


class Busy(StreamError):
    """The stream already has a step under way, or the pool has no free place."""


class Gap(StreamError):
    """A step number skips steps that were never taken.

    expected   the number that the stream's next step has
    got        the number that came
    """

    def __init__(
        self, message: str = "", *, expected: int | None = None, got: int | None = None
    ) -> None:
        super().__init__(message)
        self.expected = expected
        self.got = got


class Conflict(StreamError):
    """Another owner has moved the stream on, or a step was replayed with another input.

    lost  the streams of a pool that were dropped because another owner has them
    """

    def __init__(self, message: str = "", *, lost: Iterable[Any] = ()) -> None:
        super().__init__(message)
        self.lost = frozenset(lost)


def check_shape(
    name: str, what: str, shape: Sequence[int], expected: Sequence[int | None], hint: str = ""
) -> None:
    """Raise `ShapeError` unless `shape` matches `expected`, where None allows any size.

    `name` is the layer with its sizes, `what` the array ("x", "Wi"), `hint` a remedy that ends the
    message.
    """
    if len(shape) == len(expected) and all(
        want is None or size == want for size, want in zip(shape, expected, strict=True)
    ):
        return
    wanted = "(" + ", ".join("any" if n is None else str(n) for n in expected)
    wanted += ",)" if len(expected) == 1 else ")"
    tail = f" {hint}" if hint else ""
    raise ShapeError(
        f"{name}: {what} has shape {tuple(shape)}, expected {wanted}. Nothing was changed.{tail}"
    )
