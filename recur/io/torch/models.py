"""Layers from the names and arrays of a `state_dict`, and back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from recur import ops
from recur.cells import Cell
from recur.errors import FormatError, RecurError, StateError
from recur.io._gates import check_start, floats
from recur.io.torch.cells import cell_from_torch, cell_to_torch
from recur.layers import Chain, Dense, Dropout, Embedding
from recur.recurrent import Bidirectional, Recur

_WEIGHT = re.compile(
    r"(?:(?P<prefix>.*)\.)?(?:(?P<part>weight|bias)_(?P<side>ih|hh|hr)"
    r"(?:_l(?P<layer>\d{1,4})(?P<reverse>_reverse)?)?|(?P<plain>weight|bias))"
)
_KINDS = {1: "RNN", 3: "GRU", 4: "LSTM"}
_PLAIN = ("Linear", "Embedding")
_NO_STATES = "A state_dict holds none: set it to zero here, and pass it to PyTorch's call."


def layers_from_torch(
    state_dict: Mapping[str, Any],
    *,
    kinds: Mapping[str, str] | None = None,
    acts: Mapping[str, Any] | None = None,
    recurrent_bias: bool | None = None,
    layout: Any = "fbt",
) -> dict[str, Any]:
    """The layers whose weights a `state_dict` holds, by the name of their module.

    RNN, LSTM, GRU       a `Recur`; a `Bidirectional` of two; for several layers a `Chain` of these
    their *Cell          the cell
    Linear, Embedding    `Dense`, `Embedding`

    A `state_dict` says neither how modules are connected nor what functions stand between them:
    put the layers into a `Chain` in the order of `forward`.

    state_dict      arrays, or tensors on the CPU, by name; copied
    kinds           "Linear" or "Embedding" by module, needed for one with a matrix and no bias
    acts            activations by module: of an RNN (default tanh), of a Linear (default identity)
    recurrent_bias  as in `cell_from_torch`
    layout          of the Recurs

    Raises `FormatError` for anything else in it, proj_size among them: the message names it.
    """
    kinds, acts = dict(kinds or {}), dict(acts or {})
    modules: dict[str, dict[str, Any]] = {}
    for name, array in state_dict.items():
        match = _WEIGHT.fullmatch(name)
        if match is None:
            raise FormatError(
                f"{name}: not a weight of RNN, LSTM, GRU, their cells, Linear or Embedding. Leave "
                "it out, and build its layer by hand."
            )
        modules.setdefault(match["prefix"] or "", {})[_own(name, match["prefix"])] = array
    for given in (kinds, acts):
        for module in given:
            if module not in modules:
                raise FormatError(
                    f"the state_dict has no module {module!r}; it has "
                    f"{', '.join(map(repr, modules))}."
                )
    found = {}
    for module, arrays in modules.items():
        arrays = {name: _plain(array) for name, array in arrays.items()}
        try:
            if "weight" in arrays or "bias" in arrays:
                found[module] = _product(arrays, kinds.get(module), acts.get(module))
            else:
                found[module] = _recurrent(
                    arrays, acts.get(module), recurrent_bias=recurrent_bias, layout=layout
                )
        except RecurError as error:
            raise FormatError(f"{module or 'the module'}: {error}") from error
    return found


def _own(name: str, prefix: str | None) -> str:
    return name if prefix is None else name[len(prefix) + 1 :]


def _plain(array: Any) -> np.ndarray:
    """The array of a tensor, or the array itself."""
    if hasattr(array, "detach"):
        array = array.detach().cpu()
        if str(array.dtype) == "torch.bfloat16":
            array = array.float()
        array = array.numpy()
    return np.asarray(array)


def _product(arrays: dict[str, np.ndarray], kind: str | None, act: Any) -> Dense | Embedding:
    if set(arrays) not in ({"weight"}, {"weight", "bias"}) or arrays["weight"].ndim != 2:
        raise FormatError(
            "it holds "
            + ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
            + ", which is neither a Linear nor an Embedding. Leave it out, and build its layer by "
            "hand."
        )
    if kind is None and "bias" not in arrays:
        raise FormatError(
            "a matrix without a bias is a Linear or an Embedding; say which: "
            'kinds={"<module>": "Embedding"}.'
        )
    if kind not in (None, *_PLAIN):
        raise FormatError(f"kinds says {kind!r}, expected one of {', '.join(_PLAIN)}.")
    weight = floats("weight", arrays["weight"], (None, None))
    if kind == "Embedding":
        if "bias" in arrays:
            raise FormatError("kinds says that it is an Embedding, but it has a bias.")
        return Embedding(weight.T)
    bias = floats("bias", arrays["bias"], (len(weight),)) if "bias" in arrays else False
    act = ops.activation(act) if isinstance(act, str) else act
    return Dense(weight, bias, act or ops.identity)


def _recurrent(
    arrays: dict[str, np.ndarray],
    act: Any,
    *,
    recurrent_bias: bool | None,
    layout: Any,
) -> Any:
    cells: dict[tuple[int, bool] | None, dict[str, np.ndarray]] = {}
    for name, array in arrays.items():
        match = _WEIGHT.fullmatch(name)
        assert match is not None
        if match["side"] == "hr":
            raise FormatError(
                f"{name}: the layer has proj_size={len(array)}; no cell here projects its output, "
                "so it cannot be held."
            )
        place = None if match["layer"] is None else (int(match["layer"]), bool(match["reverse"]))
        cells.setdefault(place, {})[f"{match['part'][0]}_{match['side']}"] = array
    made = {}
    for place, parts in cells.items():
        if not {"w_ih", "w_hh"} <= set(parts) or parts["w_hh"].ndim != 2:
            raise FormatError(f"it lacks a matrix: it holds {', '.join(arrays)}.")
        rows, n_out = parts["w_hh"].shape
        kind = _KINDS.get(rows // max(n_out, 1))
        if kind is None or rows % n_out:
            raise FormatError(f"weight_hh has shape {(rows, n_out)}; no RNN, LSTM or GRU has such.")
        if act is not None and kind != "RNN":
            raise FormatError(f"acts names an activation for it, but it is a {kind}.")
        made[place] = cell_from_torch(
            kind, **parts, recurrent_bias=recurrent_bias, act="tanh" if act is None else act
        )
    if None in made:
        if len(made) > 1:
            raise FormatError(f"it holds the weights of a cell and of layers: {', '.join(arrays)}.")
        return made[None]
    return _stacked({place: Recur(cell, layout=layout) for place, cell in made.items() if place})


def _stacked(made: dict[tuple[int, bool], Recur]) -> Any:
    depth, both = 1 + max(layer for layer, _ in made), any(reverse for _, reverse in made)
    directions = (False, True) if both else (False,)
    wanted = {(k, reverse) for k in range(depth) for reverse in directions}
    if set(made) != wanted:
        layers = ", ".join(f"l{k}{'_reverse' * reverse}" for k, reverse in sorted(made))
        raise FormatError(f"the layers {layers} make no whole stack.")
    stack = [
        Bidirectional(made[k, False], made[k, True]) if both else made[k, False]
        for k in range(depth)
    ]
    return stack[0] if depth == 1 else Chain(*stack)


def layers_to_torch(layers: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The `state_dict` of PyTorch modules with the weights of these layers, by module name.

    layers  by name: a `Recur`, a `Bidirectional`, or a `Chain` of them (with Dropout between them,
            which has no weights) for an RNN, LSTM or GRU; a cell for a *Cell; `Dense`, `Embedding`.
            Under the name "" the arrays have no prefix

    The arrays are new.  Raises `StateError` for what PyTorch cannot hold, initial states other than
    zero among it: there they are given at each call.
    """
    found: dict[str, np.ndarray] = {}
    for name, layer in layers.items():
        prefix = f"{name}." if name else ""
        found.update({prefix + own: array for own, array in _arrays(layer, name).items()})
    return found


