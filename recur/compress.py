"""Copies of models for inference, with their weights in 16 or 8 bits each."""

from __future__ import annotations

import copy
from typing import Any, Literal, TypeAlias

import numpy as np

from recur import _kernels, ops
from recur.cells import GRUCell, GRUv3Cell, KernelCell, LSTMCell, RNNCell
from recur.cells.kernel import Packed
from recur.errors import StateError, TapeError
from recur.layers import Dense
from recur.layers.dense import StepLayer, first_axis, options, stepped_activation
from recur.module import (
    Module,
    Stages,
    f32,
    features,
    label,
    raw_weights,
    walk,
)
from recur.tape import current, peek

Storage: TypeAlias = Literal["bfloat16", "float16", "int8"]
_STORAGES = ("bfloat16", "float16", "int8")
_CELLS = (RNNCell, LSTMCell, GRUCell, GRUv3Cell)


def compress(model: Any, storage: Storage) -> Any:
    """A copy of a model for inference: weight matrices in fewer bits, everything else in float32.

    storage  "bfloat16": 8 bits of mantissa, the range of float32.  "float16": 11 bits, up to 65504.
             "int8": whole numbers from -127 to 127 times one scale for each row of a matrix, which
             depends on the weights alone

    RNN, LSTM, GRU, GRUv3 and `Dense` are compressed wherever they are in the model; `WeightDrop`
    gives way to the layer in it.  Other layers, biases, initial states and recurrent states are
    float32, as in `f32(model)`.  Weights are widened in registers and sums are float32, so a 16-bit
    cell gives the bits of a float32 cell with the rounded weights; a sample's numbers do not depend
    on its batch, and a sequence gives those of its steps.  The copy has no parameters where it is
    compressed, and cannot be trained, recorded or saved: keep the model.

    Raises `ValueError` for another storage, or a weight that it cannot hold, by name; `StateError`
    if there is nothing to compress.
    """
    if storage not in _STORAGES:
        raise ValueError(
            f"compress: storage is {storage!r}, expected {', '.join(map(repr, _STORAGES))}."
        )
    model = f32(model)
    new: dict[int, Any] = {}  # by the id of the old layer, as deepcopy reads it
    wrappers: list[Any] = []
    for _, layer in walk(model):
        if isinstance(layer, Module) and layer.computes():
            wrappers.append(layer)
        elif type(layer) is Dense:
            new[id(layer)] = CompressedDense(layer, storage)
        elif type(layer) in _CELLS and _has_kernel(layer):
            new[id(layer)] = CompressedCell(layer, storage)
    if not new:
        raise StateError(
            f"{label(model)}: it has no RNN, LSTM, GRU, GRUv3 or Dense layer to compress."
        )
    for wrapper in wrappers:
        new[id(wrapper)] = copy.deepcopy(wrapper.layer, new)
    return copy.deepcopy(model, new)


def _has_kernel(cell: KernelCell) -> bool:
    with raw_weights():
        return cell.packed().kernel is not None


# ---------------------------------------------------------------------- layers of compressed models


class _Held:
    """A kernel and what it was made of, so that it can be copied and pickled.

    kernel   holds the matrices, in `storage`
    vectors  biases and peepholes in float32, by name
    options  further arguments of the kernel
    """

    def __init__(
        self, title: str, make: Any, storage: str, weights: dict[str, Any], options: dict[str, Any]
    ) -> None:
        arrays = {
            name: np.ascontiguousarray(peek(w), np.float32)
            for name, w in weights.items()
            if w is not None
        }
        try:
            self.kernel = make(**arrays, **options, storage=storage)
        except ValueError as error:
            raise ValueError(f"{title}: {error}. Nothing was changed.") from None
        self.vectors = {name: a for name, a in arrays.items() if a.ndim == 1 or name == "peephole"}
        self.options = options

    def __deepcopy__(self, memo: dict[int, Any]) -> _Held:
        return self  # nothing of it ever changes

    def arrays(self) -> dict[str, np.ndarray]:
        """The matrices as they are held, by name: new arrays; for int8 and their scales."""
        found = {}
        for name, matrix in self.kernel.matrices().items():
            if self.kernel.storage == "int8":
                scale = np.abs(matrix).max(1, initial=0, keepdims=True) / np.float32(127)
                found[name] = np.rint(matrix / np.where(scale > 0, scale, 1)).astype(np.int8)
                found[f"{name}_scale"] = scale
            elif self.kernel.storage == "float16":
                found[name] = matrix.astype(np.float16)
            else:
                found[name] = (matrix.view(np.uint32) >> 16).astype(np.uint16)
        return found | self.vectors

    def __reduce__(self) -> Any:
        return _rebuilt, (type(self.kernel), self.kernel.storage, self.arrays(), self.options)


