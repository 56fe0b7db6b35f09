"""A model from an ONNX graph that is a row of layers.

Axes are followed by name: "T" time, "B" batch, "F" features, "D" directions; until a layer tells
which is which, those of the input are "?0", "?1", ...  Where an axis stands does not matter here,
where every array is features-first, so transposes only rename.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from recur import ops
from recur.errors import FormatError, RecurError
from recur.io._gates import floats
from recur.io.onnx.activations import ALONG_FEATURES, OPERATORS, activation_of
from recur.io.onnx.cells import cell_from_onnx, of_direction
from recur.io.onnx.graph import RECURRENT, Graph, told
from recur.io.onnx.write import INIT, import_onnx
from recur.layers import Chain, Dense, Embedding, FinalStep, LayerNorm, Scale
from recur.recurrent import Bidirectional, Recur, Reversed

_STATES = {"RNN": ("h",), "GRU": ("h",), "LSTM": ("h", "c")}
_PARTS = {"W": 1, "R": 2, "B": 3, "P": 7}
_LENGTHS, _FIRST_STATE = 4, 5
_KNOWN = frozenset(
    {
        *("hidden_size", "direction", "layout", "activations", "activation_alpha"),
        *("activation_beta", "clip", "input_forget", "linear_before_reset"),
    }
)


def from_onnx(
    proto: Any,
    *,
    constants: Mapping[str, Any] | None = None,
    recurrent_bias: bool | None = None,
) -> Chain:
    """The `Chain` of layers that an `onnx.ModelProto` computes.

    The graph is a row of RNN, LSTM, GRU (forward, reverse or bidirectional, either layout), Gemm,
    MatMul, Add, Mul, activations, LayerNormalization, Gather from a table, and what moves axes:
    Transpose, Squeeze, Reshape.  The first output counts; others may be states.  The model takes
    (features, batch, time) whatever the graph's order of axes is.

    Initial states that are inputs of the graph start from zeros; set them with `set_states`.
    Inputs sequence_lens are `lengths=` of a call.  A last step or a final state that is used as an
    output becomes a `FinalStep`.

    constants       arrays for inputs of the graph that are weights, by name
    recurrent_bias  as in `cell_from_torch`

    Raises `FormatError` for what has no counterpart here; the message names the operator.
    `ImportError` without the package onnx.
    """
    onnx = import_onnx()
    try:
        return Chain(*_layers(Graph(onnx, proto, constants or {}), recurrent_bias))
    except FormatError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise FormatError(f"the graph is damaged: {error}") from error


def _layers(graph: Graph, recurrent_bias: bool | None) -> list[Any]:
    """The layers of a graph in a row."""
    if not graph.outputs:
        raise FormatError("the model has no output.")
    source, row = graph.row(graph.outputs[0])
    reader = _Reader(graph, graph.inputs[source], recurrent_bias)
    for node, place, output in row:
        try:
            reader.read(node, place, output)
        except (RecurError, ValueError, LookupError, TypeError) as error:
            raise FormatError(f"{told(node)}: {error}") from None
    reader.finish()
    for name in graph.outputs[1:]:
        for node, _ in graph.sources(name):
            if node is None or node.op_type not in RECURRENT or node not in reader.recurrent:
                raise FormatError(
                    f"the output {name!r} is no state of a layer on the way to "
                    f"{graph.outputs[0]!r}; one output is read."
                )
    return reader.layers


class _Reader:
    """Layers so far, and the axes of the value that they have come to."""

    def __init__(self, graph: Graph, rank: int | None, recurrent_bias: bool | None) -> None:
        self.graph = graph
        self.axes: list[str] | None = None if rank is None else [f"?{k}" for k in range(rank)]
        self.layers: list[Any] = []
        self.recurrent: list[Any] = []
        self.padded: set[bool] = set()
        self.directions = 1  # the size of "D"
        self.recurrent_bias = recurrent_bias

    def read(self, node: Any, place: int, output: str) -> None:
        """Adds what a node computes; its input number `place` carries the data."""
        kind, attributes = node.op_type, self.graph.attributes(node)
        if kind in RECURRENT:
            self.read_recurrent(node, attributes, output)
        elif kind in OPERATORS:
            if kind in ALONG_FEATURES:
                self.along_features(attributes.get("axis", -1))
            self.activate(activation_of(kind, attributes))
        elif kind in _READERS:
            _READERS[kind](self, node, place, attributes)
        else:
            raise FormatError("this operator has no counterpart among the layers that are read.")

    def finish(self) -> None:
        if len(self.padded) > 1:
            raise FormatError(
                "some of its recurrent layers have sequence_lens and others have not."
            )
        if "D" in (self.axes or ()) and self.directions == 2:
            left = [axis for axis in self.axes or () if axis != "T"]
            if left != ["D", "B", "F"]:
                raise FormatError("its output has the two directions in an order of their own.")

    # ---- axes --------------------------------------------------------------------------------

    def known_axes(self, rank: int | None = None) -> list[str]:
        if self.axes is None:
            if rank is None:
                raise FormatError("the shape of the model's input is not given.")
            self.axes = [f"?{k}" for k in range(rank)]
        return self.axes

    def name_axes(self, wanted: list[str]) -> None:
        """Checks the axes, and names those that are not named yet."""
        axes = self.known_axes(len(wanted))
        if len(axes) != len(wanted) or any(
            a != b and not a.startswith("?") for a, b in zip(axes, wanted, strict=True)
        ):
            raise FormatError(f"it gets the axes {''.join(axes)}, expected {''.join(wanted)}.")
        self.axes = list(wanted)

    def along_features(self, axis: int) -> None:
        axes = self.known_axes()
        if axis not in (-1, len(axes) - 1) or axes[-1] not in ("F", f"?{len(axes) - 1}"):
            raise FormatError(f"it works along axis {axis} of {''.join(axes)}, not the features.")
        if "D" in axes and self.directions == 2:
            raise FormatError("it works along the features of each direction by itself.")
        self.axes = [*axes[:-1], "F"]

    # ---- recurrent layers --------------------------------------------------------------------

    def read_recurrent(self, node: Any, attributes: dict[str, Any], output: str) -> None:
        unknown = set(attributes) - _KNOWN
        if unknown:
            raise FormatError(f"it has the unknown attributes {', '.join(sorted(unknown))}.")
        batch_first = bool(attributes.pop("layout", 0))
        direction = attributes.pop("direction", "forward")
        self.name_axes(["B", "T", "F"] if batch_first else ["T", "B", "F"])
        inputs = [*node.input, *[""] * 8]
        arrays = {n: self.graph.needed(inputs[k], n) for n, k in _PARTS.items() if inputs[k]}
        ways = 2 if direction == "bidirectional" else 1
        cells = []
        for way in range(ways):
            own: dict[str, Any] = {n: np.asarray(a)[way : way + 1] for n, a in arrays.items()}
            options = of_direction(node.op_type, attributes, way, ways)
            if node.op_type == "GRU":
                options["recurrent_bias"] = self.recurrent_bias
            cells.append(cell_from_onnx(node.op_type, **own, **options))
        starts = [
            self.start(inputs[_FIRST_STATE + k], name, ways, batch_first, cells[0].n_out)
            for k, name in enumerate(_STATES[node.op_type])
        ]
        layers = [
            Recur(cell, _init(cell, [part[way] for part in starts]))
            for way, cell in enumerate(cells)
        ]
        self.add_recurrent(direction, layers)
        self.recurrent.append(node)
        self.padded.add(self.has_lengths(inputs[_LENGTHS]))
        self.directions = ways
        self.after(node, output, batch_first, direction, cells[0].n_out)

    def add_recurrent(self, direction: str, layers: list[Recur]) -> None:
        if direction == "bidirectional":
            self.layers.append(Bidirectional(*layers))
        elif direction == "reverse":
            self.layers.append(Reversed(layers[0]))
        elif direction == "forward":
            self.layers.append(layers[0])
        else:
            raise FormatError(f"its direction is {direction!r}.")

    def after(self, node: Any, output: str, batch_first: bool, direction: str, n_out: int) -> None:
        place = list(node.output).index(output)
        if place == 2:
            raise FormatError("the cell state Y_c is used as an output, which no layer here gives.")
        if place == 1:
            ends = {"forward": None, "reverse": 0, "bidirectional": n_out}[direction]
            self.layers.append(FinalStep(ends))
            self.axes = ["B", "D", "F"] if batch_first else ["D", "B", "F"]
        else:
            self.axes = ["B", "T", "D", "F"] if batch_first else ["T", "D", "B", "F"]

    def has_lengths(self, name: str) -> bool:
        if not name:
            return False
        if self.graph.constant(name) is not None:
            raise FormatError(
                f"sequence_lens ({name!r}) is a constant of the model; padding is told by lengths= "
                "at each call."
            )
        for node, source in self.graph.sources(name):
            if node is not None or source not in self.graph.inputs:
                raise FormatError(f"sequence_lens ({name!r}) is computed, and not an input.")
        return True

    def start(
        self, name: str, state: str, ways: int, batch_first: bool, n: int
    ) -> list[np.ndarray | None]:
        """What each direction starts from, (n,), or None for zeros."""
        if not name:
            return [None] * ways
        constant = self.graph.constant(name)
        if constant is not None and constant.any():
            axis = 0 if batch_first else 1
            array = floats(f"initial_{state}", constant, (None, None, n))
            if array.shape[1 - axis] != ways or (array != array.take([0], axis)).any():
                raise FormatError(
                    f"initial_{state} of shape {array.shape} differs between the samples of a "
                    "batch; a layer starts all alike. Set it with set_states before a call."
                )
            return list(array.take(0, axis))
        parts = self.graph.directions_of(name, ways)
        return [self.start_of(part, state, n) for part in parts]

    def start_of(self, name: str, state: str, n: int) -> np.ndarray | None:
        """What one direction starts from: zeros, or what `to_onnx` has noted for an input."""
        found = None
        for node, source in self.graph.sources(name):
            if node is None and source in self.graph.inputs:
                text = self.graph.metadata.get(INIT + source)
                found = None if text is None else floats(source, json.loads(text), (n,))
            elif not self.graph.is_zero(node, source):
                raise FormatError(
                    f"initial_{state} ({name!r}) is computed; it may be a constant or an input."
                )
        return found

    # ---- layers ------------------------------------------------------------------------------

    def activate(self, act: Callable[..., Any]) -> None:
        last = self.layers[-1] if self.layers else None
        if isinstance(last, (Dense, Scale, LayerNorm)) and last.act is ops.identity:
            last.act = act
        else:
            self.layers.append(act)

    def gather(self, node: Any, place: int, attributes: dict[str, Any]) -> None:
        axis = attributes.get("axis", 0)
        if place == 1:
            table = self.graph.needed(node.input[0], "the table")
            if axis != 0 or self.layers:
                raise FormatError("it looks up what is no table of features for the model's input.")
            self.layers.append(Embedding(floats("the table", table, (None, None)).T))
            self.axes = None if self.axes is None else [*self.axes, "F"]
            return
        axes = self.known_axes()
        index = self.graph.needed(node.input[1], "the index")
        if index.ndim or not -len(axes) <= axis < len(axes):
            raise FormatError(f"it takes the steps {index.tolist()} of {''.join(axes)}.")
        self.take(axes[axis], int(index))

    def take(self, axis: str, index: int) -> None:
        """Removes an axis: the only direction, or all steps but the last."""
        axes = self.known_axes()
        if axis == "D" and self.directions == 1 and index in (0, -1):
            pass
        elif axis == "T" and index == (0 if isinstance(self.layers[-1], Reversed) else -1):
            if any(self.padded):
                raise FormatError("it takes the last step, which in padded sequences is padding.")
            if isinstance(self.layers[-1], Bidirectional):
                raise FormatError("it takes the last step of a layer that ends at both ends.")
            self.layers.append(FinalStep(0 if index == 0 else None))
        else:
            raise FormatError(f"it takes number {index} along the axis {axis}.")
        self.axes = [a for a in axes if a != axis]

    def squeeze(self, node: Any, place: int, attributes: dict[str, Any]) -> None:
        axes = self.known_axes()
        given = attributes.get("axes")
        if len(node.input) > 1 and node.input[1]:
            given = self.graph.needed(node.input[1], "axes").tolist()
        names = ["D"] if given is None else [axes[k] for k in given]
        if names != ["D"] or self.directions != 1 or "D" not in axes:
            raise FormatError(
                f"it removes {''.join(names)} of {''.join(axes)}, no single direction."
            )
        self.take("D", 0)

    def transpose(self, node: Any, place: int, attributes: dict[str, Any]) -> None:
        order = attributes.get("perm")
        axes = self.known_axes(None if order is None else len(order))
        order = list(range(len(axes)))[::-1] if order is None else order
        if sorted(order) != list(range(len(axes))):
            raise FormatError(f"perm is {order} for the axes {''.join(axes)}.")
        self.axes = [axes[k] for k in order]

    def reshape(self, node: Any, place: int, attributes: dict[str, Any]) -> None:
        """Joins the directions with the features, which is how ours come."""
        axes = self.known_axes()
        shape = self.graph.needed(node.input[1], "shape").tolist()
        lead, last = shape[:-1], shape[-1]
        kept = lead == [0] * len(lead) or last > 0
        if axes[-2:] != ["D", "F"] or len(shape) != len(axes) - 1 or not kept:
            raise FormatError(f"it makes {shape} of {''.join(axes)}; it may join D and F.")
        self.axes = [*axes[:-2], "F"]

    def product(self, node: Any, place: int, attributes: dict[str, Any]) -> None:
        if place != 0:
            raise FormatError("it multiplies the data from the left.")
        self.along_features(-1)
        weight = floats("B", self.graph.needed(node.input[1], "B"), (None, None))
        self.layers.append(Dense(weight.T, False))

    def gemm(self, node: Any, place: int, attributes: dict[str, Any]) -> None:
        if place != 0 or attributes.get("transA"):
            raise FormatError("it multiplies the data from the left, or transposed.")
        if attributes.get("alpha", 1.0) != 1 or attributes.get("beta", 1.0) != 1:
            raise FormatError("alpha or beta is not 1.")
        self.along_features(-1)
        weight = floats("B", self.graph.needed(node.input[1], "B"), (None, None))
        weight = weight if attributes.get("transB") else weight.T
        bias: Any = False
        if len(node.input) > 2 and node.input[2]:
            bias = self.vector(node.input[2], "C", len(weight))
        self.layers.append(Dense(weight, bias))

    def vector(self, name: str, what: str, n: int | None = None) -> np.ndarray:
        """A constant that is one number for each feature."""
        array = self.graph.needed(name, what)
        if array.size != array.shape[-1] if array.ndim else True:
            raise FormatError(f"{what} has shape {array.shape}, not one number for each feature.")
        return floats(what, array.reshape(-1), (n,))

    def add(self, node: Any, place: int, attributes: dict[str, Any]) -> None:
        last = self.layers[-1] if self.layers else None
        self.along_features(-1)
        if isinstance(last, Dense) and last.bias is None and last.act is ops.identity:
            bias = self.vector(node.input[1 - place], "the bias", last.weight.shape[0])
            self.layers[-1] = Dense(last.weight, bias)
        elif isinstance(last, Scale) and last.bias is None and last.act is ops.identity:
            bias = self.vector(node.input[1 - place], "the bias", last.scale.shape[0])
            self.layers[-1] = _scale(np.asarray(last.scale.value), bias)
        else:
            bias = self.vector(node.input[1 - place], "what is added")
            self.layers.append(_scale(np.ones_like(bias), bias))

    def multiply(self, node: Any, place: int, attributes: dict[str, Any]) -> None:
        self.along_features(-1)
        self.layers.append(_scale(self.vector(node.input[1 - place], "the factor"), None))

    def layer_norm(self, node: Any, place: int, attributes: dict[str, Any]) -> None:
        self.along_features(attributes.get("axis", -1))
        if place != 0 or attributes.get("stash_type", 1) != 1:
            raise FormatError("it is not LayerNormalization of the data in float32.")
        scale = self.vector(node.input[1], "the scale")
        eps = attributes.get("epsilon", 1e-5) ** 0.5
        layer: Any = LayerNorm(len(scale), eps=eps, dtype=scale.dtype)
        layer.scale = scale
        if len(node.input) > 2 and node.input[2]:
            layer.bias = self.vector(node.input[2], "the bias", len(scale))
        self.layers.append(layer)

    def cast(self, node: Any, place: int, attributes: dict[str, Any]) -> None:
        types = self.graph.onnx.TensorProto
        if self.layers or attributes.get("to") not in (types.INT64, types.INT32):
            raise FormatError("it changes the type of numbers on the way.")

    def nothing(self, node: Any, place: int, attributes: dict[str, Any]) -> None:
        if place != 0:
            raise FormatError("its data is no data.")


def _init(cell: Any, parts: list[np.ndarray | None]) -> Any:
    """The initial state of a layer, None for zeros."""
    if all(part is None for part in parts):
        return None
    return cell.wrap(tuple(np.zeros(cell.n_out) if p is None else p for p in parts))


def _scale(scale: np.ndarray, bias: np.ndarray | None) -> Scale:
    layer: Any = Scale(len(scale), bias=False if bias is None else bias, dtype=scale.dtype)
    layer.scale = scale
    return layer


_READERS: dict[str, Callable[[_Reader, Any, int, dict[str, Any]], None]] = {
    "Gather": _Reader.gather,
    "Squeeze": _Reader.squeeze,
    "Transpose": _Reader.transpose,
    "Reshape": _Reader.reshape,
    "MatMul": _Reader.product,
    "Gemm": _Reader.gemm,
    "Add": _Reader.add,
    "Mul": _Reader.multiply,
    "LayerNormalization": _Reader.layer_norm,
    "Cast": _Reader.cast,
    "Identity": _Reader.nothing,
    "Dropout": _Reader.nothing,
}
