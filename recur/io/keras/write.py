"""Models as files of Keras 3, and models filled from weights files."""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np

from recur import ops
from recur.cells import GRUCell, GRUv3Cell, LSTMCell, RNNCell
from recur.errors import FormatError, ShapeError, StateError
from recur.io._gates import check_start, floats
from recur.io.keras.activations import activation_name, version_of
from recur.io.keras.cells import cell_from_keras, cell_to_keras, class_of
from recur.io.keras.config import snake_case
from recur.io.keras.h5 import import_h5py
from recur.io.keras.read import arrays_of_leaves
from recur.layers import Chain, Dense, Dropout, Embedding, FinalStep
from recur.recurrent import Bidirectional, Recur, Reversed

KERAS_VERSION = "3.0.0"
_NO_STATES = "A file of Keras holds none: set it to zero here."
_DATE = (1980, 1, 1, 0, 0, 0)  # the same model gives the same bytes


@dataclass
class _Leaf:
    """One of Keras' layers: its class, its options, its arrays by place below it."""

    kind: str
    config: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, list[np.ndarray]] = field(default_factory=dict)


def flat(model: Any) -> list[tuple[str, Any]]:
    """The layers in a row, with their paths; Chains inside Chains are no layers of their own."""
    if not isinstance(model, Chain):
        return [("", model)]
    found = []
    for name, layer in model.items():
        for path, inner in flat(layer):
            found.append((f"layers.{name}.{path}" if path else f"layers.{name}", inner))
    return found


# ---------------------------------------------------------------------- writing


def leaves(model: Any) -> list[_Leaf]:
    """Keras' layers for a model.  Raises `StateError`, with the path, for what Keras lacks."""
    layers = flat(model)
    found = []
    for k, (path, layer) in enumerate(layers):
        after = layers[k + 1][1] if k + 1 < len(layers) else None
        ends = isinstance(after, FinalStep) and after.n_forward == _end_of(layer)
        if isinstance(layer, FinalStep):
            if k == 0 or _end_of(layers[k - 1][1]) != layer.n_forward:
                raise StateError(f"{path}: {layer!r} does not follow the layer whose end it takes.")
            continue
        found.append(_leaf(layer, path, bool(ends)))
    return found


def _end_of(layer: Any) -> Any:
    """The `n_forward` of the FinalStep that takes a recurrent layer's end; else no number."""
    if isinstance(layer, Bidirectional):
        return layer.forward.cell.n_out
    if isinstance(layer, Reversed):
        return 0
    return None if isinstance(layer, Recur) else "no end"


def _leaf(layer: Any, path: str, ends: bool) -> _Leaf:
    if isinstance(layer, Recur):
        return _recurrent(layer, path, return_sequences=not ends, go_backwards=False)
    if isinstance(layer, Reversed):
        if not ends:
            raise StateError(f"{path}: {layer!r} without a FinalStep gives other steps in Keras.")
        return _recurrent(layer.layer, path, return_sequences=False, go_backwards=True)
    if isinstance(layer, Bidirectional):
        parts = {
            way: _recurrent(part, path, return_sequences=not ends, go_backwards=way == "backward")
            for way, part in (("forward", layer.forward), ("backward", layer.backward))
        }
        inner = {
            way: _entry(part.kind, {"name": f"{way}_{snake_case(part.kind)}", **part.config})
            for way, part in parts.items()
        }
        return _Leaf(
            "Bidirectional",
            {
                "merge_mode": "concat",
                "layer": inner["forward"],
                "backward_layer": inner["backward"],
            },
            {f"{way}_layer/cell": part.arrays["cell"] for way, part in parts.items()},
        )
    if isinstance(layer, Dense):
        bias = [] if layer.bias is None else [np.asarray(layer.bias.value)]
        config = {
            "units": layer.weight.shape[0],
            "activation": activation_name(layer, layer.act, KERAS_VERSION),
            "use_bias": bool(bias),
        }
        return _Leaf("Dense", config, {"": [np.asarray(layer.weight.value).T, *bias]})
    if isinstance(layer, Embedding):
        n_out, n_in = layer.weight.shape
        config = {"input_dim": n_in, "output_dim": n_out}
        return _Leaf("Embedding", config, {"": [np.asarray(layer.weight.value).T]})
    if isinstance(layer, Dropout) and layer.dims is None:
        return _Leaf("Dropout", {"rate": layer.p})
    if (callable(layer) and ops.name_of(layer)) or layer in (ops.softmax, ops.logsoftmax):
        return _Leaf("Activation", {"activation": activation_name(layer, layer, KERAS_VERSION)})
    raise StateError(f"{path or 'the model'}: Keras has no layer for {layer!r}.")


