"""Models from the files of Keras."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import numpy as np

from recur.errors import FormatError, RecurError
from recur.io._archive import Archive
from recur.io._gates import floats
from recur.io.keras.activations import activation, version_of
from recur.io.keras.cells import CELL_KINDS, cell_from_keras
from recur.io.keras.config import Spec, parse, row, spec_of
from recur.io.keras.h5 import NewWeights, OldWeights, opened
from recur.layers import Chain, Dense, Dropout, Embedding, FinalStep
from recur.recurrent import Bidirectional, Recur, Reversed

_CONFIG_LIMIT = 20_000_000
_MODELS = ("Sequential", "Functional", "Model")
_CELL_OPTIONS = ("units", "activation", "recurrent_activation", "use_bias", "reset_after")
Weights = NewWeights | OldWeights


def read_model(file: BinaryIO, masks: bool, recurrent_bias: bool | None) -> Chain:
    """The model in a `.keras` or `.h5` file.  Raises `FormatError` as `load`."""
    start = file.read(4)
    file.seek(0)
    if start.startswith(b"PK"):
        return _from_zip(file, masks, recurrent_bias)
    with opened(file) as tree:
        config = tree.text("model_config")
        if config is None:
            raise FormatError(
                "the file holds weights alone; build the model and fill it with load_into."
            )
        weights = OldWeights(tree)
        builder = _Builder(weights, weights.version, masks, recurrent_bias)
        return builder.model(spec_of(parse(config)))


def _from_zip(file: BinaryIO, masks: bool, recurrent_bias: bool | None) -> Chain:
    archive = Archive(file)
    if archive.sizes.get("config.json", 0) > _CONFIG_LIMIT:
        raise FormatError("its config.json is larger than a model's can be.")
    version = str(parse(archive.read("metadata.json")).get("keras_version", "3"))
    spec = spec_of(parse(archive.read("config.json")))
    with opened(io.BytesIO(archive.read("model.weights.h5"))) as tree:
        return _Builder(NewWeights(tree), version, masks, recurrent_bias).model(spec)


class _Builder:
    """Makes layers of a configuration and arrays."""

    def __init__(
        self, weights: Weights, version: str, masks: bool, recurrent_bias: bool | None
    ) -> None:
        if version_of(version) < (2, 0):
            raise FormatError(
                f"it was written by Keras {version}, which kept each gate apart; save it again "
                "with Keras 2."
            )
        self.weights, self.version = weights, version
        self.masks, self.recurrent_bias = masks, recurrent_bias

    def model(self, model: Spec) -> Chain:
        layers: list[Any] = []
        for spec in row(model, self.weights.root):
            if spec.kind == "InputLayer":  # the old format has no group for it
                continue
            try:
                self.weights.enter(spec.name)
                layers += self.layers(spec, 0)
                self.weights.leave()
            except (RecurError, ValueError, TypeError) as error:
                raise FormatError(f"{spec}: {error}") from None
        return Chain(*layers)

    def layers(self, spec: Spec, depth: int) -> list[Any]:
        """The layers that compute one of Keras'."""
        if spec.kind in _MODELS:
            inner = row(spec, f"{spec.place}/layers", depth)
            kept = (part for part in inner if part.kind != "InputLayer")
            return [layer for part in kept for layer in self.layers(part, depth + 1)]
        if spec.kind in CELL_KINDS:
            return self.recurrent(spec)
        maker = _MAKERS.get(spec.kind)
        if maker is None:
            raise FormatError("this kind of layer has no counterpart here.")
        return maker(self, spec)

    def option(self, spec: Spec, name: str, allowed: Sequence[Any]) -> None:
        """Raises `FormatError` if an option has another value than those."""
        value = spec.config.get(name, allowed[0])
        if value not in allowed:
            raise FormatError(f"{name}={value!r} has no counterpart here.")

    # ---- recurrent layers --------------------------------------------------------------------

    def cell(self, spec: Spec, place: str) -> Any:
        options = {name: spec.config[name] for name in _CELL_OPTIONS if name in spec.config}
        for name in ("return_state", "time_major"):
            self.option(spec, name, (False,))
        if spec.kind.startswith("CuDNN"):
            options = {"units": spec.config.get("units")}
        with_bias = spec.config.get("use_bias", True)
        arrays = self.weights.take(f"{place}/cell", [3 if with_bias else 2])
        return cell_from_keras(
            spec.kind,
            *arrays,
            **options,
            keras_version=self.version,
            recurrent_bias=self.recurrent_bias,
        )

    def recurrent(self, spec: Spec) -> list[Any]:
        layer = Recur(self.cell(spec, spec.place))
        sequences = spec.config.get("return_sequences", False)
        if not spec.config.get("go_backwards", False):
            return [layer] if sequences else [layer, FinalStep()]
        if sequences:
            raise FormatError("go_backwards with return_sequences gives the steps in reverse.")
        return [Reversed(layer), FinalStep(0)]

    def bidirectional(self, spec: Spec) -> list[Any]:
        self.option(spec, "merge_mode", ("concat",))
        ahead = spec_of(spec.config.get("layer"))
        behind = spec_of(spec.config.get("backward_layer") or spec.config.get("layer"))
        for inner in (ahead, behind):
            if inner.kind not in CELL_KINDS:
                raise FormatError(f"its layer is {inner}, which has no counterpart here.")
        if ahead.config.get("go_backwards", False):
            raise FormatError("its first layer goes backwards.")
        layers = [
            Recur(self.cell(inner, f"{spec.place}/{way}_layer"))
            for inner, way in ((ahead, "forward"), (behind, "backward"))
        ]
        both = Bidirectional(*layers)
        if ahead.config.get("return_sequences", False):
            return [both]
        return [both, FinalStep(layers[0].cell.n_out)]

    # ---- other layers ------------------------------------------------------------------------

    def dense(self, spec: Spec) -> list[Any]:
        with_bias = spec.config.get("use_bias", True)
        kernel, *bias = self.weights.take(spec.place, [2 if with_bias else 1])
        kernel = floats("kernel", kernel, (None, spec.config.get("units")))
        shift: Any = floats("bias", bias[0], (kernel.shape[1],)) if bias else False
        return [Dense(kernel.T, shift, activation(spec.config.get("activation"), self.version))]

    def time_distributed(self, spec: Spec) -> list[Any]:
        inner = spec_of(spec.config.get("layer"))
        if inner.kind != "Dense":
            raise FormatError(f"it wraps {inner}; a Dense is read.")
        return self.dense(Spec(inner.kind, inner.config, f"{spec.place}/layer"))

    def embedding(self, spec: Spec) -> list[Any]:
        if spec.config.get("mask_zero", False):
            self.masking(spec)
        (table,) = self.weights.take(spec.place, [1])
        shape = spec.config.get("input_dim"), spec.config.get("output_dim")
        return [Embedding(floats("embeddings", table, shape).T)]

    def masking(self, spec: Spec) -> list[Any]:
        if not self.masks:
            raise FormatError(
                "it tells later layers which steps are padding. Layers here are told by each call: "
                "load with masks=True and pass lengths= or mask=."
            )
        return []

    def dropout(self, spec: Spec) -> list[Any]:
        self.option(spec, "noise_shape", (None,))
        rate = spec.config.get("rate", 0.0)
        return [Dropout(rate)] if spec.kind == "Dropout" else [Dropout(rate, dims=(0, 1))]

    def activation(self, spec: Spec) -> list[Any]:
        return [activation(spec.config.get("activation"), self.version)]


