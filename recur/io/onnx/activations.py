"""Activations as operators of ONNX, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from recur import ops
from recur.errors import FormatError

# One operator: ours, ONNX's, its attributes.  Where ONNX has other defaults than ours, or our
# constants could differ in the last digits, the attributes are written out.
_SINGLE: tuple[tuple[Callable[..., Any], str, dict[str, Any]], ...] = (
    (ops.tanh, "Tanh", {}),
    (ops.sigmoid, "Sigmoid", {}),
    (ops.relu, "Relu", {}),
    (ops.activation("softplus"), "Softplus", {}),
    (ops.activation("softsign"), "Softsign", {}),
    (ops.activation("elu"), "Elu", {"alpha": 1.0}),
    (ops.activation("celu"), "Celu", {"alpha": 1.0}),
    (
        ops.activation("selu"),
        "Selu",
        {"alpha": 1.6732632423543773, "gamma": 1.0507009873554805},
    ),
    (ops.activation("leakyrelu"), "LeakyRelu", {"alpha": 0.01}),
    (ops.activation("hard_sigmoid"), "HardSigmoid", {"alpha": 0.2, "beta": 0.5}),
    (ops.activation("hardsigmoid"), "HardSigmoid", {"alpha": 1 / 6, "beta": 0.5}),
    (ops.activation("hardswish"), "HardSwish", {}),
    (ops.activation("softshrink"), "Shrink", {"lambd": 0.5, "bias": 0.5}),
    (ops.softmax, "Softmax", {"axis": -1}),
    (ops.logsoftmax, "LogSoftmax", {"axis": -1}),
)
_DEFAULTS: dict[str, dict[str, Any]] = {
    "Elu": {"alpha": 1.0},
    "Celu": {"alpha": 1.0},
    "Selu": {"alpha": 1.6732632423543773, "gamma": 1.0507009873554805},
    "LeakyRelu": {"alpha": 0.01},
    "HardSigmoid": {"alpha": 0.2, "beta": 0.5},
    "Shrink": {"lambd": 0.5, "bias": 0.0},
    "Softmax": {"axis": -1},
    "LogSoftmax": {"axis": -1},
}
OPERATORS = frozenset(name for _, name, _ in _SINGLE)
ALONG_FEATURES = frozenset({"Softmax", "LogSoftmax"})

Emit = Callable[..., str]


def emit_activation(act: Any, x: str, emit: Emit, constant: Callable[[Any], str]) -> str | None:
    """Adds the operators that compute `act` of the value named x; None for an unknown function.

    `emit(operator, *inputs, **attributes)` and `constant(number)` give names of values.
    """
    if act is ops.identity:
        return x
    for ours, operator, attributes in _SINGLE:
        if act is ours or (act is np.tanh and ours is ops.tanh):
            return emit(operator, x, **attributes)
    build = _COMPOSED.get(ops.name_of(act) or "")
    return None if build is None else build(x, emit, constant)


# A few operators, because ONNX has none of that name, or only since later versions.
_COMPOSED: dict[str, Callable[[str, Emit, Callable[[Any], str]], str]] = {
    "relu6": lambda x, emit, c: emit("Clip", x, c(0.0), c(6.0)),
    "hardtanh": lambda x, emit, c: emit("Clip", x, c(-1.0), c(1.0)),
    "swish": lambda x, emit, c: emit("Mul", x, emit("Sigmoid", x)),
    "mish": lambda x, emit, c: emit("Mul", x, emit("Tanh", emit("Softplus", x))),
    "lisht": lambda x, emit, c: emit("Mul", x, emit("Tanh", x)),
    "tanhshrink": lambda x, emit, c: emit("Sub", x, emit("Tanh", x)),
    "logsigmoid": lambda x, emit, c: emit("Neg", emit("Softplus", emit("Neg", x))),
}


def activation_of(operator: str, attributes: Mapping[str, Any]) -> Callable[..., Any]:
    """Our function for an operator in `OPERATORS`.

    Raises `FormatError` if its parameters are not those of ours.
    """
    wanted = _DEFAULTS.get(operator, {}) | dict(attributes)
    for ours, name, own in _SINGLE:
        if name == operator and all(
            key in own and np.isclose(value, own[key], rtol=1e-6, atol=0)
            for key, value in wanted.items()
            if key != "axis"
        ):
            return ours
    told = ", ".join(f"{key}={value:g}" for key, value in wanted.items())
    raise FormatError(f"{operator} with {told} is no activation here.")
