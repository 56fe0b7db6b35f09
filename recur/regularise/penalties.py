"""Penalties on activations, to be added to a loss."""

from __future__ import annotations

from typing import Any

import numpy as np

from recur import ops
from recur.errors import ShapeError
from recur.tape import peek


def activity_penalty(ys: Any, alpha: float = 2.0, *, mask: Any = None) -> Any:
    """alpha * mean(y²), "AR" (Merity, McCann and Socher 2017, Revisiting activation
    regularization).

    ys     outputs of a recurrent layer after dropout, (F, B, T), (F, B), or a list of steps
    mask   (B, T) bool: padded steps, False, do not count

    The mean is over features, samples and steps.  Raises `ShapeError` for a mask that does not fit.
    """
    Y = _sequence(ys)
    return alpha * _mean_square(Y, _alive("activity_penalty", mask, Y))


def temporal_activity_penalty(ys: Any, beta: float = 1.0, *, mask: Any = None) -> Any:
    """beta * mean((y_t - y_{t+1})²), "TAR" (Merity, McCann and Socher 2017).

    ys     outputs of a recurrent layer before dropout, (F, B, T) or a list of at least two steps
    mask   (B, T) bool: only pairs of real steps count

    Raises `ShapeError` for fewer than two steps, and as `activity_penalty`.
    """
    Y = _sequence(ys)
    if np.ndim(peek(Y)) != 3 or Y.shape[2] < 2:
        raise ShapeError(
            f"temporal_activity_penalty: ys has shape {np.shape(peek(Y))}, expected (features, "
            "batch, time) with at least 2 steps."
        )
    alive = _alive("temporal_activity_penalty", mask, Y)
    pairs = None if alive is None else alive[:, 1:] & alive[:, :-1]
    return beta * _mean_square(Y[:, :, 1:] - Y[:, :, :-1], pairs)


def _sequence(ys: Any) -> Any:
    return ops.stack(ys, -1) if isinstance(ys, (list, tuple)) else ys


def _alive(caller: str, mask: Any, Y: Any) -> np.ndarray | None:
    if mask is None:
        return None
    alive = np.asarray(peek(mask))
    if alive.dtype != bool or alive.shape != tuple(Y.shape[1:]):
        raise ShapeError(
            f"{caller}: mask is {alive.dtype} of shape {alive.shape}, expected bool "
            f"{tuple(Y.shape[1:])} as (batch, time)."
        )
    return alive


def _mean_square(Y: Any, alive: np.ndarray | None) -> Any:
    if alive is None:
        return (Y * Y).mean()
    Y = ops.where(alive, Y, 0)  # what padding holds must not count, not even as NaN
    return (Y * Y).sum() / max(1, int(alive.sum()) * Y.shape[0])
