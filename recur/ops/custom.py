"""Operations of the user's own, and the one that stops gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from recur import tape
from recur.errors import ShapeError
from recur.ops.table import any_traced, sources
from recur.tape import Node, Op, Param, Sweep, Tensor, check_version, protected, record, value


def stop_gradient(x: Any) -> Any:
    """The value of x as a constant: no gradient flows back through it.

    Tuples, lists and dicts are gone through.
    """
    if isinstance(x, Param):
        return np.array(x.value)  # later writes to the parameter must not reach the constant
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*map(stop_gradient, x))
    if isinstance(x, tuple | list):
        return type(x)(map(stop_gradient, x))
    if isinstance(x, dict):
        return {key: stop_gradient(entry) for key, entry in x.items()}
    return value(x)


class _Custom(Op):
    __slots__ = ("function",)

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        super().__init__(name)
        self.function = function

    def backward(self, sweep: Sweep, node: Node, grads: dict[int, np.ndarray]) -> None:
        assert node.inputs is not None
        saved, versions, outputs = node.saved
        for param, version in versions:
            check_version(param, version)
        dys = tuple(
            protected(grads[i]) if i in grads else np.zeros(shape, dtype)
            for i, (shape, dtype) in enumerate(outputs[1])
        )
        found = self.function(saved, dys if outputs[0] else dys[0])
        if not isinstance(found, tuple | list):
            found = (found,)
        if len(found) != len(node.inputs):
            raise TypeError(
                f"{self.name}: backward returned {len(found)} gradients, expected "
                f"{len(node.inputs)}, one for each argument (None for one that takes none)."
            )
        for i, (source, grad) in enumerate(zip(node.inputs, found, strict=True)):
            if source is None or grad is None:
                continue
            grad = np.array(value(grad), source.dtype)
            if grad.shape != source.shape:
                raise ShapeError(
                    f"{self.name}: backward returned a gradient of shape {grad.shape} for argument "
                    f"{i}, expected {source.shape}, the shape of that argument."
                )
            sweep.add(source, grad, own=True)


def custom_grad(
    forward: Callable[..., tuple[Any, Any]], backward: Callable[[Any, Any], Any]
) -> Callable[..., Any]:
    """A differentiable function from a forward and a backward of your own.

    `forward(*arrays, **options)` gets plain arrays, read-only where they belong to a Tensor or
    Param, and returns `(y, saved)`: y an array or a tuple of arrays, saved whatever backward needs.
    `backward(saved, dy)` gets the gradient of y (a tuple, zeros where the loss does not reach, if y
    is one) and returns one gradient for each array, None for those that take none; a single one
    need not be a tuple.  Options take no gradient.  For example::

        cube = custom_grad(lambda x: (x**3, x), lambda x, dy: 3 * x**2 * dy)

    The result raises `TypeError` if forward returns no pair or backward another number of
    gradients, `ShapeError` if one has another shape than its array, `TapeError` if a parameter
    among the arrays was written between forward and backward.
    """
    op = _Custom(getattr(forward, "__name__", "custom_grad"), backward)

    @functools.wraps(forward)
    def call(*xs: Any, **options: Any) -> Any:
        inputs = sources(xs)
        recorded = tape.current() is not None and any_traced(inputs)
        plain = [_argument(x, recorded) for x in xs]
        result = forward(*plain, **options)
        if not (isinstance(result, tuple) and len(result) == 2):
            raise TypeError(
                f"{op.name}: forward returned {type(result).__name__}, expected the pair "
                "(y, saved) of the result and what backward needs."
            )
        y, saved = result
        if not recorded:
            return y
        several = isinstance(y, tuple)
        # Copies: forward may have returned an array that its caller goes on writing.
        ys = [np.array(value(part)) for part in (y if several else (y,))]
        versions = [(x, x.version) for x in inputs if type(x) is Param]
        kept = (saved, versions, (several, [(part.shape, part.dtype) for part in ys]))
        results = record(op, inputs, ys, kept)
        return tuple(results) if several else results[0]

    return call


def _argument(x: Any, recorded: bool) -> Any:
    """What forward sees of an argument; a plain array is copied, since `saved` may hold it."""
    if isinstance(x, Tensor | Param):
        return value(x) if x.ndim else protected(np.asarray(value(x)))
    return x.copy(order="K") if recorded and isinstance(x, np.ndarray) else x
