"""Operators, methods and NumPy's protocols (NEP 13 and 18) of Tensors and Params.

What a function of NumPy does with a recorded value is one of three things: it is one of our rows
and is recorded; it depends on the value only and gives a plain result; or it raises a `TypeError`,
since its result would drop the gradient in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from recur import tape
from recur.ops import arrays, elementwise, products, reductions
from recur.ops.activations import identity
from recur.ops.table import NUMPY, parameters_of
from recur.tape import Operand, peek, traced, value

# fmt: off
# Functions of the value only: piecewise constant, so nothing is lost with the gradient.
_VALUE_ONLY: frozenset[Callable[..., Any]] = frozenset({
    np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal,
    np.isnan, np.isfinite, np.isinf, np.signbit, np.sign, np.logical_not, np.logical_and,
    np.logical_or, np.logical_xor, np.floor, np.ceil, np.rint, np.trunc,
    np.shape, np.ndim, np.size, np.argmax, np.argmin, np.argsort, np.nanargmax, np.nanargmin,
    np.argpartition, np.nonzero, np.flatnonzero, np.argwhere, np.count_nonzero, np.searchsorted,
    np.digitize, np.any, np.all, np.allclose, np.isclose, np.array_equal, np.array_equiv,
    np.iscomplexobj, np.isrealobj, np.iscomplex, np.isreal, np.isposinf, np.isneginf,
    np.zeros_like, np.ones_like, np.empty_like, np.result_type, np.can_cast, np.min_scalar_type,
    np.shares_memory, np.may_share_memory, np.array_repr, np.array_str, np.array2string,
})
# fmt: on
_PARAMETERS = {function: parameters_of(call) for function, call in NUMPY.items()}


def _traced_anywhere(x: Any) -> bool:
    if isinstance(x, Operand):
        return traced(x) is not None
    if isinstance(x, tuple | list):
        return any(map(_traced_anywhere, x))
    return False


def _refusal(function: Any, reason: str = "has no gradient here") -> TypeError:
    name = getattr(function, "__name__", str(function))
    return TypeError(
        f"{name}: {reason}, and a recorded Tensor must not lose its gradient in silence. Use a "
        "function of recur.ops, write one with recur.custom_grad, or pass recur.value(t) if the "
        "value is all that counts."
    )


def _array_ufunc(self: Operand, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
    if tape.current() is None or not any(map(_traced_anywhere, (*inputs, options.get("out")))):
        return getattr(ufunc, method)(*map(value, inputs), **value(options))
    if method != "__call__":
        raise _refusal(ufunc, f"{ufunc.__name__}.{method} has no gradient here")
    if "out" in options:
        raise _refusal(ufunc, "writing the result into an array (out=, or a += t) is not recorded")
    if ufunc in _VALUE_ONLY:
        return ufunc(*map(peek, inputs), **value(options))
    call = NUMPY.get(ufunc)
    if call is None or options:
        raise _refusal(ufunc)
    return call(*inputs)


def _array_function(
    self: Operand, function: Callable, types: Any, args: tuple, options: dict[str, Any]
) -> Any:
    if tape.current() is None or not _traced_anywhere((*args, *options.values())):
        return function(*value(args), **value(options))
    if function in _VALUE_ONLY:
        return function(*value(args), **value(options))
    if function is np.where and len(args) == 1:
        return np.where(*value(args))  # the places where it is not 0
    call = NUMPY.get(function)
    if call is None:
        raise _refusal(function)
    names, positional = _PARAMETERS[function]
    unknown = [f"{name}=" for name in options if name not in names]
    if len(args) > positional:
        unknown.append(f"{len(args)} positional arguments")
    if unknown:
        raise _refusal(function, f"has no gradient here with {', '.join(unknown)}")
    return call(*args, **options)


def _array(self: Operand, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    if tape.current() is not None and traced(self) is not None:
        raise TypeError(
            f"a recorded {type(self).__name__} does not become a plain array by itself, its "
            "gradient would be lost in silence. Use a function of recur.ops (stack joins a list of "
            "tensors), or pass recur.value(t) if the value is all that counts."
        )
    return np.array(value(self), dtype, copy=copy)


def _plain_number(kind: Callable[[Any], Any]) -> Callable[[Operand], Any]:
    def convert(self: Operand) -> Any:
        if tape.current() is not None and traced(self) is not None:
            raise TypeError(
                f"{kind.__name__}(t): the number would lose its gradient in silence. Write "
                f"{kind.__name__}(recur.value(t)), or print it with format."
            )
        return kind(value(self))

    return convert


def _bool(self: Operand) -> bool:
    if self.size != 1 and tape.current() is not None and traced(self) is not None:
        raise TypeError(
            f"the truth of a {type(self).__name__} of shape {self.shape} is ambiguous. Reduce it "
            "with recur.value(t).any() or .all()."
        )
    return bool(peek(self))  # a function of the value only


def _iterate(self: Operand) -> Any:
    if self.ndim == 0:
        raise TypeError("a Tensor without axes cannot be iterated.")
    return (arrays.getitem(self, i) for i in range(len(self)))


def _attribute(self: Operand, name: str) -> Any:
    """Methods of arrays that have no row: there on a Tensor that acts as an array."""
    if not name.startswith("_") and hasattr(np.ndarray, name):
        if tape.current() is None or traced(self) is None:
            return getattr(value(self), name)
        raise AttributeError(
            f"a recorded {type(self).__name__} has no {name}: its result would lose its gradient "
            f"in silence. Use recur.value(t).{name}, or a function of recur.ops."
        )
    raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _swapped(call: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda self, other: call(other, self)


def _compared(ufunc: np.ufunc) -> Callable[[Any, Any], Any]:
    return lambda self, other: ufunc(peek(self), value(other))


def _refused(ufunc: np.ufunc) -> Callable[[Any, Any], Any]:
    """An operator that has no gradient: for values only."""

    def operate(self: Any, other: Any) -> Any:
        if tape.current() is not None and _traced_anywhere((self, other)):
            raise _refusal(ufunc)
        return ufunc(value(self), value(other))

    return operate


def _reshape_method(self: Operand, *shape: Any, order: str = "C") -> Any:
    """`ops.reshape`: t.reshape(2, 3) or t.reshape((2, 3)); one size may be -1."""
    one = len(shape) == 1 and not isinstance(shape[0], int | np.integer)
    return arrays.reshape(self, shape[0] if one else shape, order=order)


def _transpose_method(self: Operand, *axes: Any) -> Any:
    """`ops.transpose`: t.transpose(), t.transpose(1, 0, 2) or t.transpose((1, 0, 2))."""
    if not axes or axes == (None,):
        return arrays.transpose(self)
    one = len(axes) == 1 and not isinstance(axes[0], int | np.integer)
    return arrays.transpose(self, axes[0] if one else axes)


def _value_method(name: str) -> Callable[..., Any]:
    def method(self: Operand, *args: Any, **options: Any) -> Any:
        return getattr(np.asarray(value(self)), name)(*args, **options)

    method.__name__ = name
    method.__doc__ = f"`ndarray.{name}` of the value: a plain result, without gradient."
    return method


def _last_axes_swapped(self: Operand) -> Any:
    """`t.swapaxes(-1, -2)`."""
    return arrays.swapaxes(self, -1, -2)


def _install() -> None:
    binary = {
        "add": elementwise.add,
        "sub": elementwise.subtract,
        "mul": elementwise.multiply,
        "truediv": elementwise.divide,
        "pow": elementwise.power,
        "matmul": products.matmul,
    }
    members: dict[str, Any] = {
        **{f"__{name}__": call for name, call in binary.items()},
        **{f"__r{name}__": _swapped(call) for name, call in binary.items()},
        "__neg__": elementwise.negative,
        "__pos__": identity,
        "__abs__": elementwise.abs,
        "__eq__": _compared(np.equal),
        "__ne__": _compared(np.not_equal),
        "__lt__": _compared(np.less),
        "__le__": _compared(np.less_equal),
        "__gt__": _compared(np.greater),
        "__ge__": _compared(np.greater_equal),
        "__floordiv__": _refused(np.floor_divide),
        "__rfloordiv__": _swapped(_refused(np.floor_divide)),
        "__mod__": _refused(np.remainder),
        "__rmod__": _swapped(_refused(np.remainder)),
        "__hash__": object.__hash__,
        "__getitem__": arrays.getitem,
        "__iter__": _iterate,
        "__float__": _plain_number(float),
        "__int__": _plain_number(int),
        "__bool__": _bool,
        "__array__": _array,
        "__array_ufunc__": _array_ufunc,
        "__array_function__": _array_function,
        "__getattr__": _attribute,
        "T": property(arrays.transpose),
        "mT": property(_last_axes_swapped),
        "reshape": _reshape_method,
        "transpose": _transpose_method,
        **{name: _value_method(name) for name in ("argmax", "argmin", "argsort", "any", "all")},
    }
    for name in ("sum", "mean", "var", "std", "max", "min", "prod", "cumsum"):
        members[name] = getattr(reductions, name)
    for name in ("astype", "repeat", "ravel", "squeeze", "swapaxes", "take"):
        members[name] = getattr(arrays, name)
    members["clip"], members["dot"] = elementwise.clip, products.dot
    for name, member in members.items():
        setattr(Operand, name, member)


_install()
