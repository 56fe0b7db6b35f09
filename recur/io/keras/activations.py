"""Keras' names of activations, which depend on its version."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from recur import ops
from recur.errors import FormatError, StateError

# gelu and leaky_relu are left out: Keras computes gelu with erf, and its slope is not NNlib's.
_ACTS: dict[str, Callable[..., Any]] = {
    "linear": ops.identity,
    **{
        name: ops.activation(name)
        for name in ("tanh", "sigmoid", "relu", "softplus", "softsign", "selu", "elu", "swish")
    },
    "softmax": ops.softmax,
}
_SINCE_3: dict[str, Callable[..., Any]] = {
    "relu6": ops.relu6,
    "mish": ops.mish,
    "log_softmax": ops.logsoftmax,
    "log_sigmoid": ops.logsigmoid,
    "hard_tanh": ops.hardtanh,
    "hard_silu": ops.hardswish,
    "tanh_shrink": ops.tanhshrink,
    "hard_sigmoid": ops.hardsigmoid,
}
_BEFORE_3: dict[str, Callable[..., Any]] = {"hard_sigmoid": ops.hard_sigmoid}
_ALIASES = {"silu": "swish", "hard_swish": "hard_silu"}


def version_of(keras_version: str) -> tuple[int, int]:
    """The first two numbers of a version such as "2.2.4-tf"; raises `FormatError` for no version.

    "2.2.4-tf" itself was written by TensorFlow 1.13 to 2.1; it counts as it says.
    """
    match = re.match(r"(\d{1,3})(?:\.(\d{1,3}))?", str(keras_version))
    if match is None:
        raise FormatError(f"{keras_version!r} is no version of Keras, such as 2.2.4.")
    return int(match[1]), int(match[2] or 0)


def _table(keras_version: str) -> dict[str, Callable[..., Any]]:
    return _ACTS | (_SINCE_3 if version_of(keras_version) >= (3, 0) else _BEFORE_3)


def activation(name: Any, keras_version: str) -> Callable[..., Any]:
    """The function of a config's entry.  Raises `FormatError` for those that recur lacks."""
    if name is None:
        return ops.identity
    if isinstance(name, dict) and isinstance(name.get("config"), str):
        name = name["config"]  # Keras 3 writes a function as {"class_name": "function", ...}
    table = _table(keras_version)
    key = _ALIASES.get(name, name) if isinstance(name, str) else ""
    if key not in table:
        raise FormatError(
            f"the activation {str(name)[:60]!r} of Keras is not held here; there are "
            f"{', '.join(table)}."
        )
    return table[key]


def activation_name(layer: Any, act: Any, keras_version: str) -> str:
    """Keras' name of a function.  Raises `StateError` for those that Keras lacks."""
    for name, held in _table(keras_version).items():
        if held is act:
            return name
    raise StateError(
        f"{layer!r}: Keras {keras_version} lacks the function "
        f"{getattr(act, '__name__', act)!r}, or has another one of that name."
    )
