"""What shape a model gives, without running it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from recur.errors import ShapeError
from recur.module.base import Module, raw_weights
from recur.module.parameters import modules
from recur.tape import paused, peek

Shape = tuple[int, ...]


def outputsize(model: Any, *sizes: Sequence[int]) -> Shape:
    """The shape that `model` gives for inputs of these shapes; no layer is stepped.

    Layers answer by `output_shape`.  A function, or a layer of one's own without that method, is
    tried on zeros, unless something in it has a state or draws random numbers.

    Raises `ShapeError` where a shape does not fit, `TypeError` for what cannot be asked.
    """
    if not sizes or not all(isinstance(size, (tuple, list)) for size in sizes):
        raise TypeError(
            "outputsize: expected the shape of each input, as in outputsize(m, (3, 8))."
        )
    shapes = [tuple(int(n) for n in size) for size in sizes]
    if any(n < 0 for shape in shapes for n in shape):
        raise ShapeError(f"outputsize: a size is negative in {', '.join(map(str, shapes))}.")
    return shape_after(model, *shapes)


def shape_after(layer: Any, *shapes: Shape) -> Shape:
    """`outputsize` for shapes that are known to be good; containers pass them on with it."""
    if isinstance(layer, Module) and type(layer).output_shape is not Module.output_shape:
        with raw_weights():
            return layer.output_shape(*shapes)
    for path, inner in modules(layer):
        if hasattr(inner, "active") or _is_stateful(inner):
            raise TypeError(
                f"outputsize: {layer!r} cannot be asked without running {path or 'it'} "
                f"({inner!r}). Give {type(layer).__name__} a method output_shape(shape)."
            )
    with paused():
        result = peek(layer(*(np.zeros(shape, np.float32) for shape in shapes)))
    return np.shape(result)


def _is_stateful(layer: Module) -> bool:
    return type(layer).load_running_state is not Module.load_running_state
