"""Build models from the layers that a Flux file holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from recur import ops
from recur.cells import Cell, GRUCell, GRUv3Cell, LSTMCell, RNNCell
from recur.errors import FormatError, RecurError
from recur.io.flux import values
from recur.io.flux.old import cell_of_dense_gates
from recur.io.flux.values import array, field, is_state, plain, told
from recur.io.julia import Struct, undefined
from recur.layers import (
    BatchNorm,
    Chain,
    Dense,
    Dropout,
    Embedding,
    LayerNorm,
    Parallel,
    Scale,
    SkipConnection,
)
from recur.recurrent import Recur
from recur.tape import Param

_DEEPEST = 100
"""Models nest a few levels; a file that nests hundreds was made to do harm."""

_CELLS: dict[str, Any] = {
    "RNNCell": RNNCell,
    "LSTMCell": LSTMCell,
    "GRUCell": GRUCell,
    "GRUv3Cell": GRUv3Cell,
}


class _Failed(Exception):
    """One layer cannot be built; the others are still looked at, to report all at once."""


class Builder:
    """Makes layers of Julia values; what Julia shared is shared.

    functions   callables by the place where they stand in the built model
    resume      Recurs go on from the state that was saved with them
    learn_init  initial states become parameters
    layout      of the Recurs
    """

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        resume: bool = False,
        learn_init: bool = False,
        layout: str = "fbt",
    ) -> None:
        self._functions = dict(functions or {})
        self._unused = set(self._functions)
        self._resume = resume
        self._options: dict[str, Any] = {"learn_init": learn_init, "layout": layout}
        self._problems: list[str] = []
        self._layers: dict[int, Any] = {}
        self._cells: dict[int, tuple[Any, Any]] = {}
        self._params: dict[int, tuple[np.ndarray, Param]] = {}

    def model(self, value: Any) -> Any:
        """The model that `value` describes.

        Raises `FormatError` that lists every place which could not be built.
        """
        model = self._layer(value, "", 0)
        if self._problems:
            raise FormatError(_report(self._problems))
        if self._unused:
            raise FormatError(
                f"functions= names {', '.join(sorted(map(repr, self._unused)))}, but the model has "
                "no function or layer there. `describe(path)` shows the places."
            )
        return model

    # ---- one layer ---------------------------------------------------------------------------

    def _layer(self, value: Any, path: str, depth: int) -> Any:
        """The layer at `path`, or None after a problem was noted."""
        if path in self._functions:
            self._unused.discard(path)
            return self._functions[path]
        if id(value) in self._layers:
            return self._layers[id(value)]
        try:
            layer = self._make(value, path, depth)
        except (_Failed, RecurError, TypeError, ValueError) as problem:
            self._problems.append(f"{path or 'the model'}: {problem}")
            return None
        if isinstance(value, Struct):
            self._layers[id(value)] = layer
        return layer

    def _make(self, value: Any, path: str, depth: int) -> Any:
        if depth > _DEEPEST:
            raise _Failed("layers nest too deeply")
        kind = values.kind(value)
        if kind in _CELLS or kind == "Cell":
            return self._cell(value, path)[0]
        if kind is not None:
            maker: Callable[[Any, str, int], Any] = getattr(self, f"_{kind.lower()}")
            return maker(value, path, depth)
        if isinstance(value, Struct) and not is_state(value) and len(value):
            raise _Failed(f"a {value.type}, which is not one of Flux's layers")
        if is_state(value):
            raise _Failed(f"a NamedTuple of {', '.join(value)}, which no layer of Flux has")
        return self._need(values.function(value))

    def _need(self, found: Any) -> Any:
        """What was found, unless it is a problem."""
        if isinstance(found, str):
            raise _Failed(found)
        return found

    def _function(self, value: Any, path: str, connection: bool = False) -> Any:
        """A function that belongs to a layer: its activation, its connection."""
        if path in self._functions:
            self._unused.discard(path)
            return self._functions[path]
        found = values.function(value, connection)
        if isinstance(found, str):
            self._problems.append(f"{path}: {found}")
            return ops.identity
        return found

    def _matrix(self, value: Any, name: str) -> np.ndarray:
        found = array(value, 2)
        if found is None:
            raise _Failed(f"{name} is {told(value)}, expected a matrix of numbers")
        return found

    def _param(self, found: np.ndarray, dtype: Any = None, order: Any = "C") -> Param:
        """The parameter for an array; one for each array of the file."""
        if id(found) not in self._params:
            made = Param(found.astype(dtype or _dtype(found), copy=False), order=order)
            self._params[id(found)] = found, made  # an id names an array only while that lives
        return self._params[id(found)][1]

    def _bias(self, value: Any, weight: np.ndarray) -> Param | None:
        found = self._need(values.bias(value, len(weight)))
        return None if found is None else self._param(found, _dtype(weight))

    # ---- recurrent layers --------------------------------------------------------------------

    def _cell(self, value: Struct, path: str) -> tuple[Any, Any]:
        """The cell that `value` describes, and its initial state, None where it holds none."""
        if id(value) not in self._cells:
            self._cells[id(value)] = self._new_cell(value, path)
        return self._cells[id(value)]

    def _new_cell(self, value: Struct, path: str) -> tuple[Any, Any]:
        gates = cell_of_dense_gates(value)
        if gates is not None:
            name, arrays, start, act = self._need(gates)
        else:
            name = values.kind(value) or ""
            arrays = {"Wi": self._matrix(field(value, "Wi"), "Wi")}
            arrays["Wh"] = self._matrix(field(value, "Wh"), "Wh")
            if name == "Cell":
                name = _cell_by_shapes(*arrays.values())
            arrays["b"] = self._need(values.bias(field(value, "bias", "b"), len(arrays["Wi"])))
            if name == "GRUv3Cell":
                # Flux 0.15 and 0.16 allocate a third block of Wh and never use it.
                arrays["Wh"] = arrays["Wh"][: 2 * arrays["Wh"].shape[1]]
                arrays["Whh"] = self._matrix(field(value, "Wh_h̃"), "Wh_h̃")
            start, act = initial_state(value), field(value, "σ")
        options = {"act": self._function(act, f"{path}.act")} if name == "RNNCell" else {}
        dtype = _dtype(arrays["Wi"])
        params = {n: None if a is None else self._param(a, dtype) for n, a in arrays.items()}
        return _CELLS[name].from_arrays(**params, **options), start

    def _recur(self, value: Struct, path: str, depth: int) -> Recur:
        inner = field(value, "cell")
        place = f"{path}.cell" if path else "cell"
        own = state_of(field(value, "init"))  # until Flux 0.11; later the cell holds it
        if place in self._functions:
            cell, start = self._layer(inner, place, depth), None
        elif values.kind(inner) in _CELLS or values.kind(inner) == "Cell":
            cell, start = self._cell(inner, place)
        else:
            raise _Failed(f"its cell is {told(inner)}, which is none of Flux's own")
        start = start if own is None else own
        state = state_of(field(value, "state")) if self._resume else None
        if state is not None and start is not None and _same(state, start):
            state = None
        if isinstance(cell, Cell) and start is not None and not self._options["learn_init"]:
            start = start if any(map(np.any, _parts(start))) else None
        return Recur(cell, start, state, **self._options)

    # ---- other layers ------------------------------------------------------------------------

    def _chain(self, value: Struct, path: str, depth: int) -> Chain:
        layers = self._inner(value, path, depth)
        return Chain(**layers) if isinstance(layers, dict) else Chain(*layers)

    def _parallel(self, value: Struct, path: str, depth: int) -> Parallel | SkipConnection:
        held = field(value, "layers")
        if is_state(value) and values.kind(held) is not None:
            return self._skipconnection(value, path, depth)
        place = f"{path}.connection" if path else "connection"
        connection = self._function(field(value, "connection"), place, connection=True)
        layers = self._inner(value, path, depth)
        if isinstance(layers, dict):
            return Parallel(connection, **layers)
        return Parallel(connection, *layers)

    def _skipconnection(self, value: Struct, path: str, depth: int) -> SkipConnection:
        prefix = f"{path}." if path else ""
        layer = self._layer(field(value, "layers"), f"{prefix}layers.0", depth + 1)
        place = f"{prefix}connection"
        connection = self._function(field(value, "connection"), place, connection=True)
        return SkipConnection(layer or ops.identity, connection)

    def _inner(self, value: Struct, path: str, depth: int) -> list[Any] | dict[str, Any]:
        """The layers of a container; identity in the place of those that were noted as problems."""
        held = field(value, "layers")
        prefix = f"{path}.layers." if path else "layers."
        if isinstance(held, Struct) and is_state(held):
            items = list(held.items())
        elif isinstance(held, (tuple, list)):
            items = [(str(i), layer) for i, layer in enumerate(held)]
        else:
            raise _Failed(f"its layers are {told(held)}, expected a tuple")
        made = {n: self._layer(x, prefix + n, depth + 1) or ops.identity for n, x in items}
        return made if isinstance(held, Struct) else list(made.values())

    def _dense(self, value: Struct, path: str, depth: int) -> Dense:
        weight = self._matrix(field(value, "weight", "W"), "weight")
        bias = self._bias(field(value, "bias", "b"), weight)
        act = self._function(field(value, "σ"), f"{path}.act" if path else "act")
        return Dense(self._param(weight), False if bias is None else bias, act)

    def _embedding(self, value: Struct, path: str, depth: int) -> Embedding:
        weight = self._matrix(field(value, "weight"), "weight")
        return Embedding(self._param(weight, order="F"))

    def _dropout(self, value: Struct, path: str, depth: int) -> Dropout:
        p, dims, active = (field(value, name) for name in ("p", "dims", "active"))
        if not isinstance(p, (float, np.floating, int)):
            raise _Failed(f"p is {told(p)}, expected a number")
        axes = None
        if isinstance(dims, int):
            axes = (dims - 1,)
        elif isinstance(dims, tuple) and dims and all(isinstance(n, int) for n in dims):
            axes = tuple(n - 1 for n in dims)
        if len(value) == 2 and active is True:
            active = None  # before Flux 0.10 true was the default, and testmode! set it
        return Dropout(float(p), dims=axes, active=active if isinstance(active, bool) else None)

    def _scale(self, value: Struct, path: str, depth: int) -> Scale:
        scale = array(field(value, "scale", "α"), 1)
        if scale is None:
            raise _Failed("a scale that is no vector")
        bias = self._bias(field(value, "bias", "β"), scale)
        named = field(value, "σ")
        act = self._function(named, f"{path}.act") if named is not undefined else ops.identity
        layer = Scale(len(scale), act, bias=False, dtype=_dtype(scale))
        layer.scale, layer.bias = self._param(scale), bias
        return layer

    _diagonal = _scale

    def _layernorm(self, value: Struct, path: str, depth: int) -> LayerNorm:
        if len(value) < 2 and not is_state(value):
            raise _Failed(
                "the LayerNorm of Flux 0.11 and before, which divides by another deviation"
            )
        diag, size = field(value, "diag"), field(value, "size")
        scale = array(field(diag, "scale", "α"), 1)
        act = self._function(field(value, "λ"), f"{path}.act" if path else "act")
        n = len(scale) if scale is not None else size[0] if isinstance(size, tuple) and size else 0
        eps = _number(field(value, "ϵ", "eps"), 1e-5)
        if scale is None:
            return LayerNorm(n, act, affine=False, eps=eps)
        layer = LayerNorm(n, act, eps=eps, dtype=_dtype(scale))
        bias = self._bias(field(diag, "bias", "β"), scale)
        layer.scale = self._param(scale)
        if bias is not None:
            layer.bias = bias
        return layer

    def _batchnorm(self, value: Struct, path: str, depth: int) -> BatchNorm:
        if len(value) == 8 and not is_state(value) and len(value.type.params) < 4:
            raise _Failed("the BatchNorm of Flux 0.5, which keeps deviations in place of variances")
        names = {"scale": "γ", "bias": "β", "mean": "μ", "var": "σ²"}
        found = {ours: array(field(value, theirs), 1) for ours, theirs in names.items()}
        held = next((a for a in found.values() if a is not None), None)
        if held is None:
            raise _Failed("it holds neither scale nor statistics, so its size is unknown")
        if any(a is not None and len(a) != len(held) for a in found.values()):
            raise _Failed("its scale, bias and statistics have different sizes")
        active = field(value, "active")
        layer = BatchNorm(
            len(held),
            self._function(field(value, "λ"), f"{path}.act" if path else "act"),
            affine=found["scale"] is not None,
            track_stats=found["mean"] is not None,
            eps=_number(field(value, "ϵ", "eps"), 1e-5),
            momentum=_number(field(value, "momentum"), 0.1),
            active=active if isinstance(active, bool) and len(value) > 8 else None,
            dtype=_dtype(held),
        )
        if found["scale"] is not None and found["bias"] is not None:
            layer.scale, layer.bias = self._param(found["scale"]), self._param(found["bias"])
        if found["mean"] is not None and found["var"] is not None:
            layer.load_buffers({"mean": found["mean"], "var": found["var"]})
        return layer


def initial_state(cell: Any) -> Any:
    """The initial state that a cell holds: an array, a pair of them, or None."""
    for found in (field(cell, "state0"), (field(cell, "h"), field(cell, "c")), field(cell, "h")):
        state = state_of(found)
        if state is not None:
            return state
    return None


def state_of(value: Any) -> Any:
    """A state: an array or a tuple of arrays; None for anything else."""
    value = plain(value)
    if isinstance(value, tuple) and value:
        parts = tuple(array(part) for part in value)
        return None if any(part is None for part in parts) else parts
    return array(value)


def _cell_by_shapes(Wi: np.ndarray, Wh: np.ndarray) -> str:
    """Which cell has weights of these shapes; raises `_Failed` if none has."""
    blocks = len(Wi) / Wh.shape[1] if Wh.shape[1] else 0
    name = {1: "RNNCell", 3: "GRUCell", 4: "LSTMCell"}.get(blocks)
    if name is None or len(Wh) != len(Wi):
        raise _Failed(f"Wi of size {Wi.shape} and Wh of size {Wh.shape} fit no cell of Flux")
    return name


def _dtype(found: np.ndarray) -> Any:
    return np.float64 if found.dtype == np.float64 else np.float32


def _number(value: Any, otherwise: float) -> float:
    return float(value) if isinstance(value, (int, float, np.floating)) else otherwise


def _parts(state: Any) -> tuple[Any, ...]:
    return state if isinstance(state, tuple) else (state,)


def _same(state: Any, start: Any) -> bool:
    """Whether a state is the very arrays of the initial state, as in a layer never stepped."""
    return len(_parts(state)) == len(_parts(start)) and all(
        a is b for a, b in zip(_parts(state), _parts(start), strict=True)
    )


def _report(problems: list[str]) -> str:
    shown = problems[:20]
    more = [f"and {len(problems) - 20} more"] if len(problems) > 20 else []
    lines = "\n  ".join([*shown, *more])
    return (
        f"the model has parts that cannot be built:\n  {lines}\n"
        "Give a callable for each place, functions={place: callable}; or build the model in Python "
        "and fill it with load_into(model, path); or load a part with name=, such as "
        'name="model.encoder". read(path) gives all arrays.'
    )
