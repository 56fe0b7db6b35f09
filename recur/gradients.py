"""`gradient` and `withgradient`: one scope, one sweep, new arrays shaped like the arguments."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from recur._kernels import new_vector
from recur.errors import ShapeError, StateError, TapeError, UnknownParameter
from recur.module import Module, Params, named_params, params, ties
from recur.tape import FlatBuffer, Param, Start, Sweep, Tape, Tensor, peek, value


def gradient(
    f: Callable[..., Any],
    *args: Any,
    into: Any = None,
    accumulate: bool = False,
    keep_history: bool = False,
) -> Any:
    """df/d(args): sums over time and batch of what f asks for, with no hidden division.

    f is called inside a scope with the arguments and returns one number.

    args
        Models (anything that holds parameters): the result is a `Gradients`.  Arrays and numbers,
        also inside lists, tuples and dicts: new arrays of their shapes.  A `Param`: an array.
        `params(m)` as the only argument: f takes none, as in Flux's implicit style.  Integer
        arrays and what holds no numbers are passed on: None.
    into
        An earlier result of the same call: its arrays are written, all of them (zeros where f does
        not reach), and it is returned.  They are not read, unless `accumulate` adds.
    keep_history
        Lets recurrent states keep their past, so that a later scope's loss reaches it.

    One argument gives one result, several give a tuple.  No `.grad` is touched.  If f raises,
    calls that had completed keep their states, as values.

    Raises `TapeError` if f returns anything but one number or a scope is open already,
    `ShapeError` if `into` has another form.
    """
    return _differentiate(f, args, into, accumulate, keep_history, has_aux=False)[1]


def withgradient(
    f: Callable[..., Any],
    *args: Any,
    into: Any = None,
    accumulate: bool = False,
    keep_history: bool = False,
) -> tuple[Any, Any]:
    """`(f(*args), gradient(f, *args))` from one call; f may also return `(loss, aux)`.

    The loss is a NumPy scalar.  With aux the result is `((loss, aux), gradients)`, the tensors in
    aux as plain arrays.  Otherwise as `gradient`.
    """
    return _differentiate(f, args, into, accumulate, keep_history, has_aux=True)


def zero_grad(model: Any) -> None:
    """Sets every `.grad` of a model to zeros, in its own memory; None stays None."""
    for p in params(model):
        p.zero_grad()


def _differentiate(
    f: Any,
    args: tuple,
    into: Any,
    accumulate: bool,
    keep_history: bool,
    has_aux: bool,
) -> tuple[Any, Any]:
    swapped = isinstance(f, Module) and any(isinstance(arg, types.FunctionType) for arg in args)
    if swapped or not callable(f):
        raise TypeError(
            f"gradient: {f!r} is no function to differentiate. The function comes first: "
            "gradient(f, model)."
        )
    if not args:
        raise TypeError("gradient: pass what to differentiate by: a model, arrays, params(model).")
    if accumulate and into is None:
        raise TypeError("gradient: accumulate=True adds to an earlier result; pass it as into=.")
    with Tape(keep_history=keep_history) as tape:
        targets = [_target(arg, tape) for arg in args]
        buffers = [
            target.buffer(earlier)
            for target, earlier in zip(targets, _earlier(into, len(args)), strict=True)
        ]
        implicit = len(args) == 1 and isinstance(args[0], Params)
        result = f() if implicit else f(*(target.passed for target in targets))
        with_aux = has_aux and isinstance(result, tuple) and len(result) == 2
        loss, aux = result if with_aux else (result, None)
        sweep = _sweep(tape, loss)
        outcome = np.asarray(peek(loss)).reshape(())[()]
        results = [
            target.fill(buffer, sweep, accumulate)
            for target, buffer in zip(targets, buffers, strict=True)
        ]
        aux = value(aux)
    return (outcome, aux) if with_aux else outcome, results[0] if len(args) == 1 else tuple(results)


def _earlier(into: Any, count: int) -> tuple:
    if into is None:
        return (None,) * count
    if count == 1:
        return (into,)
    if not isinstance(into, tuple) or len(into) != count:
        raise ShapeError(
            f"gradient: into is no result of {count} arguments. Nothing was changed. Pass what an "
            "earlier call with the same arguments returned."
        )
    return into


def _sweep(tape: Tape, loss: Any) -> Sweep:
    """The finished sweep from what f returned; an empty one if that depends on nothing."""
    recorded = isinstance(loss, Param) or (isinstance(loss, Tensor) and loss.live)
    if recorded and loss.size == 1:
        return tape.sweep(loss, caller="gradient")
    plain = peek(loss)
    if not isinstance(plain, np.ndarray | np.generic | float | int):
        what = f"a {type(loss).__name__}"
    elif np.size(plain) != 1:
        what = f"an array of shape {np.shape(plain)}"
    else:
        return Sweep()
    raise TapeError(
        f"gradient: f returned {what}, expected one number. Reduce it, for example with sum; "
        "withgradient also takes (loss, aux)."
    )


class _Constant:
    """An argument that takes no gradient."""

    def __init__(self, arg: Any) -> None:
        self.passed = arg

    def buffer(self, earlier: Any) -> None:
        return None

    def fill(self, buffer: None, sweep: Sweep, accumulate: bool) -> None:
        return None


class _Leaf:
    """An array, a number or a parameter."""

    def __init__(self, arg: Any, tape: Tape) -> None:
        self.passed = arg if type(arg) is Param else tape.watch(np.asarray(peek(arg)))
        self.is_number = not isinstance(arg, np.ndarray | Tensor | Param)

    def buffer(self, earlier: Any) -> Any:
        shape, dtype = self.passed.shape, self.passed.dtype
        if earlier is not None and (
            np.shape(earlier) != shape or getattr(earlier, "dtype", dtype) != dtype
        ):
            raise ShapeError(
                f"gradient: into holds an array of shape {np.shape(earlier)}, expected {shape} "
                f"of {dtype}. Nothing was changed."
            )
        return earlier

    def fill(self, buffer: Any, sweep: Sweep, accumulate: bool) -> Any:
        if buffer is None:
            out = sweep.take(self.passed)
        else:
            out = np.array(buffer) if self.is_number else buffer
            _write(out, sweep.leaf(self.passed), accumulate)
        return out[()] if self.is_number else out


class _Tree:
    """A list, tuple or dict of arguments."""

    def __init__(self, arg: Any, tape: Tape) -> None:
        self.like = arg
        self.parts = {key: _target(part, tape) for key, part in _items(arg)}
        self.passed = self._rebuilt({key: part.passed for key, part in self.parts.items()})

    def _rebuilt(self, parts: dict[Any, Any]) -> Any:
        if isinstance(self.like, dict):
            return parts
        if hasattr(self.like, "_fields"):
            return type(self.like)(*parts.values())
        return type(self.like)(parts.values())

    def buffer(self, earlier: Any) -> dict[Any, Any]:
        given = {} if earlier is None else dict(_items(earlier))
        if earlier is not None and given.keys() != self.parts.keys():
            raise ShapeError(
                f"gradient: into holds {len(given)} parts, expected {len(self.parts)}. "
                "Nothing was changed."
            )
        return {key: part.buffer(given.get(key)) for key, part in self.parts.items()}

    def fill(self, buffer: dict[Any, Any], sweep: Sweep, accumulate: bool) -> Any:
        return self._rebuilt(
            {key: part.fill(buffer[key], sweep, accumulate) for key, part in self.parts.items()}
        )


class _Model:
    """Anything that holds parameters."""

    def __init__(self, arg: Any, weights: dict[str, Param], tape: Tape) -> None:
        self.passed = arg
        self.weights = weights
        self.tape = tape

    def buffer(self, earlier: Any) -> Gradients:
        if earlier is None:
            return Gradients(self.passed, self.weights)
        if not isinstance(earlier, Gradients):
            raise ShapeError(
                f"gradient: into is a {type(earlier).__name__}, expected what an earlier gradient "
                "of this model returned. Nothing was changed."
            )
        earlier._fit(self.passed, self.weights)
        return earlier

    def fill(self, buffer: Gradients, sweep: Sweep, accumulate: bool) -> Gradients:
        buffer._take(sweep, accumulate, self.tape.starts)
        return buffer


def _target(arg: Any, tape: Tape) -> Any:
    if type(arg) is Param or isinstance(arg, np.ndarray | Tensor | float | np.floating):
        is_integer = isinstance(arg, np.ndarray) and arg.dtype.kind != "f"
        return _Constant(arg) if is_integer else _Leaf(arg, tape)
    if isinstance(arg, int) and not isinstance(arg, bool):
        return _Leaf(float(arg), tape)
    weights = named_params(arg)
    if weights:
        return _Model(arg, weights, tape)
    return _Tree(arg, tape) if isinstance(arg, list | tuple | dict) else _Constant(arg)


def _items(tree: Any) -> list[tuple[Any, Any]]:
    return list(tree.items() if isinstance(tree, dict) else enumerate(tree))


def _write(out: np.ndarray, grad: np.ndarray | None, accumulate: bool) -> None:
    if accumulate:
        if grad is not None:
            out += grad
    else:
        out[...] = 0 if grad is None else grad


class Gradients:
    """The gradient of a model: an array for each parameter, zeros where the loss did not reach.

    ::

        g["layers.0.cell.Wh"]     by path, as `state_dict` names it
        g.layers[0].cell.Wh       by attributes and indices
        g[m.layers[0].cell.Wh]    by parameter
        g.flat                    all of them as one vector, of which the others are views

    Iterating gives the paths, in the order of `params`; `keys`, `values`, `items` and `len` are
    those of a dict.  The arrays belong to the caller, who may write into them.
    """

    def __init__(self, model: Any, weights: dict[str, Param]) -> None:
        self._name(weights)
        self._model = model
        self._again: dict[str, str] | None = None
        self.flats = [new_vector(n, dtype) for dtype, n in _sizes(weights.values()).items()]
        """One vector for each dtype, in the order in which the parameters have them."""
        self._arrays = dict(zip(weights, _views(weights.values(), self.flats), strict=True))
        self._missing: frozenset[int] = frozenset()
        self._starts: dict[int, Any] = {}

    @property
    def flat(self) -> np.ndarray:
        """All gradients as one vector (n,), in the order of `params`, rows first.

        Raises `StateError` if the parameters have several dtypes: `flats` has a vector for each.
        """
        if len(self.flats) != 1:
            raise StateError(
                f"flat: the parameters have {len(self.flats)} dtypes, expected one. Use `flats`, "
                "or convert the model with f32 or f64."
            )
        return self.flats[0]

    @flat.setter
    def flat(self, new: Any) -> None:  # `g.flat *= 2` assigns what it has changed in place
        if new is not self.flat:
            self.flat[...] = new

    def state(self, layer: Any) -> Any:
        """The gradient of the state with which `layer` entered the scope, shaped like that state.

        Exists for layers with init_grad="scope" that were not reset inside it.
        """
        found = self._starts.get(id(layer))
        if found is None:
            raise StateError(
                f"{layer!r}: there is no gradient of its starting state. It is kept for layers "
                'with init_grad="scope" that enter the scope without a reset inside it.'
            )
        return found[1]

    @property
    def _ties(self) -> dict[str, str]:
        """Where a shared parameter is met again, and its first path; found when first asked for."""
        if self._again is None:
            self._again = ties(self._model)
        return self._again

    def __getstate__(self) -> dict[str, Any]:
        return {"_weights": self._weights, "_again": self._ties, "flats": self.flats}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _model=None, _missing=frozenset(), _starts={})
        views = _views(self._weights.values(), self.flats)  # in a copy they are views, too
        self._arrays = dict(zip(self._weights, views, strict=True))
        self._name(self._weights)

    def _name(self, weights: dict[str, Param]) -> None:
        """Holds these parameters, found by path and by themselves."""
        self._weights = weights
        self._paths = {id(p): path for path, p in weights.items()}

    def _fit(self, model: Any, weights: dict[str, Param]) -> None:
        """Goes on to serve a model that has the same parameters, by path, shape and dtype."""
        old = {path: (array.shape, array.dtype) for path, array in self._arrays.items()}
        new = {path: (p.shape, p.dtype) for path, p in weights.items()}
        if old != new:
            different = sorted(p for p in old.keys() | new.keys() if old.get(p) != new.get(p))
            raise ShapeError(
                f"gradient: into does not fit the model at {', '.join(different[:5])}. Nothing was "
                "changed. Start again with into=None."
            )
        self._name(weights)
        self._model, self._again = model, None

    def _take(self, sweep: Sweep, accumulate: bool, starts: dict[int, Start]) -> None:
        stood_for = {id(p) for start in starts.values() for p in start.instead_of}
        missing = set()
        for path, p in self._weights.items():
            grad = sweep.leaf(p)
            if grad is None and id(p) in stood_for:
                missing.add(id(p))
            _write(self._arrays[path], grad, accumulate)
        self._missing = frozenset(missing)
        self._starts = {key: (start.layer, start.gradient(sweep)) for key, start in starts.items()}

    def __getitem__(self, key: Any) -> Any:
        if type(key) is Param:
            path = self._paths.get(id(key))
            if path is not None:
                return self._at(path)
            raise UnknownParameter(f"{key.name or 'this parameter'} is no parameter of the model")
        return self._find(str(key))

    def _find(self, path: str) -> Any:
        if path in self._arrays:
            return self._at(path)
        if path in self._ties:
            return self._at(self._ties[path])
        if any(known.startswith(f"{path}.") for known in (*self._arrays, *self._ties)):
            return _Branch(self, path)
        hint = ""
        if "init" in path.split("."):
            hint = " An initial state is a parameter only in a layer built with learn_init=True."
        raise UnknownParameter(
            f"{path!r} is not a parameter of the model; it has {', '.join(self._arrays)}.{hint}"
        )

    def _at(self, path: str) -> np.ndarray | None:
        return None if id(self._weights[path]) in self._missing else self._arrays[path]

    def __getattr__(self, name: str) -> Any:
        return _part(self, name, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __contains__(self, key: object) -> bool:
        if type(key) is Param:
            return id(key) in self._paths
        return key in self._arrays or key in self._ties

    def keys(self) -> list[str]:
        """The paths, in the model's order."""
        return list(self._arrays)

    def values(self) -> list[np.ndarray | None]:
        """The gradients in the order of `keys`, None where none arrived."""
        return [self._at(path) for path in self._arrays]

    def items(self) -> list[tuple[str, np.ndarray | None]]:
        """Pairs of a path and its gradient."""
        return [(path, self._at(path)) for path in self._arrays]

    def __repr__(self) -> str:
        shapes = ", ".join(f"{path}: {array.shape}" for path, array in self._arrays.items())
        return f"Gradients({shapes})"


