"""`Stage`: one layer of a stepped model, as a function of rows and of a state that lies outside.

Rows are features-last: x (B, F), a block of steps X (T, B, F), a part of the state (B, H).  A stage
writes the new state into the arrays of the old one.  Its output may be such an array, which is the
next stage's to read and not to write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from recur import _kernels, ops
from recur.cells import Cell, KernelCell
from recur.compress import CompressedDense
from recur.errors import StateError
from recur.layers import BatchNorm, Dense, Embedding, LayerNorm, Scale
from recur.layers.containers import connect
from recur.module import Module, label
from recur.ops.products import packed_affine
from recur.tape import Param

State: TypeAlias = Sequence[np.ndarray]
Scratch: TypeAlias = "dict[Stage, np.ndarray]"

# What a Stepper applies with the same bits as the operation of that name.
_STEPPER_ACTS = ("identity", "relu", "tanh")


class Stage:
    """A layer.

    blocks  whether `run` takes all steps at once, with the bits of the single steps
    sealed  whether a step of checked input can only fail for want of memory
    """

    blocks = False
    sealed = False

    def step(self, x: Any, state: State, scratch: Scratch) -> Any:
        """One step on rows x (B, F): rows y (B, R)."""
        raise NotImplementedError

    def run(self, X: Any, state: State) -> Any:
        """T steps on X (T, B, F): Y (T, B, R).  Only where `blocks`."""
        raise NotImplementedError

    def kernels(self) -> list[Any] | None:
        """What a `Stepper` needs to do the same, or None if it cannot."""
        return None

    def counters(self) -> tuple[Any, ...]:
        """The counters that show that `kernels` is out of date."""
        return ()


class CellStage(Stage):
    """A cell whose parts of the state are those at `place`; `again` if another stage has them."""

    def __init__(self, cell: Cell, place: slice, again: bool) -> None:
        self.cell = cell
        self.place = place
        self.again = again
        self._plain = type(cell).run_step is KernelCell.run_step
        self.sealed = self._kernel() is not None
        self.blocks = self.sealed and not again  # steps of two stages on one state alternate

    def _kernel(self) -> Any:
        return self.cell.packed().kernel if self._plain else None  # type: ignore[attr-defined]

    def step(self, x: Any, state: State, scratch: Scratch) -> Any:
        mine = tuple(state[self.place])
        kernel = self._kernel()
        if kernel is not None:
            kernel.step(self._input(x, kernel.dtype), *mine, out=mine)
            return mine[0].copy() if self.again else mine[0]
        refuse_active(self.cell)
        x = self._input(x, self.cell.dtype)
        new, y = self.cell.run_step(x.T, tuple(part.T for part in mine))
        for part, moved in zip(mine, new, strict=True):
            part[...] = moved.T
        return _rows(self.cell.title, y)

    def run(self, X: Any, state: State) -> Any:
        mine = state[self.place]
        kernel = self._kernel()
        Y, new = kernel.sequence(self._input(X, kernel.dtype), *mine)
        for part, moved in zip(mine, new, strict=True):
            part[...] = moved
        return Y

    def _input(self, x: Any, dtype: np.dtype) -> Any:
        if self.again:
            return np.array(x, dtype, order="C")  # it may be the state that is written
        return np.ascontiguousarray(x, dtype)

    def kernels(self) -> list[Any] | None:
        kernel = None if self.again else self._kernel()
        return None if kernel is None or self._watched() is None else [kernel]

    def counters(self) -> tuple[Any, ...]:
        return self._watched() or ()

    def _watched(self) -> tuple[Any, ...] | None:
        return self.cell.counters()  # type: ignore[attr-defined]


class DenseStage(Stage):
    """y = act(W x + b), with an activation that is known by name: the layer's at first."""

    blocks = sealed = True

    def __init__(self, layer: Dense | CompressedDense) -> None:
        self.layer = layer
        self.act = ops.name_of(layer.act)

    def step(self, x: Any, state: State, scratch: Scratch) -> Any:
        kernel = self._kernel()
        x = np.ascontiguousarray(x, kernel.dtype)
        y = scratch.get(self)
        if y is None or len(y) != len(x) or y.dtype != kernel.dtype:
            y = scratch[self] = np.empty((len(x), kernel.n_out), kernel.dtype)
        return self._activated(kernel.apply(x, out=y))

    def run(self, X: Any, state: State) -> Any:
        kernel = self._kernel()
        rows = np.ascontiguousarray(X, kernel.dtype).reshape(-1, kernel.n_in)
        return self._activated(kernel.apply(rows)).reshape(*X.shape[:2], kernel.n_out)

    def _kernel(self) -> Any:
        if isinstance(self.layer, CompressedDense):
            return self.layer.held.kernel
        return packed_affine(self.layer.weight, self.layer.bias)

    def _activated(self, y: np.ndarray) -> np.ndarray:
        if self.act == "identity":
            return y
        if self.act == "relu":
            return np.maximum(y, 0, out=y)
        if self.act == "tanh":
            return _kernels.tanh(y, out=y)
        if self.act == "sigmoid":
            return _kernels.sigmoid(y, out=y)
        return np.ascontiguousarray(self.layer.act(y.T).T)

    def kernels(self) -> list[Any] | None:
        if self.act not in _STEPPER_ACTS:
            return None
        return [self._kernel()] if self.act == "identity" else [self._kernel(), self.act]

    def counters(self) -> tuple[Any, ...]:
        if isinstance(self.layer, CompressedDense):
            return (self.layer.change_counter(),)
        params = [p for p in (self.layer.weight, self.layer.bias) if p is not None]
        written = (counter for p in params for counter in p.counters)
        return (self.layer.change_counter(), *written)


