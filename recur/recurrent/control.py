"""What acts on every recurrent layer of a model: reset, truncate, reading and moving states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from recur.errors import StateError
from recur.module import Module, walk
from recur.recurrent import calls
from recur.recurrent.recur import Recur
from recur.recurrent.state import START
from recur.tape import current

Model = TypeVar("Model")


def layers_of(model: Any) -> dict[str, Recur]:
    """Every Recur of a model by path, each once."""
    return {path: layer for path, layer in walk(model) if isinstance(layer, Recur)}


def reset(model: Model, mask: Any = None) -> Model:
    """The next step of every recurrent layer starts from its `init`; returns the model.

    It changes no weight and no gradient.  Where it is called, inside or outside the gradient, makes
    no difference.  Random layers that keep one mask for a window draw a new one.

    mask  (B,) bool: only these samples start anew, the others go on, with the masks that they had

    Raises `StateError` if a layer that was stepped inside a call of `model` in the open scope is
    not found in it, or if the mask does not fit a state.  Nothing was changed then.
    """
    layers = layers_of(model)
    _check_all_found("reset", model, layers)
    if mask is not None:
        for layer in layers.values():
            layer.masked_reset(mask)  # raises before any layer has changed
        for layer in layers.values():
            layer.reset(mask)
        return model
    for _, layer in walk(model):
        if isinstance(layer, Recur):
            layer.reset()
        elif isinstance(layer, Module) and hasattr(layer, "resample"):
            layer.resample()
    return model


def truncate(model: Model) -> Model:
    """Keeps the value of every recurrent state and forgets how it was computed; returns the model.

    Weights are not frozen: they go on collecting gradient from every step after the call, and
    losses already computed are not affected.  What stops is gradient flowing back past this point,
    into earlier steps, earlier inputs and `init`.  `init` can receive gradient again only after
    `reset`.

    Raises `StateError` as `reset`.
    """
    layers = layers_of(model)
    _check_all_found("truncate", model, layers)
    for layer in layers.values():
        layer.truncate()
    return model


def _check_all_found(caller: str, model: Any, layers: Mapping[str, Recur]) -> None:
    tape = current()
    if tape is None:
        return
    found = {id(layer) for layer in layers.values()}
    for layer in tape.layers():
        callers = getattr(layer, "_callers", None)
        if id(layer) in found or callers is None or callers.serial != tape.serial:
            continue
        if calls.was_called(model, callers):
            raise StateError(
                f"{caller}: {layer.title} was stepped inside this model, but is not found among "
                "its parts, so its state would stay as it is. Make the layer an attribute of the "
                f"model, or call {caller} on it as well. Nothing was changed."
            )


def states(model: Any) -> dict[str, Any]:
    """Every recurrent state by the path of its layer; `START` for a layer at its start.

    In a scope a state is the recorded value, outside a read-only copy.
    """
    return {
        path: START if layer.at_start else layer.state for path, layer in layers_of(model).items()
    }


def set_states(model: Model, new: Mapping[str, Any]) -> Model:
    """Gives every recurrent layer the state that `states` gave; returns the model.

    Raises `StateError` for other paths, parts or shapes, before any layer has changed.
    """
    layers = layers_of(model)
    if set(new) != set(layers):
        raise StateError(
            f"set_states: states for {_listed(new)} were given, the model has the layers "
            f"{_listed(layers)}. Nothing was changed."
        )
    return _put_all(model, {path: layer.own(new[path]) for path, layer in layers.items()}, layers)


def reindex(model: Model, index: Any) -> Model:
    """Every state becomes `state[..., index]` along its batch; returns the model.

    index  integers or booleans, as NumPy indexes an axis: reorders samples, repeats them (beam
           search), drops them (streams that leave)

    Differentiable inside a scope.  A state without a batch stays.  Raises `StateError` for an index
    out of range, before any layer has changed.
    """
    layers = layers_of(model)
    return _put_all(model, {p: layer.reindexed(index) for p, layer in layers.items()}, layers)


def _put_all(model: Model, new: Mapping[str, Any], layers: Mapping[str, Recur]) -> Model:
    for path, layer in layers.items():
        layer.put(new[path])
    return model


def _listed(paths: Any) -> str:
    return ", ".join(repr(path) for path in paths) or "no path"