class _Branch:
    """The gradients below one path, reached by attribute or index."""

    def __init__(self, gradients: Gradients, path: str) -> None:
        self._gradients = gradients
        self._path = path

    def __getattr__(self, name: str) -> Any:
        return _part(self._gradients, name, f"{self._path}.{name}")

    def __getitem__(self, key: Any) -> Any:
        return self._gradients._find(f"{self._path}.{key}")

    def __repr__(self) -> str:
        below = [path for path in self._gradients if path.startswith(f"{self._path}.")]
        return f"Gradients of {self._path}: {', '.join(below)}"


def _part(gradients: Gradients, name: str, path: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    try:
        return gradients._find(path)
    except KeyError as error:
        raise AttributeError(error.args[0]) from None


def _sizes(weights: Any) -> dict[np.dtype, int]:
    """How many numbers the parameters have in each dtype."""
    sizes: dict[np.dtype, int] = {}
    for p in weights:
        sizes[p.dtype] = sizes.get(p.dtype, 0) + p.size
    return sizes


def _views(weights: Any, flats: list[np.ndarray]) -> list[np.ndarray]:
    """The part of the vectors that belongs to each parameter, in its shape and memory order."""
    used = {flat.dtype: 0 for flat in flats}
    by_dtype = {flat.dtype: flat for flat in flats}
    views = []
    for p in weights:
        start = used[p.dtype]
        used[p.dtype] = stop = start + p.size
        views.append(by_dtype[p.dtype][start:stop].reshape(p.shape, order=p.order))
    return views


def flatten_parameters(model: Any) -> list[FlatBuffer]:
    """Moves the parameters of a model into one vector for each dtype, laid out like `Gradients`.

    The parameters stay the same objects with the same values; each now is a view of
    `buffer.array`, so that one operation on the vector reaches all of them::

        (flat,) = flatten_parameters(model)
        with flat.writing() as w:
            w -= 0.1 * grads.flat

    A model that lies in its vectors already is left there.  A copy, a cast or an unpickled model
    has parameters of its own.
    """
    weights = params(model)
    held = [p.flat_buffer for p in weights]
    buffers = list({id(b): b for b in held if b is not None}.values())
    if None not in held and _lies_in(weights, buffers):
        return buffers
    flats = [new_vector(n, dtype) for dtype, n in _sizes(weights).items()]
    new = {flat.dtype: FlatBuffer(flat) for flat in flats}
    for p, view in zip(weights, _views(weights, flats), strict=True):
        p.move_into(new[p.dtype], view)
    return list(new.values())


def _lies_in(weights: Params, buffers: list[FlatBuffer]) -> bool:
    """Whether the parameters fill these vectors, in their order."""
    if {b.array.dtype: b.array.size for b in buffers} != _sizes(weights):
        return False
    views = _views(weights, [b.array for b in buffers])
    return all(
        p.value.__array_interface__["data"] == (v.__array_interface__["data"][0], True)
        for p, v in zip(weights, views, strict=True)
    )