_MAKERS: dict[str, Callable[[_Builder, Spec], list[Any]]] = {
    "Bidirectional": _Builder.bidirectional,
    "Dense": _Builder.dense,
    "TimeDistributed": _Builder.time_distributed,
    "Embedding": _Builder.embedding,
    "Masking": _Builder.masking,
    "Dropout": _Builder.dropout,
    "SpatialDropout1D": _Builder.dropout,
    "Activation": _Builder.activation,
}


# ---------------------------------------------------------------------- weights alone


def arrays_of_leaves(
    file: BinaryIO, kinds: Sequence[tuple[str, ...]], sizes: Sequence[int]
) -> tuple[list[list[np.ndarray]], str | None]:
    """The arrays of the layers of a weights file, in order, and the version that wrote it.

    kinds  what Keras calls each layer that has weights: ("lstm",) or ("bidirectional", "lstm")
    sizes  how many arrays each has
    """
    with opened(file) as tree:
        if tree.texts("layer_names") is not None or tree.get("model_weights") is not None:
            old = OldWeights(tree)
            held = [arrays for name in old.names if (arrays := old.arrays(name))]
            if [len(arrays) for arrays in held] != list(sizes):
                raise FormatError(
                    f"its layers hold {[len(arrays) for arrays in held]} arrays, those of the "
                    f"model {list(sizes)}."
                )
            return held, old.version
        weights, counts = NewWeights(tree), dict[str, int]()
        found = []
        for (kind, *inner), count in zip(kinds, sizes, strict=True):
            number = counts[kind] = counts.get(kind, -1) + 1
            place = f"{weights.root}/{kind}_{number}" if number else f"{weights.root}/{kind}"
            parts = [f"{place}/{below}" if below else place for below in inner or [""]]
            each = count // len(parts)
            found.append([array for part in parts for array in weights.take(part, [each])])
        for kind, number in counts.items():
            if tree.get(f"{weights.root}/{kind}_{number + 1}") is not None:
                raise FormatError(f"it holds more layers of the kind {kind} than the model.")
        return found, None
