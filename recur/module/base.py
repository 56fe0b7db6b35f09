"""`Module`: an object whose parameters, layers and buffers can be found, named, copied, saved."""

from __future__ import annotations

import copy
import functools
import operator
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from reprlib import recursive_repr
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from recur._kernels import Version
from recur.errors import ShapeError
from recur.module.streams import Stages
from recur.tape import Operand, Param, Tensor, current, peek


class Computed(Protocol):
    """How a weight is made from the parameter that stands for it, at each use."""

    def weight(self, raw: Any) -> Any:
        """The weight, a Tensor, an array, or `raw` itself."""


class Module:
    """A layer or a model.

    Parameters are attributes of type `Param`, sub-layers are attributes too (also inside lists,
    tuples and dicts); both are found in the order in which they were first assigned.  Assigning to
    an attribute that holds a `Param` copies a plain array into it and shares a `Param`:

        cell.Wi = array     # copied; the shape must fit, the dtype is converted
        cell.Wi = other.Wi  # both layers now own one parameter

    A subclass may override `fields`, `buffers`, `running_state`, `describe`, `config`,
    `output_shape`.  Names in `transient` (caches) are left out of copies and pickles; give them a
    default on the class.  `takes_lists` says that a call takes a list of steps; containers hand the
    steps to other layers one by one.  `unsaved` says what to do instead of saving such a layer.
    """

    kind: ClassVar[str | None] = None
    version: ClassVar[int] = 1
    transient: ClassVar[frozenset[str]] = frozenset()
    positional: ClassVar[tuple[str, ...]] = ()
    takes_lists: ClassVar[bool] = False
    unsaved: ClassVar[str | None] = None
    computed_weights: Mapping[str, Computed] = MappingProxyType({})

    if not TYPE_CHECKING:  # type checkers know the attributes that there are

        def __getattr__(self, name: str) -> Any:
            if name in self.computed_weights:
                raw = self.__dict__[raw_name(name)]
                return raw if _reading.raw else self.computed_weights[name].weight(raw)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, new: Any) -> None:
        if name in self.computed_weights:
            name = raw_name(name)
            if new is None:
                raise TypeError(
                    f"{type(self).__name__}.{name} is a parameter that a weight is computed from; "
                    "it cannot be None. Nothing was changed."
                )
        if type(new) is Param:
            new.name = new.name or f"{type(self).__name__}.{name}"
        else:
            old = self.__dict__.get(name)
            if type(old) is Param and isinstance(new, _ARRAY_LIKE):
                copy_into(old, new)
                return
        object.__setattr__(self, name, new)
        self._replaced()

    def _replaced(self) -> None:
        """Lets every holder of what this layer does look again."""
        counter = self.__dict__.get("_changes")
        if counter is not None:
            counter.bump()

    def change_counter(self) -> Version:
        """A counter that moves when an attribute is assigned; writes to a Param move its own."""
        return self.__dict__.setdefault("_changes", Version())

    def _is_cache(self, name: str) -> bool:
        return name == "_changes" or name in self.transient

    def holds_param(self, name: str) -> bool:
        """Whether attribute `name` is a parameter, or computed from one."""
        stored = raw_name(name) if name in self.computed_weights else name
        return type(self.__dict__.get(stored)) is Param

    def compute_weight(self, name: str, how: Computed) -> None:
        """From now on `self.name` is computed at each use by `how.weight(raw)`.

        The parameter itself, `raw`, takes the name `<name>_raw`, in the same place.  Assigning to
        either name writes the parameter.
        """
        self._rename(name, raw_name(name), {**self.computed_weights, name: how})

    def restore_weight(self, name: str) -> None:
        """Undoes `compute_weight`: the parameter has its old name again."""
        left = {other: how for other, how in self.computed_weights.items() if other != name}
        self._rename(raw_name(name), name, left)

    def computes(self) -> list[tuple[Module, str]]:
        """The layers and weights that this layer called `compute_weight` for, and will again."""
        return []

    def _rename(self, old: str, new: str, computed: dict[str, Computed]) -> None:
        param = self.__dict__[old]
        if type(param) is Param and param.name.endswith(f".{old}"):
            param.name = param.name.removesuffix(old) + new
        held = {new if key == old else key: part for key, part in self.__dict__.items()}
        held.pop("computed_weights", None)
        if computed:
            held["computed_weights"] = computed
        object.__setattr__(self, "__dict__", held)
        self._replaced()

    def fields(self) -> list[tuple[str, Any]]:
        """What this object holds, by name, in the order in which parameters are listed."""
        hidden = self.transient
        return [x for x in attributes(self) if x[0] not in hidden and x[0] != "_changes"]

    def stages(self) -> Stages | None:
        """Kernels that do a single step outside a scope with the bits of a call, or None."""
        return None

    def buffers(self) -> dict[str, np.ndarray]:
        """This layer's arrays that are saved but not trained, by name: the arrays themselves."""
        return {}

    def load_buffers(self, new: dict[str, np.ndarray]) -> None:
        """Takes over the values of some of `buffers()`; names and shapes were checked before."""
        held = self.buffers()
        for name, array in new.items():
            held[name][...] = array

    def running_state(self) -> dict[str, np.ndarray]:
        """This layer's own recurrent state by name (`state`, `state.h`), {} at the start."""
        return {}

    def load_running_state(self, new: dict[str, np.ndarray]) -> None:
        """Goes on from a state that `running_state` gave; {} is the start."""

    def config(self) -> dict[str, Any]:
        """The constructor's arguments by name, for files; see `register`."""
        raise NotImplementedError(f"{type(self).__qualname__} defines no config().")

    @classmethod
    def from_config(cls, config: dict[str, Any], version: int) -> Module:
        """A new layer from what `config` gave in a version of the class, this one or an older.

        Arguments that `positional` names are passed by position.
        """
        others = {name: config[name] for name in config if name not in cls.positional}
        return cls(*(config[name] for name in cls.positional), **others)

    def parts(self) -> list[tuple[str, Any]]:
        """What this layer is made of, to print: each with the name to show before it, or ""."""
        return list(_parts([x for x in self.fields() if x[0] != "computed_weights"]))

    def describe(self) -> str:
        """One line: the kind of layer and its sizes, or what it is made of."""
        inside = (f"{name}={label(x)}" if name else label(x) for name, x in self.parts())
        return f"{type(self).__name__}({', '.join(inside)})"

    def output_shape(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that a call gives for inputs of these shapes; must not run the layer."""
        raise NotImplementedError(f"{type(self).__qualname__} defines no output_shape().")

    def describe_state(self) -> str | None:
        """`state: start` or `state: batch 10` for a layer that carries a state, else None."""
        return None

    def name_params(self) -> None:
        """Names this layer's own parameters after it, for error messages: `Dense(3 => 5).weight`.

        Called at the end of a constructor, when the sizes are known.  A parameter that another
        layer has named keeps that name.
        """
        title = self.describe()
        for name, child in self.fields():
            if type(child) is Param and child.name == f"{type(self).__name__}.{name}":
                child.name = f"{title}.{name}"

    @recursive_repr("...")
    def __repr__(self) -> str:
        with raw_weights():
            return self.describe()

    def __getstate__(self) -> dict[str, Any]:
        return {n: detached(x) for n, x in attributes(self) if not self._is_cache(n)}

    def __reduce_ex__(self, protocol: Any) -> Any:
        return super().__reduce_ex__(max(protocol, 2))  # the older know no compiled base class

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, child in state.items():
            object.__setattr__(self, name, child)

    def __copy__(self) -> Module:
        # A shallow copy would own the same parameters, and stepping it would move both states.
        return copy.deepcopy(self)


def raw_name(name: str) -> str:
    """The name of the parameter from which weight `name` is computed."""
    return f"{name}_raw"


class _Reading(threading.local):
    raw = False


_reading = _Reading()


@contextmanager
def raw_weights() -> Iterator[None]:
    """Inside, a computed weight reads as its parameter: for what asks for sizes only."""
    before, _reading.raw = _reading.raw, True
    try:
        yield
    finally:
        _reading.raw = before


# What `layer.name = new` copies into a Param; anything else (None, a layer, a structured matrix)
# takes the Param's place.
_ARRAY_LIKE = (np.ndarray, Operand, np.generic, int, float, list, tuple)


def copy_into(param: Param, new: Any) -> None:
    """Writes `new`, which must have the parameter's shape, into it."""
    if not isinstance(new, Operand):
        new = numeric(param.name or "Param", new)
    if np.shape(peek(new)) != param.shape:
        raise ShapeError(
            f"{param.name or 'Param'}: the new array has shape {np.shape(peek(new))}, expected "
            f"{param.shape}. Nothing was changed."
        )
    param[...] = new


def numeric(name: str, x: Any) -> np.ndarray:
    """`x` as an array of real numbers; raises ShapeError (ragged) or TypeError (not numbers)."""
    try:
        array = np.asarray(peek(x))
    except ValueError as error:
        raise ShapeError(f"{name}: not an array: {error}. Nothing was changed.") from error
    if array.dtype.kind not in "biuf":
        raise TypeError(
            f"{name}: an array of {array.dtype} was given, expected real numbers. "
            "Nothing was changed."
        )
    return array


def attributes(obj: object) -> list[tuple[str, Any]]:
    """The instance attributes of any object, then its slots, base classes first."""
    held: list[tuple[str, Any]] = list(getattr(obj, "__dict__", {}).items())
    for name in _slots_of(type(obj)):  # type: ignore[arg-type]
        try:
            held.append((name, getattr(obj, name)))
        except AttributeError:  # a slot that was never filled
            continue
    return held


@functools.lru_cache(maxsize=256)
def _slots_of(kind: type) -> tuple[str, ...]:
    """The names of a class's slots as attributes, base classes first."""
    names = []
    for cls in reversed(kind.__mro__):
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name in ("__dict__", "__weakref__"):
                continue
            if name.startswith("__") and not name.endswith("__"):
                name = f"_{cls.__name__.lstrip('_')}{name}"
            names.append(name)
    return tuple(names)


def detached(x: Any, inside: frozenset[int] = frozenset()) -> Any:
    """`x` with every Tensor in it (through tuples, lists, dicts) replaced by its array.

    What holds no Tensor comes back as the same object, so that sharing and cycles stay.
    """
    if isinstance(x, Tensor):
        return peek(x)
    if not isinstance(x, (tuple, list, dict)) or id(x) in inside:
        return x
    inside |= {id(x)}
    old = list(x.values()) if isinstance(x, dict) else x
    new = [detached(item, inside) for item in old]
    if all(a is b for a, b in zip(old, new, strict=True)):
        return x
    if isinstance(x, dict):
        return dict(zip(x, new, strict=True))
    return type(x)(*new) if hasattr(x, "_fields") else type(x)(new)


def is_active(layer: Any) -> bool:
    """Whether a random or statistics layer acts: as set by its `active`, else inside a scope."""
    active: bool | None = layer.active
    return current() is not None if active is None else active


def label(x: Any) -> str:
    """A layer or function on one line: layers by their sizes, functions by name."""
    if isinstance(x, Module):
        return repr(x)
    if x is operator.add or x is operator.mul:
        return "+" if x is operator.add else "*"
    name = getattr(x, "__name__", None)
    return name if isinstance(name, str) else repr(x)


def _parts(fields: list[tuple[str, Any]]) -> Iterator[tuple[str, Module]]:
    for name, child in fields:
        if isinstance(child, Module):
            yield name, child
        elif isinstance(child, (list, tuple, deque)):
            named = [(f"{name}[{i}]", item) for i, item in enumerate(child)]
            yield from ((n, item) for n, item in named if isinstance(item, Module))
        elif isinstance(child, (dict, MappingProxyType)):
            named = [(f"{name}[{key!r}]", item) for key, item in child.items()]
            yield from ((n, item) for n, item in named if isinstance(item, Module))
