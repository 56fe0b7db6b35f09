"""What acts on every recurrent layer of a model: reset, truncate, reading and moving states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from recur.errors import StateError
from recur.module import Module, walk
from recur.recurrent import calls
from recur.recurrent.recur import Recur
from recur.recurrent.state import START
from recur.tape import Tensor, current

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
    not found in it, if the mask does not fit a state, or if `model` is a state and no model.
    Nothing was changed then.
    """
    layers = _acted_on("reset", model)
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
    layers = _acted_on("truncate", model)
    for layer in layers.values():
        layer.truncate()
    return model


def _acted_on(caller: str, model: Any) -> dict[str, Recur]:
    """`layers_of` a model that is about to be changed; raises if some of them would be missed."""
    layers = layers_of(model)
    if not layers:
        _refuse_state(caller, model)
    if caller != "reindex":
        _check_all_found(caller, model, layers)
    return layers


def _refuse_state(caller: str, model: Any) -> None:
    """Raises for a state that somebody carries himself and takes for a model."""
    leaves = _leaves(model)
    if any(type(leaf) is Tensor for leaf in leaves) or (
        leaves and all(type(leaf) is np.ndarray for leaf in leaves)
    ):
        raise StateError(f"{caller}: expected a model, got {_form(model)}. {_BY_HAND[caller]}")


def _leaves(model: Any) -> list[Any]:
    """What lies in nested tuples, lists and dicts, which may hold themselves."""
    leaves: list[Any] = []
    left, seen = [model], set()
    while left:
        part = left.pop()
        if not isinstance(part, (tuple, list, dict)):
            leaves.append(part)
        elif id(part) not in seen:
            seen.add(id(part))
            left.extend(part.values() if isinstance(part, dict) else part)
    return leaves


def _form(state: Any) -> str:
    kind = type(state).__name__
    return f"a {kind} of arrays" if isinstance(state, (tuple, list, dict)) else f"an array ({kind})"


# What does to a state carried by hand what the function would do to a model's.
_BY_HAND = {
    "truncate": "A state that you carry yourself is cut by state = recur.value(state).",
    "reset": (
        "A state that you carry yourself starts anew from cell.initial_state(); "
        "recur.value(state) cuts its history."
    ),
    "reindex": "The samples of a state that you carry yourself are state[:, index], part by part.",
}


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
    out of range and for a state instead of a model, before any layer has changed.
    """
    layers = _acted_on("reindex", model)
    return _put_all(model, {p: layer.reindexed(index) for p, layer in layers.items()}, layers)


def _put_all(model: Model, new: Mapping[str, Any], layers: Mapping[str, Recur]) -> Model:
    for path, layer in layers.items():
        layer.put(new[path])
    return model


def _listed(paths: Any) -> str:
    return ", ".join(repr(path) for path in paths) or "no path"
