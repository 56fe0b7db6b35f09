"""`LayerNorm` and `BatchNorm`."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from recur import ops
from recur.errors import ShapeError
from recur.layers.dense import Activation, StepLayer, first_axis, options, scaled, size
from recur.module import (
    features,
    floating,
    is_active,
    journal,
    new_param,
    ones,
    register,
    zeros,
)
from recur.module.initialisers import Initialiser
from recur.tape import Node, Op, Sweep, current, peek, record_one, traced

# Rows are (N, F) with features last, contiguous: then NumPy adds up the features of a row in one
# order, whatever the number of rows, and single steps are batch invariant.


def _rows(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x.T).reshape(-1, x.shape[0])


def _columns(rows: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return rows.reshape(*shape[:0:-1], shape[0]).T


class _Normalise(Op):
    """xhat = (x - mean) * r along one axis of the rows, r = 1 / sqrt(var + eps)."""

    __slots__ = ("axis",)

    def __init__(self, name: str, axis: int) -> None:
        super().__init__(name)
        self.axis = axis

    def forward(self, rows: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(xhat, mean, var), the last two with the axis kept."""
        mean = rows.mean(axis=self.axis, keepdims=True)
        centred = rows - mean
        var = np.square(centred).mean(axis=self.axis, keepdims=True)
        centred /= np.sqrt(var + rows.dtype.type(eps))
        return centred, mean, var

    def backward(self, sweep: Sweep, node: Node, grads: dict[int, np.ndarray]) -> None:
        assert node.inputs is not None
        xhat, scale = node.saved
        dy = _rows(grads[0])
        dx = dy - dy.mean(axis=self.axis, keepdims=True)
        dx -= xhat * (dy * xhat).mean(axis=self.axis, keepdims=True)
        dx *= scale
        sweep.add(node.inputs[0], _columns(dx, grads[0].shape), own=True)


_ALONG_FEATURES = _Normalise("layer_norm", axis=1)
_ALONG_SAMPLES = _Normalise("batch_norm", axis=0)


def _normalised(op: _Normalise, x: Any, eps: float) -> tuple[Any, np.ndarray, np.ndarray]:
    """x (F, ...) normalised, recorded if x is traced, and the mean and the variance."""
    array = peek(x)
    xhat, mean, var = op.forward(_rows(array), eps)
    y: Any = _columns(xhat, array.shape)
    source = traced(x) if current() is not None else None
    if source is not None:
        scale = 1 / np.sqrt(var + xhat.dtype.type(eps))
        y = record_one(op, (source,), y, (xhat, scale))
    return y, mean, var


def normalise(x: Any, eps: float = 1e-5) -> Any:
    """(x - mean) / sqrt(var + eps²) along the features of each sample and step.

    x (F,), (F, B) or (F, B, T), floating-point.  The variance is that of the population.
    """
    return _normalised(_ALONG_FEATURES, x, eps * eps)[0]


