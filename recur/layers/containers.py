"""Models made of layers: `Chain`, `Parallel`, `SkipConnection`."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from recur._kernels import layer_call
from recur.errors import ShapeError, StateError
from recur.layers.dense import stepped_activation
from recur.module import (
    Live,
    Module,
    Stages,
    in_transaction,
    joint_stepper,
    register,
    shape_after,
    transaction,
)
from recur.tape import current

# What a call may say about the steps of a sequence; only recurrent layers make use of it.
STEP_OPTIONS = frozenset({"lengths", "mask", "truncate_every", "remat"})

Shape = tuple[int, ...]


class Container(Module):
    """A layer made of layers, held in a tuple, or in a dict by name.

    A call that raises leaves the states of all layers as they were.  `lengths=`, `mask=`,
    `truncate_every=` and `remat=` reach every layer that takes them.
    """

    takes_lists = True
    layers: tuple[Any, ...] | dict[str, Any]

    def __call__(self, *xs: Any, **options: Any) -> Any:
        if options:
            self._check(options)
        with transaction():
            return self.run(xs, options)

    def run(self, xs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """What a call on the inputs `xs` gives; if it raises, the call undoes what layers changed.

        options  those of `lengths=`, `mask=`, `truncate_every=`, `remat=` that were given
        """
        raise NotImplementedError

    def hold(self, layers: Sequence[Any], named: dict[str, Any]) -> None:
        """Sets `layers` from a constructor's arguments."""
        kind = type(self).__name__
        if layers and named:
            raise TypeError(f"{kind}: give layers either by position or by name, not both.")
        self.layers = named or tuple(layers)
        for name, layer in self.items():
            if not callable(layer):
                raise TypeError(f"{kind}: layer {name} is {layer!r}, expected a layer or function.")

    def items(self) -> list[tuple[str, Any]]:
        """The layers with their names, or positions."""
        if isinstance(self.layers, dict):
            return list(self.layers.items())
        return [(str(i), layer) for i, layer in enumerate(self.layers)]

    def values(self) -> list[Any]:
        """The layers."""
        return list(self.layers.values() if isinstance(self.layers, dict) else self.layers)

    def accepts(self) -> frozenset[str]:
        """Which options any of the layers takes."""
        return frozenset().union(*map(accepted, self.values()))

    def _check(self, options: dict[str, Any]) -> None:
        stray = sorted(set(options) - self.accepts())
        if stray:
            raise TypeError(f"{self!r}: no layer takes {', '.join(stray)}=. Nothing was changed.")

    def parts(self) -> list[tuple[str, Any]]:
        if isinstance(self.layers, dict):
            return list(self.layers.items())
        return [("", layer) for layer in self.layers]

    def __len__(self) -> int:
        return len(self.layers)

    def __bool__(self) -> bool:
        return True  # a model without layers is still a model

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())

    def __getitem__(self, place: int | str | slice) -> Any:
        """One layer by position or name; for a slice a container that shares its layers."""
        if isinstance(place, str):
            if isinstance(self.layers, dict) and place in self.layers:
                return self.layers[place]
            raise KeyError(f"{type(self).__name__}: no layer is named {place!r}.")
        if not isinstance(place, slice):
            return self.values()[place]
        if isinstance(self.layers, dict):
            return self.part(named=dict(self.items()[place]))
        return self.part(*self.layers[place])

    def part(self, *layers: Any, named: dict[str, Any] | None = None) -> Container:
        """A container of the same kind with other layers."""
        return type(self)(*layers, **(named or {}))

    def config(self) -> dict[str, Any]:
        return {"layers": self.layers}


def accepted(layer: Any) -> frozenset[str]:
    """Which step options a call of `layer` takes; functions take none.

    A layer that wraps others may say so by a method `accepts()`; else its signature tells.
    """
    if not isinstance(layer, Module):
        return frozenset()
    if hasattr(layer, "accepts"):
        return layer.accepts()
    return _accepted(type(layer).__call__)


@functools.cache
def _accepted(call: Callable[..., Any]) -> frozenset[str]:
    return STEP_OPTIONS & inspect.signature(call).parameters.keys()


