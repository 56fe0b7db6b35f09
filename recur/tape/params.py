"""`Param`: the leaf that may be written, with the versions by which a write is noticed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np

from recur._kernels import Version
from recur.errors import ShapeError, TapeError
from recur.tape.values import Operand, Tensor, peek, protected


class FlatBuffer:
    """One array that holds many parameters, each of them a view of it.

    `count` counts the writes to the whole buffer; a write through a single Param counts there.
    """

    __slots__ = ("array", "count", "left")

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.count = Version()
        self.left = False  # whether a parameter has moved on into another buffer

    @contextmanager
    def writing(self) -> Iterator[np.ndarray]:
        """Yields the writable buffer; every parameter in it counts as changed.

        Raises `TapeError` if a parameter has moved on into another buffer: it would be missed.
        """
        if self.left:
            raise TapeError(
                "this flat buffer no longer holds all of its parameters: they were flattened "
                "again. Use the buffers that the last flatten_parameters returned."
            )
        self.count.bump()
        writes.bump()
        try:
            yield self.array
        finally:
            self.count.bump()
            writes.bump()


class _Writes:
    """A number that changes at every write to any Param, so that one look shows "nothing moved"."""

    __slots__ = ("_next", "stamp")

    def __init__(self) -> None:
        self._next = itertools.count(1).__next__
        self.stamp = 0

    def bump(self) -> None:
        # Drawn, not incremented: two threads that write at once must not leave the same stamp.
        self.stamp = self._next()


writes = _Writes()


class Param(Operand):
    """A parameter: a leaf of every graph, and the one kind of value that may be written.

    The array given is copied.  `p.value` is a read-only view; `p[...] = v`, `p += v` (`-=`, `*=`,
    `/=`) and `with p.writing() as a:` write in place and raise `p.version`, which is how a backward
    learns that a value it needs has gone, and a cell that its packed weights are stale.  `p.grad`
    is what `backward` has added up, or None.
    """

    __slots__ = ("__weakref__", "_array", "_count", "_flat", "_saved", "grad", "name", "packed")

    def __init__(self, array: Any, name: str = "", *, order: Literal["C", "F"] = "C") -> None:
        if isinstance(array, Tensor) and array.live:
            raise TapeError("Param: a recorded Tensor cannot become a parameter. Pass its value.")
        if isinstance(array, Operand):
            array = peek(array)
        try:
            # Kernels read weights row by row, tables by column.
            array = np.array(array, order=order)
        except ValueError as error:
            raise ShapeError(f"{name or 'Param'}: not an array: {error}.") from error
        if array.dtype.kind not in "biuf":
            raise TypeError(
                f"{name or 'Param'}: an array of {array.dtype} was given, expected real numbers."
            )
        if array.dtype.kind != "f":
            array = array.astype(np.float32)
        self.name = name
        self.grad: np.ndarray | None = None
        self.packed: Any = None  # what an operation keeps of the present version, for its own use
        self._count = Version()
        self._flat: FlatBuffer | None = None
        self._saved: _SavedParam | None = None
        self._hold(array)

    def _hold(self, array: np.ndarray) -> None:
        self._array = array
        self._value = protected(array)

    @property
    def value(self) -> np.ndarray:
        """The current values, read-only; the view follows later writes."""
        return self._value

    @property
    def version(self) -> int:
        """Rises at every write: the parameter's own count plus that of its flat buffer."""
        flat = self._flat
        return self._count.count if flat is None else self._count.count + flat.count.count

    @property
    def counters(self) -> tuple[Version, ...]:
        """The counters whose sum is `version`, for kernels that watch them."""
        return (self._count,) if self._flat is None else (self._count, self._flat.count)

    @property
    def flat_buffer(self) -> FlatBuffer | None:
        """The buffer that this parameter is a view of, if it was moved into one."""
        return self._flat

    @contextmanager
    def writing(self) -> Iterator[np.ndarray]:
        """Yields the writable array; the parameter counts as changed, also when the body raises."""
        self._changed()
        try:
            yield self._array
        finally:
            self._changed()

    def _changed(self) -> None:
        self._count.bump()
        writes.bump()

    def move_into(self, flat: FlatBuffer, view: np.ndarray) -> None:
        """Goes on living in `view`, a part of `flat`, which takes over the present values."""
        view[...] = self._array
        if self._flat is not None:
            self._flat.left = True
        version = self.version
        self._changed()  # whoever watches the counter that is now given up looks again
        self._count = Version(version + 1)
        self._flat = flat
        self._hold(view)

    def __setitem__(self, key: Any, new: Any) -> None:
        array = self._plain(new)
        try:
            if not isinstance(array, (int, float)):
                array = np.asarray(array)
                # NumPy would write objects and strings one by one, up to the first that it cannot.
                array = array if array.dtype.kind in "biufc" else array.astype(self.dtype)
            self._array[key] = array
        except ValueError as error:
            raise ShapeError(
                f"{self.name or 'Param'}: cannot write an array of shape {np.shape(array)} into a "
                f"parameter of shape {self.shape}: {error}. Nothing was changed."
            ) from error
        except (FloatingPointError, Warning):  # of np.errstate, once the numbers are written
            self._changed()
            raise
        self._changed()

    def _in_place(self, ufunc: np.ufunc, other: Any) -> Param:
        array = self._plain(other)
        try:
            ufunc(self._array, array, out=self._array, casting="same_kind")
        except ValueError as error:
            raise ShapeError(
                f"{self.name or 'Param'}: cannot {ufunc.__name__} an array of shape "
                f"{np.shape(array)} in place, the parameter has shape {self.shape}. "
                "Nothing was changed."
            ) from error
        except (FloatingPointError, Warning):  # of np.errstate, once the numbers are written
            self._changed()
            raise
        self._changed()
        return self

    def _plain(self, new: Any) -> Any:
        if isinstance(new, Tensor) and new.live:
            raise TapeError(
                f"{self.name or 'Param'}: a recorded Tensor cannot be written into a parameter, "
                "its history would be lost. Write recur.value(t), after the scope."
            )
        return peek(new) if isinstance(new, Operand) else new

    def __iadd__(self, other: Any) -> Param:
        return self._in_place(np.add, other)

    def __isub__(self, other: Any) -> Param:
        return self._in_place(np.subtract, other)

    def __imul__(self, other: Any) -> Param:
        return self._in_place(np.multiply, other)

    def __itruediv__(self, other: Any) -> Param:
        return self._in_place(np.true_divide, other)

    def zero_grad(self) -> None:
        """Sets `.grad` to zeros, in its own memory; leaves None as it is."""
        if self.grad is not None:
            self.grad.fill(0)

    def __repr__(self) -> str:
        return f"Param({np.array2string(self._array, separator=', ', prefix='Param(')})"

    def __copy__(self) -> Param:
        return self.like(self._array)

    def __deepcopy__(self, memo: dict) -> Param:
        memo[id(self)] = copy = self.like(self._array)
        return copy

    def __reduce__(self) -> tuple:
        return _param, (np.array(self._array, order="K"), self.name, self.order)

    def like(self, array: Any) -> Param:
        """A new parameter with these values, and with this one's name and memory layout."""
        return Param(array, self.name, order=self.order)

    @property
    def order(self) -> Literal["C", "F"]:
        """How the values lie in memory: row by row, or column by column."""
        return "C" if self._array.flags.c_contiguous else "F"

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._array.copy(order="K").__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple:
        return self._array.__dlpack_device__()


