"""Layers that are one product: `Dense`, `Scale`, `Embedding`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from recur import _kernels, ops
from recur.errors import ShapeError
from recur.module import (
    Module,
    Stages,
    features,
    glorot_uniform,
    label,
    new_param,
    normal,
    numeric,
    ones,
    register,
    zeros,
)
from recur.module.initialisers import Initialiser
from recur.ops.products import packed_affine
from recur.tape import Node, Op, Param, Sweep, current, peek, record_one, traced

Activation = Callable[[Any], Any]


class StepLayer(Module):
    """A layer that treats every step alike: a list or tuple of steps gives a list."""

    takes_lists = True

    def __call__(self, x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return [self.apply(step) for step in x]
        return self.apply(x)

    def apply(self, x: Any) -> Any:
        """The layer's output for one array: a step (n,), (n, B), or a sequence (n, B, T)."""
        raise NotImplementedError


def size(layer: str, what: str, n: Any) -> int:
    """`n` as a number of features; raises `ShapeError` unless it is a positive integer."""
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1:
        raise ShapeError(f"{layer}: {what} is {n!r}, expected a positive integer.")
    return int(n)


def given(name: str, array: Any, shape: tuple[int | None, ...], dtype: Any = None) -> Param:
    """A parameter from an array, which is copied, or from a Param, which is shared."""
    if type(array) is not Param:
        plain = numeric(name, array)
        kept = plain.dtype if plain.dtype in (np.float32, np.float64) else np.dtype(np.float32)
        array = Param(plain.astype(dtype or kept), name)
    if len(shape) != array.ndim or any(
        n not in (None, m) for n, m in zip(shape, array.shape, strict=True)
    ):
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise ShapeError(f"{name} has shape {array.shape}, expected ({wanted}).")
    return array


def bias_of(
    name: str, bias: Any, n: int, init: Initialiser, rng: np.random.Generator | None, dtype: Any
) -> Param | None:
    """The bias that a constructor's `bias=` asks for: True, False, or an array or Param (n,)."""
    if bias is None or bias is False:
        return None
    if bias is True:
        return new_param(name, init, (n,), rng=rng, dtype=dtype)
    return given(name, bias, (n,), dtype)


def options(act: Activation, **others: Any) -> str:
    """The activation, unless identity, and the options that were set, for printing."""
    shown = [] if act is ops.identity else [label(act)]
    shown += [f"{name}={value}" for name, value in others.items()]
    return "".join(f", {text}" for text in shown)


_STEPPED = {ops.identity: (), ops.relu: ("relu",), ops.tanh: ("tanh",)}


def stepped_activation(act: Any) -> tuple[str, ...] | None:
    """What a `Stepper` does with the same bits as `act`, None if nothing."""
    return next((stages for known, stages in _STEPPED.items() if known is act), None)


