"""Layers as JSON and back, so that a file can say what model its arrays belong to.

A description is data: building from it calls the constructors of registered layers and nothing
else.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from recur import ops
from recur.errors import FormatError, RecurError, StateError
from recur.module.base import Module, raw_weights
from recur.module.initialisers import rebuilding
from recur.module.parameters import ties
from recur.module.walking import children, walk
from recur.tape import Param

Layer = TypeVar("Layer", bound=type[Module])

_registry: dict[str, type[Module]] = {}

# The functions besides activations that models are made of, by the name that a file holds.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "+": operator.add,
    "*": operator.mul,
    "tuple": tuple,
    "vcat": ops.vcat,
    "hcat": ops.hcat,
    "softmax": ops.softmax,
    "logsoftmax": ops.logsoftmax,
}


def register(kind: str, version: int = 1) -> Callable[[Layer], Layer]:
    """Class decorator: models that hold this layer can be saved, and loaded where it is registered.

    The class needs `config()`, which gives its constructor's arguments by name: numbers, strings,
    None, layers, activations and other functions that files can name, lists and dicts of these.
    Raise `version` when they change their meaning, and override `from_config`, which gets the
    version that was written.

    Raises `ValueError` if another class holds the name.
    """

    def decorate(cls: Layer) -> Layer:
        held = _registry.get(kind)
        if held is not None and held.__qualname__ != cls.__qualname__:
            raise ValueError(
                f"register: {kind!r} is taken by {held.__module__}.{held.__qualname__}."
            )
        cls.kind, cls.version = kind, version
        _registry[kind] = cls
        return cls

    return decorate


def function_name(function: Callable[..., Any]) -> str | None:
    """The name under which a file holds a function, or None if it holds no such function."""
    for name, held in _FUNCTIONS.items():
        if function is held:
            return name
    return ops.name_of(function)


def describe_model(model: Module) -> dict[str, Any]:
    """A model's layers and options as JSON-able data, without arrays; `build_model` reads it.

    Shared layers and shared parameters stay shared.  Raises `StateError` for what cannot be
    described, by name.
    """
    return {"layers": _Writer().write("", model), "ties": ties(model)}


def build_model(description: Mapping[str, Any], max_bytes: int | None = None) -> Module:
    """The model that `describe_model` described, with weights of no meaning, to be loaded into.

    Raises `FormatError` if the description is damaged, names a layer that is not registered or a
    later version of one, or asks for more than `max_bytes` of weights.
    """
    try:
        with rebuilding(max_bytes):
            model = _Reader().read(description["layers"])
        if not isinstance(model, Module):
            raise FormatError("the description holds no model.")
        places = dict(walk(model))
        for path, first in dict(description["ties"]).items():
            _tie(places, path, first)
    except FormatError:
        raise
    except (RecurError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as e:
        raise FormatError(f"the description of the model is damaged: {e}") from e
    except (RecursionError, MemoryError) as e:
        raise FormatError("the description of the model is too deep or too large.") from e
    return model


def _tie(places: dict[str, Any], path: str, first: str) -> None:
    above, _, name = path.rpartition(".")
    owner, param = places[above], places[first]
    held = dict(children(owner)).get(name)
    if not isinstance(owner, Module) or type(param) is not Param or type(held) is not Param:
        raise FormatError(f"the description ties {path!r} to {first!r}, which are no parameters.")
    if held.shape != param.shape:
        raise FormatError(f"the description ties {path!r} to {first!r}, which has another shape.")
    setattr(owner, name, param)


class _Writer:
    """Writes each layer once; met again it is a reference to its number."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.computed: set[tuple[int, str]] = set()  # weights whose wrapper has been written

    def write(self, path: str, x: Any) -> Any:
        if x is None or isinstance(x, (bool, int, float, str)):
            return x
        if isinstance(x, (np.dtype, np.generic)):
            return x.name if isinstance(x, np.dtype) else x.item()
        if isinstance(x, Module):
            return self.layer(path, x)
        if isinstance(x, (list, tuple)):
            return [self.write(f"{path}[{i}]", item) for i, item in enumerate(x)]
        if isinstance(x, dict):
            return {"$dict": [[key, self.write(f"{path}[{key!r}]", x[key])] for key in x]}
        name = function_name(x) if callable(x) else None
        if name is None:
            raise StateError(
                f"{path or 'model'}: {x!r} cannot be described in a file. Use a layer or a "
                "function of recur, or a Module registered with recur.register(...)."
            )
        return {"$function": name}

    def layer(self, path: str, layer: Module) -> dict[str, Any]:
        if id(layer) in self.numbers:
            return {"$again": self.numbers[id(layer)]}
        cls = type(layer)
        if cls.unsaved is not None:
            raise StateError(f"{path or 'model'}: {layer!r} is not saved. {cls.unsaved}")
        if cls.kind is None or _registry.get(cls.kind) is not cls:
            raise StateError(
                f"{path or 'model'}: {cls.__qualname__} is a layer of your own, which a file "
                f'cannot describe. Decorate the class with @recur.register("{cls.__qualname__}") '
                "and give it a config() that returns its constructor's arguments."
            )
        self.computed.update((id(owner), name) for owner, name in layer.computes())
        for name in layer.computed_weights:
            if (id(layer), name) not in self.computed:
                raise StateError(
                    f"{path or 'model'}: the weight {name} of {layer!r} is computed by a wrapper "
                    "that is no part of the model. Save the wrapper, or take it off: "
                    "WeightDrop.remove()."
                )
        self.numbers[id(layer)] = len(self.numbers)
        with raw_weights():
            options = layer.config()
        config = {
            name: self.write(f"{path}.{name}" if path else name, option)
            for name, option in options.items()
        }
        return {"$layer": cls.kind, "version": cls.version, "config": config}


class _Reader:
    """The layers come in the order in which they were written, outer before inner."""

    def __init__(self) -> None:
        self.layers: list[Module | None] = []

    def read(self, x: Any) -> Any:
        if isinstance(x, list):
            return [self.read(item) for item in x]
        if not isinstance(x, Mapping):
            return x
        if "$layer" in x:
            return self.layer(x)
        if "$again" in x:
            layer = self.layers[x["$again"]]
            if layer is None:
                raise FormatError("the description holds a layer that holds itself.")
            return layer
        if "$function" in x:
            name = x["$function"]
            return _FUNCTIONS.get(name) or ops.activation(name)
        return {key: self.read(item) for key, item in x["$dict"]}

    def layer(self, x: Mapping[str, Any]) -> Module:
        cls = _registry.get(x["$layer"])
        if cls is None:
            raise FormatError(
                f"the description names a layer {x['$layer']!r} that is not registered. Import the "
                "module that registers it first."
            )
        version = x["version"]
        if not isinstance(version, int) or version > cls.version:
            raise FormatError(
                f"{x['$layer']}: version {version} was written by a newer recur, this one reads up "
                f"to {cls.version}."
            )
        place = len(self.layers)
        self.layers.append(None)
        config = {str(name): self.read(option) for name, option in x["config"].items()}
        layer = cls.from_config(config, version)
        self.layers[place] = layer
        return layer
