"""Choosing samples of a state: which start anew, which go on, and in what order."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from recur import ops
from recur.errors import StateError
from recur.recurrent.state import map_tree
from recur.tape import peek


def checked_mask(title: str, mask: Any) -> np.ndarray:
    """`mask` as (B,) of bool."""
    mask = np.asarray(peek(mask))
    if mask.ndim != 1 or mask.dtype != bool:
        raise StateError(
            f"{title}: reset's mask is {mask.dtype} of shape {mask.shape}, expected bool, one for "
            "each sample of the batch. Nothing was changed."
        )
    return mask


def mixed(title: str, mask: np.ndarray, start: Any, state: Any) -> Any:
    """`start` for the samples of the mask, `state` for the others; any tree of arrays.

    A part of `start` may lack the batch axis.
    """
    return map_tree(functools.partial(_mixed, title, mask), start, state)


def _mixed(title: str, mask: np.ndarray, start: Any, held: Any) -> Any:
    shape = np.shape(peek(held))
    if not shape or shape[-1] != len(mask):
        raise StateError(
            f"{title}: a part of the state has shape {shape}, expected the batch {len(mask)} of "
            "reset's mask on its last axis. Nothing was changed."
        )
    if np.ndim(peek(start)) == len(shape) - 1 > 0:
        start = start[..., None]
    return _by_columns(ops.where(mask, start, held))


def picked(title: str, index: Any, state: Any) -> Any:
    """The samples of `index` along the batch, the last of two or more axes of each part."""

    def leaf(part: Any) -> Any:
        if np.ndim(peek(part)) < 2:  # without a batch
            return part
        batch = peek(part).shape[-1]
        try:
            chosen = np.atleast_1d(np.arange(batch)[index])
        except IndexError as error:
            raise StateError(
                f"{title}: the state holds batch {batch}, the index does not fit it: {error}. "
                "Nothing was changed."
            ) from error
        if chosen.ndim != 1:
            raise StateError(
                f"{title}: the index has shape {chosen.shape}, expected one axis, the samples of "
                "the new batch in order. Nothing was changed."
            )
        return _by_columns(ops.getitem(part, (..., chosen)))

    return map_tree(leaf, state)


def _by_columns(part: Any) -> Any:
    """A plain part in the memory order of kernels; a recorded one as it is."""
    return np.asfortranarray(part) if isinstance(part, np.ndarray) else part
