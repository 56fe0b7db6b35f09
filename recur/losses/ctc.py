"""Connectionist temporal classification: labels without the times at which they are spoken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from recur.errors import ShapeError, check_shape
from recur.losses.entries import aggregated, joined
from recur.ops import mean
from recur.tape import Node, Op, Sweep, current, peek, record, traced


def ctc_loss(
    yhat: Any,
    y: Any,
    *,
    agg: Callable[[Any], Any] = mean,
    mask: Any = None,
    blank: int | None = None,
) -> Any:
    """-log of the probability that softmax(yhat) spells y, summed over all alignments.

    An alignment gives each step a class; runs of one class count once, then blanks are dropped.

    yhat   logits of one sequence, (C, T) as in Flux, or of a batch, (C, B, T); or a list of steps
    y      the labels of the sequence, 0-based, (L,); for a batch a list of B such, of any lengths
    mask   (B, T), for one sequence (T,): True at the first steps of each sample, which are its own
    blank  the class that stands for no label, by default the last

    A batch has one entry for each sample, of which `agg` makes a number.  Raises `ShapeError` if a
    sample has fewer steps than its labels need, `IndexError` for a label that is not a class.

    Source: Graves et al., Connectionist temporal classification, 2006.
    """
    yhat = joined("ctc_loss", yhat)
    logits = np.asarray(peek(yhat))
    if logits.ndim not in (2, 3):
        raise ShapeError(
            f"ctc_loss: yhat has shape {logits.shape}, expected (C, T) for one sequence or "
            "(C, B, T) for a batch."
        )
    single = logits.ndim == 2
    if logits.dtype.kind != "f":
        logits = logits.astype(np.float64)
    z = logits.T[:, None] if single else logits.T  # (T, B, C)
    T, B, C = z.shape
    blank = C - 1 if blank is None else blank
    if not -C <= blank < C:
        raise IndexError(f"ctc_loss: blank is {blank}, expected a class from 0 to {C - 1}.")
    targets = _targets([y] if single else y, B, C, blank % C)
    lengths = _lengths(mask, logits.shape[1:], T, B)
    for b, (labels, steps) in enumerate(zip(targets, lengths, strict=True)):
        needed = len(labels) + int(np.count_nonzero(labels[1:] == labels[:-1]))
        if steps < needed:
            raise ShapeError(
                f"ctc_loss: sample {b} has {steps} steps, its {len(labels)} labels need at least "
                f"{needed} (a blank stands between equal ones)."
            )
    entries, slope = _forward_backward(z, targets, lengths, blank % C)
    if single:
        entries, slope = entries[0], slope[:, 0]
    x = traced(yhat)
    if current() is not None and x is not None:
        return aggregated(record(_CTC, (x,), [np.asarray(entries)], slope)[0], agg)
    return aggregated(entries, agg)


class _Ctc(Op):
    __slots__ = ()

    def backward(self, sweep: Sweep, node: Node, grads: dict[int, np.ndarray]) -> None:
        assert node.inputs is not None
        sweep.add(node.inputs[0], (node.saved * grads[0][..., None]).T, own=True)


_CTC = _Ctc("ctc_loss")


def _targets(y: Any, B: int, C: int, blank: int) -> list[np.ndarray]:
    targets = [np.asarray(peek(labels), np.intp) for labels in y]
    if len(targets) != B:
        raise ShapeError(f"ctc_loss: y holds labels of {len(targets)} samples, expected {B}.")
    for b, labels in enumerate(targets):
        check_shape("ctc_loss", f"y of sample {b}", labels.shape, (None,))
        wrong = (labels < 0) | (labels >= C) | (labels == blank)
        if wrong.any():
            raise IndexError(
                f"ctc_loss: sample {b} has label {labels[wrong][0]}, expected 0 to {C - 1} and not "
                f"the blank {blank}."
            )
    return targets


def _lengths(mask: Any, shape: tuple[int, ...], T: int, B: int) -> np.ndarray:
    if mask is None:
        return np.full(B, T)
    mask = np.asarray(peek(joined("ctc_loss", mask)))
    if mask.dtype != np.bool_:
        raise TypeError(f"ctc_loss: mask has dtype {mask.dtype}, expected bool.")
    check_shape("ctc_loss", "mask", mask.shape, shape)
    mask = mask.reshape(B, T)
    lengths = mask.sum(axis=1)
    if (mask != (np.arange(T) < lengths[:, None])).any():
        raise ShapeError("ctc_loss: the mask has gaps, expected True up to each sample's length.")
    return lengths


def _forward_backward(
    z: np.ndarray, targets: Sequence[np.ndarray], lengths: np.ndarray, blank: int
) -> tuple[np.ndarray, np.ndarray]:
    """The loss of each sample (B,), and its slope in the logits z (T, B, C).

    A sample's states are its labels with a blank before, between and behind them.
    """
    T, B = z.shape[:2]
    if not T:
        return np.zeros(B, z.dtype), np.zeros_like(z)
    last = np.array([2 * len(labels) for labels in targets])
    states = np.full((B, last.max(initial=0) + 1), blank)
    for row, labels in zip(states, targets, strict=True):
        row[1 : 2 * len(labels) : 2] = labels
    inside = np.arange(T)[:, None] < lengths
    log_p = _log_softmax(np.where(inside[..., None], z, 0))
    emit = np.take_along_axis(log_p, np.broadcast_to(states, (T, *states.shape)), axis=2)
    # The blank between two different labels may be left out: those states are entered by a skip.
    skips = np.zeros(states.shape, bool)
    skips[:, 2:] = (states[:, 2:] != blank) & (states[:, 2:] != states[:, :-2])

    rows = np.arange(B)
    ends = np.full(states.shape, -np.inf, z.dtype)
    ends[rows, last] = ends[rows, np.maximum(last - 1, 0)] = 0
    forward = _forward(emit, skips)
    backward = _backward(emit, skips, ends, lengths)
    total = np.logaddexp.reduce(forward[lengths - 1, rows] + ends, axis=1)
    total = np.where(lengths > 0, total, 0)

    visits = np.where(inside[..., None], np.exp(forward + backward - total[:, None]), 0)
    slope = np.exp(log_p) * inside[..., None]
    for s in range(states.shape[1]):
        slope[:, rows, states[:, s]] -= visits[:, :, s]
    return -total, slope


def _forward(emit: np.ndarray, skips: np.ndarray) -> np.ndarray:
    """(T, B, S): the log probability of all ways to be in state s after step t."""
    forward = np.empty_like(emit)
    now = np.full(skips.shape, -np.inf, emit.dtype)
    now[:, 0] = 0  # before the first step: in front of the first label
    for t in range(len(emit)):
        came = np.logaddexp(now, _moved(now, 1))
        came = np.logaddexp(came, np.where(skips, _moved(now, 2), -np.inf))
        now = forward[t] = came + emit[t]
    return forward


def _backward(
    emit: np.ndarray, skips: np.ndarray, ends: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """(T, B, S): the log probability of all ways from state s after step t to the end."""
    backward = np.empty_like(emit)
    come = np.full_like(ends, -np.inf)
    for t in reversed(range(len(emit))):
        on = np.logaddexp(come, _moved(come, -1))
        on = np.logaddexp(on, _moved(np.where(skips, come, -np.inf), -2))
        backward[t] = np.where((lengths == t + 1)[:, None], ends, on)
        come = backward[t] + emit[t]
    return backward


def _log_softmax(z: np.ndarray) -> np.ndarray:
    z = z - z.max(axis=2, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=2, keepdims=True))


def _moved(x: np.ndarray, by: int) -> np.ndarray:
    """x (B, S) moved along its states, with probability 0 coming in."""
    out = np.full_like(x, -np.inf)
    if by > 0:
        out[:, by:] = x[:, :-by]
    else:
        out[:, :by] = x[:, -by:]
    return out
