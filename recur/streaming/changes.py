"""`Watch`: whether layers are still set as they were when they were looked at."""

from __future__ import annotations

import operator
from typing import Any

from recur._kernels import Version
from recur.layers.containers import Container
from recur.module import Module

_count = operator.attrgetter("count")


class Watch:
    """Layers that were looked at.  Weights that are written do not count: they have counters.

    counters  one moves when an attribute of a layer is assigned
    named     dicts of layers, which may be changed in place, with what they held
    """

    def __init__(self) -> None:
        self.counters: list[Version] = []
        self.named: list[tuple[dict[str, Any], list[Any]]] = []
        self._counts: list[int] = []

    def see(self, layer: Module) -> None:
        """Begins to watch a layer; call it before anything of the layer is read."""
        counter = layer.change_counter()
        self.counters.append(counter)
        self._counts.append(counter.count)
        if isinstance(layer, Container) and isinstance(layer.layers, dict):
            self.named.append((layer.layers, list(layer.layers.values())))

    @property
    def moved(self) -> bool:
        """Whether an attribute was assigned since, or another layer stands under a name."""
        if list(map(_count, self.counters)) != self._counts:
            return True
        for names, held in self.named:
            if len(names) != len(held) or not all(map(operator.is_, names.values(), held)):
                return True
        return False