class LayerStage(Stage):
    """Any layer or function without a recurrent state, called on columns."""

    def __init__(self, layer: Callable[[Any], Any]) -> None:
        self.layer = layer
        self.blocks = is_known(layer) and _known_act(layer)

    def step(self, x: Any, state: State, scratch: Scratch) -> Any:
        refuse_active(self.layer)
        if not isinstance(self.layer, Module):
            x = x.copy()  # a function may write into its input, which may be a state
        return _rows(label(self.layer), self.layer(x.T))

    def run(self, X: Any, state: State) -> Any:
        refuse_active(self.layer)
        T, B = X.shape[:2]
        y = _rows(label(self.layer), self.layer(X.reshape(T * B, *X.shape[2:]).T))
        return y.reshape(T, B, *y.shape[1:])


class ChainStage(Stage):
    """Stages one after the other."""

    def __init__(self, stages: list[Stage]) -> None:
        self.stages = stages
        self.blocks = all(stage.blocks for stage in stages)
        self.sealed = all(stage.sealed for stage in stages)

    def step(self, x: Any, state: State, scratch: Scratch) -> Any:
        for stage in self.stages:
            x = stage.step(x, state, scratch)
        return x

    def run(self, X: Any, state: State) -> Any:
        for stage in self.stages:
            X = stage.run(X, state)
        return X

    def kernels(self) -> list[Any] | None:
        found: list[Any] = []
        for stage in self.stages:
            kernels = stage.kernels()
            if kernels is None:
                return None
            found += kernels
        return found

    def counters(self) -> tuple[Any, ...]:
        return tuple(counter for stage in self.stages for counter in stage.counters())


class JoinStage(Stage):
    """connection(f(x), g(x), …): `Parallel`, and `SkipConnection` with an empty stage."""

    def __init__(self, name: str, connection: Callable[..., Any], stages: list[Stage]) -> None:
        self.name = name
        self.connection = connection
        self.stages = stages

    def step(self, x: Any, state: State, scratch: Scratch) -> Any:
        # Copies, for the function that joins them may write into them.
        ys = [np.array(stage.step(x, state, scratch)).T for stage in self.stages]
        return _rows(self.name, connect(self.connection, ys, False))


def _rows(name: str, y: Any) -> np.ndarray:
    """The columns that a layer returned as rows."""
    if not isinstance(y, np.ndarray) or y.ndim == 0:
        raise StateError(
            f"{name}: in a stream it returned {type(y).__name__}, expected an array with the "
            "batch on its last axis. Nothing was changed."
        )
    return np.ascontiguousarray(y.T)


def is_known(layer: Any) -> bool:
    """Whether it is a layer of which all that it does is known here."""
    return type(layer) in (Dense, CompressedDense, Embedding, LayerNorm, Scale, BatchNorm)


def _known_act(layer: Any) -> bool:
    act = getattr(layer, "act", None)
    return act is None or ops.name_of(act) is not None


def refuse_active(layer: Any) -> None:
    """Raises `StateError` if a random or statistics layer was set active: streams draw nothing."""
    if getattr(layer, "active", None):
        raise StateError(
            f"{label(layer)}: it was set active, and a stream draws no masks and gathers no "
            "statistics. Call testmode(model) first. Nothing was changed."
        )


def fits_dense(layer: Dense | CompressedDense) -> bool:
    """Whether `DenseStage` can do what this layer does."""
    if isinstance(layer, CompressedDense):
        return _known_act(layer)
    plain = [type(p) is Param for p in (layer.weight, layer.bias) if p is not None]
    return all(plain) and not layer.computed_weights and _known_act(layer)
