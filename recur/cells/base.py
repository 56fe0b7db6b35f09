"""`Cell`: one step of a recurrent layer as a pure function, and how its arrays are checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np

from recur import ops
from recur.errors import BatchSizeError, ShapeError, StateError
from recur.module import Module
from recur.tape import Node, Op, Operand, Param, Sweep, Tensor, current, peek, record, traced

State: TypeAlias = tuple[Any, ...]


class LSTMState(NamedTuple):
    """The state of an LSTM: both parts are (n_out, B), or (n_out,) without a batch."""

    h: Any
    c: Any


class Cell(Module):
    """A step of a recurrent layer: `state, y = cell(state, x)`.  It keeps nothing.

    A subclass sets `n_in` and `n_out` (and `state_type`, a NamedTuple, if its state has more than
    one part) and defines `equations`.  `Recur` then checks inputs, carries the state, broadcasts
    the initial state over the batch, and handles sequences, lengths and cuts.

    x      (n_in,) or (n_in, B)
    state  (n_out,) or (n_out, B), or a tuple of them; (n_out,) and (n_out, 1) are broadcast over
           the batch of x.  The new state has a batch axis if x or state has one
    y      (n_out,) or (n_out, B), as x

    Outside a scope x and state are plain arrays and so are the results; inside, the step is
    recorded.  Raises `ShapeError`, `BatchSizeError`, `StateError` before anything is computed.
    """

    state_type: ClassVar[type[tuple] | None] = None
    n_in: int
    n_out: int
    Wi: Any

    def equations(self, x: Any, *state: Any) -> tuple[State, Any]:
        """One step by the operations of `recur.ops`: (parts of the new state, output).

        x (n_in, B) and each part of the state (size, B) are arrays or Tensors of `self.dtype`.
        """
        raise NotImplementedError(f"{type(self).__qualname__} defines no equations().")

    @property
    def dtype(self) -> np.dtype:
        """What the cell computes in: the dtype of `Wi`."""
        Wi = self.Wi
        return Wi.dtype if isinstance(Wi, (Operand, np.ndarray)) else np.dtype(np.float32)

    @property
    def title(self) -> str:
        """The cell in error messages: its layer's name and sizes."""
        return f"{type(self).__name__.removesuffix('Cell')}({self.n_in} => {self.n_out})"

    @property
    def state_names(self) -> tuple[str, ...]:
        """The name of each part of the state."""
        return ("h",) if self.state_type is None else self.state_type._fields  # type: ignore

    @property
    def state_sizes(self) -> tuple[int, ...]:
        """How many features each part of the state has."""
        return (self.n_out,) * len(self.state_names)

    def initial_state(self) -> Any:
        """Zeros, (n_out,) for each part: a state without a batch."""
        return self.wrap(tuple(np.zeros(n, self.dtype) for n in self.state_sizes))

    def wrap(self, parts: State) -> Any:
        """The parts of a state as users see them: one array, or a named tuple."""
        return parts[0] if self.state_type is None else self.state_type(*parts)

    def __call__(self, state: Any, x: Any = None) -> tuple[Any, Any]:
        if x is None:
            raise TypeError(
                f"{self.title}: a cell takes (state, x). Without a state call cell.step(x), which "
                "starts from zeros and returns (y, state)."
            )
        x = floats(self.title, "x", x, self.dtype)
        check_input(self, self.title, x, (1, 2))
        vector = x.ndim == 1
        parts = own_state(self, self.title, state)
        bare = vector and parts[0].ndim == 1
        batch = 1 if vector else x.shape[1]
        parts = fit_batch(self, self.title, parts, batch)
        new, y = self.run_step(x, parts)
        if bare:
            new = tuple(part[:, 0] for part in new)
        return self.wrap(new), y

    def step(self, x: Any, state: Any = None) -> tuple[Any, Any]:
        """`y, state = cell.step(x, state)`: Flux 0.16's order; the state defaults to zeros."""
        if state is None:
            state = self.initial_state()
        new, y = self(state, x)
        return y, new

    # What layers call: everything has been checked, every part of the state has its batch axis.

    def run_step(self, x: Any, state: State, layer: object = None) -> tuple[State, Any]:
        """One step on x (n_in,) or (n_in, B): (new state, output of x's number of axes)."""
        vector = x.ndim == 1
        new, y = self.equations(x[:, None] if vector else x, *state)
        if isinstance(y, np.ndarray):
            y = y.copy(order="K")  # it may be a part of the state, which the caller must not reach
        return new, y[:, 0] if vector else y

    def run_sequence(
        self,
        X: Any,
        state: State,
        lengths: np.ndarray | None = None,
        remat: int | None = None,
        layer: object = None,
    ) -> tuple[State, Any]:
        """T ≥ 1 steps on X (n_in, B, T): (last state, Y (n_out, B, T)).

        lengths  (B,) int64: sample b keeps its state after lengths[b] steps, its Y is 0 from there
        remat    keep the states of every remat-th step only, and recompute the rest in backward
        """
        if remat is not None:
            raise StateError(
                f"{self.title}: remat= needs a cell that runs as one kernel; this one runs as "
                "separate operations. Leave remat= out."
            )
        ys = []
        for t in range(X.shape[2]):
            x = X[:, :, t]
            alive = None if lengths is None or t < lengths.min() else t < lengths
            if alive is not None:
                x = ops.where(alive, x, 0)  # what padding holds must not reach any gradient
            new, y = self.equations(x, *state)
            if alive is not None:
                new = tuple(ops.where(alive, a, b) for a, b in zip(new, state, strict=True))
                y = ops.where(alive, y, 0)
            state = new
            ys.append(y)
        return state, ops.stack(ys, -1)


