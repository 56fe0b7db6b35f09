"""A model as an ONNX graph.

Arrays in the graph are the transposes of ours: x is (time, batch, features), which is `X.T`, and a
state (batch, features).  Each part of each layer's state is an input `<path>.h_in` and an output
`<path>.h_out`, so that a caller carries the states from one call to the next.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from recur import ops
from recur._version import __version__
from recur.errors import StateError
from recur.io.onnx.activations import emit_activation
from recur.io.onnx.cells import cell_to_onnx, is_cell, operator_of
from recur.layers import (
    BatchNorm,
    Chain,
    Dense,
    Dropout,
    Embedding,
    FinalStep,
    LayerNorm,
    Parallel,
    Scale,
    SkipConnection,
)
from recur.module import named_params, walk
from recur.recurrent import Bidirectional, Recur, Reversed
from recur.tape import peek

INIT = "recur.init."  # metadata: the numbers that a layer starts from, if they are not zeros
OPSET, IR_VERSION = 17, 8
_CONNECTIONS = {operator.add: "Add", operator.mul: "Mul", np.add: "Add", np.multiply: "Mul"}


def to_onnx(model: Any, *, lengths: bool = False) -> Any:
    """`model` as an `onnx.ModelProto` (opset 17) that computes what it does outside a scope.

    inputs   x (time, batch, n_in), or (time, batch) of int64 before an `Embedding`; the states;
             with `lengths=True` lengths (batch,) of int32, the real steps of padded sequences
    outputs  y (time, batch, n_out), or (batch, n_out) after a `FinalStep`; the states

    `time` and `batch` are symbolic.  The state that the model carries now is not in the graph; what
    to feed first is `initial_states(model, batch)`.  Dropout is left out, BatchNorm uses its
    running statistics.

    Raises `StateError`, with the path, for a layer that ONNX cannot compute; `ImportError` without
    the package onnx.
    """
    onnx = import_onnx()
    first = next(_leaves(model), None)
    indices = isinstance(first, Embedding)
    graph = _Graph(onnx, _dtype(model), lengths, indices)
    shape = ["time", "batch"] if indices else ["time", "batch", _n_in(first)]
    x = graph.input("x", shape, np.int64 if indices else graph.dtype)
    if lengths:
        graph.input("lengths", ["batch"], np.int32)
    y, rank = graph.layer(model, x, 2 if indices else 3, "")
    graph.nodes.append(onnx.helper.make_node("Identity", [y], ["y"]))
    dims = ["time", "batch", None] if rank == 3 else ["batch", None]
    graph.outputs.insert(0, graph.info("y", dims, graph.dtype))
    proto = onnx.helper.make_model(
        onnx.helper.make_graph(
            graph.nodes, "recur", graph.inputs, graph.outputs, graph.initializers
        ),
        producer_name="recur",
        producer_version=__version__,
        opset_imports=[onnx.helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
    )
    onnx.helper.set_model_props(proto, graph.metadata)
    onnx.checker.check_model(proto)
    return proto


def initial_states(model: Any, batch: int) -> dict[str, np.ndarray]:
    """What to feed the state inputs of `to_onnx(model)` at the start, (batch, features) each."""
    return {
        f"{name}_in": np.tile(part.reshape(1, -1), (batch, 1))
        for path, layer in walk(model)
        if isinstance(layer, Recur)
        for name, part in _starts(layer, path)
    }


def import_onnx() -> Any:
    """The package; raises `ImportError` that names the extra."""
    try:
        import onnx
    except ImportError:
        raise ImportError('ONNX models need the package onnx: pip install "recur[onnx]".') from None
    return onnx


def _dtype(model: Any) -> np.dtype:
    dtypes = {param.dtype for param in named_params(model).values()}
    if len(dtypes) > 1:
        raise StateError(
            "to_onnx: the model has parameters of float32 and of float64; convert it with "
            "recur.f32(model) or recur.f64(model)."
        )
    return dtypes.pop() if dtypes else np.dtype(np.float32)


def _leaves(layer: Any) -> Iterator[Any]:
    if isinstance(layer, (Chain, Parallel, SkipConnection)):
        for inner in layer.values():
            yield from _leaves(inner)
    elif not isinstance(layer, Dropout):
        yield layer


def _n_in(layer: Any) -> int | None:
    if isinstance(layer, Bidirectional):
        return _n_in(layer.forward)
    if isinstance(layer, Reversed):
        return _n_in(layer.layer)
    if isinstance(layer, Recur):
        return getattr(layer.cell, "n_in", None)
    if isinstance(layer, Dense):
        return int(layer.weight.shape[1])
    return getattr(layer, "n", None)


def _starts(layer: Recur, path: str) -> list[tuple[str, np.ndarray]]:
    """The parts of a layer's state: their names in a graph, and what they start from, (n,)."""
    if not is_cell(layer.cell):
        raise StateError(f"{path or 'the model'}: {layer!r} has a cell that ONNX cannot compute.")
    parts = layer.init if isinstance(layer.init, tuple) else (layer.init,)
    prefix = f"{path}." if path else ""
    names = (f"{prefix}{name}" for name in layer.cell.state_names)
    return [
        (name, np.asarray(peek(part)).reshape(-1)) for name, part in zip(names, parts, strict=True)
    ]


