"""What the values of a Flux file are: arrays under their wrappers, layers, activations.

A layer is recognised by its Julia type; in a tree of `Flux.state`, which keeps no types, by the
names of its fields.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from recur import ops
from recur.io.julia import Struct, undefined

Problem = str
"""Why a value cannot become a part of a model."""

RECURRENT = ("Recur", "RNN", "LSTM", "GRU", "GRUv3", "Recurrence")
CELLS = ("RNNCell", "LSTMCell", "GRUCell", "GRUv3Cell")
_LAYERS = {
    *(*RECURRENT, *CELLS),
    *("Chain", "Dense", "Embedding", "Dropout", "LayerNorm", "BatchNorm", "Scale", "Diagonal"),
    *("Parallel", "SkipConnection"),
}

# In a tree of Flux.state: fields that tell a layer, the most telling first.
_TELLING: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("GRUv3Cell", ("Wi", "Wh", "Wh_h̃")),
    ("Cell", ("Wi", "Wh")),
    ("Recur", ("cell",)),
    ("Parallel", ("connection", "layers")),
    ("Chain", ("layers",)),
    ("BatchNorm", ("μ", "σ²")),
    ("LayerNorm", ("diag", "affine")),
    ("Dropout", ("p", "active")),
    ("Scale", ("scale",)),
    ("Dense", ("weight", "bias")),
    ("Embedding", ("weight",)),
)


def plain(value: Any) -> Any:
    """`value` without what Tracker and LinearAlgebra wrap around arrays."""
    for _ in range(8):
        if not isinstance(value, Struct) or not value.type.package or not len(value):
            break
        if value.type.name == "TrackedArray" and len(value) > 1:
            value = value[1]
        elif value.type.name == "TrackedTuple":
            value = value[0]
        elif value.type.name in ("Adjoint", "Transpose") and len(value) == 1:
            parent = plain(value[0])
            return parent.T if isinstance(parent, np.ndarray) else value
        else:
            break
    if isinstance(value, tuple):
        return tuple(plain(part) if isinstance(part, Struct) else part for part in value)
    return value


def array(value: Any, ndim: int | None = None) -> np.ndarray | None:
    """The array of real numbers that `value` is, or None."""
    value = plain(value)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiub":
        return None
    return value if ndim is None or value.ndim == ndim else None


def bias(value: Any, n: int) -> np.ndarray | Problem | None:
    """A bias of n numbers, None for a layer without one, or what is wrong with it."""
    value = plain(value)
    if (
        value is False
        or value is None
        or (isinstance(value, Struct) and value.type.name == "Zeros")
    ):
        return None
    found = array(value, 1)
    if found is None or len(found) != n:
        return f"the bias is {told(value)}, expected an array of size ({n},) or false"
    return found


def field(value: Any, *names: str) -> Any:
    """The field of a struct under the first of `names` that it has, else `undefined`."""
    if isinstance(value, Struct):
        for name in names:
            if name in value:
                return value[name]
    return undefined


def kind(value: Any) -> str | None:
    """Which of Flux's layers a value is; "Cell" for a recurrent cell to be told by its shapes."""
    if not isinstance(value, Struct):
        return None
    if value.type.name == "NamedTuple" and not value.type.package:
        return next((k for k, names in _TELLING if all(n in value for n in names)), None)
    if value.type.package != "Flux" or value.type.name not in _LAYERS:
        return None
    return "Recur" if value.type.name in RECURRENT else value.type.name


def is_state(value: Any) -> bool:
    """Whether a value is part of a tree of `Flux.state`, which keeps no functions."""
    return isinstance(value, Struct) and value.type.name == "NamedTuple"


def is_lost(value: Any) -> bool:
    """Whether a value stands for one that `Flux.state` does not keep."""
    return (
        value is undefined
        or value is None
        or (isinstance(value, tuple) and not value)
        or (isinstance(value, Struct) and value.type.name == "Missing")
    )


# Names under which Base and NNlib know our functions; the _fast ones differ in the last digits.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: ops.activation(name) for name in ("identity", "relu", "relu6", "selu", "gelu")},
    **{name: ops.activation(name) for name in ("softplus", "softsign", "swish", "mish", "elu")},
    **{name: ops.activation(name) for name in ("leakyrelu", "celu", "hardtanh", "hardswish")},
    **{name: ops.activation(name) for name in ("tanhshrink", "softshrink", "logcosh", "lisht")},
    **dict.fromkeys(("tanh", "tanh_fast"), ops.tanh),
    **dict.fromkeys(("σ", "sigmoid", "sigmoid_fast"), ops.sigmoid),
    **dict.fromkeys(("logσ", "logsigmoid"), ops.logsigmoid),
    "gelu_tanh": ops.gelu,
    "softmax": ops.softmax,
    "logsoftmax": ops.logsoftmax,
}
_CONNECTIONS: dict[str, Callable[..., Any]] = {
    "vcat": ops.vcat,
    "tuple": tuple,
    "+": operator.add,
    "*": operator.mul,
}


def function(value: Any, connection: bool = False) -> Callable[..., Any] | Problem:
    """Our function for Flux's, or why there is none."""
    if is_lost(value):
        return "the file does not hold this function"
    if not isinstance(value, Struct):
        return f"expected a function, the file holds {told(value)}"
    if value.type.anonymous or value.type.name.lstrip("#")[:1].isdigit():
        return "an anonymous function"
    if not value.type.name.startswith("#"):
        return f"expected a function, the file holds {told(value)}"
    name = value.type.name.lstrip("#")
    if name in ("hardσ", "hardsigmoid"):
        return "hardσ, whose slope NNlib changed: give hardsigmoid (1/6), or hard_sigmoid (1/5)"
    known = _CONNECTIONS if connection and name in _CONNECTIONS else _FUNCTIONS
    ours = value.type.path[0] in ("Base", "NNlib", "Flux", "Core")
    if not ours or name not in known:
        return f"the function {str(value.type).replace('#', '')}, which has no namesake here"
    return known[name]


def told(value: Any) -> str:
    """A value in a few words."""
    value = plain(value)
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} of size {value.shape}"
    if isinstance(value, Struct):
        return f"a {value.type}" if not is_state(value) else "a NamedTuple"
    if isinstance(value, (list, tuple, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    return repr(value)[:60]
