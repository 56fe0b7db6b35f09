"""`Slots`: streams of a pool that were looked up once."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeAlias

import numpy as np

from recur.errors import StreamError
from recur.streaming.blocks import Places

Id: TypeAlias = Hashable


class Slots:
    """Streams of a pool that were looked up once, to be stepped by `pool.step(slots, X)`.

    Valid until one of them is closed, expires or is taken over; a step then raises.
    """

    __slots__ = ("epochs", "ids", "owner", "places", "seen")

    def __init__(
        self, owner: object, ids: tuple, places: Places, epochs: np.ndarray, seen: int
    ) -> None:
        self.owner = owner  # by which the pool knows its own
        self.ids = ids
        self.places = places
        self.epochs = epochs
        self.seen = seen  # the pool's count of departures when these were last found to be there

    def check_owner(self, title: str, owner: object) -> None:
        """Raises `StreamError` for slots of another pool, which has other streams there."""
        if self.owner is not owner:
            raise StreamError(
                f"{title}: these slots are those of another pool. Call slots(ids) of this one. "
                "Nothing was changed."
            )

    def __len__(self) -> int:
        return self.places.count
