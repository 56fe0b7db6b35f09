"""`Plan`: a model taken apart into what its weights do and what a stream remembers."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from recur._kernels import Stepper
from recur.cells import Cell, KernelCell
from recur.compress import CompressedDense
from recur.errors import ShapeError, StateError
from recur.layers import Chain, Dense, Dropout, Embedding, Parallel, SkipConnection
from recur.layers.containers import Container
from recur.module import (
    Module,
    describe_model,
    label,
    named_params,
    raw_weights,
    state_dict,
    walk,
)
from recur.recurrent import Bidirectional, Recur, Reversed
from recur.recurrent.state import named_leaves
from recur.regularise import EmbeddingDropout, LockedDropout, WeightDrop
from recur.streaming.arguments import Form
from recur.streaming.changes import Watch
from recur.streaming.stages import (
    CellStage,
    ChainStage,
    DenseStage,
    JoinStage,
    LayerStage,
    Scratch,
    Stage,
    fits_dense,
    is_known,
)
from recur.tape import current, paused, peek, writes

BLOCK = 256  # steps of a block that are computed at once: their intermediate results stay in cache


class Part(NamedTuple):
    """One array of a stream's state: h of the layer at `path`."""

    path: str
    name: str
    size: int
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


class Plan:
    """The steps of a model as functions of a state that the caller holds.

    Weights may be written at any time; a plan that no longer shows how the layers are set is
    replaced by `current`.  Random layers do nothing, nothing is recorded, and the model's own
    states are neither read nor moved.

    parts   the arrays of a state, in order; a state is a list of arrays (B, part.size), row-major
    n_in    how many features an input has, None if the model does not say
    vocabulary  how many indices an input may be, for a model that begins with an `Embedding`

    Raises `StateError` by name for a layer that cannot step.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.title = label(model)
        self.parts: list[Part] = []
        self.layers: dict[str, Recur] = {}
        self._places: dict[int, slice] = {}
        self.n_in: int | None = None
        self.vocabulary: int | None = None
        self._entry: Module | None = None
        self._watch = Watch()
        self.root = self._stage("", model) or ChainStage([])
        self.computed = any(getattr(layer, "computed_weights", None) for _, layer in walk(model))
        dtypes = {part.dtype for part in self.parts}
        self.dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)
        self.sealed = self.root.sealed and not dtypes
        self._weights: tuple[int, bytes] | None = None
        self._architecture: bytes | None = None

    def current(self) -> Plan:
        """The plan of the model as it is now: this one, unless a layer was set otherwise.

        Raises `StateError` if what a stream remembers would be another, or as for a new plan.
        """
        if not self._watch.moved:
            return self
        plan = Plan(self.model)
        if plan.parts != self.parts:
            raise StateError(
                f"{self.title}: the model was changed, and a stream of it has {shown(plan.parts)} "
                f"now, expected {shown(self.parts)}. Begin new streams of it, or give the model "
                "its layers back. Nothing was changed."
            )
        return plan

    # ------------------------------------------------------------ taking the model apart

    def _stage(self, path: str, layer: Any) -> Stage | None:
        """The stage of a layer, None for one that does nothing in a stream."""
        if isinstance(layer, (WeightDrop, Recur, Container, EmbeddingDropout)) or is_known(layer):
            self._watch.see(layer)
        if isinstance(layer, WeightDrop):
            return self._stage(_below(path, "layer"), layer.layer)
        if isinstance(layer, (Bidirectional, Reversed)):
            raise StateError(
                f"{self.title}: {label(layer)} reads a sequence from its end, and a stream has "
                "none yet. Stream a model that reads forwards only."
            )
        if isinstance(layer, Recur):
            return self._cell_stage(path, layer)
        if isinstance(layer, Container):
            return self._container(path, layer)
        if isinstance(layer, (Dropout, LockedDropout)):
            return None
        if isinstance(layer, EmbeddingDropout):
            return self._stage(_below(path, "embedding"), layer.embedding)
        self._refuse_strangers(layer)
        self._note_input(layer)
        if type(layer) in (Dense, CompressedDense) and fits_dense(layer):
            return DenseStage(layer)
        return LayerStage(layer)

    def _cell_stage(self, path: str, layer: Recur) -> CellStage:
        cell = layer.cell
        while isinstance(cell, WeightDrop):
            self._watch.see(cell)
            cell = cell.layer
        if isinstance(cell, KernelCell):
            self._watch.see(cell)
        if not isinstance(cell, Cell) or type(cell).__call__ is not Cell.__call__:
            raise StateError(
                f"{self.title}: {layer.title} steps a function, whose state has no known size. "
                "Make its cell a recur.Cell (state sizes and equations) to stream it."
            )
        self._note_input(cell)
        again = id(layer) in self._places
        if not again:
            first = len(self.parts)
            self.layers[path] = layer
            for name, size in zip(cell.state_names, cell.state_sizes, strict=True):
                self.parts.append(Part(path, name, size, cell.dtype))
            self._places[id(layer)] = slice(first, len(self.parts))
        return CellStage(cell, self._places[id(layer)], again)

    def _container(self, path: str, layer: Container) -> Stage:
        stages = [
            self._stage(_below(path, f"layers.{name}"), part) or ChainStage([])
            for name, part in layer.items()
        ]
        if isinstance(layer, Chain):
            return ChainStage(stages)
        if isinstance(layer, SkipConnection):
            stages.append(ChainStage([]))
        elif not isinstance(layer, Parallel):
            raise StateError(f"{self.title}: {label(layer)} is a container that no stream knows.")
        return JoinStage(label(layer), layer.connection, stages)

    def _refuse_strangers(self, layer: Any) -> None:
        if not callable(layer) or isinstance(layer, type):
            raise TypeError(
                f"A stream of {self.title}: {label(layer)} is no layer, expected a recurrent layer "
                "or a Chain, Parallel or SkipConnection of layers and functions."
            )
        if isinstance(layer, Cell):
            raise StateError(
                f"{self.title}: {label(layer)} is a cell. Put a recur.Recur around it to stream it."
            )
        hidden = [inner for _, inner in walk(layer) if isinstance(inner, (Recur, WeightDrop))]
        if hidden:
            raise StateError(
                f"{self.title}: {label(layer)} holds {label(hidden[0])} where a stream cannot step "
                "it. Build the model of Chain, Parallel and SkipConnection."
            )

    def _note_input(self, layer: Any) -> None:
        """The first layer with a known size says what an input is."""
        if self._entry is not None or not isinstance(layer, Module):
            return
        if isinstance(layer, Embedding):
            self.vocabulary = self.n_in = layer.weight.shape[1]
        elif isinstance(layer, Cell):
            self.n_in = layer.n_in
        elif isinstance(layer, Dense):
            self.n_in = layer.weight.shape[1]
        elif isinstance(layer, CompressedDense):
            self.n_in = layer.held.kernel.n_in
        else:
            return
        self._entry = layer

    # ------------------------------------------------------------ inputs

    def rows(self, x: Any, batch: int) -> np.ndarray:
        """An input for `batch` streams, (n_in, batch), as rows (batch, n_in).

        Indices of an `Embedding` are (batch,) integers; for one stream an input may lack the batch.
        """
        array = self._numbers(x)
        index = self.vocabulary is not None and array.dtype.kind in "iu"
        if batch == 1 and array.ndim == (0 if index else 1):
            array = array[..., None]
        if array.ndim == 0 or array.shape[-1] != batch or array.ndim != (1 if index else 2):
            wanted = f"({batch},)" if index else f"({self._features()}, {batch})"
            raise ShapeError(
                f"{self.title}: x has shape {np.shape(x)}, expected {wanted}. Nothing was changed."
            )
        self._check_features(array, index)
        return self._laid_out(array, index)

    def blocks(self, X: Any) -> tuple[np.ndarray, bool]:
        """T steps of one stream, (n_in, T) or (n_in, 1, T), as (T, 1, n_in); whether it had 3 axes.

        Indices are (T,) or (1, T).
        """
        array = self._numbers(X)
        index = self.vocabulary is not None and array.dtype.kind in "iu"
        flat = 1 if index else 2
        if array.ndim not in (flat, flat + 1) or (array.ndim > flat and array.shape[-2] != 1):
            n = self._features()
            wanted = "(T,) or (1, T)" if index else f"({n}, T) or ({n}, 1, T)"
            raise ShapeError(
                f"{self.title}: X has shape {array.shape}, expected {wanted}, the steps of one "
                "stream. Nothing was changed."
            )
        self._check_features(array, index)
        batched = array.ndim > flat
        if not batched:
            array = array[..., None, :]
        return self._laid_out(array, index), batched

    def _numbers(self, x: Any) -> np.ndarray:
        try:
            array = np.asarray(peek(x))
        except ValueError as error:
            raise ShapeError(
                f"{self.title}: x is not an array: {error}. Nothing was changed."
            ) from error
        if array.dtype.kind not in "fiub":
            raise ShapeError(
                f"{self.title}: x holds {array.dtype}, expected numbers. Nothing was changed."
            )
        return array

    def _check_features(self, array: np.ndarray, index: bool) -> None:
        if index:
            n = self.vocabulary or 0
            if array.size and not (array.min() >= 0 and array.max() < n):
                raise ShapeError(
                    f"{self.title}: an index lies outside 0 to {n - 1}. Nothing was changed."
                )
        elif self.n_in is not None and array.shape[0] != self.n_in:
            raise ShapeError(
                f"{self.title}: x has {array.shape[0]} features on axis 0, expected {self.n_in}. "
                "Nothing was changed."
            )

    def _laid_out(self, array: np.ndarray, index: bool) -> np.ndarray:
        dtype = np.int64 if index else self.dtype
        return np.ascontiguousarray(array.T, dtype)

    def _features(self) -> str:
        return "features" if self.n_in is None else str(self.n_in)

    # ------------------------------------------------------------ states

    def rest(self, kind: str = "learned") -> list[np.ndarray]:
        """The state at rest, (1, size) each: the layers' initial states, or zeros."""
        state = []
        for path, layer in self.layers.items():
            sizes = [part for part in self.parts if part.path == path]
            leaves = [np.asarray(peek(leaf)) for _, leaf in named_leaves(layer.init, "init")]
            for part, leaf in zip(sizes, leaves, strict=True):
                row = np.zeros((1, part.size), part.dtype)
                if kind == "learned":
                    row[0] = leaf.reshape(-1)
                state.append(row)
        return state

    def empty(self, batch: int) -> list[np.ndarray]:
        """Memory for the states of a batch, with nothing of meaning in it."""
        return [np.empty((batch, part.size), part.dtype) for part in self.parts]

    def columns(self, state: Sequence[np.ndarray]) -> dict[str, Any]:
        """A state by the paths of the layers, as `recur.states` gives it: copies (size, B)."""
        found: dict[str, Any] = {}
        for path, layer in self.layers.items():
            mine = [a.T.copy("F") for a, p in zip(state, self.parts, strict=True) if p.path == path]
            found[path] = _cell(layer).wrap(tuple(mine))
        return found

    def from_columns(self, given: Any, batch: int) -> list[np.ndarray]:
        """The inverse of `columns`, checked: raises `StateError` for paths, parts and shapes."""
        if not isinstance(given, dict) or set(given) != set(self.layers):
            have = ", ".join(map(repr, given)) if isinstance(given, dict) else type(given).__name__
            raise StateError(
                f"{self.title}: the state has {have or 'no path'}, expected a dict with "
                f"{', '.join(map(repr, self.layers)) or 'no path'}. Nothing was changed."
            )
        rows = []
        for path in self.layers:
            leaves = [leaf for _, leaf in named_leaves(given[path], path)]
            expected = [part for part in self.parts if part.path == path]
            if len(leaves) != len(expected):
                raise StateError(
                    f"{self.title}: the state of {path!r} has {len(leaves)} parts, expected "
                    f"{len(expected)}. Nothing was changed."
                )
            for part, leaf in zip(expected, leaves, strict=True):
                array = np.asarray(peek(leaf))
                if array.shape == (part.size,) and batch == 1:
                    array = array[:, None]
                if array.shape != (part.size, batch) or array.dtype.kind not in "fiub":
                    raise StateError(
                        f"{self.title}: {path or 'the state'} {part.name} is {array.dtype} of "
                        f"shape {array.shape}, expected ({part.size}, {batch}). "
                        "Nothing was changed."
                    )
                rows.append(np.array(array.T, part.dtype, order="C"))
        return rows

    # ------------------------------------------------------------ stepping

    def step(self, x: np.ndarray, state: Sequence[np.ndarray], scratch: Scratch) -> np.ndarray:
        """One step on `rows`: y (B, R), which may be a part of the state or of the scratch.

        The state is moved in place.  If a layer raises, parts of it may have moved: hand in a copy
        unless the plan is `sealed`.
        """
        if current() is None and not self.computed:
            return self.root.step(x, state, scratch)
        with self._aside():
            return self.root.step(x, state, scratch)

    def run(
        self,
        X: np.ndarray,
        state: Sequence[np.ndarray],
        scratch: Scratch,
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """T steps on X (T, B, n_in): Y (T, B, R), new or `out`; the state as in `step`.

        Every way to cut the steps into calls gives the same bits.
        """
        with self._aside():
            if len(X) == 0:
                return self._no_steps(X, state, scratch) if out is None else out
            for start, Y in self._pieces(X, state, scratch):
                if out is None:
                    out = np.empty((len(X), *Y.shape[1:]), Y.dtype)
                if (out.shape[1:], out.dtype) != (Y.shape[1:], Y.dtype):
                    raise ShapeError(
                        f"{self.title}: out has room for steps of {out.shape[:0:-1]} and holds "
                        f"{out.dtype}, the answer has {Y.shape[:0:-1]} and {Y.dtype}. Nothing was "
                        "changed."
                    )
                out[start : start + len(Y)] = Y
        assert out is not None
        return out

    def _pieces(
        self, X: np.ndarray, state: Sequence[np.ndarray], scratch: Scratch
    ) -> Iterator[tuple[int, np.ndarray]]:
        if self.root.blocks:
            for start in range(0, len(X), BLOCK):
                yield start, self.root.run(X[start : start + BLOCK], state)
            return
        for start, x in enumerate(X):
            yield start, self.root.step(x, state, scratch)[None]

    def _no_steps(self, X: np.ndarray, state: Sequence[np.ndarray], scratch: Scratch) -> np.ndarray:
        """The answer to no input: what a step would give says its shape."""
        x = np.zeros(X.shape[1:], X.dtype)
        y = self.root.step(x, [part.copy() for part in state], scratch)
        return np.empty((0, *y.shape), y.dtype)

    def form_of(self, x: np.ndarray) -> Form:
        """Shape and dtype of an answer to rows like x (B, n_in), without the batch: by trying."""
        y = self.step(x[:1].copy(), self.rest(), {})
        return y.shape[1:], y.dtype

    @functools.cached_property
    def form(self) -> Form | None:
        """The same for whatever an input is; None if the model does not say what that is."""
        if self.vocabulary is None and self.n_in is None:
            return None
        x = np.zeros(1, np.int64) if self.vocabulary else np.zeros((1, self.n_in or 0), self.dtype)
        try:
            return self.form_of(x)
        except Exception:  # of a function of the user's that takes something else
            return None

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        with paused(), raw_weights():
            yield

    def stepper(self) -> Stepper | None:
        """A `Stepper` for one stream, if one call of kernels is the whole step.

        Its bits are those of `step`.
        """
        kernels = None if self.computed or not self.sealed else self.root.kernels()
        if kernels is None or not any(hasattr(kernel, "n_states") for kernel in kernels):
            return None
        stepper = Stepper(kernels, 1, watch=self.counters(), named=self.named)
        return stepper if self.still(kernels) else None

    def counters(self) -> tuple[Any, ...]:
        """The counters that show that `root.kernels()` is out of date."""
        return tuple(dict.fromkeys((*self._watch.counters, *self.root.counters())))

    @property
    def named(self) -> list[tuple[dict[str, Any], list[Any]]]:
        """Dicts of layers, with what they held: another layer in one shows the same."""
        return self._watch.named

    def still(self, kernels: list[Any]) -> bool:
        """Whether `root.kernels()` gives these, and would in a plan of now: nobody wrote meanwhile.

        To be asked when whatever steps them has begun to watch.
        """
        again = self.root.kernels()
        same = again is not None and all(a is b for a, b in zip(kernels, again, strict=True))
        return same and not self._watch.moved

    # ------------------------------------------------------------ what it is

    @functools.cached_property
    def description(self) -> bytes:
        """The parts of a state as JSON."""
        parts = [[part.path, part.name, part.size, part.dtype.name] for part in self.parts]
        return json.dumps(parts, separators=(",", ":")).encode()

    @property
    def architecture(self) -> bytes:
        """SHA-256 of the layers and options, without weights: 32 bytes."""
        if self._architecture is None:
            try:
                described: Any = _without_modes(describe_model(self.model))
            except StateError:  # a function or a layer of one's own among them
                with raw_weights():
                    described = [self.title, [list(part[:3]) for part in self.parts]]
                    described += [[p, list(w.shape)] for p, w in named_params(self.model).items()]
            text = json.dumps(described, sort_keys=True)
            self._architecture = hashlib.sha256(text.encode()).digest()
        return self._architecture

    @property
    def weights(self) -> bytes:
        """SHA-256 of all parameters and buffers; looked at anew when a parameter was written."""
        if self._weights is None or self._weights[0] != writes.stamp:
            stamp = writes.stamp
            digest = hashlib.sha256()
            for path, array in state_dict(self.model).items():
                digest.update(f"{path} {array.dtype.str} {array.shape} ".encode())
                digest.update(np.ascontiguousarray(array).data)
            self._weights = stamp, digest.digest()
        return self._weights[1]


def _cell(layer: Recur) -> Cell:
    cell = layer.cell
    while isinstance(cell, WeightDrop):
        cell = cell.layer
    return cell


def shown(parts: Sequence[Part]) -> str:
    """The parts of a state in words."""
    return ", ".join(f"{p.path} {p.name} ({p.size},) {p.dtype}".strip() for p in parts) or "none"


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _without_modes(described: Any) -> Any:
    """The description without train and test modes, which do not change a stream."""
    if isinstance(described, dict):
        return {key: _without_modes(x) for key, x in described.items() if key != "active"}
    if isinstance(described, list):
        return [_without_modes(x) for x in described]
    return described
