"""What a Keras model is made of: its configuration as a row of layers."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from recur.errors import FormatError

_DEEPEST = 20


@dataclass(frozen=True)
class Spec:
    """One layer: its class, its options, and where Keras 3 keeps its arrays."""

    kind: str
    config: dict[str, Any]
    place: str = ""

    @property
    def name(self) -> str:
        return str(self.config.get("name", self.kind))

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}"


def parse(text: str | bytes) -> dict[str, Any]:
    """The configuration of a model.  Raises `FormatError` if it is no JSON object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the model's configuration is damaged: {error}") from None
    if not isinstance(found, dict):
        raise FormatError("the model's configuration is damaged.")
    return found


def spec_of(found: Any, place: str = "") -> Spec:
    """One entry of a configuration."""
    if not isinstance(found, dict) or not isinstance(found.get("class_name"), str):
        raise FormatError("the model's configuration is damaged: an entry has no class_name.")
    config = found.get("config")
    if isinstance(config, list):  # a Sequential of the first versions of Keras 2
        config = {"layers": config}
    if not isinstance(config, dict):
        raise FormatError("the model's configuration is damaged: an entry has no config.")
    return Spec(found["class_name"], config, place)


def row(model: Spec, root: str, depth: int = 0) -> list[Spec]:
    """The layers of a Sequential, or of a functional model that is a row.

    Raises `FormatError` for any other model.
    """
    layers = model.config.get("layers")
    if depth > _DEEPEST or model.kind not in ("Sequential", "Functional", "Model"):
        raise FormatError(f"{model}: Sequential models and functional ones are read.")
    if not isinstance(layers, list):
        raise FormatError(f"{model}: its configuration lacks the layers.")
    if model.kind != "Sequential":
        _check_row(model, layers)
    counts: dict[str, int] = {}
    found = []
    for entry in layers:
        spec = spec_of(entry)
        name = snake_case(spec.kind)
        count = counts[name] = counts.get(name, -1) + 1
        place = f"{root}/{name}_{count}" if count else f"{root}/{name}"
        found.append(Spec(spec.kind, spec.config, place))
    return found


def _check_row(model: Spec, layers: list[Any]) -> None:
    """Raises `FormatError` unless each layer has the one before it for its only input."""
    before: str | None = None
    for entry in layers:
        name = entry.get("name") if isinstance(entry, dict) else None
        name = name or spec_of(entry).name
        sources = _sources(entry.get("inbound_nodes"))
        if sources != ([] if before is None else [before]):
            raise FormatError(
                f"{model}: the layer {name!r} gets {', '.join(map(repr, sources)) or 'nothing'}; "
                "only models in which each layer follows the one before it are read."
            )
        before = name
    outputs = model.config.get("output_layers")
    if outputs not in ([[before, 0, 0]], [before, 0, 0]):
        raise FormatError(f"{model}: its output is not that of the last layer alone.")


def _sources(nodes: Any) -> list[str]:
    """The layers that an entry of a functional model gets its input from."""
    found: list[str] = []
    left: list[tuple[Any, int]] = [(nodes, 0)]
    while left:
        value, depth = left.pop()
        if depth > _DEEPEST:
            raise FormatError("the model's configuration nests too deeply.")
        if isinstance(value, dict):
            history = value.get("keras_history")
            if history is not None:
                value = [history]
            else:
                left += [(inner, depth + 1) for inner in value.values()]
                continue
        if isinstance(value, list):
            if value and isinstance(value[0], str) and len(value) >= 3:
                found.append(value[0])
            else:
                left += [(inner, depth + 1) for inner in value]
    return found


def snake_case(name: str) -> str:
    """The name that Keras 3 derives from a class: "SimpleRNN" becomes "simple_rnn"."""
    name = re.sub(r"\W+", "", name)
    name = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()
