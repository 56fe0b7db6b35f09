"""One cell's arrays, from PyTorch's layout and back.

PyTorch stacks gates as recur does (LSTM: i, f, g, o; GRU: r, z, n) in matrices (rows out, columns
in), and has two biases, b_ih and b_hh.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from recur import ops
from recur.cells import Cell, GRUCell, GRUv3Cell, LSTMCell, RNNCell
from recur.errors import FormatError, ShapeError, StateError
from recur.io._gates import GATES, floats, sum_of_biases, weights

_KINDS: dict[str, type[Cell]] = {"RNN": RNNCell, "LSTM": LSTMCell, "GRU": GRUCell}
_ACTS = ("tanh", "relu")


def cell_from_torch(
    kind: str,
    w_ih: Any,
    w_hh: Any,
    b_ih: Any = None,
    b_hh: Any = None,
    *,
    recurrent_bias: bool | None = None,
    act: Any = "tanh",
) -> Any:
    """A cell with the weights of `torch.nn.<kind>` or `<kind>Cell`: "RNN", "LSTM" or "GRU".

    w_ih        (G n_out, n_in); G is 1, 4 or 3 blocks of gates
    w_hh        (G n_out, n_out)
    b_ih, b_hh  (G n_out,), or both None

    All are copied.  LSTM and RNN add the biases up.  In a GRU those of r and z are added up; of n,
    b_hh lies inside the reset product and becomes `bh` (None: if it is not zero).  `act` is the
    RNN's `nonlinearity`.

    A model trained further with two biases moves their sum twice as fast as one bias.

    Raises `ShapeError` for sizes, `FormatError` for recurrent_bias=False where b_hh of n is not
    zero.
    """
    if kind not in _KINDS:
        raise FormatError(f"{kind!r} is no recurrent layer of PyTorch; expected RNN, LSTM or GRU.")
    gates = GATES[_KINDS[kind]]
    w_hh = floats("w_hh", w_hh, (None, None))
    rows, n_out = w_hh.shape
    if rows != gates * n_out:
        raise ShapeError(
            f"{kind}: w_hh has shape {w_hh.shape}, expected ({gates} n, n). A projection "
            "(proj_size) has no counterpart here."
        )
    w_ih = floats("w_ih", w_ih, (rows, None))
    if (b_ih is None) != (b_hh is None):
        raise FormatError(f"{kind}: only one of b_ih and b_hh is given.")
    arrays: dict[str, Any] = {"Wi": w_ih, "Wh": w_hh}
    if b_ih is not None:
        b_ih, b_hh = floats("b_ih", b_ih, (rows,)), floats("b_hh", b_hh, (rows,))
        if kind == "GRU":
            arrays["b"], bh = sum_of_biases(
                f"GRU({w_ih.shape[1]} => {n_out})", b_ih, b_hh, recurrent_bias
            )
            if bh is not None:
                arrays |= {"bh": bh, "recurrent_bias": True}
        else:
            arrays["b"] = b_ih + b_hh
    elif recurrent_bias and kind == "GRU":
        arrays |= {"bh": np.zeros(n_out, w_hh.dtype), "recurrent_bias": True}
    if kind == "RNN":
        arrays["act"] = act
    return _KINDS[kind].from_arrays(**arrays)  # type: ignore[attr-defined]


def cell_to_torch(cell: Any) -> dict[str, np.ndarray]:
    """The arrays w_ih, w_hh, b_ih, b_hh of PyTorch for a cell; without a bias only the first two.

    b_ih = b; b_hh is zero but for a GRU's `bh` in the rows of n.  The arrays are new.

    Raises `StateError` for what PyTorch's cells cannot hold: GRUv3, peepholes, hard_sigmoid gates,
    an RNN's activation other than tanh and relu.
    """
    held = weights(cell)
    _check(cell)
    arrays = {"w_ih": held["Wi"], "w_hh": held["Wh"]}
    if "b" in held or "bh" in held:
        rows, n = held["Wh"].shape
        b_hh = np.zeros(rows, held["Wi"].dtype)
        if "bh" in held:
            b_hh[-n:] = held["bh"]
        arrays |= {"b_ih": held.get("b", np.zeros_like(b_hh)), "b_hh": b_hh}
    return {name: np.array(array) for name, array in arrays.items()}


def _check(cell: Any) -> None:
    if isinstance(cell, GRUv3Cell):
        reason = "the reset gate of PyTorch's GRU comes after the product"
    elif isinstance(cell, RNNCell) and ops.name_of(cell.act) not in _ACTS:
        reason = "PyTorch's RNN has tanh and relu only"
    elif getattr(cell, "gate_act", "sigmoid") != "sigmoid":
        reason = "the gates of PyTorch are sigmoid"
    elif getattr(cell, "peephole", None) is not None:
        reason = "PyTorch's LSTM has no peepholes"
    else:
        return
    raise StateError(f"{cell.describe()}: PyTorch cannot hold it: {reason}.")
