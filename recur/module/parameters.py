"""Parameters by path, and the dict of arrays that a model is saved as."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

from recur.errors import ShapeError, StateError
from recur.module.base import Module, numeric
from recur.module.walking import join, visit, walk
from recur.tape import Param

Model = TypeVar("Model")


class Params(list[Param]):
    """Parameters in order, each once.  `p in ps` asks for the parameter itself, not its values."""

    def __contains__(self, p: object) -> bool:
        return any(p is own for own in self)

    def index(self, p: Any, *bounds: Any) -> int:
        for i in range(*slice(*(bounds or (None,))).indices(len(self))):
            if self[i] is p:
                return i
        raise ValueError("this parameter is not in the list")


def named_params(model: Any) -> dict[str, Param]:
    """Every parameter of a model by path, layers in order, each once under its first path.

    Raises `StateError` if two have one path, and for a layer that only a set holds.
    """
    found: dict[str, Param] = {}
    for path, obj in walk(model):
        if type(obj) is Param:
            if path in found:
                raise StateError(
                    f"two parameters share the path {path!r}: a key of a dict holds a dot, or two "
                    "keys look alike. Rename one."
                )
            found[path] = obj
    return found


def params(*models: Any) -> Params:
    """The parameters of one or more models, each once, in the order of `named_params`."""
    return Params(named_params(models).values())


def ties(model: Any) -> dict[str, str]:
    """Where a parameter is met again: that path, and the first one."""
    firsts: dict[int, str] = {}
    again: dict[str, str] = {}
    for path, obj, first in visit(model):
        if type(obj) is Param and first:
            firsts[id(obj)] = path
        elif type(obj) is Param:
            again[path] = firsts[id(obj)]
    return again


def modules(model: Any) -> Iterator[tuple[str, Module]]:
    """Every layer of a model with its path, each once, outer before inner."""
    for path, obj in walk(model):
        if isinstance(obj, Module):
            yield path, obj


def buffers(model: Any) -> dict[str, np.ndarray]:
    """What is saved with a model but not trained, by path: the arrays themselves."""
    return {join(path, n): a for path, layer in modules(model) for n, a in layer.buffers().items()}


def generators(model: Any) -> dict[str, np.random.Generator]:
    """The generators of a model's random layers by the path of the layer, each once."""
    found: dict[int, tuple[str, np.random.Generator]] = {}
    for path, layer in modules(model):
        held = getattr(layer, "generator", None)
        if isinstance(held, np.random.Generator):
            found.setdefault(id(held), (path, held))
    return dict(found.values())


def state_dict(model: Any, include_state: bool = False) -> dict[str, np.ndarray]:
    """Copies of all parameters, then all buffers, by path.

    `include_state` adds what recurrent layers carry (`state`, `state.h`); a layer at its start
    adds nothing.
    """
    held: dict[str, Any] = {path: p.value for path, p in named_params(model).items()}
    held.update(buffers(model))
    if include_state:
        for path, layer in modules(model):
            held.update((join(path, n), a) for n, a in layer.running_state().items())
    return {path: np.array(array, order="K") for path, array in held.items()}


def load_state_dict(model: Model, saved: Mapping[str, Any], strict: bool = True) -> Model:
    """Copies saved arrays into a model by path, and puts recurrent layers at their start.

    Layers whose state was saved (`include_state`) go on from it.  With `strict=False` names that
    only one side has are passed over.  Raises `StateError` for names, `ShapeError` for shapes,
    naming the paths, before anything is changed.
    """
    if not isinstance(saved, Mapping) or not all(isinstance(path, str) for path in saved):
        raise TypeError(
            f"load_state_dict: the saved arrays are a {type(saved).__name__}, expected a dict of "
            "arrays by path, as state_dict(model) gives it. The model comes first."
        )
    layers = list(modules(model))
    weights = named_params(model)
    places = {
        join(path, name): (layer, name, array.shape)
        for path, layer in layers
        for name, array in layer.buffers().items()
    }
    wanted = {path: p.shape for path, p in weights.items()}
    wanted.update((path, shape) for path, (_, _, shape) in places.items())
    states, unknown = _states(layers, saved, wanted)
    if strict:
        _check_names([path for path in wanted if path not in saved], unknown)
    new = {path: numeric(path, saved[path]) for path in wanted if path in saved}
    for path, array in new.items():
        if array.shape != wanted[path]:
            raise ShapeError(
                f"{path}: the saved array has shape {array.shape}, expected {wanted[path]}. "
                "Nothing was changed."
            )
    _load_states(layers, states)
    for path, array in new.items():
        if path in weights:
            weights[path][...] = array
        else:
            layer, name, _ = places[path]
            layer.load_buffers({name: array})
    return model


def _states(
    layers: list[tuple[str, Module]], saved: Mapping[str, Any], known: Mapping[str, Any]
) -> tuple[dict[int, dict[str, Any]], list[str]]:
    """The saved running states by layer, and the names that fit nowhere."""
    stateful = {
        path: layer
        for path, layer in layers
        if type(layer).load_running_state is not Module.load_running_state
    }
    states: dict[int, dict[str, Any]] = {}
    unknown = []
    for key in saved:
        if key in known:
            continue
        parts = key.split(".")
        cut = len(parts) - 1 - parts[::-1].index("state") if "state" in parts else 0
        layer = stateful.get(".".join(parts[:cut]))
        if "state" in parts and layer is not None:
            states.setdefault(id(layer), {})[".".join(parts[cut:])] = saved[key]
        else:
            unknown.append(key)
    return states, unknown


def _check_names(missing: list[str], unknown: list[str]) -> None:
    complaints = []
    if missing:
        complaints.append(f"the saved arrays lack {_listed(missing)}")
    if unknown:
        complaints.append(f"the model has no {_listed(unknown)}")
    if complaints:
        raise StateError(
            f"load_state_dict: {'; '.join(complaints)}. Nothing was changed. Load into a model of "
            "the same make, or pass strict=False to load what both have."
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _load_states(layers: list[tuple[str, Module]], new: dict[int, dict[str, Any]]) -> None:
    """Sets every running state, or none if one of them does not fit."""
    before = []
    try:
        for _, layer in layers:
            before.append((layer, layer.running_state()))
            layer.load_running_state(new.get(id(layer), {}))
    except BaseException:
        for layer, state in before:
            layer.load_running_state(state)
        raise


def loadmodel(model: Model, source: Any) -> Model:
    """Copies the parameters and buffers of `source`, a model or a dict of arrays, into `model`.

    A dict may be nested; False in it stands for a bias that is not there.  As in Flux a missing
    bias and a bias of zeros are the same thing: it is set to zeros where only `model` has it, and
    passed over where only `source` has it.  Errors as for `load_state_dict`.
    """
    wanted = {path: p.shape for path, p in named_params(model).items()}
    if isinstance(source, Mapping):
        saved = {p: np.zeros(wanted.get(p, 0)) if a is False else a for p, a in _flat(source)}
    else:
        saved = dict(state_dict(source))
        saved.update((p, np.zeros(wanted[p])) for p in wanted if p not in saved and _is_bias(p))
    known = {*wanted, *buffers(model)}
    for path in [path for path in saved if path not in known and _is_bias(path)]:
        if not np.any(saved[path]):
            del saved[path]
    return load_state_dict(model, saved)


def _is_bias(path: str) -> bool:
    return path.rpartition(".")[2] in ("b", "bias")


def _flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, part in tree.items():
        path = join(above, str(key))
        if isinstance(part, Mapping):
            yield from _flat(part, path)
        else:
            yield path, part