@register("Dense")
class Dense(StepLayer):
    """y = act(W x + b) for every sample and step.

        Dense(n_in, n_out, act=identity)
        Dense(weight, bias=True, act=identity)

    weight (n_out, n_in), bias (n_out,).  An array given for either is copied, a `Param` is shared;
    `bias=False` leaves the bias out.  x (n_in,), (n_in, B), (n_in, B, T), or a list of steps gives
    y with n_out features and x's other axes, in the dtype of the weight.  Outside a scope a
    sample's numbers do not depend on the rest of its batch.

    Raises `ShapeError` for another number of features, and with `strict_dtype` for another dtype.
    """

    positional = ("n_in", "n_out", "act")

    def __init__(
        self,
        first: Any,
        second: Any = True,
        act: Activation = ops.identity,
        /,
        *,
        bias: Any = True,
        init: Initialiser = glorot_uniform,
        bias_init: Initialiser = zeros,
        strict_dtype: bool = False,
        dtype: Any = np.float32,
        rng: np.random.Generator | None = None,
    ) -> None:
        if np.ndim(peek(first)) == 2:
            self.weight = given("Dense: weight", first, (None, None))
            bias, dtype = (second if bias is True else bias), self.weight.dtype
        else:
            dims = size("Dense", "n_out", second), size("Dense", "n_in", first)
            self.weight = new_param("Dense.weight", init, dims, rng=rng, dtype=dtype)
        n_out = self.weight.shape[0]
        self.bias = bias_of("Dense.bias", bias, n_out, bias_init, rng, dtype)
        if not callable(act):
            raise TypeError(f"Dense: the activation is {act!r}, expected a function.")
        self.act = act
        self.strict_dtype = strict_dtype
        self.name_params()

    def apply(self, x: Any) -> Any:
        weight = self.weight
        x = features(self, x, weight.shape[1], weight.dtype, self.strict_dtype)
        y = ops.affine(weight, x, self.bias)
        return y if self.act is ops.identity else self.act(y)

    def stages(self) -> Stages | None:
        params = [p for p in (self.weight, self.bias) if p is not None]
        act = stepped_activation(self.act)
        if (
            type(self) is not Dense
            or self.strict_dtype
            or act is None
            or self.computed_weights
            or any(type(p) is not Param for p in params)
        ):
            return None
        counters = (self.change_counter(), *(c for p in params for c in p.counters))
        return Stages((packed_affine(self.weight, self.bias), *act), counters)

    def describe(self) -> str:
        n_out, n_in = self.weight.shape
        off = {"bias": False} if self.bias is None else {}
        return f"Dense({n_in} => {n_out}{options(self.act, **off)})"

    def output_shape(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        return first_axis(self, shapes, self.weight.shape[1], self.weight.shape[0])

    def config(self) -> dict[str, Any]:
        n_out, n_in = self.weight.shape
        return {
            "n_in": n_in,
            "n_out": n_out,
            "act": self.act,
            "bias": self.bias is not None,
            "strict_dtype": self.strict_dtype,
            "dtype": self.weight.dtype,
        }


def first_axis(
    layer: Module, shapes: tuple[tuple[int, ...], ...], n_in: int, n_out: int
) -> tuple[int, ...]:
    """The output's shape of a layer that takes n_in features to n_out and keeps other axes."""
    (shape,) = shapes
    if not 1 <= len(shape) <= 3 or shape[0] != n_in:
        raise ShapeError(
            f"{layer!r}: an input of shape {shape} has no {n_in} features on axis 0 of at most 3."
        )
    return (n_out, *shape[1:])


@register("Scale")
class Scale(StepLayer):
    """y = act(scale * x + bias), elementwise along the features.

    scale (n,), bias (n,).  x (n,), (n, B), (n, B, T), or a list of steps.  Raises as `Dense`.
    """

    positional = ("n", "act")

    def __init__(
        self,
        n: int,
        act: Activation = ops.identity,
        /,
        *,
        bias: Any = True,
        init: Initialiser = ones,
        bias_init: Initialiser = zeros,
        dtype: Any = np.float32,
        rng: np.random.Generator | None = None,
    ) -> None:
        n = size("Scale", "n", n)
        self.scale = new_param("Scale.scale", init, (n,), rng=rng, dtype=dtype)
        self.bias = bias_of("Scale.bias", bias, n, bias_init, rng, dtype)
        self.act = act
        self.name_params()

    def apply(self, x: Any) -> Any:
        x = features(self, x, self.scale.shape[0], self.scale.dtype)
        return self.act(scaled(self.scale, x, self.bias))

    def describe(self) -> str:
        off = {"bias": False} if self.bias is None else {}
        return f"Scale({self.scale.shape[0]}{options(self.act, **off)})"

    def output_shape(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        return first_axis(self, shapes, self.scale.shape[0], self.scale.shape[0])

    def config(self) -> dict[str, Any]:
        return {
            "n": self.scale.shape[0],
            "act": self.act,
            "bias": self.bias is not None,
            "dtype": self.scale.dtype,
        }


def scaled(scale: Any, x: Any, bias: Any) -> Any:
    """scale * x + bias, with one number of each for a feature."""
    column = (-1, *(1,) * (x.ndim - 1))
    y = ops.multiply(x, ops.reshape(scale, column))
    return y if bias is None else ops.add(y, ops.reshape(bias, column))


class _Gather(Op):
    __slots__ = ()

    def backward(self, sweep: Sweep, node: Node, grads: dict[int, np.ndarray]) -> None:
        assert node.inputs is not None
        index = node.saved
        rows = np.ascontiguousarray(grads[0].T).reshape(len(index), -1)
        table = sweep.buffer(node.inputs[0]).T
        if table.flags.c_contiguous:
            _kernels.embedding_scatter_add(rows, index, table, accumulate=True)
        else:
            np.add.at(table, index, rows)


_GATHER = _Gather("embedding")


@register("Embedding")
class Embedding(StepLayer):
    """y = weight[:, x]: one column of features for every index.

        Embedding(n_in, n_out)
        Embedding(weight)

    weight (n_out, n_in), whose columns lie contiguous in memory.  x is an integer, or an array of
    integers in [0, n_in) of any shape (), (B,), (B, T), and gives (n_out, *x.shape); a list of such
    steps gives a list.  x may also be one-hot, (n_in,), (n_in, B) or (n_in, B, T) of floats or
    bools; then y = weight x.  The gradient adds up in the columns that were used.

    Raises `IndexError` for an index out of range, `ShapeError` for one-hot columns of another size.
    """

    positional = ("n_in", "n_out")

    def __init__(
        self,
        first: Any,
        n_out: int | None = None,
        /,
        *,
        init: Initialiser = normal,
        dtype: Any = np.float32,
        rng: np.random.Generator | None = None,
    ) -> None:
        if type(first) is Param:
            self.weight = given("Embedding: weight", first, (None, None))
        else:
            if np.ndim(first) == 2:
                weight = given("Embedding: weight", first, (None, None))
            else:
                dims = size("Embedding", "n_out", n_out), size("Embedding", "n_in", first)
                weight = new_param("Embedding.weight", init, dims, rng=rng, dtype=dtype)
            self.weight = Param(weight, order="F")
        self.name_params()

    def apply(self, x: Any) -> Any:
        array = np.asarray(peek(x))
        if array.dtype.kind in "iu":
            return self._gather(array)
        weight = self.weight
        return ops.affine(weight, features(self, x, weight.shape[1], weight.dtype))

    def _gather(self, x: np.ndarray) -> Any:
        weight = self.weight
        self._check(x, weight.shape[1])
        # New memory: the index that a backward needs must not follow later writes to x.
        index = np.array(x.T, np.int64, order="C").reshape(-1)
        table = np.ascontiguousarray(peek(weight).T)
        rows = _kernels.embedding_gather(table, index)
        y = rows.reshape(*x.shape[::-1], weight.shape[0]).T
        source = traced(weight) if current() is not None else None
        return y if source is None else record_one(_GATHER, (source,), y, index)

    def _check(self, x: np.ndarray, n: int) -> None:
        if x.size == 0 or (x.min() >= 0 and x.max() < n):
            return
        place = tuple(int(i) for i in np.argwhere((x < 0) | (x >= n))[0])
        where = f" at position {place}" if place else ""
        raise IndexError(
            f"{self!r}: index {x[place]}{where} is out of range, expected 0 to {n - 1}. "
            "Nothing was changed."
        )

    def describe(self) -> str:
        n_out, n_in = self.weight.shape
        return f"Embedding({n_in} => {n_out})"

    def output_shape(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        (shape,) = shapes
        return (self.weight.shape[0], *shape)

    def config(self) -> dict[str, Any]:
        n_out, n_in = self.weight.shape
        return {"n_in": n_in, "n_out": n_out, "dtype": self.weight.dtype}