def _param(array: np.ndarray, name: str, order: Literal["C", "F"]) -> Param:
    return Param(array, name, order=order)


def traced(x: Any) -> Tensor | Param | None:
    """`x` if gradient may flow into it, else None: what belongs into `Node.inputs`."""
    if type(x) is Tensor:
        return x if x.node.tape.alive else None
    return x if type(x) is Param else None


class _SavedParam:
    """A parameter's value as nodes need it: by reference, with the version it then had.

    It refers to the counters, not to the parameter, which keeps it for the next node: no cycle.
    """

    __slots__ = ("counters", "name", "stamp", "value", "version")

    def __init__(self, param: Param) -> None:
        self.stamp = writes.stamp  # read first: a write from here on makes it stale
        self.value = param._value
        self.counters = param.counters
        self.version = param.version
        self.name = param.name


def save(x: Any) -> Any:
    """What a node keeps of an input whose value its backward needs; `restore` gives it back.

    Tensors never change, so their array is kept.  A parameter is kept by reference with its
    version.  A plain array belongs to the caller, who may write into it: it is copied.
    """
    if type(x) is Tensor:
        return x._value
    if type(x) is Param:
        held = x._saved
        if held is None or held.stamp != writes.stamp:
            held = x._saved = _SavedParam(x)
        return held
    if type(x) is float or type(x) is int:
        return x  # a Python number adapts to the other operand's dtype, an array would not
    return np.array(x, order="K")


def restore(saved: Any) -> np.ndarray:
    """The value that `save` kept; raises `TapeError` if the parameter was written meanwhile."""
    if type(saved) is not _SavedParam:
        return saved
    if saved.stamp != writes.stamp and sum(c.count for c in saved.counters) != saved.version:
        raise _written_since(saved.name)
    return saved.value


def check_version(param: Param, version: int) -> None:
    """Raises `TapeError` if `param` was written since it had `version`."""
    if param.version != version:
        raise _written_since(param.name)


def _written_since(name: str) -> TapeError:
    return TapeError(
        f"backward needs the value that {name or 'a parameter'} had when it was used, and it has "
        "been written since. Call backward before the write, or cut the history with "
        "truncate(model) or reset(model) after it."
    )
