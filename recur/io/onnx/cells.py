"""One cell's arrays, from the layout of ONNX's RNN, LSTM and GRU and back.

ONNX stacks gates as i, o, f, c (LSTM) and z, r, h (GRU), peepholes as i, o, f, the two biases one
after the other, and puts an axis of directions first.

Source: github.com/onnx/onnx, docs/Operators.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from recur import ops
from recur.cells import Cell, GRUCell, GRUv3Cell, LSTMCell, RNNCell
from recur.errors import FormatError, StateError
from recur.io._gates import GATES, blocks, floats, sum_of_biases, weights

_TO = {RNNCell: (0,), LSTMCell: (0, 3, 1, 2), GRUCell: (1, 0, 2), GRUv3Cell: (1, 0, 2)}
_FROM = {"RNN": (0,), "LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2)}
_USUAL = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}
_PEEPHOLES = (0, 2, 1)  # its own inverse
_GATE = {"sigmoid": "Sigmoid", "hard_sigmoid": "HardSigmoid"}

# What an RNN may have; with the parameters (alpha, beta) that our functions have, which are those
# that ONNX takes where none are given.
_ACTS = {
    "tanh": ("Tanh", None, None),
    "relu": ("Relu", None, None),
    "sigmoid": ("Sigmoid", None, None),
    "hard_sigmoid": ("HardSigmoid", 0.2, 0.5),
    "identity": ("Affine", 1.0, 0.0),
    "leakyrelu": ("LeakyRelu", 0.01, None),
    "elu": ("Elu", 1.0, None),
    "softsign": ("Softsign", None, None),
    "softplus": ("Softplus", None, None),
}
_PARAMETERS = {name.lower(): (alpha, beta) for name, alpha, beta in _ACTS.values()}
_OURS = {name.lower(): ours for ours, (name, _, _) in _ACTS.items()}


def operator_of(cell: Any) -> str:
    """The ONNX operator that computes a cell: "RNN", "LSTM" or "GRU".  Raises as `cell_to_onnx`."""
    weights(cell)
    return "GRU" if isinstance(cell, GRUv3Cell) else type(cell).__name__.removesuffix("Cell")


def cell_to_onnx(cell: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """(arrays, attributes) of the ONNX operator that computes a cell.

    W  (1, G n_out, n_in), R (1, G n_out, n_out), B (1, 2 G n_out) with a bias, P (1, 3 n_out) with
       peepholes, in ONNX's order of gates; new arrays.  The axis of size 1 is that of directions
    attributes  hidden_size, activations, linear_before_reset for a GRU (1: after the product, for
                `GRUCell`; 0 for `GRUv3Cell`), and parameters of activations where they have any

    Raises `StateError` for other cells, and for an RNN's activation that ONNX's RNN lacks.
    """
    held = weights(cell)
    order, kind = _TO[type(cell)], type(cell)
    recurrent = held["Wh"]
    if "Whh" in held:
        recurrent = np.concatenate([recurrent, held["Whh"]])
    arrays = {"W": blocks(held["Wi"], order), "R": blocks(recurrent, order)}
    if "b" in held or "bh" in held:
        rows = len(recurrent)
        inner = np.zeros(rows, recurrent.dtype)
        if "bh" in held:
            inner[-cell.n_out :] = held["bh"]
        outer = held.get("b", np.zeros_like(inner))
        arrays["B"] = np.concatenate([blocks(outer, order), blocks(inner, order)])
    if "peephole" in held:
        arrays["P"] = held["peephole"][list(_PEEPHOLES)].reshape(-1)
    attributes: dict[str, Any] = {"hidden_size": cell.n_out, **_activations(cell)}
    if kind in (GRUCell, GRUv3Cell):
        attributes["linear_before_reset"] = int(kind is GRUCell)
    return {name: np.array(array)[None] for name, array in arrays.items()}, attributes


def _activations(cell: Any) -> dict[str, Any]:
    if isinstance(cell, RNNCell):
        act = ops.name_of(cell.act)
        if act not in _ACTS:
            raise StateError(
                f"{cell.describe()}: the RNN of ONNX lacks this activation; it has "
                f"{', '.join(_ACTS)}."
            )
        name, alpha, beta = _ACTS[act]
        names = [name]
    else:
        gate = _GATE[cell.gate_act]
        alpha, beta = _PARAMETERS[gate.lower()]
        names = [gate, "Tanh", "Tanh"] if isinstance(cell, LSTMCell) else [gate, "Tanh"]
    attributes: dict[str, Any] = {"activations": names}
    if alpha is not None:
        attributes["activation_alpha"] = [alpha]
    if beta is not None:
        attributes["activation_beta"] = [beta]
    return attributes


def cell_from_onnx(
    kind: str,
    W: Any,
    R: Any,
    B: Any = None,
    P: Any = None,
    *,
    hidden_size: int | None = None,
    activations: Sequence[str] | None = None,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    clip: float | None = None,
    input_forget: int = 0,
    linear_before_reset: int = 0,
    recurrent_bias: bool | None = None,
) -> Any:
    """The cell with the weights of one direction of ONNX's operator `kind`: RNN, LSTM or GRU.

    W, R, B, P  as `cell_to_onnx` gives them; B and P may be absent; copied
    others      the operator's attributes.  A GRU is a `GRUCell` if linear_before_reset, else a
                `GRUv3Cell`.  input_forget (f = 1 - i) becomes rows of f that are those of i with
                the other sign, which is the same, for 1 - s(x) = s(-x)
    recurrent_bias  as in `cell_from_torch`

    Raises `ShapeError` for sizes, `FormatError` for what cells cannot hold: clip, gates other than
    Sigmoid and HardSigmoid, other candidates than Tanh, activations with other parameters.
    """
    if kind not in _FROM:
        raise FormatError(f"{kind!r} is no recurrent operator of ONNX; expected RNN, LSTM or GRU.")
    order = _FROM[kind]
    gates = len(order)
    R = floats("R", R, (1, None, None))[0]
    n_out = R.shape[1]
    R = floats("R", R, (gates * n_out, n_out))
    W = floats("W", W, (1, gates * n_out, None))[0]
    title = f"{kind}({W.shape[1]} => {n_out})"
    if hidden_size not in (None, n_out):
        raise FormatError(f"{title}: hidden_size is {hidden_size}, R has shape {R.shape}.")
    if clip is not None:
        raise FormatError(
            f"{title}: clip={clip} limits what goes into the gates; no cell here does that."
        )
    arrays: dict[str, Any] = {"Wi": blocks(W, order), "Wh": blocks(R, order)}
    outer = inner = None
    if B is not None:
        both = floats("B", B, (1, 2 * gates * n_out))[0]
        outer, inner = (blocks(half, order) for half in np.split(both, 2))
    names = _known(title, kind, activations, activation_alpha, activation_beta)
    if P is not None:
        if kind != "LSTM":
            raise FormatError(f"{title}: P is given, but only an LSTM has peepholes.")
        P = floats("P", P, (1, 3 * n_out)).reshape(3, n_out)[list(_PEEPHOLES)]
    if kind == "GRU" and linear_before_reset:
        if outer is not None and inner is not None:
            arrays["b"], bh = sum_of_biases(title, outer, inner, recurrent_bias)
            if bh is not None:
                arrays |= {"bh": bh, "recurrent_bias": True}
        return GRUCell.from_arrays(**arrays, gate_act=names[0])
    if outer is not None:
        arrays["b"] = outer + inner
    if kind == "GRU":
        arrays["Wh"], arrays["Whh"] = np.split(arrays["Wh"], [2 * n_out])
        return GRUv3Cell.from_arrays(**arrays, gate_act=names[0])
    if kind == "RNN":
        return RNNCell.from_arrays(**arrays, act=names[0])
    if P is not None:
        arrays |= {"peephole": P, "peepholes": True}
    if input_forget:
        arrays = {name: _forget_is_rest(name, a, n_out) for name, a in arrays.items()}
    return LSTMCell.from_arrays(**arrays, gate_act=names[0])


def _forget_is_rest(name: str, array: Any, n: int) -> Any:
    """An LSTM's array whose forget gate is 1 minus the input gate."""
    if name == "peepholes":
        return array
    array = np.array(array)
    rows = 1 if name == "peephole" else n
    array[rows : 2 * rows] = -array[:rows]
    return array


