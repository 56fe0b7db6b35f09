"""The cells of Flux 0.3 and 0.4, whose gates are Dense layers on the stacked [x; h]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from recur.cells import GRUv3Cell
from recur.errors import ShapeError
from recur.io.flux.values import Problem, array, bias, field, function
from recur.io.julia import Struct, undefined

# The order in which the gates' fields stand, and our row blocks with the gate that fills each.
_GATES = {
    "LSTMCell": (("forget", "input", "output", "cell"), ("input", "forget", "cell", "output")),
    "GRUCell": (("update", "reset", "new"), ("reset", "update", "new")),
    "RNNCell": (("d",), ("d",)),
}

Arrays = dict[str, Any]


def gru_from_dense(update: tuple[Any, Any], reset: tuple[Any, Any], new: tuple[Any, Any]) -> Any:
    """The GRUv3 cell that computes what the GRU of Flux 0.4 does.

    Each gate is (W, b), W (n_out, n_in + n_out) and b (n_out,), on the stacked [x; h]; `new` sees
    [x; r h].  That GRU mixes h' = (1 - z) h + z n, the mirror of today's: the update gate's rows
    change sign.  Raises `ShapeError` if the shapes are not those of one cell.
    """
    gates = [(np.asarray(W), np.asarray(b)) for W, b in (update, reset, new)]
    shape = gates[0][0].shape
    if len(shape) != 2 or any(W.shape != shape or b.shape != shape[:1] for W, b in gates):
        raise ShapeError(
            f"gru_from_dense: the gates have shapes {', '.join(str(W.shape) for W, _ in gates)}, "
            "expected one shape (n_out, n_in + n_out), with a bias (n_out,) each."
        )
    return GRUv3Cell.from_arrays(**_gru(*gates))


def cell_of_dense_gates(value: Struct) -> tuple[str, Arrays, Any, Any] | Problem | None:
    """A cell of Flux 0.3 or 0.4 as (cell, arrays, initial state, activation).

    None for a cell of another version.
    """
    order, blocks = _GATES.get(value.type.name, ((), ()))
    dense = value.fields[: len(order)]
    if not order or len(value) <= len(order) or not all(map(_is_dense, dense)):
        return None
    gates = {}
    for name, layer in zip(order, dense, strict=True):
        W = array(field(layer, "weight", "W"), 2)
        if W is None or W.shape[1] <= W.shape[0]:
            return f"gate {name} of a cell of Flux 0.4 has no matrix on [x; h]"
        b = bias(field(layer, "bias", "b"), len(W))
        if isinstance(b, str):
            return b
        gates[name] = (W, np.zeros(len(W), W.dtype) if b is None else b)
    if len({W.shape for W, _ in gates.values()}) != 1:
        return "the gates of a cell of Flux 0.4 have different sizes"
    starts = tuple(array(part, 1) for part in value.fields[len(order) :])
    start = None if any(part is None for part in starts) else starts
    if value.type.name == "GRUCell":
        arrays = _gru(gates["update"], gates["reset"], gates["new"])
        return "GRUv3Cell", arrays, start and start[0], undefined
    arrays = _split([gates[name] for name in blocks])
    if value.type.name == "RNNCell":
        return "RNNCell", arrays, start and start[0], field(dense[0], "σ")
    for name, layer in zip(order, dense, strict=True):
        wanted = "tanh" if name == "cell" else "sigmoid"
        act = function(field(layer, "σ"))
        if getattr(act, "__name__", act) != wanted:
            return f"gate {name} of a cell of Flux 0.4 has another activation than {wanted}"
    return "LSTMCell", arrays, start, undefined


def _is_dense(value: Any) -> bool:
    return isinstance(value, Struct) and value.type.name == "Dense"


def _split(gates: Sequence[tuple[np.ndarray, np.ndarray]]) -> Arrays:
    """Gates on [x; h] as stacked rows, the columns cut where x ends."""
    W = np.concatenate([W for W, _ in gates])
    n_in = W.shape[1] - len(gates[0][0])
    return {"Wi": W[:, :n_in], "Wh": W[:, n_in:], "b": np.concatenate([b for _, b in gates])}


def _gru(update: Any, reset: Any, new: Any) -> Arrays:
    arrays = _split([reset, (-update[0], -update[1]), new])
    n = len(new[0])
    return arrays | {"Wh": arrays["Wh"][: 2 * n], "Whh": arrays["Wh"][2 * n :]}
