"""What server and client say to each other: errors with their codes, and frames.

A binary frame is 8 bytes, the number of a step (little-endian, 0 for "the next"), and float32
numbers, little-endian: an input on the way there, the answer to that step on the way back.  A JSON
frame is {"step": n, "x": [...]} and {"step": n, "y": [...]}.
"""

from __future__ import annotations

import json
import re
import sqlite3
import struct
from typing import Any, NoReturn

import numpy as np

from recur.errors import (
    Busy,
    Conflict,
    Expired,
    FormatError,
    Gap,
    RecurError,
    ShapeError,
    StreamError,
    UnknownStream,
)

_NAME = re.compile(r"[A-Za-z0-9._:@-]{1,128}")
_NUMBER = struct.Struct("<Q")
_FLOATS = np.dtype("<f4")


class WrongToken(StreamError):
    """The call does not carry the token that the stream was opened with, or no longer."""


class Unauthorised(StreamError):
    """The server wants a bearer token, and the call has none or another."""


class TooLarge(StreamError):
    """A message is longer than the server takes."""


class Unavailable(StreamError):
    """The server cannot answer now; later it may.  Clients ask again by themselves."""


class Stopping(Unavailable):
    """The server is going down; the stream is kept where it has a store."""


class StoreFailed(Unavailable):
    """The store cannot be written or read: its disk is full, its server is not there.

    A step that was taken is not answered before it is written; sent again, with its number, it is
    answered once the store can take it.
    """


# Error, its name, its HTTP status, the code with which it closes a socket.  No two causes share a
# name; subclasses come first.
_CODES: list[tuple[type[Exception], str, int, int]] = [
    (UnknownStream, "unknown", 404, 4404),
    (Expired, "expired", 410, 4410),
    (Gap, "gap", 409, 4409),
    (Conflict, "conflict", 409, 4419),
    (Busy, "busy", 429, 1013),
    (WrongToken, "token", 403, 4403),
    (Unauthorised, "unauthorised", 401, 4401),
    (TooLarge, "too_large", 413, 1009),
    (Stopping, "stopping", 503, 1012),
    (StoreFailed, "store", 503, 1013),
    (ShapeError, "shape", 422, 1007),
    (FormatError, "format", 400, 1007),
]
_FIELDS = ("expected", "got", "at", "last_step")


def own_error(error: Exception) -> Exception:
    """A failure of the store as `StoreFailed`, with its cause; any other error as it is."""
    foreign = type(error).__module__.partition(".")[0] == "redis"
    if isinstance(error, (sqlite3.Error, OSError)) or foreign:
        failed = StoreFailed("The store cannot be used now. Send the same step again later.")
        failed.__cause__ = error
        return failed
    return error


def describe_error(error: BaseException) -> tuple[dict[str, Any], int, int]:
    """An error as JSON, with its HTTP status and the code that closes a socket."""
    for kind, name, status, close in _CODES:
        if isinstance(error, kind):
            found: dict[str, Any] = {"code": name, "message": str(error)}
            for field in _FIELDS:
                value = getattr(error, field, None)
                if value is not None:
                    found[field] = value
            return found, status, close
    return {"code": "internal", "message": "the server failed; its log says how"}, 500, 1011


def raise_error(described: Any) -> NoReturn:
    """Raises the error that `describe_error` described."""
    if not isinstance(described, dict):
        raise RecurError(f"the server answered {described!r}.")
    message = str(described.get("message", ""))
    for kind, name, _, _ in _CODES:
        if described.get("code") == name:
            fields = {f: described[f] for f in _FIELDS if f in described}
            raise kind(message, **fields)
    raise RecurError(f"the server failed: {message}")


def check_name(id: Any) -> str:
    """The name of a stream as it came; raises `FormatError` for what is none."""
    if not isinstance(id, str) or not _NAME.fullmatch(id):
        raise FormatError(
            f"the name {str(id)[:40]!r} is none, expected 1 to 128 letters, digits or . _ : @ -"
        )
    return id


def read_token(token: Any) -> str:
    """A token as it came, "" for none.  Raises `FormatError` for what is no ASCII text."""
    if token is None:
        return ""
    if not isinstance(token, str) or not token.isascii():
        raise FormatError("a token that is no ASCII text.")
    return token


def pack_frame(number: int, values: Any) -> bytes:
    """A binary frame."""
    return _NUMBER.pack(number) + np.ascontiguousarray(values, _FLOATS).tobytes()


def unpack_frame(frame: bytes) -> tuple[int, np.ndarray]:
    """The step number and the numbers (n,) of a binary frame.  Raises `FormatError`."""
    if len(frame) < 8 or len(frame) % 4:
        raise FormatError(
            f"a binary frame of {len(frame)} bytes, expected 8 and 4 for each number."
        )
    (number,) = _NUMBER.unpack_from(frame)
    if number >= 2**63:
        raise FormatError(f"a binary frame of step {number}, expected less than 2**63.")
    return number, np.frombuffer(frame, _FLOATS, offset=8)


def read_json(text: str | bytes) -> dict[str, Any]:
    """A JSON object.  Raises `FormatError` for anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise FormatError("the message is no JSON.") from None
    if not isinstance(found, dict):
        raise FormatError("the message is JSON, but no object.")
    return found


def read_step(message: dict[str, Any]) -> tuple[int | None, np.ndarray]:
    """The step number (None for the next) and the input of a JSON message."""
    number = message.get("step")
    if number is not None and (type(number) is not int or not 0 < number < 2**63):
        raise FormatError(f"step is {number!r}, expected a positive integer.")
    if "x" not in message:
        raise FormatError('the message has no "x".')
    try:
        x = np.asarray(message["x"])
    except ValueError:
        raise FormatError("x is ragged, expected numbers.") from None
    if x.dtype.kind not in "fiub" or x.ndim > 1:
        raise FormatError("x holds something else than numbers, expected a list of them or one.")
    return number, x


def as_list(y: np.ndarray) -> Any:
    """An answer as JSON can hold it: NaN and infinities, which it cannot, as null."""
    if y.dtype.kind == "f" and not np.isfinite(y).all():
        return np.where(np.isfinite(y), y.astype(object), np.array(None)).tolist()
    return y.tolist()
