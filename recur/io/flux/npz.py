"""Give the arrays of a model the names that `Flux.state` would give them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from recur.cells import Cell, GRUv3Cell, LSTMCell
from recur.errors import StateError
from recur.layers import BatchNorm, LayerNorm
from recur.module import Module
from recur.module.walking import join
from recur.recurrent import Recur
from recur.tape import Operand, peek

Named = Iterator[tuple[str, np.ndarray]]


def named_arrays(model: Any, stateless: bool) -> dict[str, np.ndarray]:
    """The arrays of `model` in Fortran order, by key path with dots: `layers.1.cell.Wi`.

    Positions count from 1.  `stateless` is Flux 0.15 and later, whose cells hold no initial state.
    Raises `StateError` for what Flux's layers cannot hold.
    """
    return {name: np.asfortranarray(value) for name, value in _arrays(model, "", stateless)}


def _arrays(layer: Any, path: str, stateless: bool) -> Named:
    if isinstance(layer, Operand):
        yield path, peek(layer)
    elif isinstance(layer, Recur) and isinstance(layer.cell, Cell):
        place = join(path, "cell")
        yield from _cell(layer.cell, place, stateless)
        yield from _start(layer, place, stateless)
    elif isinstance(layer, Cell):
        yield from _cell(layer, path, stateless)
    elif isinstance(layer, LayerNorm):
        for name in ("scale", "bias"):
            held = getattr(layer, name)
            if held is not None:
                yield join(path, f"diag.{name}"), np.asarray(peek(held))
    elif isinstance(layer, BatchNorm):
        for ours, theirs in (("bias", "β"), ("scale", "γ"), ("mean", "μ"), ("var", "σ²")):
            held = getattr(layer, ours)
            if held is not None:
                yield join(path, theirs), np.asarray(peek(held))
    else:
        for name, part in _parts(layer):
            yield from _arrays(part, join(path, name), stateless)


def _parts(layer: Any) -> list[tuple[str, Any]]:
    if isinstance(layer, Module):
        return layer.fields()
    if isinstance(layer, dict):
        return [(str(name), part) for name, part in layer.items()]
    if isinstance(layer, (list, tuple)):
        return [(str(i + 1), part) for i, part in enumerate(layer)]
    return []


def _cell(cell: Any, path: str, stateless: bool) -> Named:
    for extra in ("bh", "peephole"):
        held = getattr(cell, extra, None)
        if held is not None and np.any(peek(held)):
            raise StateError(f"save_npz: {cell!r} at {path} has a {extra}, which no Flux cell has.")
    if getattr(cell, "gate_act", "sigmoid") != "sigmoid":
        raise StateError(f"save_npz: {cell!r} at {path} has hard_sigmoid gates; Flux has none.")
    n = cell.n_out
    yield join(path, "Wi"), np.asarray(peek(cell.Wi))
    Wh = np.asarray(peek(cell.Wh))
    if isinstance(cell, GRUv3Cell) and stateless:
        Wh = np.concatenate(
            [Wh, np.zeros((n, n), Wh.dtype)]
        )  # Flux allocates it, and never uses it
    yield join(path, "Wh"), Wh
    gated = not isinstance(cell, LSTMCell) and hasattr(cell, "gate_act")
    if cell.b is not None:
        yield join(path, "bias" if stateless and not gated else "b"), np.asarray(peek(cell.b))
    if isinstance(cell, GRUv3Cell):
        yield join(path, "Wh_h̃"), np.asarray(peek(cell.Whh))


def _start(layer: Recur, path: str, stateless: bool) -> Named:
    init = layer.init
    parts = [np.asarray(peek(p)) for p in (init if isinstance(init, tuple) else (init,))]
    if stateless:
        if any(map(np.any, parts)):
            raise StateError(
                f"save_npz: {layer!r} at {path} has an initial state, and Flux 0.15 and later keep "
                'none in the layer. Save it for an older Flux (flux="0.14"), or apart.'
            )
        return
    columns = [part.reshape(-1, 1) for part in parts]
    if len(columns) == 1:
        yield join(path, "state0"), columns[0]
    else:
        for i, column in enumerate(columns):
            yield join(path, f"state0.{i + 1}"), column
