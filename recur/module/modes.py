"""Train and test mode, and calls that leave no trace when they fail."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from recur._kernels import closed, opened
from recur.module.base import Module
from recur.module.walking import walk

Model = TypeVar("Model")
Mode = bool | Literal["auto"]


def trainmode(model: Model, mode: Mode = True) -> Model:
    """Switches every random or statistics layer on, off, or ("auto") on inside a scope only."""
    active = None if mode == "auto" else bool(mode)
    for _, layer in walk(model):
        if isinstance(layer, Module) and hasattr(layer, "active"):
            layer.active = active
    return model


def testmode(model: Model, mode: Mode = True) -> Model:
    """Switches every random or statistics layer off, on, or ("auto") on inside a scope only."""
    return trainmode(model, mode if mode == "auto" else not mode)


testmode.__test__ = False  # type: ignore[attr-defined]  # pytest would collect it


class _Journal(threading.local):
    entries: dict[int, tuple[Any, Callable[[], None]]] | None = None


_journal = _Journal()


class transaction:
    """`with transaction():` an exception that leaves the block undoes what layers changed in it.

    Inside another transaction of the same thread it does nothing: the outermost undoes all.
    """

    __slots__ = ("_outermost",)

    def __enter__(self) -> None:
        self._outermost = _journal.entries is None
        if self._outermost:
            _journal.entries = {}
            opened()

    def __exit__(self, kind: object, *_: object) -> None:
        if not self._outermost:
            return
        entries, _journal.entries = _journal.entries or {}, None
        closed()
        if kind is not None:
            for _layer, restore in reversed(entries.values()):
                restore()


def in_transaction() -> bool:
    """Whether a failure would have to be undone, in this thread."""
    return _journal.entries is not None


def journal(layer: Any, restore: Callable[[], None]) -> None:
    """Says how to undo what `layer` is about to change; does nothing outside a transaction.

    Only the first call for a layer counts: `restore` must bring back all that the layer changes.
    """
    entries = _journal.entries
    if entries is not None and id(layer) not in entries:
        entries[id(layer)] = layer, restore