def of_direction(kind: str, attributes: dict[str, Any], way: int, ways: int) -> dict[str, Any]:
    """The attributes of an operator with `ways` directions that are those of one of them.

    Activations are listed direction by direction; their parameters for those that take any.
    """
    own = {name: value for name, value in attributes.items() if not name.startswith("activation")}
    names = list(attributes.get("activations") or _USUAL[kind] * ways)
    if len(names) != len(_USUAL[kind]) * ways:
        raise FormatError(f"activations are {names}, expected {len(_USUAL[kind])} a direction.")
    n = len(_USUAL[kind])
    own["activations"] = names[way * n : (way + 1) * n]
    for k, name in enumerate(("activation_alpha", "activation_beta")):
        given = attributes.get(name)
        if given is not None:
            before = sum(_parameters(act)[k] is not None for act in names[: way * n])
            own[name] = given[before:]
    return own


def _parameters(name: str) -> tuple[float | None, float | None]:
    return _PARAMETERS.get(name.lower(), (None, None))


def _known(
    title: str,
    kind: str,
    given: Sequence[str] | None,
    alphas: Sequence[float] | None,
    betas: Sequence[float] | None,
) -> list[str]:
    """Our names of an operator's activations, of which a cell must be able to hold all."""
    usual = _USUAL[kind]
    names = usual if given is None else list(given)
    if len(names) != len(usual):
        raise FormatError(f"{title}: activations are {names}, expected {len(usual)} of them.")
    # Parameters are listed for those activations that take any, in order; then come the usual ones.
    left = [list(alphas or ()), list(betas or ())]
    found = []
    for name in names:
        ours, parameters = _OURS.get(name.lower()), _parameters(name)
        for usual_one, rest in zip(parameters, left, strict=True):
            if usual_one is not None and rest and not np.isclose(rest.pop(0), usual_one, 1e-6, 0):
                raise FormatError(
                    f"{title}: activation {name} has other parameters than {parameters}, "
                    "which no cell here holds."
                )
        found.append(ours)
    held = _GATE if kind != "RNN" else _ACTS
    if found[0] not in held or any(ours != "tanh" for ours in found[1:]):
        raise FormatError(f"{title}: no cell here has the activations {', '.join(names)}.")
    return [str(ours) for ours in found]


def is_cell(layer: Any) -> bool:
    """Whether `cell_to_onnx` knows the kind of a cell."""
    return isinstance(layer, Cell) and type(layer) in GATES