def _arrays(layer: Any, name: str) -> dict[str, np.ndarray]:
    if isinstance(layer, (Dense, Embedding)):
        weight, bias = np.array(layer.weight.value), getattr(layer, "bias", None)
        if isinstance(layer, Embedding):
            return {"weight": np.ascontiguousarray(weight.T)}
        return {"weight": weight} | ({} if bias is None else {"bias": np.array(bias.value)})
    if isinstance(layer, Cell):
        return _named(layer, "")
    inner = layer.values() if isinstance(layer, Chain) else [layer]
    stack = [part for part in inner if not isinstance(part, Dropout)]
    arrays: dict[str, np.ndarray] = {}
    for k, part in enumerate(stack):
        for layer, suffix in zip(_directions(part), ("", "_reverse"), strict=False):
            if type(layer) is not Recur or not isinstance(layer.cell, Cell):
                raise StateError(f"{name}: {part!r} is no layer that PyTorch's modules can hold.")
            check_start(layer, name, _NO_STATES)
            arrays |= _named(layer.cell, f"_l{k}{suffix}")
    _check_stack(stack, name)
    return arrays


def _directions(part: Any) -> list[Recur]:
    return [part.forward, part.backward] if type(part) is Bidirectional else [part]


def _check_stack(stack: list[Any], name: str) -> None:
    """One module of PyTorch has layers of one kind, size and number of directions."""
    forms = {
        (len(_directions(part)), type(cell), cell.n_out, cell.b is None, getattr(cell, "act", None))
        for part in stack
        for cell in (direction.cell for direction in _directions(part))
    }
    if len(forms) != 1:
        raise StateError(
            f"{name}: its layers differ in kind, size, bias or activation, or there are none; one "
            "module of PyTorch cannot hold them. Give each layer a name of its own."
        )


def _named(cell: Any, suffix: str) -> dict[str, np.ndarray]:
    words = {"w": "weight", "b": "bias"}
    return {
        f"{words[name[0]]}{name[1:]}{suffix}": array for name, array in cell_to_torch(cell).items()
    }