def _recurrent(layer: Recur, path: str, **config: bool) -> _Leaf:
    check_start(layer, path or "the model", _NO_STATES)
    arrays, own = cell_to_keras(layer.cell, KERAS_VERSION)
    return _Leaf(class_of(layer.cell), own | config, {"cell": list(arrays.values())})


def _entry(kind: str, config: dict[str, Any], name: str | None = None) -> dict[str, Any]:
    config = config if name is None else {"name": name, "trainable": True, **config}
    entry = {"module": "keras.layers", "class_name": kind, "config": config}
    return {**entry, "registered_name": None}


def weights_bytes(found: list[_Leaf]) -> bytes:
    """The HDF5 file of Keras 3 with the arrays of layers."""
    h5py = import_h5py()
    content = io.BytesIO()
    with h5py.File(content, "w") as file:
        for leaf, name in zip(found, _names(found), strict=True):
            for below, arrays in leaf.arrays.items():
                place = f"layers/{name}/{below}/vars" if below else f"layers/{name}/vars"
                for k, array in enumerate(arrays):
                    file[f"{place}/{k}"] = array
    return content.getvalue()


def _names(found: list[_Leaf]) -> list[str]:
    counts: dict[str, int] = {}
    names = []
    for leaf in found:
        name = snake_case(leaf.kind)
        count = counts[name] = counts.get(name, -1) + 1
        names.append(f"{name}_{count}" if count else name)
    return names


def keras_bytes(model: Any) -> bytes:
    """The `.keras` archive of a model.  Raises `StateError` as `leaves`."""
    found = leaves(model)
    first = found[0] if found else None
    if first is None or not first.arrays:
        raise StateError("save: the first layer tells no number of features; it needs weights.")
    arrays = next(iter(first.arrays.values()))
    shape = [None, None] if first.kind == "Embedding" else [None, None, arrays[0].shape[0]]
    dtype = arrays[0].dtype.name
    start = _entry("InputLayer", {"batch_shape": shape, "dtype": dtype}, "input_layer")
    layers = [
        _entry(leaf.kind, {"dtype": dtype, **leaf.config}, name)
        for leaf, name in zip(found, _names(found), strict=True)
    ]
    inner = {"name": "sequential", "trainable": True, "dtype": dtype, "layers": [start, *layers]}
    inner["build_input_shape"] = shape
    model_entry = {**_entry("Sequential", inner), "module": "keras"}
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, member in (
            ("metadata.json", json.dumps({"keras_version": KERAS_VERSION, "date_saved": ""})),
            ("config.json", json.dumps(model_entry)),
            ("model.weights.h5", weights_bytes(found)),
        ):
            archive.writestr(zipfile.ZipInfo(name, _DATE), member)
    return content.getvalue()


# ---------------------------------------------------------------------- filling


def fill(model: Any, file: BinaryIO, gate_act: str | None) -> None:
    """Copies the arrays of a weights file into a model, after all of them have been checked."""
    layers = [(path, layer) for path, layer in flat(model) if _cells(layer) or _is_product(layer)]
    kinds: list[tuple[str, ...]] = []
    sizes: list[int] = []
    for _, layer in layers:
        cells = _cells(layer)
        if isinstance(layer, Bidirectional):
            kinds.append(("bidirectional", "forward_layer/cell", "backward_layer/cell"))
        elif cells:
            kinds.append((snake_case(class_of(cells[0])), "cell"))
        else:
            kinds.append((snake_case(type(layer).__name__),))
        sizes.append(sum(2 + _has_bias(cell) for cell in cells) or _count(layer))
    held, version = arrays_of_leaves(file, kinds, sizes)
    copies: list[tuple[Any, str, np.ndarray]] = []
    for (path, layer), arrays in zip(layers, held, strict=True):
        try:
            copies += _copies(layer, arrays, gate_act, version)
        except (FormatError, ShapeError) as error:
            raise FormatError(f"{path or 'the model'}: {error} Nothing was changed.") from None
    for owner, name, array in copies:
        setattr(owner, name, array)


