"""The table of operations, and what turns one of its rows into a function.

A row is a name, a forward (arrays in, array out) and a gradient.  The functions made from it take
arrays, numbers, `Tensor`s and `Param`s alike: outside a scope, or when no input is traced, they
compute and return a plain array; otherwise the result is recorded.

A gradient is a function of the gradient of the result, `g`, and of what it `keeps`: the shape of
the input, the input, the result.  It returns a new array, or `g` or a view, and writes to neither.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np

from recur import tape
from recur.errors import ShapeError
from recur.tape import (
    Node,
    Op,
    Operand,
    Operation,
    Param,
    Sweep,
    Tensor,
    peek,
    record_one,
    restore,
    save,
    traced,
    value,
)

F = TypeVar("F", bound=Callable[..., Any])


class Row(NamedTuple):
    """One operation: its public function, how gradients go through it, and NumPy's names for it."""

    call: Callable[..., Any]
    op: Operation
    numpy: tuple[Callable[..., Any], ...]


TABLE: dict[str, Row] = {}
NUMPY: dict[Callable[..., Any], Callable[..., Any]] = {}
"""What runs when one of NumPy's functions meets a recorded value."""


def add_row(op: Operation, call: F, *numpy: Callable[..., Any]) -> F:
    """Puts an operation into the table, and under NumPy's names for it."""
    assert op.name not in TABLE, op.name
    TABLE[op.name] = Row(call, op, numpy)
    return as_numpy(*numpy)(call)


def as_numpy(*names: Callable[..., Any]) -> Callable[[F], F]:
    """Lets NumPy's functions `names` reach the decorated one when they meet a recorded value."""

    def decorate(call: F) -> F:
        for name in names:
            NUMPY[name] = call
        return call

    return decorate


