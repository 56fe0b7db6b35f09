"""One cell's arrays, from the layout of Keras' layers and back.

Keras multiplies from the right: kernels are (n_in, G n_out), with gates as blocks of columns, in an
LSTM i, f, c, o, in a GRU z, r, h.

Source: github.com/keras-team/keras, of 2.2 and 3: the layers' `call`; 2.2: `CuDNNLSTM`, `CuDNNGRU`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from recur import ops
from recur.cells import Cell, GRUCell, GRUv3Cell, LSTMCell, RNNCell
from recur.errors import FormatError, StateError
from recur.io._gates import blocks, floats, sum_of_biases, weights
from recur.io.keras.activations import activation, activation_name, version_of

_GATES = {"SimpleRNN": 1, "LSTM": 4, "GRU": 3}
_ORDER = {"SimpleRNN": (0,), "LSTM": (0, 1, 2, 3), "GRU": (1, 0, 2)}  # each its own inverse
_CUDNN = {"CuDNNLSTM": "LSTM", "CuDNNGRU": "GRU"}
CELL_KINDS = ("SimpleRNN", "LSTM", "GRU", "CuDNNLSTM", "CuDNNGRU")


def class_of(cell: Cell) -> str:
    """The Keras layer that computes a cell: "SimpleRNN", "LSTM" or "GRU"."""
    if isinstance(cell, RNNCell):
        return "SimpleRNN"
    return "LSTM" if isinstance(cell, LSTMCell) else "GRU"


def cell_to_keras(cell: Any, keras_version: str = "3") -> tuple[dict[str, np.ndarray], dict]:
    """(arrays, config) of the Keras layer that computes a cell.

    kernel (n_in, G n_out), recurrent_kernel (n_out, G n_out) and, with a bias, bias: (G n_out,), or
    (2, 3 n_out) of a GRU with reset_after; new arrays.  config has units, activation, use_bias,
    recurrent_activation of cells with gates, and reset_after of a GRU: True for `GRUCell`, False
    for `GRUv3Cell`.

    Raises `StateError` for what Keras cannot hold: peepholes, activations that it lacks, and
    hard_sigmoid gates from Keras 3 on, where that name means another function.
    """
    held, kind = weights(cell), class_of(cell)
    order = _ORDER[kind]
    if "peephole" in held:
        raise StateError(f"{cell.describe()}: the LSTM of Keras has no peepholes.")
    recurrent = held["Wh"]
    if "Whh" in held:
        recurrent = np.concatenate([recurrent, held["Whh"]])
    arrays = {"kernel": blocks(held["Wi"], order).T, "recurrent_kernel": blocks(recurrent, order).T}
    if "b" in held or "bh" in held:
        bias = np.zeros((2, len(recurrent)), recurrent.dtype)
        bias[0] = held.get("b", 0)
        bias[1, -cell.n_out :] = held.get("bh", 0)
        bias = blocks(bias, order, axis=1)
        arrays["bias"] = bias if isinstance(cell, GRUCell) else bias[0]
    act = cell.act if kind == "SimpleRNN" else ops.tanh
    config: dict[str, Any] = {
        "units": cell.n_out,
        "activation": activation_name(cell, act, keras_version),
        "use_bias": "bias" in arrays,
    }
    if kind != "SimpleRNN":
        gate = ops.activation(cell.gate_act)
        config["recurrent_activation"] = activation_name(cell, gate, keras_version)
    if kind == "GRU":
        config["reset_after"] = isinstance(cell, GRUCell)
    return {name: np.array(array, order="C") for name, array in arrays.items()}, config


def cell_from_keras(
    kind: str,
    kernel: Any,
    recurrent_kernel: Any,
    bias: Any = None,
    *,
    units: int | None = None,
    activation: Any = "tanh",
    recurrent_activation: Any = None,
    use_bias: bool | None = None,
    reset_after: bool | None = None,
    keras_version: str = "3",
    recurrent_bias: bool | None = None,
) -> Any:
    """The cell with the weights of Keras' layer `kind`.

    kind    SimpleRNN, LSTM, GRU, or CuDNNLSTM, CuDNNGRU of Keras 2 with their two biases in one
    arrays  as `cell_to_keras` gives them; copied
    others  the layer's config

    Where the config does not say it, `keras_version` does: before 2.3 gates were hard_sigmoid,
    clip(0.2 x + 0.5, 0, 1), and a GRU had reset_after=False.  Keras 3 gives the name hard_sigmoid
    to relu6(x + 3) / 6.  A GRU with reset_after is a `GRUCell`, one without a `GRUv3Cell`;
    `recurrent_bias` as in `cell_from_torch`.

    Raises `ShapeError` for sizes, `FormatError` for what cells cannot hold.
    """
    if kind in _CUDNN:
        kind = _CUDNN[kind]
        kernel, recurrent_kernel, bias = _from_cudnn(kind, kernel, recurrent_kernel, bias)
        recurrent_activation, reset_after = "sigmoid", True
    if kind not in _GATES:
        raise FormatError(f"{kind!r} is no recurrent layer of Keras; expected {CELL_KINDS}.")
    gates, order = _GATES[kind], _ORDER[kind]
    recurrent_kernel = floats("recurrent_kernel", recurrent_kernel, (None, None))
    n_out = len(recurrent_kernel)
    recurrent_kernel = floats("recurrent_kernel", recurrent_kernel, (n_out, gates * n_out))
    kernel = floats("kernel", kernel, (None, gates * n_out))
    title = f"{kind}({len(kernel)} => {n_out})"
    if units not in (None, n_out) or use_bias not in (None, bias is not None):
        raise FormatError(
            f"{title}: its config says units={units}, use_bias={use_bias}, which its arrays "
            "contradict."
        )
    arrays: dict[str, Any] = {
        "Wi": blocks(kernel.T, order),
        "Wh": blocks(recurrent_kernel.T, order),
    }
    if kind == "SimpleRNN":
        if bias is not None:
            arrays["b"] = floats("bias", bias, (n_out,))
        return RNNCell.from_arrays(**arrays, act=_act(title, activation, keras_version))
    arrays["gate_act"] = _gate(title, recurrent_activation, keras_version)
    if _act(title, activation, keras_version) is not ops.tanh:
        raise FormatError(f"{title}: its activation is {activation!r}; cells with gates have tanh.")
    if kind == "LSTM":
        if bias is not None:
            arrays["b"] = floats("bias", bias, (4 * n_out,))
        return LSTMCell.from_arrays(**arrays)
    if reset_after is None:
        reset_after = version_of(keras_version) >= (2, 3)
    if not reset_after:
        if bias is not None:
            arrays["b"] = blocks(floats("bias", bias, (3 * n_out,)), order)
        arrays["Wh"], arrays["Whh"] = np.split(arrays["Wh"], [2 * n_out])
        return GRUv3Cell.from_arrays(**arrays)
    if bias is not None:
        both = blocks(floats("bias", bias, (2, 3 * n_out)), order, axis=1)
        arrays["b"], bh = sum_of_biases(title, both[0], both[1], recurrent_bias)
        if bh is not None:
            arrays |= {"bh": bh, "recurrent_bias": True}
    return GRUCell.from_arrays(**arrays)


def _act(title: str, name: Any, keras_version: str) -> Any:
    try:
        return activation(name, keras_version)
    except FormatError as error:
        raise FormatError(f"{title}: {error}") from None


def _gate(title: str, name: Any, keras_version: str) -> str:
    if name is None:
        name = "hard_sigmoid" if version_of(keras_version) < (2, 3) else "sigmoid"
    act = _act(title, name, keras_version)
    if act not in (ops.sigmoid, ops.hard_sigmoid):
        reason = ""
        if name == "hard_sigmoid":
            reason = " Since Keras 3 that is relu6(x + 3) / 6."
        raise FormatError(
            f"{title}: its gates are {name!r}; cells here have sigmoid or clip(0.2 x + 0.5, 0, 1)."
            f"{reason}"
        )
    return str(ops.name_of(act))


def _from_cudnn(kind: str, kernel: Any, recurrent: Any, bias: Any) -> tuple[Any, Any, Any]:
    """The arrays of a cuDNN layer as those of Keras' own layer with reset_after.

    The memory of each gate's kernel (n_in, n_out) is that of cuDNN's matrix (n_out, n_in); of two
    biases, one after the other, the LSTM only ever takes the sum.
    """
    gates = _GATES[kind]
    recurrent = floats("recurrent_kernel", recurrent, (None, None))
    n_out = len(recurrent)
    recurrent = floats("recurrent_kernel", recurrent, (n_out, gates * n_out))
    kernel = floats("kernel", kernel, (None, gates * n_out))
    kernel = np.hstack(
        [np.ravel(gate).reshape(n_out, -1).T for gate in np.split(kernel, gates, axis=1)]
    )
    recurrent = np.hstack([gate.T for gate in np.split(recurrent, gates, axis=1)])
    if bias is not None:
        bias = floats("bias", bias, (2 * gates * n_out,)).reshape(2, -1)
        bias = bias if kind == "GRU" else bias.sum(0)
    return kernel, recurrent, bias
