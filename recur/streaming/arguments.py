"""What callers hand to streams and pools, checked before anything is done with it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np

from recur.errors import ShapeError, StreamError

Form: TypeAlias = "tuple[tuple[int, ...], np.dtype]"

SHORTEST = 1e-6  # seconds


def whole(title: str, name: str, n: Any, least: int = 1) -> int:
    """`n` as an int; raises `ValueError` unless it is a whole number of at least `least`."""
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < least:
        raise ValueError(f"{title}: {name} is {n!r}, expected a whole number of at least {least}.")
    return int(n)


def amount(title: str, name: str, n: Any, least: float, what: str = "a number") -> float:
    """`n` as a float; raises `ValueError` unless it is a finite number of at least `least`."""
    number = isinstance(n, (int, float, np.integer, np.floating)) and not isinstance(n, bool)
    if not number or not least <= n < math.inf:
        raise ValueError(f"{title}: {name} is {n!r}, expected {what}, at least {least:g}.")
    return float(n)


def seconds(title: str, name: str, t: Any) -> float | None:
    """`t` as a float, or None; raises `ValueError` for what is no time that passes."""
    return None if t is None else amount(title, name, t, SHORTEST, "seconds, or None for never")


def check_key(title: str, key: Any) -> None:
    """Raises `TypeError` for a key that cannot sign; None signs nothing."""
    if key is not None and (not isinstance(key, (bytes, bytearray)) or not key):
        what = "empty" if isinstance(key, (bytes, bytearray)) else f"a {type(key).__name__}"
        raise TypeError(f"{title}: key is {what}, expected secret bytes, or None.")


def check_tag(title: str, tag: Any) -> None:
    """Raises `ValueError` unless the tag of a stream has its 16 bytes."""
    if not isinstance(tag, (bytes, bytearray)) or len(tag) != 16:
        what = f"has {len(tag)} bytes" if isinstance(tag, bytes) else f"is a {type(tag).__name__}"
        raise ValueError(f"{title}: tag {what}, expected 16 bytes. Nothing was changed.")


def check_id(title: str, id: Any) -> None:
    """Raises `StreamError` for what cannot be looked up."""
    try:
        hash(id)
    except TypeError:
        raise StreamError(
            f"{title}: {id!r} is a {type(id).__name__}, which cannot name a stream, expected a "
            "string or a number. Nothing was changed."
        ) from None


def listed(title: str, ids: Any) -> tuple[Hashable, ...]:
    """`ids`, unless it is a single name, which would be read letter by letter, or none at all."""
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
        raise TypeError(f"{title}: ids is {ids!r}, expected a list of streams.")
    return tuple(ids)


def check_snapshots(title: str, snapshots: Any) -> None:
    """Raises `TypeError` unless they are a dict."""
    if not isinstance(snapshots, Mapping):
        raise TypeError(
            f"{title}: snapshots is a {type(snapshots).__name__}, expected a dict of bytes by "
            "stream, as snapshot(ids) gives it. Nothing was changed."
        )


def integers(title: str, name: str, given: Any, n: int) -> np.ndarray:
    """`given` as an array (n,) of whole numbers, one a stream; raises `ShapeError`."""
    try:
        array = np.asarray(given)
    except ValueError:
        array = np.empty(0, object)
    if array.shape != (n,) or (n and array.dtype.kind not in "iu"):
        raise ShapeError(
            f"{title}: {name} is {array.dtype} of shape {array.shape}, expected integers ({n},), "
            "one for each stream. Nothing was changed."
        )
    return array


def check_out(title: str, out: Any, form: Form) -> None:
    """Raises `ShapeError` for what cannot take answers of this form."""
    shape, dtype = form
    what = None
    if type(out) is not np.ndarray:
        what = f"is a {type(out).__name__}, expected an array"
    elif (out.shape, out.dtype) != form:
        what = f"has shape {out.shape} and holds {out.dtype}, the answers have {shape} and {dtype}"
    elif not out.flags.behaved:
        what = "is read-only or not aligned, expected an array to write into"
    if what is not None:
        raise ShapeError(f"{title}: out {what}. Nothing was changed.")
