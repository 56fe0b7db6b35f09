"""`Slots`: streams of a pool that were looked up once."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, TypeAlias

import numpy as np

from recur.streaming.blocks import Places

Id: TypeAlias = Hashable


class Slots:
    """Streams of a pool that were looked up once, to be stepped by `pool.step(slots, X)`.

    Valid until one of them is closed, expires or is taken over; a step then raises.
    """

    __slots__ = ("epochs", "ids", "places", "seen")

    def __init__(self, ids: tuple, places: Places, epochs: np.ndarray, seen: int) -> None:
        self.ids = ids
        self.places = places
        self.epochs = epochs
        self.seen = seen  # the pool's count of departures when these were last found to be there

    def __len__(self) -> int:
        return self.places.count


def listed(ids: Any) -> Iterable[Id]:
    """`ids`, unless it is a single name, which would be read letter by letter."""
    if isinstance(ids, (str, bytes)):
        raise TypeError(f"ids is {ids!r}, expected a list of streams.")
    return ids


def check_tag(title: str, tag: bytes) -> None:
    """Raises `ValueError` unless the tag of a stream has its 16 bytes."""
    if len(tag) != 16:
        raise ValueError(f"{title}: tag has {len(tag)} bytes, expected 16.")