class _Graph:
    """Collects nodes; values are named as they come.

    A value of rank 3 is (time, batch, features), of rank 2 (batch, features); before an Embedding
    the two are (time, batch).
    """

    def __init__(self, onnx: Any, dtype: np.dtype, lengths: bool, indices: bool) -> None:
        self.onnx, self.dtype, self.lengths = onnx, dtype, lengths
        self.indices = "x" if indices else None  # the value that holds no numbers but indices
        self.nodes: list[Any] = []
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self.initializers: list[Any] = []
        self.metadata: dict[str, str] = {}
        self.count = 0
        self.placed: set[int] = set()  # recurrent layers that are in the graph, by id
        # Of the last output of a recurrent layer: the state h that it ended with, by direction,
        # and the `n_forward` of the FinalStep which that is.
        self.ends: dict[str, tuple[str, int | None]] = {}

    def info(self, name: str, shape: Sequence[Any], dtype: Any) -> Any:
        kind = self.onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        return self.onnx.helper.make_tensor_value_info(name, kind, shape)

    def input(self, name: str, shape: Sequence[Any], dtype: Any) -> str:
        self.inputs.append(self.info(name, shape, dtype))
        return name

    def new(self, kind: str) -> str:
        self.count += 1
        return f"{kind}_{self.count}"

    def emit(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        """The name of a new operator's output, or their names."""
        names = [self.new(kind) for _ in range(outputs)]
        self.nodes.append(self.onnx.helper.make_node(kind, inputs, names, **attributes))
        return names[0] if outputs == 1 else names

    def constant(self, array: Any, dtype: Any = None, name: str = "constant") -> str:
        name = self.new(name)
        array = np.asarray(array, dtype or self.dtype)
        self.initializers.append(self.onnx.numpy_helper.from_array(array, name))
        return name

    # ---- layers ------------------------------------------------------------------------------

    def layer(self, layer: Any, x: str, rank: int, path: str) -> tuple[str, int]:
        """The layer's output for the value x: its name and rank."""
        if isinstance(layer, Chain):
            for name, inner in layer.items():
                x, rank = self.layer(inner, x, rank, _below(path, name))
            return x, rank
        if isinstance(layer, (Parallel, SkipConnection)):
            return self.connected(layer, x, rank, path)
        if isinstance(layer, (Recur, Reversed, Bidirectional)):
            if rank != 3:
                raise StateError(f"{path or 'the model'}: {layer!r} gets no sequence.")
            return self.recurrent(layer, x, path), 3
        if isinstance(layer, Embedding):
            table = self.constant(layer.weight.value.T, name=path)
            if x == self.indices:
                return self.emit("Gather", table, x), 3
            return self.emit("MatMul", x, table), rank
        if isinstance(layer, FinalStep):
            return (self.final_step(layer, x), 2) if rank == 3 else (x, 2)
        if isinstance(layer, Dropout):
            return x, rank
        return self.each_step(layer, x, path), rank

    def each_step(self, layer: Any, x: str, path: str) -> str:
        """A layer that treats every step alike, or a function."""
        if isinstance(layer, Dense):
            y = self.emit("MatMul", x, self.constant(layer.weight.value.T, name=path))
            y = self.shifted(y, layer.bias, path)
        elif isinstance(layer, Scale):
            y = self.shifted(self.scaled(x, layer.scale.value, path), layer.bias, path)
        elif isinstance(layer, LayerNorm):
            y = self.layer_norm(layer, x, path)
        elif isinstance(layer, BatchNorm) and layer.mean is not None:
            y = self.emit("Sub", x, self.constant(layer.mean, name=path))
            y = self.scaled(y, 1 / np.sqrt(layer.var + layer.mean.dtype.type(layer.eps)), path)
            if layer.scale is not None:
                y = self.shifted(self.scaled(y, layer.scale.value, path), layer.bias, path)
        else:
            return self.activated(layer, x, path)
        return self.activated(layer.act, y, path)

    def layer_norm(self, layer: LayerNorm, x: str, path: str) -> str:
        scale = np.ones(layer.n) if layer.scale is None else layer.scale.value
        inputs = [x, self.constant(scale, name=path)]
        if layer.bias is not None:
            inputs.append(self.constant(layer.bias.value, name=path))
        return self.emit("LayerNormalization", *inputs, axis=-1, epsilon=layer.eps**2)

    def scaled(self, x: str, scale: Any, path: str) -> str:
        return self.emit("Mul", x, self.constant(scale, name=path))

    def shifted(self, y: str, bias: Any, path: str) -> str:
        return y if bias is None else self.emit("Add", y, self.constant(bias.value, name=path))

    def activated(self, act: Any, x: str, path: str) -> str:
        y = emit_activation(act, x, self.emit, self.constant)
        if y is None:
            raise StateError(f"{path or 'the model'}: ONNX has no operator here for {act!r}.")
        return y

    def connected(self, layer: Any, x: str, rank: int, path: str) -> tuple[str, int]:
        found = [self.layer(f, x, rank, _below(path, name)) for name, f in layer.items()]
        if isinstance(layer, SkipConnection):
            found.append((x, rank))
        ranks = {rank for _, rank in found}
        names = [name for name, _ in found]
        if len(ranks) > 1:
            raise StateError(f"{path or 'the model'}: {layer!r} joins a step with sequences.")
        if layer.connection in (ops.vcat, ops.concatenate):
            return self.emit("Concat", *names, axis=-1), ranks.pop()
        kind = _CONNECTIONS.get(layer.connection)
        if kind is None:
            raise StateError(
                f"{path or 'the model'}: ONNX has no operator here for the connection "
                f"{layer.connection!r}."
            )
        y = names[0]
        for other in names[1:]:
            y = self.emit(kind, y, other)
        return y, ranks.pop()

    def final_step(self, layer: FinalStep, x: str) -> str:
        end, n_forward = self.ends.get(x, ("", None))
        if end and n_forward == layer.n_forward:
            if not n_forward:
                return self.emit("Squeeze", end, self.constant([0], np.int64))
            end = self.emit("Transpose", end, perm=[1, 0, 2])
            return self.emit("Reshape", end, self.constant([0, -1], np.int64))
        n, first = layer.n_forward, self.constant(0, np.int64)
        ends = x
        if self.lengths:  # reversing the real steps of each sample puts the last one first
            lengths = self.emit("Cast", "lengths", to=self.onnx.TensorProto.INT64)
            ends = self.emit("ReverseSequence", x, lengths, time_axis=0, batch_axis=1)
        place = first if self.lengths else self.constant(-1, np.int64)
        last = self.emit("Gather", ends, place, axis=0)
        if n is None:
            return last
        begin, cut, end, axis = (
            self.constant([k], np.int64) for k in (0, n, np.iinfo(np.int64).max, -1)
        )
        front = self.emit("Slice", last, begin, cut, axis)
        back = self.emit("Slice", self.emit("Gather", x, first, axis=0), cut, end, axis)
        return self.emit("Concat", front, back, axis=-1)

    # ---- recurrent layers --------------------------------------------------------------------

    def recurrent(self, layer: Any, x: str, path: str) -> str:
        """(time, batch, n_out) of a layer whose states are inputs and outputs of the graph."""
        if isinstance(layer, Bidirectional):
            ways = ("forward", "backward")
            both = [(getattr(layer, way), _below(path, way, "")) for way in ways]
            if _alike(layer.forward.cell, layer.backward.cell):
                y, end = self.operator(both, x, "bidirectional")
                y = self.emit("Transpose", y, perm=[0, 2, 1, 3])
                y = self.emit("Reshape", y, self.constant([0, 0, -1], np.int64))
                self.ends[y] = end, layer.forward.cell.n_out
                return y
            ahead, behind = (
                self.one_way(*part, x, direction)
                for part, direction in zip(both, ("forward", "reverse"), strict=True)
            )
            return self.emit("Concat", ahead, behind, axis=-1)
        if isinstance(layer, Reversed):
            return self.one_way(layer.layer, _below(path, "layer", ""), x, "reverse")
        return self.one_way(layer, path, x, "forward")

    def one_way(self, layer: Recur, path: str, x: str, direction: str) -> str:
        y, end = self.operator(((layer, path),), x, direction)
        y = self.emit("Squeeze", y, self.constant([1], np.int64))
        self.ends[y] = end, 0 if direction == "reverse" else None
        return y

    def operator(
        self, layers: Sequence[tuple[Recur, str]], x: str, direction: str
    ) -> tuple[str, str]:
        """(time, directions, batch, n_out) and (directions, batch, n_out), the outputs and the last
        h, of one operator for the layers of all directions."""
        for layer, path in layers:
            if id(layer) in self.placed:
                raise StateError(
                    f"{path or 'the model'}: {layer!r} stands in the model twice, and carries one "
                    "state through both places; the states of a graph have no such order."
                )
            self.placed.add(id(layer))
        starts = [_starts(layer, path) for layer, path in layers]
        converted = [cell_to_onnx(layer.cell) for layer, _ in layers]
        names = converted[0][0].keys()
        prefix = layers[0][1] or "recur"
        weights = {
            name: self.constant(
                np.concatenate([arrays[name] for arrays, _ in converted]), name=f"{prefix}.{name}"
            )
            for name in names
        }
        attributes = {
            name: value * len(layers) if isinstance(value, list) else value
            for name, value in converted[0][1].items()
        }
        begin = [self.begin(parts) for parts in zip(*starts, strict=True)]
        lengths = "lengths" if self.lengths else ""
        row = [x, weights["W"], weights["R"], weights.get("B", ""), lengths, *begin]
        if "P" in weights:
            row.append(weights["P"])
        y, *states = self.emit(
            operator_of(layers[0][0].cell),
            *row,
            outputs=1 + len(begin),
            direction=direction,
            **attributes,
        )
        for parts, state in zip(zip(*starts, strict=True), states, strict=True):
            for way, (name, init) in enumerate(parts):
                place = self.constant(way, np.int64)
                node = self.onnx.helper.make_node("Gather", [state, place], [f"{name}_out"], axis=0)
                self.nodes.append(node)
                self.outputs.append(self.info(f"{name}_out", ["batch", len(init)], self.dtype))
        return y, states[0]

    def begin(self, parts: Sequence[tuple[str, np.ndarray]]) -> str:
        """(directions, batch, n) of what each direction of a layer starts from."""
        rows = []
        for name, init in parts:
            if init.any():
                self.metadata[f"{INIT}{name}_in"] = json.dumps(init.tolist())
            held = self.input(f"{name}_in", ["batch", len(init)], self.dtype)
            rows.append(self.emit("Unsqueeze", held, self.constant([0], np.int64)))
        return rows[0] if len(rows) == 1 else self.emit("Concat", *rows, axis=0)


def _alike(one: Any, other: Any) -> bool:
    """Whether two cells can be the directions of one operator."""
    if type(one) is not type(other) or one.n_out != other.n_out or not is_cell(one):
        return False
    (arrays, attributes), (others, same) = cell_to_onnx(one), cell_to_onnx(other)
    return arrays.keys() == others.keys() and attributes == same


def _below(path: str, name: str, container: str = "layers.") -> str:
    return f"{path}.{container}{name}" if path else f"{container}{name}"