# ---------------------------------------------------------------------- checks


def floats(title: str, what: str, x: Any, dtype: np.dtype, *, strict: bool = False) -> Any:
    """`x` in `dtype`: a Tensor stays recorded, a plain array is copied if a scope is open.

    Integers, booleans and other floats are converted; `strict` refuses them.  A plain array comes
    back with its axes in the order of memory reversed, as kernels read it.
    """
    if type(x) is Tensor and not x.live:
        x = peek(x)
    if isinstance(x, Operand):
        if x.dtype == dtype:
            return x
        array = peek(x)
    else:
        try:
            array = np.asarray(x)
        except ValueError as error:
            raise ShapeError(
                f"{title}: {what} is not an array: {error}. Nothing was changed."
            ) from error
        if array.dtype.kind not in "fiub":
            raise ShapeError(
                f"{title}: {what} holds {array.dtype}, expected numbers. Nothing was changed."
            )
    if strict and array.dtype != dtype:
        raise ShapeError(
            f"{title}: {what} is {array.dtype}, expected {dtype} (strict_dtype=True). Nothing was "
            f"changed. Convert it with x.astype(np.{dtype}), or build the layer without "
            "strict_dtype."
        )
    if isinstance(x, Operand):
        return ops.astype(x, dtype)
    copy = None if current() is None else True
    return np.array(array.T, dtype, order="C", copy=copy).T


def check_input(cell: Cell, title: str, x: Any, ndims: tuple[int, ...]) -> None:
    """Raises `ShapeError` unless x has as many axes as allowed and the cell's features."""
    if x.ndim not in ndims:
        raise ShapeError(
            f"{title}: x has {x.ndim} axes and shape {tuple(x.shape)}, expected (features,), "
            "(features, batch)"
            + (" or (features, batch, time). " if 3 in ndims else ". ")
            + "Nothing was changed."
        )
    if x.shape[0] != cell.n_in:
        raise ShapeError(
            f"{title}: x has {x.shape[0]} features on axis 0, expected {cell.n_in}. Nothing was "
            "changed."
        )


