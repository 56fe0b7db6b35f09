"""Cells that run as compiled kernels: packed weights kept fresh, one node a step or a sequence."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from recur import _kernels, ops
from recur.cells.base import State
from recur.cells.weighted import WeightedCell
from recur.errors import ShapeError
from recur.module import new_param, numeric, zeros
from recur.tape import (
    Node,
    Op,
    Operand,
    Param,
    Sweep,
    Tensor,
    check_version,
    current,
    peek,
    record,
    traced,
    writes,
)


class Packed:
    """The weights of a cell at one moment, as its kernel holds them.

    kernel   None if the weights or the activation are none that a kernel knows
    names    the weights that the cell has
    weights  what gradient flows into, in that order; None for a constant
    key      each weight with its version: equal keys mean equal numbers
    form     what else the kernel depends on
    stamp    `writes.stamp` when the key was last found true; None if a look at it proves nothing
    computed  the weights that are computed at each read, by name, and `writes.stamp` at that time;
             None if they were not kept
    """

    __slots__ = ("__weakref__", "computed", "form", "kernel", "key", "names", "stamp", "weights")

    def __init__(
        self,
        kernel: Any,
        names: tuple,
        weights: tuple,
        key: tuple,
        form: tuple,
        stamp: int | None,
        computed: tuple[dict[str, Any], int] | None,
    ) -> None:
        self.computed = computed
        self.kernel = kernel
        self.form = form
        self.names = names
        self.weights = weights
        self.key = key
        self.stamp = stamp

    def reads_alike(self, cell: KernelCell) -> bool:
        """Whether the cell's computed weights read as they did, and no weight was written."""
        if self.computed is None or self.computed[1] != writes.stamp:
            return False
        return all(getattr(cell, name) is weight for name, weight in self.computed[0].items())

    def check(self, of_x: bool, of_state: bool) -> None:
        """Raises `TapeError` if a weight that the backward multiplies with was written since."""
        if self.stamp == writes.stamp:
            return
        for name, (weight, version) in zip(self.names, self.key, strict=True):
            needed = of_x if name == "Wi" else of_state and name not in ("b", "bh")
            if needed and type(weight) is Param:
                check_version(weight, version)