@register("LayerNorm")
class LayerNorm(StepLayer):
    """y = act(scale * (x - mean) / sqrt(var + eps²) + bias), mean and variance over the features.

    scale (n,), bias (n,); both None with `affine=False`.  x (n,), (n, B), (n, B, T), or a list of
    steps; each sample and step by itself.  Outside a scope a sample's numbers do not depend on the
    rest of its batch.  `eps` is squared, as in newer Flux; a model of PyTorch needs the square root
    of its own.  Raises `ShapeError` for another number of features.  Ba et al. (2016).
    """

    positional = ("n", "act")

    def __init__(
        self,
        n: int,
        act: Activation = ops.identity,
        /,
        *,
        affine: bool = True,
        eps: float = 1e-5,
        dtype: Any = np.float32,
    ) -> None:
        self.n = size("LayerNorm", "n", n)
        self.scale = new_param("LayerNorm.scale", ones, (n,), dtype=dtype) if affine else None
        self.bias = new_param("LayerNorm.bias", zeros, (n,), dtype=dtype) if affine else None
        self.act = act
        self.eps = float(eps)
        self.name_params()

    def apply(self, x: Any) -> Any:
        x = features(self, x, self.n, _dtype(self.scale, x))
        y = normalise(x, self.eps)
        if self.scale is not None:
            y = scaled(self.scale, y, self.bias)
        return y if self.act is ops.identity else self.act(y)

    def describe(self) -> str:
        off = {"affine": False} if self.scale is None else {}
        return f"LayerNorm({self.n}{options(self.act, **off)})"

    def output_shape(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        return first_axis(self, shapes, self.n, self.n)

    def config(self) -> dict[str, Any]:
        return {
            "n": self.n,
            "act": self.act,
            "affine": self.scale is not None,
            "eps": self.eps,
            "dtype": np.dtype(np.float32) if self.scale is None else self.scale.dtype,
        }


def _dtype(weight: Any, x: Any) -> np.dtype:
    """What to compute in: the weight's dtype, without one that of x if it is floating-point."""
    if weight is not None:
        return weight.dtype
    dtype = np.asarray(peek(x)).dtype
    return dtype if dtype in (np.float32, np.float64) else np.dtype(np.float32)


@register("BatchNorm")
class BatchNorm(StepLayer):
    """y = act(scale * (x - mean) / sqrt(var + eps) + bias), for each feature by itself.

    Active, mean and variance are those of all samples and steps of x (n, B) or (n, B, T), and the
    running ones move towards them: mean by (1 - momentum) * mean + momentum * new, var likewise
    with the unbiased variance.  Otherwise the running ones are used, and x may be (n,) too; a
    sample's numbers then do not depend on the rest of its batch.  bias (n,), scale (n,) are None
    with `affine=False`; running mean (n,), var (n,) are None with `track_stats=False`, and those
    of x always serve.

    `active` is None (on inside a scope), True or False; `trainmode` and `testmode` set it.  Raises
    `ShapeError` for another number of features, and when active for a single sample, which has no
    variance.  Ioffe and Szegedy (2015).
    """

    positional = ("n", "act")

    def __init__(
        self,
        n: int,
        act: Activation = ops.identity,
        /,
        *,
        affine: bool = True,
        track_stats: bool = True,
        eps: float = 1e-5,
        momentum: float = 0.1,
        active: bool | None = None,
        init_bias: Initialiser = zeros,
        init_scale: Initialiser = ones,
        dtype: Any = np.float32,
    ) -> None:
        self.n = size("BatchNorm", "n", n)
        dtype = floating("BatchNorm", dtype)
        dims = (self.n,)
        self.bias = new_param("BatchNorm.bias", init_bias, dims, dtype=dtype) if affine else None
        self.scale = new_param("BatchNorm.scale", init_scale, dims, dtype=dtype) if affine else None
        self.mean: Any = None
        self.var: Any = None
        if track_stats:
            self.mean = np.array(new_param("BatchNorm.mean", zeros, dims, dtype=dtype).value)
            self.var = np.array(new_param("BatchNorm.var", ones, dims, dtype=dtype).value)
        self.act = act
        self.eps, self.momentum = float(eps), float(momentum)
        self.active = active
        self.name_params()

    def apply(self, x: Any) -> Any:
        held = self.scale if self.scale is not None else self.mean
        x = features(self, x, self.n, _dtype(held, x))
        if is_active(self) or self.mean is None:
            y = self._of_batch(x)
        else:
            y = self._running(x)
        if self.scale is not None:
            y = scaled(self.scale, y, self.bias)
        return y if self.act is ops.identity else self.act(y)

    def _of_batch(self, x: Any) -> Any:
        samples = x.size // self.n
        if samples < 2:
            raise ShapeError(
                f"{self!r}: x holds {samples} samples, expected at least 2: one sample has no "
                "variance. Nothing was changed. Call testmode(model) to use the running mean."
            )
        y, mean, var = _normalised(_ALONG_SAMPLES, x, self.eps)
        if self.mean is not None:
            journal(self, partial(self._set_stats, self.mean, self.var))
            step = self.mean.dtype.type(self.momentum)
            var = var[0] * (samples / (samples - 1))
            self._set_stats(
                self.mean + step * (mean[0] - self.mean), self.var + step * (var - self.var)
            )
        return y

    def _set_stats(self, mean: np.ndarray, var: np.ndarray) -> None:
        self.mean, self.var = mean, var

    def _running(self, x: Any) -> Any:
        column = (-1, *(1,) * (x.ndim - 1))
        scale = 1 / np.sqrt(self.var + self.mean.dtype.type(self.eps))
        return ops.multiply(ops.subtract(x, self.mean.reshape(column)), scale.reshape(column))

    def buffers(self) -> dict[str, np.ndarray]:
        return {} if self.mean is None else {"mean": self.mean, "var": self.var}

    def describe(self) -> str:
        off = {"affine": False} if self.scale is None else {}
        off |= {"track_stats": False} if self.mean is None else {}
        return f"BatchNorm({self.n}{options(self.act, **off)})"

    def output_shape(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        return first_axis(self, shapes, self.n, self.n)

    def config(self) -> dict[str, Any]:
        held = self.scale if self.scale is not None else self.mean
        return {
            "n": self.n,
            "act": self.act,
            "affine": self.scale is not None,
            "track_stats": self.mean is not None,
            "eps": self.eps,
            "momentum": self.momentum,
            "active": self.active,
            "dtype": np.dtype(np.float32) if held is None else held.dtype,
        }
