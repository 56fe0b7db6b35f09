"""A cell over a sequence, as a function that keeps nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from recur.cells import Cell, fit_batch, own_state
from recur.errors import StateError
from recur.module import label
from recur.recurrent.state import map_tree, owned
from recur.recurrent.walk import Options, walk_cell, walk_function


def scan(
    cell: Callable[..., Any],
    X: Any,
    state: Any = None,
    return_state: bool = False,
    *,
    lengths: Any = None,
    mask: Any = None,
    truncate_every: int | None = None,
    remat: int | None = None,
) -> Any:
    """The outputs of `cell` over X, or `(outputs, last state)`.

    cell   a `Cell`, or any `state, y = cell(state, x)`
    X      (n_in, B, T), which gives (n_out, B, T), or a list of steps, which gives a list
    state  where to start: parts (n_out,) or (n_out, B), which may get a gradient; broadcast as by
           the cell.  None: the cell's zeros.  The last state has a batch axis

    The other options, and errors, as for `Recur`.
    """
    options = Options(lengths, mask, truncate_every, remat)
    if state is None:
        if not hasattr(cell, "initial_state"):
            raise StateError(f"scan: {label(cell)} has no initial_state(), so state= is needed.")
        state = cell.initial_state()
    if isinstance(cell, Cell) and type(cell).__call__ is Cell.__call__:
        given = own_state(cell, cell.title, state)
        enter = functools.partial(fit_batch, cell, cell.title, given)
        Y, last = walk_cell(cell, cell.title, X, enter, options)
        last = cell.wrap(given if last is None else last)
    else:
        title = f"scan({label(cell)})"
        state = map_tree(owned, state)
        Y, last = walk_function(cell, title, (X,), state, options)
        last = state if last is None else last
    return (Y, last) if return_state else Y