def call_layer(layer: Any, xs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Calls a layer with what it takes of `options`; a list goes to a function step by step."""
    if options:
        taken = accepted(layer)
        options = {name: option for name, option in options.items() if name in taken}
    if len(xs) == 1 and type(xs[0]) is list and not getattr(layer, "takes_lists", False):
        return [layer(step) for step in xs[0]]
    return layer(*xs, **options)


def stages_of(layer: Any) -> Stages | None:
    """What does single steps of a layer or function outside a scope: see `Module.stages`."""
    if isinstance(layer, Module):
        return layer.stages()
    act = stepped_activation(layer)
    return None if act is None else Stages(act)


def connect(connection: Callable[..., Any], ys: Sequence[Any], listed: bool) -> Any:
    """`connection(*ys)`; for lists of steps, a list of what it gives step by step."""
    if listed:
        return [connect(connection, step, False) for step in zip(*ys, strict=True)]
    if connection is tuple:
        return tuple(ys)
    if connection is operator.add or connection is operator.mul or isinstance(connection, np.ufunc):
        return functools.reduce(connection, ys)
    return connection(*ys)


_SYMBOLS = {"+": operator.add, "*": operator.mul}


def connection_of(kind: str, connection: Any) -> Callable[..., Any]:
    """The function that a constructor's `connection` stands for; "+" and "*" are taken too."""
    found = _SYMBOLS.get(connection) if isinstance(connection, str) else connection
    if not callable(found):
        raise TypeError(f"{kind}: the connection is {connection!r}, expected a function or '+'.")
    return found


def connected_shape(connection: Callable[..., Any], shapes: Sequence[Shape]) -> Any:
    """The shape of `connection(*ys)` for ys of these shapes; for `tuple` the shapes themselves."""
    if connection is tuple:
        return tuple(shapes)
    zeros = [np.zeros(shape, np.float32) for shape in shapes]
    return np.shape(connect(connection, zeros, False))


@register("Chain")
class Chain(Live, Container):
    """Layers one after the other: `Chain(f, g)(x)` is `g(f(x))`.

    Layers are given by position, as one list, or by name (`Chain(encoder=f, head=g)`); any function
    of one array may stand among them.  `m[0]`, `m[-1]`, `m["head"]` are layers, `m[1:]` is a Chain
    that shares them.

    x is one step, a sequence (F, B, T), or a list of steps, which gives a list of outputs.  Both
    run layer by layer and equal step by step; functions get the steps of a list one at a time.
    Several inputs go to the first layer.  Raises what its layers raise, with all states as they
    were, and `TypeError` for an option that no layer takes.

    Outside a scope single steps of recurrent and dense layers in a row run in one call of compiled
    code, which holds the layers' states meanwhile.
    """

    transient: ClassVar[frozenset[str]] = frozenset({"_met"})
    _met: tuple[Any, ...] | None = None  # the kernels of the last call

    def __init__(self, *layers: Any, **named: Any) -> None:
        if len(layers) == 1 and isinstance(layers[0], (list, tuple)):
            layers = tuple(layers[0])
        self.hold(layers, named)

    @layer_call
    def __call__(self, *xs: Any, **options: Any) -> Any:
        single = len(xs) == 1 and not options and current() is None and not in_transaction()
        live = self._live
        if live is not None:
            if live.stepping:
                raise StateError(
                    "Chain: this model is inside a call already, of another thread; two calls at "
                    "once would mix up its states. Give each thread a copy: copy.deepcopy(model)."
                )
            y = live(xs[0]) if single else None
            if y is not None:
                return y
        y = super().__call__(*xs, **options)
        if single and type(xs[0]) is np.ndarray and xs[0].ndim < 3:
            self._go_live()
        return y

    def _go_live(self) -> None:
        """Hands the layers' states to a stepper once two calls in a row have met its kernels."""
        stages = self.stages()
        if stages is None or not stages.fit():
            kernels = stepper = None
        elif stages.kernels != self._met:
            kernels, stepper = stages.kernels, None
        else:
            kernels, stepper = self._met, joint_stepper(stages, self._live)
            if self.stages() != stages:  # written meanwhile, before the stepper began to watch
                stepper = None
        object.__setattr__(self, "_met", kernels)
        object.__setattr__(self, "_live", stepper)

    def stages(self) -> Stages | None:
        if type(self) is not Chain or not isinstance(self.layers, (tuple, dict)):
            return None
        parts = []
        for layer in self.values():
            part = stages_of(layer)
            if part is None:
                return None
            parts.append(part)
        named = ((self.layers, self.values()),) if isinstance(self.layers, dict) else ()
        return Stages.joined([*parts, Stages(counters=(self.change_counter(),), named=named)])

    def run(self, xs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        for layer in self.values():
            xs = (call_layer(layer, xs, options),)
        return xs[0]

    def output_shape(self, *shapes: Shape) -> Shape:
        for layer in self.values():
            found: Any = shape_after(layer, *shapes)
            shapes = found if found and isinstance(found[0], tuple) else (found,)
        return shapes[0]

    @classmethod
    def from_config(cls, config: dict[str, Any], version: int) -> Chain:
        layers = config["layers"]
        return cls(**layers) if isinstance(layers, dict) else cls(*layers)


class Connected(Container):
    """A container that joins results by a `connection`."""

    connection: Callable[..., Any]

    def parts(self) -> list[tuple[str, Any]]:
        return [("", self.connection), *super().parts()]

    def fields(self) -> list[tuple[str, Any]]:
        return [("connection", self.connection), ("layers", self.layers)]

    def config(self) -> dict[str, Any]:
        return {"connection": self.connection, "layers": self.layers}


@register("Parallel")
class Parallel(Connected):
    """connection(f(x), g(x), …), or with several inputs connection(f(x), g(y), …).

    `Parallel(connection, f, g)` or `Parallel(connection, one=f, two=g)`.  The inputs are one array,
    one for each layer, or a tuple of one for each layer.  `connection` gets the results as
    arguments: `vcat`, `tuple`, "+" and "*" (of any number), or any function.  A list of steps goes
    through each layer and gives a list.  Slices and names as in `Chain`.

    Raises `ShapeError` if several inputs are not as many as the layers.
    """

    def __init__(self, connection: Any, /, *layers: Any, **named: Any) -> None:
        self.connection = connection_of("Parallel", connection)
        self.hold(layers, named)

    def run(self, xs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if len(xs) == 1 and isinstance(xs[0], tuple):
            xs = xs[0]
        layers = self.values()
        if len(xs) == 1:
            xs *= len(layers)
        elif len(xs) != len(layers):
            raise ShapeError(
                f"{self!r}: {len(xs)} inputs for {len(layers)} layers; give one for all, or one "
                "for each. Nothing was changed."
            )
        ys = [call_layer(f, (x,), options) for f, x in zip(layers, xs, strict=True)]
        return connect(self.connection, ys, any(type(x) is list for x in xs))

    def part(self, *layers: Any, named: dict[str, Any] | None = None) -> Parallel:
        return Parallel(self.connection, *layers, **(named or {}))

    def output_shape(self, *shapes: Shape) -> Any:
        layers = self.values()
        shapes = shapes * len(layers) if len(shapes) == 1 else shapes
        found = [shape_after(f, shape) for f, shape in zip(layers, shapes, strict=True)]
        return connected_shape(self.connection, found)

    @classmethod
    def from_config(cls, config: dict[str, Any], version: int) -> Parallel:
        layers = config["layers"]
        if isinstance(layers, dict):
            return cls(config["connection"], **layers)
        return cls(config["connection"], *layers)


@register("SkipConnection")
class SkipConnection(Connected):
    """connection(f(x), x).  `SkipConnection(f, "+")` adds the input to the result."""

    def __init__(self, layer: Any, connection: Any = "+", /) -> None:
        self.connection = connection_of("SkipConnection", connection)
        self.hold((layer,), {})

    def run(self, xs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        (x,) = xs
        (layer,) = self.values()
        y = call_layer(layer, xs, options)
        return connect(self.connection, (y, x), type(x) is list)

    def parts(self) -> list[tuple[str, Any]]:
        return [("", self.values()[0]), ("", self.connection)]

    def output_shape(self, *shapes: Shape) -> Shape:
        (shape,) = shapes
        return connected_shape(self.connection, [shape_after(self.values()[0], shape), shape])

    @classmethod
    def from_config(cls, config: dict[str, Any], version: int) -> SkipConnection:
        (layer,) = config["layers"]
        return cls(layer, config["connection"])