class KernelCell(WeightedCell):
    """A cell whose step is one kernel call, also in a sequence and in backward.

    Weights are parameters, or tensors computed from parameters, or constants: any object with
    `shape`, `@` and `.T`.  With such a constant, or an activation of the user's, the same equations
    run as separate operations.  A subclass gives `build` besides what `WeightedCell` asks for.
    """

    transient: ClassVar[frozenset[str]] = frozenset({"_packed", "_recent"})
    _packed: Packed | None = None
    _recent: Any = None  # a weak reference to the last one that holds computed weights

    def build(self, **weights: np.ndarray | None) -> Any:
        """The kernel for these weights, or None if no kernel knows this cell's activation."""
        raise NotImplementedError

    def form(self) -> tuple:
        """What a kernel depends on besides the weights."""
        return ()

    def _replaced(self) -> None:
        super()._replaced()
        writes.bump()  # packed weights are looked at again, though perhaps no Param was written

    def counters(self) -> tuple[_kernels.Version, ...] | None:
        """The counters that move when a weight is written or replaced; None if one is computed."""
        weights = [getattr(self, name) for name in self.weight_names if not self.computed_weights]
        if any(type(w) is not Param for w in weights if w is not None) or not weights:
            return None
        counters = (counter for w in weights if w is not None for counter in w.counters)
        return (self.change_counter(), *counters)

    @classmethod
    def from_arrays(cls, Wi: Any, Wh: Any, b: Any = None, **more: Any) -> KernelCell:
        """A cell with these weights, copied (a `Param` is shared); sizes follow from their shapes.

        `more` are further weights by name, and options of the constructor.  The dtype is that of
        Wi: float64, or else float32.
        """
        weights = {"Wi": Wi, "Wh": Wh, "b": b}
        weights.update((name, more.pop(name)) for name in cls.weight_names if name in more)
        for name, weight in weights.items():
            if weight is not None and not hasattr(weight, "shape"):
                weights[name] = numeric(f"{cls.__name__}.{name}", weight)
        Wi, Wh = weights["Wi"], weights["Wh"]
        if len(Wi.shape) != 2 or len(Wh.shape) != 2:
            raise ShapeError(
                f"{cls.__name__}: Wi has shape {tuple(Wi.shape)}, Wh {tuple(Wh.shape)}, expected "
                "two matrices."
            )
        wide = getattr(Wi, "dtype", None) == np.float64
        more.setdefault("dtype", np.float64 if wide else np.float32)
        n_in, n_out = Wi.shape[1], Wh.shape[1]
        make: Any = cls  # a cell of the least size: its weights are given up at once
        cell: KernelCell = make(min(n_in, 1), min(n_out, 1), init=zeros, bias=False, **more)
        cell.n_in, cell.n_out = n_in, n_out
        for name, shape in cell.shapes().items():
            title, wanted = f"{cell.title}.{name}", cell.holds_param(name)
            object.__setattr__(cell, name, None)
            weight = weights.get(name)
            if weight is None and wanted:
                weight = new_param(title, cls.fill.get(name, zeros), shape, dtype=more["dtype"])
            elif isinstance(weight, np.ndarray):
                weight = Param(weight.astype(more["dtype"], copy=False), title)
            if weight is not None:
                setattr(cell, name, weight)
        return cell

    # ------------------------------------------------------------ packed weights

    def packed(self) -> Packed:
        """The kernel for the weights as they are now: one comparison unless something was written.

        Threads may race here: a `Packed` never changes, and is published by one store.
        """
        held = self._packed
        if held is not None and held.stamp == writes.stamp:
            return held
        if self.computed_weights and self._recent is not None:
            recent = self._recent()
            if recent is not None and recent.reads_alike(self):
                return recent
        return self._pack(held)

    def _pack(self, held: Packed | None) -> Packed:
        seen = writes.stamp  # before the weights are read: a write meanwhile will show
        weights = {name: getattr(self, name) for name in self.weight_names}
        weights = {name: w for name, w in weights.items() if w is not None}
        # The arrays of tensors, not the tensors: a cache must not keep history alive.
        key = tuple((w, w.version) if type(w) is Param else (peek(w), 0) for w in weights.values())
        plain = all(type(w) is Param for w in weights.values())
        stamp = None if self.computed_weights or not plain else seen
        form = self.form()
        known = held is not None and held.form == form and _same(held.key, key)
        kernel = held.kernel if held is not None and known else self._build(weights)
        names = tuple(weights)
        computed = {name: weights[name] for name in self.computed_weights if name in weights}
        packed = Packed(
            kernel, names, tuple(map(traced, weights.values())), key, form, stamp, (computed, seen)
        )
        kept = packed if plain else Packed(kernel, names, (), key, form, None, None)
        object.__setattr__(self, "_packed", kept)
        if computed:
            object.__setattr__(self, "_recent", weakref.ref(packed))
        return packed

    def _build(self, weights: dict[str, Any]) -> Any:
        if not all(isinstance(w, (Operand, np.ndarray)) for w in weights.values()):
            return None
        dtype = self.dtype
        return self.build(**{n: np.ascontiguousarray(peek(w), dtype) for n, w in weights.items()})

    # ------------------------------------------------------------ running

    def run_step(self, x: Any, state: State, layer: object = None) -> tuple[State, Any]:
        packed = self.packed()
        kernel = packed.kernel
        if kernel is None:
            return super().run_step(x, state, layer)
        tape = current()
        if tape is not None:
            after, y = _kernels.record_step(STEP, packed, x, state, tape, Tensor)
            if tape.events is not None:
                tape.log(STEP.name, node=y.node, layer=layer)
            return after, y
        vector = x.ndim == 1
        x_rows = rows(x)
        after = kernel.step(x_rows[None] if vector else x_rows, *map(rows, state))
        y = after[0].copy()
        return tuple(part.T for part in after), y[0] if vector else y.T

    def run_sequence(
        self,
        X: Any,
        state: State,
        lengths: np.ndarray | None = None,
        remat: int | None = None,
        layer: object = None,
    ) -> tuple[State, Any]:
        packed = self.packed()
        kernel = packed.kernel
        if kernel is None:
            return super().run_sequence(X, state, lengths, remat, layer)
        X_rows = rows(X)
        before = tuple(map(rows, state))
        if current() is None:
            Y, after = kernel.sequence(X_rows, *before, lengths=lengths)
            return tuple(part.T for part in after), Y.T
        if remat is None:
            Y, after, saved = kernel.sequence_save(X_rows, *before, lengths=lengths)
            op: Op = _SEQUENCE
            kept: tuple = (packed, X_rows, before, lengths, saved)
        else:
            Y, after, starts = _forward_by_parts(kernel, X_rows, before, lengths, remat)
            op, kept = _REMAT, (packed, X_rows, starts, lengths, remat)
        made = record(
            op,
            (traced(X), *map(traced, state), *packed.weights),
            [*(part.T for part in after), Y.T],
            kept,
            layer,
        )
        return tuple(made[:-1]), made[-1]


def _same(old: tuple, new: tuple) -> bool:
    return len(old) == len(new) and all(
        a is b and n == m for (a, n), (b, m) in zip(old, new, strict=True)
    )


def rows(x: Any) -> np.ndarray:
    """The value of `x`, features last and C-contiguous; no copy if it is so already."""
    array = peek(x).T
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def product(W: Any, h: Any) -> Any:
    """W @ h for h (n, B), in the dtype of h; W may be a constant object with `@` and `.T`."""
    if isinstance(W, Operand) and W.dtype == h.dtype:
        return ops.affine(W, h)  # in which no sample depends on the others, as in a kernel
    y = ops.matmul(W, h)
    return y if y.dtype == h.dtype else ops.astype(y, h.dtype)


# ---------------------------------------------------------------------- backward


