"""Elementwise arithmetic and functions: one row each."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from recur import _kernels, tape
from recur.ops.table import (
    add_row,
    any_traced,
    binary,
    constant,
    operation,
    sources,
    unary,
    unbroadcast,
)
from recur.tape import Node, Op, Sweep, peek, record_one


def _fast(kernel: Any, general: Any) -> Any:
    """`kernel` for arrays of the two dtypes that it knows, `general` for anything else."""
    known = (np.dtype(np.float32), np.dtype(np.float64))

    def forward(x: Any) -> Any:
        if type(x) is not np.ndarray or x.dtype not in known:
            return general(x)
        # Kernels read C-contiguous memory, which features-first arrays are when transposed.
        return kernel(x) if x.flags.c_contiguous else kernel(np.ascontiguousarray(x.T)).T

    return forward


def _logistic(x: Any) -> Any:
    # exp of a non-positive number on both sides: no overflow, and no loss for large negative x.
    e = np.exp(-np.abs(x))
    return np.where(np.less(x, 0), e, 1) / (1 + e)


logistic = _fast(_kernels.sigmoid, _logistic)


def _power(a: Any, b: Any) -> Any:
    return a**b if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else np.power(a, b)


def _power_base(g: Any, a: Any, b: Any, y: Any) -> Any:
    if type(b) is float or type(b) is int:
        return g * (b * a ** (b - 1)) if b else np.zeros_like(g)
    with np.errstate(divide="ignore", invalid="ignore"):
        return g * np.where(b == 0, 0, b * np.power(a, b - 1))


def _power_exponent(g: Any, a: Any, b: Any, y: Any) -> Any:
    with np.errstate(divide="ignore", invalid="ignore"):
        return g * np.where(y == 0, 0, y * np.log(a))


def _opposite(g: Any) -> Any:
    """-g; where that is one number shown at every place, as a sum's gradient, so is the result."""
    if g.ndim and g.size and not any(g.strides):
        return np.broadcast_to(-g[(0,) * g.ndim], g.shape)
    return -g


def _share(wins: Any, ties: Any) -> Any:
    """1 where an operand wins, 1/2 where the two tie."""
    return np.where(ties, 0.5, wins)


# fmt: off
add = binary(
    "add", "a + b. Gradients: g to both, summed over broadcast axes.",
    operator.add, lambda g, a, b, y: g, lambda g, a, b, y: g,
    keeps=("", ""), numpy=(np.add,))
subtract = binary(
    "subtract", "a - b. Gradients: g and -g.",
    operator.sub, lambda g, a, b, y: g, lambda g, a, b, y: _opposite(g),
    keeps=("", ""), numpy=(np.subtract,))
multiply = binary(
    "multiply", "a * b, elementwise. Gradients: g b and g a.",
    operator.mul, lambda g, a, b, y: g * b, lambda g, a, b, y: g * a,
    keeps=("b", "a"), numpy=(np.multiply,))
divide = binary(
    "divide", "a / b. Gradients: g / b and -g y / b, y the result.",
    np.true_divide, lambda g, a, b, y: g / b, lambda g, a, b, y: -g * y / b,
    keeps=("b", "by"), numpy=(np.true_divide,))
power = binary(
    "power",
    "a ** b. Gradients: g b a**(b-1), which is 0 for b = 0, also at a = 0; and g y log(a), which "
    "is 0 where y is 0, and NaN for a negative base, where no derivative exists.",
    _power, _power_base, _power_exponent,
    keeps=("ab", "ay"), numpy=(np.power, np.float_power))
maximum = binary(
    "maximum", "The larger of a and b, elementwise. Where they tie, each gets half the gradient.",
    np.maximum,
    lambda g, a, b, y: g * _share(a > b, a == b),
    lambda g, a, b, y: g * _share(b > a, a == b),
    keeps=("ab", "ab"), numpy=(np.maximum,))
minimum = binary(
    "minimum", "The smaller of a and b, elementwise. Where they tie, each gets half the gradient.",
    np.minimum,
    lambda g, a, b, y: g * _share(a < b, a == b),
    lambda g, a, b, y: g * _share(b < a, a == b),
    keeps=("ab", "ab"), numpy=(np.minimum,))

negative = unary(
    "negative", "-x.", np.negative, lambda g, _: _opposite(g), keeps="", numpy=(np.negative,))
exp = unary(
    "exp", "e ** x. Gradient: g y.", _fast(_kernels.exp, np.exp),
    lambda g, y: g * y, keeps="y", numpy=(np.exp,))
expm1 = unary(
    "expm1", "e ** x - 1, exact for small x. Gradient: g (y + 1).", np.expm1,
    lambda g, y: g * (y + 1), keeps="y", numpy=(np.expm1,))
log = unary(
    "log", "The natural logarithm. Gradient: g / x.", np.log,
    lambda g, x: g / x, keeps="x", numpy=(np.log,))
