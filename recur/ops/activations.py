"""Activation functions under NNlib's names, as Flux users know them, and their registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from recur.ops.elementwise import logistic, sigmoid, tanh
from recur.ops.table import operation, unary

_SELU_SCALE, _SELU_ALPHA = 1.0507009873554805, 1.6732632423543773
_GELU = 0.7978845608028654  # sqrt(2 / pi)
_GELU_CUBIC = 0.044715


def _inside(x: Any, low: float, high: float) -> Any:
    return (x > low) & (x < high)


def _log_sigmoid(x: Any) -> Any:
    return np.minimum(x, 0) - np.log1p(np.exp(-np.abs(x)))


def _softplus(x: Any) -> Any:
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def _expm1_below(x: Any) -> Any:
    """e ** x - 1 for x < 0, and 0 elsewhere, where it could overflow."""
    return np.expm1(np.minimum(x, 0))


def _gelu_tanh(x: Any) -> Any:
    return np.tanh(_GELU * (x + _GELU_CUBIC * x * x * x))


def _gelu_gradient(g: Any, x: Any) -> Any:
    t = _gelu_tanh(x)
    return g * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * _GELU * (1 + 3 * _GELU_CUBIC * x * x))


def _swish_gradient(g: Any, x: Any) -> Any:
    s = logistic(x)
    return g * (s + x * s * (1 - s))


def _mish_gradient(g: Any, x: Any) -> Any:
    t = np.tanh(_softplus(x))
    return g * (t + x * (1 - t * t) * logistic(x))


# fmt: off
identity = unary(
    "identity", "x.", np.positive, lambda g, _: g, keeps="", numpy=(np.positive,))
relu = unary(
    "relu", "max(x, 0). Gradient: g where x > 0, else 0.", lambda x: np.maximum(x, 0),
    lambda g, y: g * (y > 0), keeps="y")
relu6 = unary(
    "relu6", "min(max(x, 0), 6). Gradient: g inside (0, 6).", lambda x: np.clip(x, 0, 6),
    lambda g, y: g * _inside(y, 0, 6), keeps="y")
hard_sigmoid = unary(
    "hard_sigmoid",
    "clip(0.2 x + 0.5, 0, 1), the gate of Keras before version 3. Gradient: 0.2 g inside.",
    lambda x: np.clip(0.2 * x + 0.5, 0, 1), lambda g, y: g * (0.2 * _inside(y, 0, 1)), keeps="y")
hardsigmoid = unary(
    "hardsigmoid", "relu6(x + 3) / 6, NNlib's. Gradient: g / 6 inside.",
    lambda x: np.clip(x + 3, 0, 6) / 6, lambda g, y: g * (_inside(y, 0, 1) / 6), keeps="y")
hardtanh = unary(
    "hardtanh", "clip(x, -1, 1). Gradient: g inside (-1, 1).", lambda x: np.clip(x, -1, 1),
    lambda g, y: g * _inside(y, -1, 1), keeps="y")
hardswish = unary(
    "hardswish", "x hardsigmoid(x).", lambda x: x * (np.clip(x + 3, 0, 6) / 6),
    lambda g, x: g * np.where(x > 3, 1, np.where(x > -3, x / 3 + 0.5, 0)), keeps="x")
softplus = unary(
    "softplus", "log(1 + e ** x). Gradient: g sigmoid(x).", _softplus,
    lambda g, x: g * logistic(x), keeps="x")
logsigmoid = unary(
    "logsigmoid", "log(sigmoid(x)). Gradient: g sigmoid(-x).", _log_sigmoid,
    lambda g, x: g * logistic(-x), keeps="x")
softsign = unary(
    "softsign", "x / (1 + |x|). Gradient: g / (1 + |x|)**2.", lambda x: x / (1 + np.abs(x)),
    lambda g, x: g / np.square(1 + np.abs(x)), keeps="x")
selu = unary(
    "selu", "s x for x > 0, else s a (e ** x - 1), with the constants of Klambauer et al. (2017).",
    lambda x: _SELU_SCALE * np.where(x > 0, x, _SELU_ALPHA * _expm1_below(x)),
    lambda g, x: g * (_SELU_SCALE * np.where(x > 0, 1, _SELU_ALPHA * np.exp(np.minimum(x, 0)))),
    keeps="x")
gelu = unary(
    "gelu", "x (1 + tanh(sqrt(2/pi) (x + 0.044715 x**3))) / 2 (Hendrycks and Gimpel 2016).",
    lambda x: 0.5 * x * (1 + _gelu_tanh(x)), _gelu_gradient, keeps="x")
swish = unary(
    "swish", "x sigmoid(x). Gradient: g (s + x s (1 - s)).", lambda x: x * logistic(x),
    _swish_gradient, keeps="x")
mish = unary(
    "mish", "x tanh(softplus(x)) (Misra 2019).", lambda x: x * np.tanh(_softplus(x)),
    _mish_gradient, keeps="x")
tanhshrink = unary(
    "tanhshrink", "x - tanh(x). Gradient: g tanh(x)**2.", lambda x: x - np.tanh(x),
    lambda g, x: g * np.square(np.tanh(x)), keeps="x")
logcosh = unary(
    "logcosh", "log(cosh(x)). Gradient: g tanh(x).",
    lambda x: _softplus(-2 * x) + x - float(np.log(2)), lambda g, x: g * np.tanh(x), keeps="x")
lisht = unary(
    "lisht", "x tanh(x). Gradient: g (tanh(x) + x (1 - tanh(x)**2)).", lambda x: x * np.tanh(x),
    lambda g, x: g * (np.tanh(x) + x * (1 - np.square(np.tanh(x)))), keeps="x")
# fmt: on


@operation(lambda g, x, a=0.01: g * np.where(x > 0, 1, a), keeps="x")
def leakyrelu(x: Any, a: float = 0.01) -> Any:
    """max(x, a x). Gradient: g where x > 0, else a g."""
    return np.maximum(x, a * x)


@operation(lambda g, x, a=1.0: g * np.where(x > 0, 1, a * np.exp(np.minimum(x, 0))), keeps="x")
def elu(x: Any, a: float = 1.0) -> Any:
    """x for x > 0, else a (e ** x - 1). Gradient: g, or a g e ** x."""
    return np.where(x > 0, x, a * _expm1_below(x))


@operation(lambda g, x, a=1.0: g * np.where(x > 0, 1, np.exp(np.minimum(x, 0) / a)), keeps="x")
def celu(x: Any, a: float = 1.0) -> Any:
    """x for x > 0, else a (e ** (x / a) - 1). Gradient: g, or g e ** (x / a)."""
    return np.where(x > 0, x, a * _expm1_below(x / a))


@operation(lambda g, x, a=0.5: g * (np.abs(x) > a), keeps="x")
def softshrink(x: Any, a: float = 0.5) -> Any:
    """x moved towards 0 by a, and 0 within a of it. Gradient: g where |x| > a."""
    return np.sign(x) * np.maximum(np.abs(x) - a, 0)


_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    f.__name__: f
    for f in (
        *(identity, tanh, sigmoid, relu, relu6, hard_sigmoid, hardsigmoid, hardtanh, hardswish),
        *(softplus, logsigmoid, softsign, selu, gelu, swish, mish, tanhshrink, logcosh, lisht),
        *(leakyrelu, elu, celu, softshrink),
    )
}
# What users of NumPy, NNlib and others also call them.
_ALIASES = {
    "σ": sigmoid,
    "logσ": logsigmoid,
    "hardσ": hardsigmoid,
    "silu": swish,
    "linear": identity,
}


def activation(name: str) -> Callable[[Any], Any]:
    """The activation of this name; raises `ValueError`, listing those there are."""
    found = _ACTIVATIONS.get(name) or _ALIASES.get(name)
    if found is None:
        raise ValueError(
            f"no activation is named {name!r}; there are {', '.join(sorted(_ACTIVATIONS))}."
        )
    return found


def name_of(act: Callable[[Any], Any]) -> str | None:
    """The name under which `activation` returns `act`, or None for a function of the user's."""
    if act is np.tanh:
        return "tanh"
    name = getattr(act, "__name__", "")
    return name if _ACTIVATIONS.get(name) is act else None