def _rebuilt(make: Any, storage: str, arrays: dict[str, np.ndarray], options: Any) -> _Held:
    """The inverse of `_Held.arrays`, exactly."""
    weights = {name: a for name, a in arrays.items() if not name.endswith("_scale")}
    for name, array in weights.items():
        if array.dtype == np.int8:
            weights[name] = array * arrays[f"{name}_scale"]
        elif array.dtype == np.uint16:
            weights[name] = (array.astype(np.uint32) << 16).view(np.float32)
    return _Held(make.__name__, make, storage, weights, options)


class _Compressed(Module):
    """What compressed layers share.  No parameters; `buffers` are copies, to look at."""

    unsaved = "Save the model that it was compressed from, and compress it once it is loaded."
    held: _Held

    @property
    def title(self) -> str:
        raise NotImplementedError

    def fields(self) -> list[tuple[str, Any]]:
        return []

    def buffers(self) -> dict[str, np.ndarray]:
        return self.held.arrays()

    def load_buffers(self, new: dict[str, np.ndarray]) -> None:
        raise StateError(
            f"{self.title}: compressed weights cannot be written. Load into the model that it was "
            "made of, and compress that again. Nothing was changed."
        )

    def check_unrecorded(self) -> None:
        if current() is not None:
            raise TapeError(
                f"{self.title}: this layer holds its weights as {self.held.kernel.storage}, for "
                "inference only, and cannot be recorded. Call it outside the scope, or inside "
                "paused(), and train the model that it was made of. Nothing was changed."
            )


class CompressedCell(_Compressed, KernelCell):
    """A cell of `compress`: steps as the cell that it was made of."""

    def __init__(self, cell: Any, storage: str) -> None:
        self.n_in, self.n_out = cell.n_in, cell.n_out
        self.cell_name = type(cell).__name__
        self.state_type = cell.state_type  # type: ignore[misc]
        if type(cell) is RNNCell:
            options = {"act": ops.name_of(cell.act)}
        else:
            options = {"gate": cell.gate_act}
        make = getattr(_kernels, self.cell_name.replace("Cell", "Kernel"))
        with raw_weights():
            weights = {name: getattr(cell, name) for name in cell.weight_names}
        self.held = _Held(cell.title, make, storage, weights, options)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float32)

    @property
    def title(self) -> str:
        return self.describe().replace("Cell", "", 1)

    def describe(self) -> str:
        return f"{self.cell_name}({self.n_in} => {self.n_out}, {self.held.kernel.storage})"

    def packed(self) -> Packed:
        self.check_unrecorded()
        return Packed(self.held.kernel, (), (), (), (), None, None)

    def counters(self) -> tuple[_kernels.Version, ...]:
        return (self.change_counter(),)


class CompressedDense(_Compressed, StepLayer):
    """y = act(W x + b), a layer of `compress`."""

    def __init__(self, layer: Dense, storage: str) -> None:
        self.act = layer.act
        self.strict_dtype = layer.strict_dtype
        with raw_weights():
            weights = {"W": layer.weight, "b": layer.bias}
        self.held = _Held(repr(layer), _kernels.AffineKernel, storage, weights, {})

    @property
    def title(self) -> str:
        return self.describe()

    def apply(self, x: Any) -> Any:
        self.check_unrecorded()
        kernel = self.held.kernel
        x = peek(features(self, x, kernel.n_in, kernel.dtype, self.strict_dtype))
        rows = np.ascontiguousarray(x.T, kernel.dtype).reshape(-1, kernel.n_in)
        y = kernel.apply(rows).reshape(*x.shape[:0:-1], kernel.n_out).T
        return y if self.act is ops.identity else self.act(y)

    def stages(self) -> Stages | None:
        act = None if self.strict_dtype else stepped_activation(self.act)
        return None if act is None else Stages((self.held.kernel, *act), (self.change_counter(),))

    def describe(self) -> str:
        kernel = self.held.kernel
        off = {} if "b" in self.held.vectors else {"bias": False}
        return f"Dense({kernel.n_in} => {kernel.n_out}{options(self.act, **off)}, {kernel.storage})"

    def output_shape(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        return first_axis(self, shapes, self.held.kernel.n_in, self.held.kernel.n_out)
