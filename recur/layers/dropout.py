"""`Dropout`."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from recur.errors import ShapeError
from recur.layers.dense import StepLayer
from recur.module import Stages, child_generator, is_active, journal, register
from recur.tape import Node, Op, Sweep, current, peek, record_one, traced


class _Mask(Op):
    __slots__ = ()

    def backward(self, sweep: Sweep, node: Node, grads: dict[int, np.ndarray]) -> None:
        assert node.inputs is not None
        sweep.add(node.inputs[0], grads[0] * node.saved, own=True)


_MASK = _Mask("dropout")


@register("Dropout")
class Dropout(StepLayer):
    """y = x * mask / (1 - p), each entry of the mask 0 with probability p (Srivastava et al. 2014).

    x (F,), (F, B), (F, B, T), or a list of steps; y has its shape.  `dims` names the axes along
    which the mask is drawn, one value for all entries along the others; None stands for all.
    Masks come step by step from the layer's own `generator` (spawned from `rng`), so a sequence
    gets the masks that its steps would get.

    `active` is None (on inside a scope), True or False; `trainmode` and `testmode` set it.  Raises
    `ValueError` for p outside [0, 1].
    """

    def __init__(
        self,
        p: float,
        *,
        dims: int | tuple[int, ...] | None = None,
        active: bool | None = None,
        rng: np.random.Generator | None = None,
    ) -> None:
        self.p = probability("Dropout", p)
        self.dims = dims if dims is None else tuple(np.atleast_1d(dims).tolist())
        self.active = active
        self.generator = child_generator(rng)

    def apply(self, x: Any) -> Any:
        if self.p == 0 or not is_active(self):
            return x
        array = np.asarray(peek(x))
        if array.dtype.kind != "f":
            array = array.astype(np.float32)
        mask = self._draw(array.shape).astype(array.dtype)
        if self.p < 1:
            mask *= array.dtype.type(1 / (1 - self.p))
        y = np.multiply(array, mask)
        source = traced(x) if current() is not None else None
        return y if source is None else record_one(_MASK, (source,), y, mask)

    def stages(self) -> Stages | None:
        idle = type(self) is Dropout and (self.p == 0 or not self.active)
        return Stages(counters=(self.change_counter(),)) if idle else None

    def _draw(self, shape: tuple[int, ...]) -> np.ndarray:
        if self.dims is not None:
            if not all(0 <= axis < len(shape) for axis in self.dims):
                raise ShapeError(
                    f"{self!r}: x has shape {shape}, expected an axis for each of dims. "
                    "Nothing was changed."
                )
            shape = tuple(n if axis in self.dims else 1 for axis, n in enumerate(shape))
        bits = self.generator.bit_generator
        journal(self, partial(setattr, bits, "state", bits.state))
        # Memory in time order.  Always float32, so that a model draws alike in both dtypes.
        return self.generator.random(shape[::-1], np.float32).T >= self.p

    def describe(self) -> str:
        dims = "" if self.dims is None else f", dims={self.dims}"
        return f"Dropout({self.p:g}{dims})"

    def output_shape(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        (shape,) = shapes
        return shape

    def config(self) -> dict[str, Any]:
        return {"p": self.p, "dims": self.dims, "active": self.active}


def probability(layer: str, p: float) -> float:
    """`p` as a float; raises `ValueError` unless it lies in [0, 1]."""
    if not isinstance(p, (int, float, np.generic)) or not 0 <= p <= 1 or math.isnan(p):
        raise ValueError(f"{layer}: p is {p!r}, expected a probability from 0 to 1.")
    return float(p)
