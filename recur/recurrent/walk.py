"""Driving a cell over a step, a list of steps or a sequence, from a state to a state.

Nothing here keeps a state: a walk takes one and gives one back.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from recur import ops
from recur.cells import Cell, check_input, floats, plain
from recur.errors import ShapeError, StateError
from recur.recurrent.state import map_tree, owned, value_of
from recur.tape import Operand, current, peek

Enter = Callable[[int], tuple]


class Options(NamedTuple):
    """What a call on a sequence may ask for.

    lengths         (B,) integers: sample b has lengths[b] steps, what follows is padding
    mask            (B, T) bool: False at padded steps, wherever they lie
    truncate_every  k: history is cut after every k steps, counted from the start of the call
    remat           k: only every k-th state is kept for backward, the rest is computed again
    """

    lengths: Any = None
    mask: Any = None
    truncate_every: int | None = None
    remat: int | None = None

    def check(self, title: str) -> None:
        for name in ("truncate_every", "remat"):
            k = getattr(self, name)
            if k is not None and (
                isinstance(k, bool) or not isinstance(k, (int, np.integer)) or k < 1
            ):
                raise ValueError(f"{title}: {name} is {k!r}, expected a positive integer.")
        if self.lengths is not None and self.mask is not None:
            raise ValueError(f"{title}: lengths= and mask= say the same thing; pass one of them.")

    def refuse_for_step(self, title: str) -> None:
        given = [
            name for name, option in zip(self._fields, self, strict=True) if option is not None
        ]
        if given:
            raise ShapeError(
                f"{title}: {given[0]}= needs a sequence (features, batch, time) or a list of "
                "steps, and x is a single step. Nothing was changed."
            )

    def alive(self, title: str, batch: int, T: int) -> np.ndarray | None:
        """(B, T) bool, True at real steps; None if all are."""
        if self.lengths is not None:
            lengths = np.asarray(peek(self.lengths))
            if lengths.shape != (batch,) or lengths.dtype.kind not in "iu":
                raise ShapeError(
                    f"{title}: lengths is {lengths.dtype} of shape {lengths.shape}, expected "
                    f"integers ({batch},), one for each sample. Nothing was changed."
                )
            if batch and not (0 <= lengths.min() and lengths.max() <= T):
                raise ShapeError(
                    f"{title}: lengths run from {lengths.min()} to {lengths.max()}, expected 0 to "
                    f"{T}, the steps of x. Nothing was changed."
                )
            alive = np.arange(T) < lengths[:, None]
        elif self.mask is not None:
            alive = np.asarray(peek(self.mask))
            if alive.shape != (batch, T) or alive.dtype != bool:
                raise ShapeError(
                    f"{title}: mask is {alive.dtype} of shape {alive.shape}, expected bool "
                    f"({batch}, {T}) as (batch, time). Nothing was changed."
                )
        else:
            return None
        return None if alive.all() else alive


class Part(NamedTuple):
    """Steps [start, stop) of a sequence, in which each sample first lives, then rests."""

    start: int
    stop: int
    cut: bool  # history ends before this part
    lengths: np.ndarray | None  # (B,) int64: how many of these steps each sample lives


def parts(T: int, alive: np.ndarray | None, cut_every: int | None) -> Iterator[Part]:
    """Cuts T steps where history ends and where a sample wakes up after padding."""
    cuts = set(range(cut_every, T, cut_every)) if cut_every else set()
    starts = {0} | cuts
    if alive is not None:
        wakes = (alive[:, 1:] & ~alive[:, :-1]).any(axis=0)
        starts.update((np.flatnonzero(wakes) + 1).tolist())
    bounds = [*sorted(starts), T]
    for start, stop in itertools.pairwise(bounds):
        lengths = None
        if alive is not None and not alive[:, start:stop].all():
            lengths = alive[:, start:stop].sum(axis=1, dtype=np.int64)
        yield Part(start, stop, start in cuts, lengths)


# ---------------------------------------------------------------------- our cells


def walk_cell(
    cell: Cell,
    title: str,
    x: Any,
    enter: Enter,
    options: Options,
    *,
    strict: bool = False,
    layer: object = None,
) -> tuple[Any, Any]:
    """Output and new state of a `Cell` on x; the state is None if there was no step.

    x      (n_in,), (n_in, B), (n_in, B, T), or a list of steps, which gives a list
    enter  gives the state for a batch size: its parts as (n_out, B); raises if there is none
    """
    options.check(title)
    if isinstance(x, (list, tuple)):
        return _walk_list(cell, title, x, enter, options, strict, layer)
    x = floats(title, "x", x, cell.dtype, strict=strict)
    check_input(cell, title, x, (1, 2, 3))
    if x.ndim == 3:
        return _walk_sequence(cell, title, x, enter, options, layer)
    options.refuse_for_step(title)
    state, y = cell.run_step(x, enter(1 if x.ndim == 1 else x.shape[1]), layer)
    return y, state


def _walk_list(
    cell: Cell,
    title: str,
    xs: Sequence[Any],
    enter: Enter,
    options: Options,
    strict: bool,
    layer: object,
) -> tuple[list, Any]:
    if not xs:
        return [], None
    steps = [floats(title, f"x[{t}]", x, cell.dtype, strict=strict) for t, x in enumerate(xs)]
    for t, step in enumerate(steps):
        check_input(cell, title, step, (1, 2))
        if step.shape != steps[0].shape:
            raise ShapeError(
                f"{title}: step {t} of the list has shape {tuple(step.shape)}, step 0 has "
                f"{tuple(steps[0].shape)}; all steps of one call have one shape. Nothing was "
                "changed."
            )
    X = ops.stack(steps, -1)
    vector = X.ndim == 2
    if vector:
        X = X[:, None, :]
    Y, state = _walk_sequence(cell, title, X, enter, options, layer)
    return [Y[:, 0, t] if vector else Y[:, :, t] for t in range(len(steps))], state


def _walk_sequence(
    cell: Cell, title: str, X: Any, enter: Enter, options: Options, layer: object
) -> tuple[Any, Any]:
    batch, T = X.shape[1:]
    alive = options.alive(title, batch, T)
    state = enter(batch)
    if T == 0:
        return np.zeros((0, batch, cell.n_out), cell.dtype).T, None
    ys = []
    for part in parts(T, alive, options.truncate_every):
        if part.cut:
            state = plain(state)
            log_cut(layer, part.start)
        whole = part.stop - part.start == T
        x = X if whole else X[:, :, part.start : part.stop]
        state, Y = cell.run_sequence(x, state, part.lengths, options.remat, layer)
        ys.append(Y)
    return ys[0] if len(ys) == 1 else ops.concatenate(ys, axis=-1), state


def log_cut(layer: object, step: int) -> None:
    """Notes that history was cut inside a call, before this step of it."""
    tape = current()
    if tape is not None and tape.events is not None:
        tape.log("cut", layer=layer, step=step)


# ---------------------------------------------------------------------- cells of the user


def walk_function(
    cell: Callable[..., Any],
    title: str,
    xs: tuple,
    state: Any,
    options: Options,
    *,
    layer: object = None,
) -> tuple[Any, Any]:
    """Output and new state of any `cell(state, *xs) -> (state, y)`; state and inputs go unchecked.

    Lists, and arrays with three axes, are sequences, all of one length; one step of each goes to
    the cell at a time.
    """
    options.check(title)
    if options.remat is not None:
        raise StateError(f"{title}: remat= needs a cell that runs as one kernel. Leave remat= out.")
    lists = [isinstance(x, (list, tuple)) for x in xs]
    deep = [not a_list and np.ndim(peek(x)) == 3 for x, a_list in zip(xs, lists, strict=True)]
    if not any(lists) and not any(deep):
        options.refuse_for_step(title)
        return _called(cell, title, state, xs)
    if not all(lists) and not all(deep):
        raise ShapeError(
            f"{title}: some inputs are sequences and some are not; pass all of them as lists of "
            "steps, or all as (features, batch, time). Nothing was changed."
        )
    sizes = [len(x) if lists[0] else x.shape[2] for x in xs]
    if len(set(sizes)) > 1:
        raise ShapeError(
            f"{title}: the inputs have {' and '.join(map(str, sizes))} steps, expected one number. "
            "Nothing was changed."
        )
    T = sizes[0]
    steps = [tuple(x[t] if lists[0] else x[:, :, t] for x in xs) for t in range(T)]
    if T == 0:
        return _no_steps(cell, title, xs, lists[0]), None
    alive = _alive_of(title, steps[0], options, T)
    ys = []
    for t, inputs in enumerate(steps):
        if options.truncate_every and t and t % options.truncate_every == 0:
            state = map_tree(value_of, state)
            log_cut(layer, t)
        if alive is None or alive[:, t].all():
            y, state = _called(cell, title, state, inputs)
        else:
            y, state = _masked(cell, title, state, inputs, alive[:, t])
        ys.append(y)
    return ys if lists[0] else ops.stack(ys, -1), state


def _called(cell: Callable[..., Any], title: str, state: Any, xs: tuple) -> tuple[Any, Any]:
    result = cell(state, *xs)
    if not isinstance(result, tuple) or len(result) != 2:
        raise StateError(
            f"{title}: the cell returned {type(result).__name__}, expected the tuple (state, y). "
            "Nothing was changed."
        )
    state, y = result
    return y, map_tree(owned, state)


def _no_steps(cell: Any, title: str, xs: tuple, as_list: bool) -> Any:
    if as_list:
        return []
    n_out = getattr(cell, "n_out", None)
    if n_out is None:
        raise ShapeError(
            f"{title}: x has no steps, and without one the cell's output has no known size. Give "
            "the cell an attribute n_out, or pass an empty list. Nothing was changed."
        )
    return np.zeros((0, xs[0].shape[1], n_out), peek(xs[0]).dtype).T


def _alive_of(title: str, xs: tuple, options: Options, T: int) -> np.ndarray | None:
    if options.lengths is None and options.mask is None:
        return None
    shape = np.shape(peek(xs[0]))
    return options.alive(title, shape[-1] if len(shape) > 1 else 1, T)


def _masked(
    cell: Callable[..., Any], title: str, state: Any, xs: tuple, alive: np.ndarray
) -> tuple[Any, Any]:
    """One step in which some samples rest: they keep their state, and their output is 0."""
    # What padding holds must not reach any gradient.
    xs = tuple(ops.where(alive, x, 0) if np.ndim(peek(x)) else x for x in xs)
    y, new = _called(cell, title, state, xs)

    def keep(new: Any, old: Any) -> Any:
        shape = np.shape(peek(new))
        if len(alive) > 1 and (not shape or shape[-1] != len(alive)):
            raise StateError(
                f"{title}: a part of the state has shape {shape}, expected the batch "
                f"{len(alive)} on the last axis, for some samples to rest. Nothing was changed."
            )
        if isinstance(old, (Operand, np.ndarray)) and old.ndim == len(shape) - 1 > 0:
            old = old[..., None]
        return ops.where(alive, new, old)

    return ops.where(alive, y, 0), map_tree(keep, new, state)
