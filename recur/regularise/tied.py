"""`TiedDense`: the output layer that reads the embedding's table backwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from recur import _kernels, ops
from recur.layers.dense import StepLayer, bias_of, first_axis, given, options, size
from recur.module import features, new_param, normal, register, zeros
from recur.ops.products import FEW_ROWS
from recur.tape import (
    Node,
    Op,
    Param,
    Sweep,
    current,
    peek,
    record_one,
    restore,
    save,
    traced,
)


class _TiedAffine(Op):
    """E' x + b.  Inputs: E, x, b."""

    __slots__ = ()

    def backward(self, sweep: Sweep, node: Node, grads: dict[int, np.ndarray]) -> None:
        assert node.inputs is not None
        weight, x, bias = node.inputs
        saved_weight, rows = node.saved
        dy = _rows(grads[0], rows.dtype)
        if x is not None:
            dx = _kernels.affine_backward_x(_table(restore(saved_weight)), dy)
            sweep.add(x, _columns(dx, x.shape), own=True)
        sweep.post(weight, rows, dy)
        sweep.post(bias, dy)


_TIED_AFFINE = _TiedAffine("tied_affine")


def _table(weight: np.ndarray) -> np.ndarray:
    """E' (V, F), which is how the memory of an embedding lies."""
    return np.ascontiguousarray(weight.T)


def _rows(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return np.ascontiguousarray(x.T, dtype).reshape(-1, x.shape[0])


def _columns(rows: np.ndarray, like: tuple[int, ...]) -> np.ndarray:
    return rows.reshape(*like[:0:-1], rows.shape[1]).T


@register("TiedDense")
class TiedDense(StepLayer):
    """y = act(E' x + b), where E is the table of an embedding (Press and Wolf 2017; Inan, Khosravi
    and Socher 2017).

        TiedDense(embedding, act=identity)

    embedding  a layer whose `weight` is E (F, V), or that Param: shared.  The gradients of both
               layers add up in it, and it is saved once
    b (V,); None with `bias=False`.  x (F,), (F, B), (F, B, T), or a list of steps gives y with V
    features and x's other axes.  Outside a scope a sample's numbers do not depend on the rest of
    its batch.  Raises `ShapeError` for another number of features.
    """

    positional = ("n_in", "n_out", "act")
    transient = frozenset({"_packed"})
    _packed: tuple = (None, None, None)  # the weights' versions, their kernel, the weights

    def __init__(
        self, embedding: Any, act: Callable[[Any], Any] = ops.identity, /, *, bias: Any = True
    ) -> None:
        weight = getattr(embedding, "weight", embedding)
        if type(weight) is not Param:
            raise TypeError(
                f"TiedDense: {type(embedding).__name__} has no parameter `weight` to share. Pass "
                "an Embedding, or its weight."
            )
        self.weight = given("TiedDense: weight", weight, (None, None))
        self.bias = bias_of("TiedDense.bias", bias, weight.shape[1], zeros, None, weight.dtype)
        self.act = act
        self.name_params()

    def apply(self, x: Any) -> Any:
        x = features(self, x, self.weight.shape[0], self.weight.dtype)
        y = self._affine(x)
        return y if self.act is ops.identity else self.act(y)

    def _affine(self, x: Any) -> Any:
        weight, bias, array = self.weight, self.bias, np.asarray(peek(x))
        scope = current()
        inputs = tuple(None if scope is None else traced(part) for part in (weight, x, bias))
        rows = _rows(array, weight.dtype)
        recorded = any(source is not None for source in inputs)
        if len(rows) < FEW_ROWS or (not recorded and array.ndim < 3):
            y = self._kernel(weight, bias).apply(rows)
        else:
            y = _kernels.affine_forward(_table(peek(weight)), rows, peek(bias))
        if not recorded:
            return _columns(y, array.shape)
        if inputs[1] is None and np.may_share_memory(rows, array):
            rows = rows.copy()  # the caller's array, which the weight's gradient needs unchanged
        kept = None if inputs[1] is None else save(weight)
        return record_one(_TIED_AFFINE, inputs, _columns(y, array.shape), (kept, rows))

    def _kernel(self, weight: Any, bias: Any) -> Any:
        """The packed weights, made anew when one was written or replaced."""
        held = [p for p in (weight, bias) if p is not None]
        if any(type(p) is not Param for p in held):
            return _kernels.AffineKernel(_table(peek(weight)), peek(bias))
        key = [(id(p), p.version) for p in held]
        if self._packed[0] != key:
            kernel = _kernels.AffineKernel(_table(peek(weight)), peek(bias))
            object.__setattr__(self, "_packed", (key, kernel, held))  # keeps what the ids stand for
        return self._packed[1]

    def fields(self) -> list[tuple[str, Any]]:
        return [(name, x) for name, x in super().fields() if name != "_packed"]

    def describe(self) -> str:
        n_in, n_out = self.weight.shape
        off = {"bias": False} if self.bias is None else {}
        return f"TiedDense({n_in} => {n_out}{options(self.act, **off)})"

    def output_shape(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        return first_axis(self, shapes, *self.weight.shape)

    def config(self) -> dict[str, Any]:
        n_in, n_out = self.weight.shape
        return {
            "n_in": n_in,
            "n_out": n_out,
            "act": self.act,
            "bias": self.bias is not None,
            "dtype": self.weight.dtype,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], version: int) -> TiedDense:
        dims = (
            size("TiedDense", "n_in", config["n_in"]),
            size("TiedDense", "n_out", config["n_out"]),
        )
        weight = new_param("TiedDense.weight", normal, dims, dtype=config["dtype"])
        return cls(Param(weight, order="F"), config["act"], bias=config["bias"])