def _cells(layer: Any) -> list[Any]:
    if isinstance(layer, Bidirectional):
        return [layer.forward.cell, layer.backward.cell]
    if isinstance(layer, Reversed):
        return [layer.layer.cell]
    return [layer.cell] if isinstance(layer, Recur) else []


def _is_product(layer: Any) -> bool:
    return isinstance(layer, (Dense, Embedding))


def _count(layer: Any) -> int:
    return 1 + (getattr(layer, "bias", None) is not None)


def _has_bias(cell: Any) -> bool:
    return cell.b is not None or getattr(cell, "bh", None) is not None


def _copies(
    layer: Any, arrays: list[np.ndarray], gate_act: str | None, version: str | None
) -> list[tuple[Any, str, np.ndarray]]:
    """Which array goes where."""
    if _is_product(layer):
        n_out, n_in = layer.weight.shape
        found = [(layer, "weight", floats("kernel", arrays[0], (n_in, n_out)).T)]
        if len(arrays) > 1:
            found.append((layer, "bias", floats("bias", arrays[1], (n_out,))))
        return found
    cells = _cells(layer)
    each = len(arrays) // len(cells)
    found = []
    for k, cell in enumerate(cells):
        own = arrays[k * each : (k + 1) * each]
        found += _cell_copies(cell, own, gate_act, version)
    return found


def _cell_copies(
    cell: Any, arrays: list[np.ndarray], gate_act: str | None, version: str | None
) -> list[tuple[Any, str, np.ndarray]]:
    kind = class_of(cell)
    if len(arrays) > 2 and arrays[2].shape == (2 * cell.Wi.shape[0],) and kind != "SimpleRNN":
        kind = f"CuDNN{kind}"
    options: dict[str, Any] = {}
    if not isinstance(cell, RNNCell):
        _check_gates(cell, kind, gate_act, version)
        options = {"recurrent_activation": cell.gate_act, "keras_version": "2.3"}
    if isinstance(cell, (GRUCell, GRUv3Cell)):
        options["reset_after"] = isinstance(cell, GRUCell)
        options["recurrent_bias"] = None if getattr(cell, "bh", None) is None else True
    made = cell_from_keras(kind, *arrays, **options)
    names = [name for name in type(cell).weight_names if getattr(made, name, None) is not None]
    found = []
    for name in names:
        array, held = np.asarray(getattr(made, name).value), getattr(cell, name, None)
        if held is None:
            raise FormatError(
                f"the file has a {name} that is not zero, which {cell.describe()} lacks. Build it "
                + ("with recurrent_bias=True." if name == "bh" else "with bias=True.")
            )
        found.append((cell, name, floats(name, array, held.shape)))
    return found


def _check_gates(cell: Any, kind: str, gate_act: str | None, version: str | None) -> None:
    """Raises `FormatError` if the file was probably trained with gates of another function."""
    trained = gate_act
    if trained is None:
        old = version is not None and version_of(version) < (2, 3)
        trained = (
            "hard_sigmoid" if old and isinstance(cell, (LSTMCell, GRUCell, GRUv3Cell)) else None
        )
    if kind.startswith("CuDNN"):
        trained = "sigmoid"
    if trained is not None and trained != cell.gate_act:
        raise FormatError(
            f"the file was written by Keras {version}, whose gates are {trained} by default, and "
            f"the cell has {cell.gate_act}. Build the layer with gate_act={trained!r}, or say what "
            "the model was trained with: load_into(..., gate_act=)."
        )
