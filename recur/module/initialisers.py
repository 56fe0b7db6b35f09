"""Random generators, and the functions that fill new weights.

An initialiser is called as `init(*dims, rng=generator)`; dims are (rows out, columns in).  Called
without dims it remembers its options: `glorot_uniform(gain=2)`.  A user's own may leave `rng` out.
"""

from __future__ import annotations

import functools
import inspect
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from recur.errors import FormatError, ShapeError
from recur.tape import Param

Initialiser = Callable[..., Any]


class _Library(threading.local):
    """What a thread draws from instead of the library's generator, and how much it may allocate."""

    stand_in: np.random.Generator | None = None
    budget: int | None = None


_local = _Library()
_lock = threading.Lock()
_generator = np.random.default_rng()


def seed(n: int | None) -> None:
    """Starts recur's own generator afresh; NumPy's global state is never used."""
    global _generator
    with _lock:
        _generator = np.random.default_rng(n)


def generator(rng: np.random.Generator | None = None) -> np.random.Generator:
    """`rng`, or recur's own generator if it is None."""
    if rng is None:
        return _local.stand_in or _generator
    if not isinstance(rng, np.random.Generator):
        raise TypeError(
            f"rng is a {type(rng).__name__}, expected a numpy.random.Generator: "
            "pass numpy.random.default_rng(seed)."
        )
    return rng


def child_generator(rng: np.random.Generator | None = None) -> np.random.Generator:
    """A generator of its own for a random layer, spawned from `rng` or from recur's own."""
    parent = generator(rng)
    with _lock:
        try:
            return parent.spawn(1)[0]
        except TypeError:  # its bit generator was not made from a seed sequence
            return np.random.default_rng(parent.integers(1 << 63, size=4))


@contextmanager
def rebuilding(budget: int | None) -> Iterator[None]:
    """Inside, layers are made only to be filled from a file.

    They draw nothing from recur's generator, and their weights may take up `budget` bytes in all.
    """
    before = _local.stand_in, _local.budget
    _local.stand_in, _local.budget = np.random.default_rng(0), budget
    try:
        yield
    finally:
        _local.stand_in, _local.budget = before


def new_param(
    name: str,
    init: Initialiser,
    dims: tuple[int, ...],
    *,
    rng: np.random.Generator | None = None,
    dtype: Any = np.float32,
) -> Param:
    """A new parameter of shape `dims`, filled by `init` and converted to `dtype`.

    Raises `TypeError` if `init` cannot be called, `ShapeError` if it gives another shape.
    """
    if not callable(init):
        raise TypeError(
            f"{name}: the initialiser is a {type(init).__name__}, expected a function such as "
            "recur.glorot_uniform. Assign an array to the layer once it is made."
        )
    dtype = floating(name, dtype)
    charge(name, dims, dtype)
    random = {"rng": generator(rng)} if _takes_rng(init) else {}
    array = np.asarray(init(*dims, **random))
    if array.shape != dims:
        raise ShapeError(f"{name}: the initialiser gave shape {array.shape}, expected {dims}.")
    return Param(array.astype(dtype), name)


def floating(name: str, dtype: Any) -> np.dtype:
    """`dtype` as float32 or float64; raises `TypeError` for any other."""
    found = np.dtype(dtype)
    if found not in (np.float32, np.float64):
        raise TypeError(f"{name}: dtype {found} is not supported, expected float32 or float64.")
    return found


def charge(name: str, dims: tuple[int, ...], dtype: np.dtype) -> None:
    """Takes an array about to be made off what a file's model may take up; see `rebuilding`.

    Raises `FormatError` if that is not enough.
    """
    if _local.budget is None:
        return
    _local.budget -= math.prod(dims) * dtype.itemsize
    if _local.budget < 0:
        raise FormatError(f"{name}: the description asks for more memory than its file holds.")


def _takes_rng(init: Initialiser) -> bool:
    try:
        parameters = inspect.signature(init).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.name == "rng" or p.kind is p.VAR_KEYWORD for p in parameters)


def _fan(dims: tuple[int, ...]) -> tuple[int, int]:
    """(in, out) of a weight; further leading axes multiply both."""
    if len(dims) < 2:
        return 1, dims[0] if dims else 1
    rest = math.prod(dims[:-2])
    return rest * dims[-1], rest * dims[-2]


def _curried(function: Initialiser) -> Initialiser:
    """Lets an initialiser be called without dims, to set its options."""

    @functools.wraps(function)
    def init(*dims: int, **options: Any) -> Any:
        return function(*dims, **options) if dims else functools.partial(init, **options)

    return init


@_curried
def glorot_uniform(*dims: int, rng: np.random.Generator | None = None, gain: float = 1) -> Any:
    """Uniform on ±gain·√(6 / (in + out)) (Glorot and Bengio 2010)."""
    bound = gain * math.sqrt(6 / sum(_fan(dims)))
    return generator(rng).uniform(-bound, bound, dims)


@_curried
def glorot_normal(*dims: int, rng: np.random.Generator | None = None, gain: float = 1) -> Any:
    """Normal with standard deviation gain·√(2 / (in + out)) (Glorot and Bengio 2010)."""
    return generator(rng).normal(0, gain * math.sqrt(2 / sum(_fan(dims))), dims)


@_curried
def kaiming_uniform(
    *dims: int, rng: np.random.Generator | None = None, gain: float = math.sqrt(2)
) -> Any:
    """Uniform on ±gain·√(3 / in) (He et al. 2015)."""
    bound = gain * math.sqrt(3 / _fan(dims)[0])
    return generator(rng).uniform(-bound, bound, dims)


@_curried
def kaiming_normal(
    *dims: int, rng: np.random.Generator | None = None, gain: float = math.sqrt(2)
) -> Any:
    """Normal with standard deviation gain / √in (He et al. 2015)."""
    return generator(rng).normal(0, gain / math.sqrt(_fan(dims)[0]), dims)


@_curried
def truncated_normal(
    *dims: int,
    rng: np.random.Generator | None = None,
    mean: float = 0,
    std: float = 1,
    lo: float = -2,
    hi: float = 2,
) -> Any:
    """Normal, given that it lies between `lo` and `hi`."""
    from scipy.special import ndtr, ndtri

    low, high = ndtr((lo - mean) / std), ndtr((hi - mean) / std)
    return np.clip(mean + std * ndtri(generator(rng).uniform(low, high, dims)), lo, hi)


@_curried
def normal(*dims: int, rng: np.random.Generator | None = None, std: float = 1) -> Any:
    """Normal with mean 0."""
    return generator(rng).normal(0, std, dims)


@_curried
def orthogonal(*dims: int, rng: np.random.Generator | None = None, gain: float = 1) -> Any:
    """gain times a uniformly drawn matrix with orthonormal rows or columns (Saxe et al. 2014)."""
    rows, columns = math.prod(dims[:-1]), dims[-1]
    draw = generator(rng).normal(size=(max(rows, columns), min(rows, columns)))
    q, r = np.linalg.qr(draw)
    q *= np.sign(np.diag(r))  # else the draw would not be uniform
    return gain * (q if rows >= columns else q.T).reshape(dims)


@_curried
def identity_init(*dims: int, gain: float = 1) -> Any:
    """gain on the diagonal of a matrix, zeros elsewhere and for a vector."""
    return gain * np.eye(*dims) if len(dims) == 2 else np.zeros(dims)


def zeros(*dims: int) -> np.ndarray:
    """All 0."""
    return np.zeros(dims)


def ones(*dims: int) -> np.ndarray:
    """All 1."""
    return np.ones(dims)