class _Sequence(Op):
    """T steps.  Outputs: the parts of the last state, then Y."""

    __slots__ = ()

    def backward(self, sweep: Sweep, node: Node, grads: dict[int, np.ndarray]) -> None:
        packed, X, before, lengths, saved = node.saved
        n = len(before)
        dX_to, state_to, weights_to = _targets(node, n)
        packed.check(dX_to is not None, True)
        dX, d_before, operands = packed.kernel.sequence_backward(
            saved,
            X,
            _gradient_rows(grads.get(n)),
            tuple(_gradient_rows(grads.get(i)) for i in range(n)),
            need_dx=dX_to is not None,
            keep=sweep.keep_graph,
            lengths=lengths,
        )
        if dX_to is not None:
            sweep.add(dX_to, dX.T, own=True)
        _hand_on(sweep, packed, state_to, d_before, weights_to, operands)


class _Remat(Op):
    """T steps of which only every k-th state was kept: each part is run again before its backward.

    Outputs as `_Sequence`.
    """

    __slots__ = ()

    def backward(self, sweep: Sweep, node: Node, grads: dict[int, np.ndarray]) -> None:
        packed, X, starts, lengths, k = node.saved
        kernel = packed.kernel
        n = kernel.n_states
        dX_to, state_to, weights_to = _targets(node, n)
        packed.check(dX_to is not None, True)
        dY = _gradient_rows(grads.get(n))
        d_state: tuple = tuple(_gradient_rows(grads.get(i)) for i in range(n))
        dX = None if dX_to is None else np.empty_like(X)
        # Multiplied out part by part: operands that waited would be the memory that was saved.
        totals: dict[str, np.ndarray] = {}
        for part in reversed(range(len(starts))):
            span = slice(part * k, (part + 1) * k)
            left = _lengths_left(lengths, span.start, len(X[span]))
            _, _, saved = kernel.sequence_save(X[span], *starts[part], lengths=left)
            dx, d_state, operands = kernel.sequence_backward(
                saved,
                X[span],
                None if dY is None else dY[span],
                d_state,
                need_dx=dX is not None,
                keep=False,
                lengths=left,
            )
            if dX is not None:
                dX[span] = dx
            for name, operand in operands.items():
                _multiply_out(totals, name, operand)
        if dX is not None:
            sweep.add(dX_to, dX.T, own=True)
        _hand_on(sweep, packed, state_to, d_state, weights_to, _dense(totals))


STEP = _kernels.StepOp("step")
_SEQUENCE = _Sequence("sequence")
_REMAT = _Remat("sequence")


def _forward_by_parts(
    kernel: Any, X: np.ndarray, state: State, lengths: np.ndarray | None, k: int
) -> tuple[np.ndarray, State, list[State]]:
    """T steps in parts of k: (Y, last state, the state at the start of each part)."""
    Y = np.empty((*X.shape[:2], kernel.n_out), X.dtype)
    starts = []
    for start in range(0, len(X), k):
        starts.append(state)
        span = slice(start, start + k)
        left = _lengths_left(lengths, start, len(X[span]))
        Y[span], state = kernel.sequence(X[span], *state, lengths=left)
    return Y, state, starts


def _lengths_left(lengths: np.ndarray | None, start: int, T: int) -> np.ndarray | None:
    return None if lengths is None else np.clip(lengths - start, 0, T)


def _gradient_rows(grad: np.ndarray | None) -> np.ndarray | None:
    return None if grad is None else np.ascontiguousarray(grad.T)


def _targets(node: Node, n_states: int) -> tuple[Any, tuple, tuple]:
    """Where gradients go: the input, the parts of the state, the weights."""
    inputs: Any = node.inputs
    return inputs[0], inputs[1 : n_states + 1], inputs[n_states + 1 :]


def _hand_on(
    sweep: Sweep,
    packed: Packed,
    state_to: Sequence[Any],
    d_state: State,
    weights_to: tuple,
    operands: dict[str, tuple],
) -> None:
    """Gives a kernel's results to the sweep: states at once, weights as posts to their sinks."""
    for to, grad in zip(state_to, d_state):  # noqa: B905  (one pair for each part, at every step)
        if to is not None:
            sweep.add(to, grad.T, own=True)
    for name, to in zip(packed.names, weights_to):  # noqa: B905
        operand = operands[name]
        if type(operand[0]) is str:
            sweep.add(to, operand[1], own=True)
        else:
            sweep.post(to, *operand)


def _multiply_out(totals: dict[str, np.ndarray], name: str, operand: tuple) -> None:
    """Adds the gradient that an operand stands for to `totals[name]`."""
    total = totals.get(name)
    if isinstance(operand[0], str):
        totals[name] = operand[1] if total is None else total + operand[1]
        return
    if total is None:
        shape = (operand[0].shape[1], *(x.shape[1] for x in operand[1:]))
        totals[name] = np.empty(shape, operand[0].dtype)
    add: Any = _kernels.bias_gradient if len(operand) == 1 else _kernels.weight_gradient
    add(*operand, totals[name], accumulate=total is not None)


def _dense(totals: dict[str, np.ndarray]) -> dict[str, tuple]:
    return {name: ("dense", total) for name, total in totals.items()}
