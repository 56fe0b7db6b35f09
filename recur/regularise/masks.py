"""Masks that last for a window: what the random layers that keep one share."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, TypeVar

import numpy as np

from recur.module import Module, child_generator, journal, modules
from recur.tape import current

Model = TypeVar("Model")

_IMPORT = uuid.uuid4().hex


class WindowMasks(Module):
    """Masks that are drawn at their first use in a scope and kept until the scope ends.

    So all steps of a window see one mask, and stepping equals the call on a sequence; `truncate`
    keeps it.  `resample` and `reset(model)` drop the masks, and the next use draws new ones from
    `generator`.  Outside a scope, where a layer acts only if it was told to (`trainmode`), masks
    last until then.  `active` is None (on inside a scope), True or False.
    """

    def __init__(self, active: bool | None, rng: np.random.Generator | None) -> None:
        self.active = active
        self.generator = child_generator(rng)
        # By whether they belong to a scope, and by what the layer keeps them under.
        self._masks: dict[Any, np.ndarray] = {}
        self._scope: int | None = None  # the serial of the scope that they belong to

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_process": _process()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        same_process = state.pop("_process") == _process()
        super().__setstate__(state)
        if not same_process:  # whose scopes have the same numbers, and are others
            self._masks = {key: mask for key, mask in self._masks.items() if not key[0]}
            self._scope = None

    def resample(self) -> None:
        """The next use draws new masks."""
        self._masks = {}
        self.changed()

    def held_masks(self) -> dict[Any, Any]:
        """What `hold_masks` takes to go on with the masks of this moment."""
        return {**self._masks, "scope": self._scope}

    def hold_masks(self, held: dict[Any, Any]) -> None:
        """Goes on with the masks that `held_masks` gave."""
        masks: dict[Any, Any] = dict(held)
        self._scope = masks.pop("scope")
        self._masks = masks
        self.changed()

    def changed(self) -> None:
        """Called when the masks that serve are others: what was made of them does no longer."""

    def held(self, key: Hashable) -> np.ndarray | None:
        """The mask that is kept under `key` and still serves, or None."""
        tape = current()
        if tape is not None and tape.serial != self._scope:
            return None
        return self._masks.get((tape is not None, key))

    def hold(self, masks: dict[Any, np.ndarray]) -> None:
        """Keeps masks, by key, for the rest of the scope."""
        tape = current()
        self._journal()
        kept = self._masks
        if tape is not None and tape.serial != self._scope:
            kept = {key: mask for key, mask in kept.items() if not key[0]}
            self._scope = tape.serial
        self._masks = {**kept, **{(tape is not None, key): mask for key, mask in masks.items()}}

    def mask_of(self, key: Hashable, draw: Callable[[], np.ndarray]) -> np.ndarray:
        """The mask kept under `key`; what `draw` gives if there is none."""
        mask = self.held(key)
        if mask is None:
            mask = draw()
            self.hold({key: mask})
        return mask

    def draw(self, p: float, shape: tuple[int, ...]) -> np.ndarray:
        """New ones and zeros from the layer's own generator; see `drawn`."""
        self._journal()
        return drawn(self.generator, p, shape)

    def _journal(self) -> None:
        journal(self, partial(self._go_back, self.held_masks(), self.generator.bit_generator.state))

    def _go_back(self, masks: dict[Any, Any], state: Any) -> None:
        self.hold_masks(masks)
        self.generator.bit_generator.state = state


def _process() -> str:
    return f"{_IMPORT} {os.getpid()}"


def drawn(generator: np.random.Generator, p: float, shape: tuple[int, ...]) -> np.ndarray:
    """Ones, each 0 with probability p: uint8, C-contiguous.

    Drawn in float32 whatever the layer computes in, so that a model draws alike in both dtypes.
    """
    return (generator.random(shape, np.float32) >= p).view(np.uint8)


def scaled(bits: np.ndarray, p: float, dtype: np.dtype) -> np.ndarray:
    """bits / (1 - p): the factor whose expectation is 1."""
    factor = bits.astype(dtype)
    if 0 < p < 1:
        factor *= dtype.type(1 / (1 - p))
    return factor


def resample(model: Model) -> Model:
    """Every layer that keeps a mask for a window draws a new one at its next step.

    For loops inside one long scope: call it where a window ends.  `reset(model)` does it too, and
    so does the next scope.  Returns the model.
    """
    keepers: list[Any] = [layer for _, layer in modules(model) if hasattr(layer, "resample")]
    for layer in keepers:
        layer.resample()
    return model