def unbroadcast(g: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sums `g` over the axes along which an array of `shape` was broadcast."""
    if g.shape == shape:
        return g
    lead = g.ndim - len(shape)
    if lead:
        g = np.asarray(g.sum(axis=tuple(range(lead))))
    axes = tuple(i for i, n in enumerate(shape) if n == 1 and g.shape[i] != 1)
    return g.sum(axis=axes, keepdims=True) if axes else g


def _array_or_number(x: Any) -> Any:
    """A list as an array, anything else as it is."""
    return np.asarray(x) if isinstance(x, list | tuple) else x


def constant(x: Any) -> Any:
    """An untraced operand, as a number or a real array; a `TypeError` names anything else."""
    x = peek(x)
    if type(x) is float or type(x) is int:
        return x
    array = np.asarray(x)
    if array.dtype.kind not in "fiub":
        raise TypeError(f"an array of {array.dtype} cannot be combined with a recorded Tensor.")
    return array


def _is_new(dx: Any, g: np.ndarray) -> bool:
    """Whether a gradient is in memory of its own; it may be `g`, or a view (a reshape, a sum's)."""
    return dx is not g and dx.base is None


class Unary(Op):
    """An operation on one array: `gradient(g, kept, *args, **options)`."""

    __slots__ = ("gradient",)

    def __init__(self, name: str, gradient: Callable[..., np.ndarray]) -> None:
        super().__init__(name)
        self.gradient = gradient

    def backward(self, sweep: Sweep, node: Node, grads: dict[int, np.ndarray]) -> None:
        g = grads[0]
        assert node.inputs is not None
        dx = self.gradient(g, restore(node.saved))
        sweep.add(node.inputs[0], dx, own=_is_new(dx, g))


def unary(
    name: str,
    doc: str,
    forward: Callable[[Any], Any],
    gradient: Callable[..., np.ndarray],
    *,
    keeps: str,
    numpy: tuple[Callable[..., Any], ...] = (),
) -> Callable[[Any], Any]:
    """A row for an elementwise function of one array; `gradient(g, kept)`, keeps "x", "y" or ""."""
    op = Unary(name, gradient)
    keeps_x, keeps_y = keeps == "x", keeps == "y"

    def call(x: Any) -> Any:
        if tape.current() is None or (source := traced(x)) is None:
            return forward(_array_or_number(peek(x)))
        y = forward(peek(x))
        return record_one(op, (source,), y, save(x) if keeps_x else y if keeps_y else None)

    call.__name__ = call.__qualname__ = name
    call.__module__ = "recur.ops"  # where pickle finds it again
    call.__doc__ = doc
    return add_row(op, call, *numpy)


_NOTHING = (None, None, None)


class _Binary(Op):
    """An elementwise operation on two arrays: `left(g, a, b, y)` and `right(g, a, b, y)`."""

    __slots__ = ("left", "right")

    def __init__(self, name: str, left: Callable, right: Callable) -> None:
        super().__init__(name)
        self.left, self.right = left, right

    def backward(self, sweep: Sweep, node: Node, grads: dict[int, np.ndarray]) -> None:
        g = grads[0]
        assert node.inputs is not None
        left, right = node.inputs
        a, b, y = node.saved
        a, b = restore(a), restore(b)
        if left is not None:
            da = unbroadcast(self.left(g, a, b, y), left.shape)
            sweep.add(left, da, own=_is_new(da, g))
        if right is not None:
            db = unbroadcast(self.right(g, a, b, y), right.shape)
            sweep.add(right, db, own=_is_new(db, g))


def binary(
    name: str,
    doc: str,
    forward: Callable[[Any, Any], Any],
    left: Callable[..., np.ndarray],
    right: Callable[..., np.ndarray],
    *,
    keeps: tuple[str, str],
    numpy: tuple[Callable[..., Any], ...] = (),
) -> Callable[[Any, Any], Any]:
    """A row for an elementwise function of two arrays that broadcast as in NumPy.

    `keeps` names for each of the two gradients what it needs of "a", "b" and "y".
    """
    op = _Binary(name, left, right)
    keeps_nothing = not any(keeps)
    if_left, if_right, if_both = (  # whether to keep a, b and y, by which of a and b are traced
        tuple(letter in needed for letter in "aby") for needed in (*keeps, keeps[0] + keeps[1])
    )

    def call(a: Any, b: Any) -> Any:
        try:
            if tape.current() is None:
                return forward(peek(a), peek(b))
            source_a, source_b = traced(a), traced(b)
            if source_a is None:
                if source_b is None:
                    return forward(peek(a), peek(b))
                a = constant(a)
            elif source_b is None:
                b = constant(b)
            y = forward(peek(a), peek(b))
            inputs = source_a, source_b
            if keeps_nothing:
                return record_one(op, inputs, y, _NOTHING)
            keep = if_right if source_a is None else if_left if source_b is None else if_both
            saved = (
                save(a) if keep[0] else None,
                save(b) if keep[1] else None,
                y if keep[2] else None,
            )
            return record_one(op, inputs, y, saved)
        except ValueError as error:
            _check_broadcast(name, peek(a), peek(b), error)
            raise

    call.__name__ = call.__qualname__ = name
    call.__module__ = "recur.ops"  # where pickle finds it again
    call.__doc__ = doc
    return add_row(op, call, *numpy)


def _check_broadcast(name: str, a: Any, b: Any, cause: ValueError) -> None:
    """Raises `ShapeError` if a and b do not broadcast, with what is meant most often."""
    left, right = np.shape(a), np.shape(b)
    try:
        np.broadcast_shapes(left, right)
    except ValueError:
        hint = ""
        if left[:1] == right[:1]:
            hint = (
                " NumPy matches axes from the last one; a bias (out,) over a batch is added by "
                "ops.affine(W, x, b), or as b[:, None]."
            )
        raise ShapeError(f"{name}: shapes {left} and {right} do not broadcast.{hint}") from cause


class _General(Op):
    """An operation on one array with options: `gradient(g, *kept, *args, **options)`."""

    __slots__ = ("gradient", "keeps")

    def __init__(self, name: str, gradient: Callable[..., np.ndarray], keeps: str) -> None:
        super().__init__(name)
        self.gradient = gradient
        self.keeps = keeps

    def backward(self, sweep: Sweep, node: Node, grads: dict[int, np.ndarray]) -> None:
        g = grads[0]
        assert node.inputs is not None
        (source,) = node.inputs
        x, y, args, options = node.saved
        kept = [source.shape] if "s" in self.keeps else []
        if "x" in self.keeps:
            kept.append(restore(x))
        if "y" in self.keeps:
            kept.append(y)
        dx = self.gradient(g, *kept, *args, **options)
        sweep.add(source, dx, own=_is_new(dx, g))


def operation(
    gradient: Callable[..., np.ndarray],
    *,
    keeps: str = "",
    numpy: tuple[Callable[..., Any], ...] = (),
    view: bool = False,
) -> Callable[[F], F]:
    """Makes a row of the decorated forward `f(x, *args, **options)`, x an array.

    `keeps` is any of "s" (the shape of x), "x" and "y"; `view` says that the result may share
    memory with x, so that it must not be writable, nor follow later writes to a parameter.
    """

    def decorate(forward: F) -> F:
        name = forward.__name__
        op = _General(name, gradient, keeps)
        keeps_x, keeps_y = "x" in keeps, "y" in keeps

        @functools.wraps(forward)
        def call(x: Any, *args: Any, **options: Any) -> Any:
            if args:
                args = tuple(_option(name, arg) for arg in args)
            if options:
                options = {key: _option(name, option) for key, option in options.items()}
            if tape.current() is None or (source := traced(x)) is None:
                x = value(x) if view else peek(x)
                return forward(_array_or_number(x), *args, **options)
            y = forward(peek(x), *args, **options)
            if view and type(x) is Param:
                y = y.copy(order="K")
            saved = (save(x) if keeps_x else None, y if keeps_y else None, args, options)
            return record_one(op, (source,), y, saved)

        return add_row(op, call, *numpy)  # type: ignore[return-value]

    return decorate


def _option(name: str, x: Any) -> Any:
    """An option as a plain value; an array is copied, since its owner may write into it."""
    if isinstance(x, Operand) and tape.current() is not None and traced(x) is not None:
        raise TypeError(
            f"{name}: only its array takes gradient, and an option is a recorded "
            f"{type(x).__name__}. Compose it from other operations (clip from maximum and "
            "minimum), or pass recur.value(t)."
        )
    x = peek(x)
    return x.copy() if isinstance(x, np.ndarray) else x


def sources(xs: Any) -> tuple[Tensor | Param | None, ...]:
    """Which of `xs` take gradient, in the form that `Node.inputs` has."""
    return tuple(map(traced, xs))


def any_traced(inputs: tuple[Tensor | Param | None, ...]) -> bool:
    """Whether any of `sources` takes gradient (== would compare Params entry by entry)."""
    return any(x is not None for x in inputs)


def parameters_of(call: Callable[..., Any]) -> tuple[frozenset[str], int]:
    """The names of a function's arguments, and how many may be given by position."""
    parameters = inspect.signature(call).parameters
    by_position = [p for p in parameters.values() if p.kind is not p.KEYWORD_ONLY]
    return frozenset(parameters), len(by_position)