log1p = unary(
    "log1p", "log(1 + x), exact for small x. Gradient: g / (1 + x).", np.log1p,
    lambda g, x: g / (1 + x), keeps="x", numpy=(np.log1p,))
log2 = unary(
    "log2", "The logarithm to base 2. Gradient: g / (x log 2).", np.log2,
    lambda g, x: g / (x * float(np.log(2))), keeps="x", numpy=(np.log2,))
log10 = unary(
    "log10", "The logarithm to base 10. Gradient: g / (x log 10).", np.log10,
    lambda g, x: g / (x * float(np.log(10))), keeps="x", numpy=(np.log10,))
sqrt = unary(
    "sqrt", "The square root. Gradient: g / (2 y), infinite at 0.", np.sqrt,
    lambda g, y: g / (2 * y), keeps="y", numpy=(np.sqrt,))
square = unary(
    "square", "x ** 2. Gradient: 2 g x.", np.square,
    lambda g, x: g * (2 * x), keeps="x", numpy=(np.square,))
reciprocal = unary(
    "reciprocal", "1 / x. Gradient: -g y**2.", np.reciprocal,
    lambda g, y: -g * y * y, keeps="y", numpy=(np.reciprocal,))
abs = unary(
    "abs", "The absolute value. Gradient: g sign(x), 0 at 0.", np.abs,
    lambda g, x: g * np.sign(x), keeps="x", numpy=(np.absolute, np.fabs))
sin = unary(
    "sin", "The sine. Gradient: g cos(x).", np.sin,
    lambda g, x: g * np.cos(x), keeps="x", numpy=(np.sin,))
cos = unary(
    "cos", "The cosine. Gradient: -g sin(x).", np.cos,
    lambda g, x: -g * np.sin(x), keeps="x", numpy=(np.cos,))
arctan = unary(
    "arctan", "The inverse tangent. Gradient: g / (1 + x**2).", np.arctan,
    lambda g, x: g / (1 + x * x), keeps="x", numpy=(np.arctan,))
sinh = unary(
    "sinh", "The hyperbolic sine. Gradient: g cosh(x).", np.sinh,
    lambda g, x: g * np.cosh(x), keeps="x", numpy=(np.sinh,))
cosh = unary(
    "cosh", "The hyperbolic cosine. Gradient: g sinh(x).", np.cosh,
    lambda g, x: g * np.sinh(x), keeps="x", numpy=(np.cosh,))
tanh = unary(
    "tanh", "The hyperbolic tangent. Gradient: g (1 - y**2).", _fast(_kernels.tanh, np.tanh),
    lambda g, y: g * (1 - y * y), keeps="y", numpy=(np.tanh,))
sigmoid = unary(
    "sigmoid", "1 / (1 + e ** -x). Gradient: g y (1 - y).", logistic,
    lambda g, y: g * (y * (1 - y)), keeps="y")
# fmt: on


def _clip_gradient(
    g: Any, x: Any, a_min: Any = None, a_max: Any = None, *, min: Any = None, max: Any = None
) -> Any:
    low, high = min if a_min is None else a_min, max if a_max is None else a_max
    inside = np.ones(np.broadcast_shapes(x.shape, np.shape(low), np.shape(high)), bool)
    if low is not None:
        inside &= x >= low
    if high is not None:
        inside &= x <= high
    return unbroadcast(g * inside, x.shape)


@operation(_clip_gradient, keeps="x", numpy=(np.clip,))
def clip(x: Any, a_min: Any = None, a_max: Any = None, *, min: Any = None, max: Any = None) -> Any:
    """x limited to [a_min, a_max], numbers or arrays, of which either may be None.

    `min` and `max` are NumPy's newer names for them.  Gradient: g where x lies inside, limits
    included, and 0 outside.
    """
    return np.clip(x, min if a_min is None else a_min, max if a_max is None else a_max)


class _Where(Op):
    __slots__ = ()

    def backward(self, sweep: Sweep, node: Node, grads: dict[int, np.ndarray]) -> None:
        g, condition = grads[0], node.saved
        assert node.inputs is not None
        a, b = node.inputs
        if a is not None:
            sweep.add(a, unbroadcast(np.where(condition, g, 0), a.shape), own=True)
        if b is not None:
            sweep.add(b, unbroadcast(np.where(condition, 0, g), b.shape), own=True)


_WHERE = _Where("where")


def where(condition: Any, a: Any, b: Any) -> Any:
    """a where the condition holds, b elsewhere; the three broadcast.

    Gradients: g where the operand was taken, exactly 0 elsewhere (also where g is NaN).
    """
    condition = peek(condition)
    inputs = sources((a, b))
    if tape.current() is None or not any_traced(inputs):
        return np.where(condition, peek(a), peek(b))
    a, b = (x if s is not None else constant(x) for x, s in zip((a, b), inputs, strict=True))
    condition = np.array(condition, bool)
    return record_one(_WHERE, inputs, np.where(condition, peek(a), peek(b)), condition)


add_row(_WHERE, where, np.where)
