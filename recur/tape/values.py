"""`Tensor`, and what it shares with a parameter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from recur._kernels import Recorded
from recur.errors import TapeError
from recur.tape.nodes import LEAF, Node


class Operand(Recorded):
    """What `Tensor` and `Param` share: the operators, which `recur.ops` installs here.

    `_value` must not be written, and is handed out only through `value`.
    """

    __slots__ = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each axis."""
        return self._value.shape

    @property
    def ndim(self) -> int:
        """How many axes there are."""
        return self._value.ndim

    @property
    def size(self) -> int:
        """How many numbers there are."""
        return self._value.size

    @property
    def dtype(self) -> np.dtype:
        """The type of the numbers."""
        return self._value.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of the value, without what its history holds."""
        return self._value.nbytes

    def __len__(self) -> int:
        return len(self._value)

    def __format__(self, spec: str) -> str:
        return format(value(self), spec)

    if TYPE_CHECKING:  # what recur.ops installs, for type checkers
        T: Any
        mT: Any

        def __getattr__(self, name: str) -> Any: ...
        def __getitem__(self, key: Any) -> Any: ...
        def __iter__(self) -> Iterator[Any]: ...
        def __add__(self, other: Any) -> Any: ...
        def __radd__(self, other: Any) -> Any: ...
        def __sub__(self, other: Any) -> Any: ...
        def __rsub__(self, other: Any) -> Any: ...
        def __mul__(self, other: Any) -> Any: ...
        def __rmul__(self, other: Any) -> Any: ...
        def __truediv__(self, other: Any) -> Any: ...
        def __rtruediv__(self, other: Any) -> Any: ...
        def __pow__(self, other: Any) -> Any: ...
        def __rpow__(self, other: Any) -> Any: ...
        def __matmul__(self, other: Any) -> Any: ...
        def __rmatmul__(self, other: Any) -> Any: ...
        def __neg__(self) -> Any: ...
        def __abs__(self) -> Any: ...
        def __lt__(self, other: Any) -> Any: ...
        def __le__(self, other: Any) -> Any: ...
        def __gt__(self, other: Any) -> Any: ...
        def __ge__(self, other: Any) -> Any: ...
        def __float__(self) -> float: ...
        def __int__(self) -> int: ...
        def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray: ...


class Tensor(Operand):
    """A recorded value: immutable, hashed by identity, known to the tape that recorded it.

    Arithmetic, indexing and the NumPy functions that `recur.ops` lists work on it and are
    recorded.  `recur.value(t)` is its array.  After its scope has ended it acts as that array.
    """

    __slots__ = ("__weakref__",)

    if TYPE_CHECKING:
        node: Node  # never None

    @property
    def live(self) -> bool:
        """Whether gradient can still flow back from here."""
        return self.node.tape.alive

    @property
    def grad(self) -> np.ndarray | None:
        """The gradient that `backward` left at a watched leaf; None for any other tensor."""
        return self.node.saved if self.node.op is LEAF else None

    def __repr__(self) -> str:
        return f"Tensor({np.array2string(self._value, separator=', ', prefix='Tensor(')})"

    def __setitem__(self, key: Any, new: Any) -> None:
        raise TypeError(
            "a Tensor cannot be written, its history would no longer be true. Build the new value "
            "with recur.ops.where or concatenate, or write into a copy of recur.value(t)."
        )

    def __reduce__(self) -> tuple:
        raise TapeError("a Tensor cannot be pickled: take recur.value(t) and pickle that.")

    def __copy__(self) -> Tensor:
        return self

    def __deepcopy__(self, memo: dict) -> Tensor:
        raise TapeError("a Tensor cannot be copied: it belongs to a tape. Copy recur.value(t).")


def peek(x: Any) -> Any:
    """The array behind a Tensor or a Param, not copied and not protected; anything else as it is.

    For use inside the library: the result must not be written or handed out.
    """
    return x._value if isinstance(x, Operand) else x


def value(x: Any) -> Any:
    """The plain value of a Tensor or Param: a read-only view, or a scalar if it has no axes.

    Tuples, lists and dicts are gone through; anything else comes back as it is.
    """
    if isinstance(x, Tensor):
        if x._value.ndim == 0:
            return x._value[()]
        return protected(x._value)
    if isinstance(x, Operand):
        return x._value
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*map(value, x))
    if isinstance(x, (tuple, list)):
        return type(x)(map(value, x))
    if isinstance(x, dict):
        return {k: value(v) for k, v in x.items()}
    return x


def protected(array: np.ndarray) -> np.ndarray:
    """A read-only view."""
    view = array.view()
    view.flags.writeable = False
    return view