def as_parts(cell: Cell, state: Any) -> Sequence[Any]:
    """The parts of a state as users give it; a list is an array where one part is expected."""
    if isinstance(state, tuple) or (isinstance(state, list) and cell.state_type is not None):
        return state
    return (state,)


def own_state(cell: Cell, title: str, state: Any) -> State:
    """The parts of a state from outside, checked and in the cell's dtype; arrays are copied.

    All parts are (size,), a state without a batch, or all are (size, B).
    """
    names = cell.state_names
    parts = as_parts(cell, state)
    if len(parts) != len(names):
        raise StateError(
            f"{title}: the state has {len(parts)} parts, expected {len(names)} "
            f"({', '.join(names)}). Nothing was changed."
        )
    owned = []
    for part, name, size in zip(parts, names, cell.state_sizes, strict=True):
        what = "state" if len(names) == 1 else f"state {name}"
        part = own_part(title, what, part, cell.dtype)
        if part.ndim not in (1, 2) or part.shape[0] != size:
            raise StateError(
                f"{title}: {what} has shape {tuple(part.shape)}, expected ({size},) or ({size}, "
                "batch). Nothing was changed."
            )
        owned.append(part)
    if len({part.shape[1:] for part in owned}) > 1:
        shapes = " and ".join(str(tuple(part.shape)) for part in owned)
        raise StateError(
            f"{title}: the parts of the state have shapes {shapes}, expected one batch size. "
            "Nothing was changed."
        )
    return tuple(owned)


def own_part(title: str, what: str, part: Any, dtype: np.dtype) -> Any:
    """One part of a state that nobody else can write: a Tensor, or a new array."""
    if type(part) is Param and current() is not None:
        part = begin(part, part.shape)
    part = floats(title, what, part if type(part) is Tensor else peek(part), dtype)
    return part if type(part) is Tensor else np.array(part, order="K")


def fit_batch(cell: Cell, title: str, parts: State, batch: int) -> State:
    """A state for a pure call: without a batch, or with batch 1, it is broadcast."""
    if parts[0].shape[1:] in ((), (1,)) and parts[0].shape[1:] != (batch,):
        return tuple(begin(part, (part.shape[0], batch)) for part in parts)
    if parts[0].shape[1] != batch:
        raise BatchSizeError(
            f"{title}: the state holds batch {parts[0].shape[1]}, x has batch {batch}. Nothing was "
            "changed. Pass a state of that batch, or one without a batch axis."
        )
    return parts


# ---------------------------------------------------------------------- the start


class _Begin(Op):
    """A state from its initial value: copied, so that neither shares memory, and broadcast."""

    __slots__ = ()

    def backward(self, sweep: Sweep, node: Node, grads: dict[int, np.ndarray]) -> None:
        grad, shape = grads[0], node.saved
        if grad.shape != shape:
            grad = grad.sum(axis=tuple(range(1, grad.ndim))).reshape(shape)
        sweep.add(node.inputs[0], grad)  # type: ignore[index]


_BEGIN = _Begin("start")


def begin(init: Any, shape: Sequence[int], layer: object = None) -> Any:
    """`init`, of shape (n,) or (n, 1), as a state of `shape` (n,) or (n, B) of its own memory.

    Recorded if gradient may flow into `init`: its gradient is the sum over the batch.
    """
    array = peek(init)
    column = array if array.ndim == len(shape) else array.reshape(-1, *(1,) * (len(shape) - 1))
    state = np.empty(tuple(shape)[::-1], array.dtype).T
    state[...] = column
    source = traced(init) if current() is not None else None
    if source is None:
        return state
    return record(_BEGIN, (source,), [state], array.shape, layer)[0]


def plain(state: State) -> State:
    """The values of a state's parts, without history, with their memory as kernels read it."""
    return tuple(
        np.array(peek(part).T, order="C").T if isinstance(part, Operand) else part for part in state
    )
