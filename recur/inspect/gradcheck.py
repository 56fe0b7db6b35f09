"""Gradients against finite differences."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from recur.module import buffers, generators, modules, named_params
from recur.tape import Param, Tape, Tensor, peek

# Where f is evaluated along a direction, and with which weight: the fourth-order central
# difference, whose error at steps of 1e-4 is that of rounding.
_STENCIL = ((1, 2 / 3), (-1, -2 / 3), (2, -1 / 12), (-2, 1 / 12))


class Slope(NamedTuple):
    """What `gradcheck` found for one argument or parameter."""

    path: str
    analytic: float  # the gradient times the direction
    numeric: float  # the difference quotient along the direction
    error: float  # how far they are apart, relative to the larger; 0 within rounding


def gradcheck(
    f: Callable[..., Any],
    *args: Any,
    directions: int = 2,
    step: float = 1e-4,
    tolerance: float = 1e-6,
    seed: int = 0,
) -> list[Slope]:
    """Checks the gradients of f by difference quotients along random directions.

    For each float64 array among the arguments, and for each parameter of a model among them, the
    gradient g is compared as g'd with (f(x + h d) - f(x - h d)) / 2h, refined to fourth order.

    f
        Called with the arguments inside one scope; returns an array, or a tuple or list of them,
        which is weighted with random numbers if it is more than one number.
    args
        float64 arrays, `Param`, models of float64 parameters; anything else is passed on.

    Recurrent states, random generators, masks and running statistics are put back before each
    evaluation and at the end, so that each sees the same; so are the parameters.  A truncated
    gradient is not the derivative of the loss and cannot be checked like this.

    Raises `AssertionError` with the worst case if an error exceeds `tolerance`, `TypeError` if
    there is nothing to check or something is in float32.
    """
    rng = np.random.default_rng(seed)
    with Tape() as tape:
        passed, leaves = _leaves(args, tape)
        if not leaves:
            raise TypeError("gradcheck: no argument is a float64 array or holds parameters.")
        surroundings = Surroundings((f, args))
        try:
            weights, gradients = _gradients(f, passed, leaves, tape, rng)
            slopes = []
            for (path, leaf), g in zip(leaves, gradients, strict=True):
                for _ in range(directions):
                    d = rng.standard_normal(leaf.shape)

                    def along(h: float, leaf: Any = leaf, d: np.ndarray = d) -> float:
                        surroundings.put_back()
                        with _moved(leaf, h * d):
                            return _weighted(f(*passed), weights)

                    slopes.append(_compare(path, float(np.sum(g * d)), along, step))
        finally:
            surroundings.put_back()
    worst = max(slopes, key=lambda slope: slope.error)
    if not worst.error <= tolerance:
        raise AssertionError(
            f"gradcheck: along a random direction of {worst.path} the gradient gives "
            f"{worst.analytic:.10g}, the difference quotient {worst.numeric:.10g}: relative error "
            f"{worst.error:.2g}, tolerance {tolerance:g}."
        )
    return slopes


def _leaves(args: tuple, tape: Tape) -> tuple[list[Any], list[tuple[str, Tensor | Param]]]:
    """What f is called with, and by path all that takes gradient."""
    passed: list[Any] = []
    leaves: list[tuple[str, Tensor | Param]] = []
    for i, arg in enumerate(args):
        if isinstance(arg, np.ndarray | Tensor | float) and np.asarray(peek(arg)).dtype.kind == "f":
            arg = tape.watch(np.asarray(peek(arg)))
            leaves.append((f"argument {i}", arg))
        else:
            leaves.extend((p or f"argument {i}", leaf) for p, leaf in named_params(arg).items())
        passed.append(arg)
    for path, leaf in leaves:
        if leaf.dtype != np.float64:
            raise TypeError(
                f"gradcheck: {path} is an array of {leaf.dtype}, expected float64: differences of "
                "less precise numbers prove nothing. Convert with recur.f64(model)."
            )
    return passed, leaves


def _gradients(
    f: Callable[..., Any],
    passed: list[Any],
    leaves: list[tuple[str, Tensor | Param]],
    tape: Tape,
    rng: np.random.Generator,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Weights for the results of f, and the gradients of their weighted sum."""
    results = _results(f(*passed))
    weights = [
        np.ones(()) if np.size(peek(y)) == 1 else rng.standard_normal(np.shape(peek(y)))
        for y in results
    ]
    total: Any = 0.0
    for y, weight in zip(results, weights, strict=True):
        total = total + (y * weight).sum()
    if not isinstance(total, Tensor):
        return weights, [np.zeros(leaf.shape) for _, leaf in leaves]
    return weights, tape.gradient(total, [leaf for _, leaf in leaves])


def _results(y: Any) -> list[Any]:
    return [part for one in y for part in _results(one)] if isinstance(y, tuple | list) else [y]


def _weighted(y: Any, weights: list[np.ndarray]) -> float:
    return float(
        sum(np.sum(peek(one) * weight) for one, weight in zip(_results(y), weights, strict=True))
    )


def _compare(path: str, analytic: float, along: Callable[[float], float], h: float) -> Slope:
    values = [(weight, along(factor * h)) for factor, weight in _STENCIL]
    numeric = sum(weight * value for weight, value in values) / h
    rounding = 8 * np.finfo(float).eps * max(abs(value) for _, value in values) / h
    apart = abs(analytic - numeric)
    larger = max(abs(analytic), abs(numeric))
    error = 0.0 if apart <= rounding else apart / larger
    return Slope(path, analytic, numeric, error if np.isfinite(apart) else np.inf)


@contextmanager
def _moved(leaf: Tensor | Param, by: np.ndarray) -> Iterator[None]:
    """While open, the leaf has other values; then its own, bit for bit."""
    if isinstance(leaf, Param):
        before = leaf.value.copy()
        leaf += by
        try:
            yield
        finally:
            leaf[...] = before
    else:
        before = leaf._value
        leaf._value = before + by
        try:
            yield
        finally:
            leaf._value = before


class Surroundings:
    """What a call of f may change: states, generators, masks, running statistics."""

    def __init__(self, held: Any) -> None:
        self._layers = [(layer, layer.running_state()) for _, layer in modules(held)]
        self._buffers = [(array, array.copy()) for array in buffers(held).values()]
        self._generators = [
            (generator, copy.deepcopy(generator.bit_generator.state))
            for generator in generators(held).values()
        ]
        # Layers that keep a mask for a window give and take it by these two methods.
        keepers: list[Any] = [layer for _, layer in modules(held) if hasattr(layer, "held_masks")]
        self._masks = [(layer, layer.held_masks()) for layer in keepers]

    def put_back(self) -> None:
        for layer, state in self._layers:
            layer.load_running_state(state)
        for array, before in self._buffers:
            array[...] = before
        for generator, before in self._generators:
            generator.bit_generator.state = before
        for layer, masks in self._masks:
            layer.hold_masks(masks)
