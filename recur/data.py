"""Data for training: windows of long streams, batches, padded sequences, one-hot columns.

Time and samples lie on the last axes, as everywhere: a sample is (F,), a batch (F, B), a sequence
(F, B, T).  Nothing that is handed out shares memory with the data it came from, except `chunk`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from recur.errors import ShapeError, StateError
from recur.module import child_generator
from recur.tape import peek

__all__ = [
    "DataLoader",
    "Windows",
    "batch",
    "batchseq",
    "chunk",
    "mask_of",
    "onecold",
    "onehot",
    "onehotbatch",
    "padded",
    "rpad_constant",
    "unbatch",
    "unsqueeze",
    "unstack",
    "windows",
]


def windows(
    data: Any,
    *,
    batch: int,
    steps: int,
    next_step: bool = False,
    partial: bool = True,
) -> Windows:
    """A long stream as `batch` parallel streams, cut in consecutive windows of `steps` steps.

    Stream b is a stretch of N // batch elements, and each window goes on where the one before
    ended: the state that a recurrent layer carries over means something.  What is left at the end
    of the data (fewer than `batch` elements) is not used.

    data       (N,), which gives windows (B, T), or (F, N), which gives (F, B, T) laid out as
               kernels read them; or a tuple of such arrays of one length N, which gives tuples
    next_step  gives pairs (x, y), y being x one step later: each element is predicted from those
               before.  Only for a single array
    partial    False drops the last window if it is shorter than `steps`

    Raises `ShapeError` if the data is shorter than one element a stream.
    """
    return Windows(data, batch, steps, next_step, partial)


class Windows:
    """What `windows` makes: iterate over it once for an epoch.

    A loop that was left early is continued by the next one; `restart()` goes back.  `state_dict`
    holds the place, so that a stopped run can go on from it.
    """

    def __init__(
        self, data: Any, batch: int, steps: int, next_step: bool = False, partial: bool = True
    ) -> None:
        self._is_tuple = isinstance(data, tuple)
        arrays = [_stream(a) for a in (data if self._is_tuple else (data,))]
        if next_step and self._is_tuple:
            raise TypeError("windows: next_step is for one array; a tuple already has its targets.")
        sizes = [a.shape[-1] for a in arrays]
        if len(set(sizes)) != 1:
            raise ShapeError(f"windows: the arrays have {sizes} elements, expected one length.")
        _check_count("windows", "batch", batch)
        _check_count("windows", "steps", steps)
        self.batch, self.steps = batch, steps
        #: Elements of each stream that are read as x.
        self.length = (sizes[0] - next_step) // batch
        if self.length < 1 or (self.length < steps and not partial):
            raise ShapeError(
                f"windows: {sizes[0]} elements are too few for {batch} streams of windows of "
                f"{steps} steps. Use a smaller batch, or fewer steps."
            )
        self._arrays = arrays
        self._next_step = next_step
        self._count = self.length // steps + (partial and self.length % steps > 0)
        self.position = 0
        self.epoch = 0

    def __len__(self) -> int:
        """Windows in an epoch."""
        return self._count

    def __iter__(self) -> Iterator[Any]:
        while self.position < self._count:
            self.position += 1  # the window is delivered: a run that stops in it goes on behind it
            yield self[self.position - 1]
        self.position = 0
        self.epoch += 1

    def __getitem__(self, i: int) -> Any:
        """Window number i."""
        if not -self._count <= i < self._count:
            raise IndexError(f"windows: there is no window {i}, only {self._count}.")
        start = i % self._count * self.steps
        stop = min(start + self.steps, self.length)
        found = [self._window(a, start, stop) for a in self._arrays]
        if self._next_step:
            return found[0], self._window(self._arrays[0], start + 1, stop + 1)
        return tuple(found) if self._is_tuple else found[0]

    def _window(self, array: np.ndarray, start: int, stop: int) -> np.ndarray:
        places = np.arange(self.batch) * self.length + np.arange(start, stop)[:, None]
        # (T, B) places of a (N, F) array: (T, B, F) in memory, (F, B, T) by axes.
        return np.take(array.T, places, axis=0).T

    def restart(self) -> None:
        """Goes back to the first window."""
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        """The place among the windows, for checkpoints: `load_state_dict` goes on from it."""
        return {**self._make(), "position": self.position, "epoch": self.epoch}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Goes on from a saved place.  Raises `StateError` for windows of another make."""
        for name, mine in self._make().items():
            if int(saved[name]) != mine:
                raise StateError(
                    f"windows: the saved place has {name} {int(saved[name])}, this one {mine}. "
                    "Nothing was changed. Lay the same data out in the same way."
                )
        self.position, self.epoch = int(saved["position"]), int(saved["epoch"])

    def _make(self) -> dict[str, int]:
        return {"batch": self.batch, "steps": self.steps, "length": self.length}

    def __repr__(self) -> str:
        return (
            f"Windows({self._count} of {self.steps} steps, batch {self.batch}, "
            f"at {self.position} of epoch {self.epoch})"
        )


def _stream(data: Any) -> np.ndarray:
    if isinstance(data, (str, bytes)):
        raise TypeError(
            f"windows: the data is {type(data).__name__}. Turn it into numbers first, for example "
            "[alphabet.index(c) for c in text]."
        )
    array = np.asarray(peek(data))
    if array.ndim not in (1, 2):
        raise ShapeError(
            f"windows: the data has shape {array.shape}, expected one stream: (N,) or (F, N)."
        )
    return array


def _check_count(name: str, what: str, n: Any) -> None:
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1:
        raise ValueError(f"{name}: {what} is {n!r}, expected a whole number of at least 1.")


class DataLoader:
    """Batches of samples; each loop over it is an epoch.

    data       an array, samples on its last axis; a list or another sequence of samples; a tuple,
               named tuple or dict of these, which gives tuples or dicts
    batchsize  samples in a batch; None or a negative number gives the samples themselves
    shuffle    takes the samples in a new order in each epoch
    partial    False drops the last batch if it is smaller
    collate    what makes a batch: None indexes the data; False gives a list of samples; True stacks
               them on a new last axis, as `batch` does; a function gets the list
    rng        what shuffles; by default a generator of its own, spawned from recur's

    `state_dict` holds the place in the epoch and in the generator: a loop after `load_state_dict`
    gives the batches that were still to come.
    """

    def __init__(
        self,
        data: Any,
        *,
        batchsize: int | None = 1,
        shuffle: bool = False,
        partial: bool = True,
        collate: bool | Callable[[list[Any]], Any] | None = None,
        rng: np.random.Generator | None = None,
    ) -> None:
        self.data = data
        if batchsize is not None and batchsize >= 0:
            _check_count("DataLoader", "batchsize", batchsize)
        else:
            batchsize = None
        self.batchsize, self.shuffle, self.partial = batchsize, shuffle, partial
        self._collate = batch if collate is True else collate
        self.generator = child_generator() if rng is None else rng
        self._samples = _samples_in(data)
        self.position = 0
        self.epoch = 0
        self._start = self.generator.bit_generator.state
        self._resume = False

    def __len__(self) -> int:
        """Batches in an epoch."""
        if self.batchsize is None:
            return self._samples
        full, rest = divmod(self._samples, self.batchsize)
        return full + (self.partial and rest > 0)

    def __iter__(self) -> Iterator[Any]:
        if self._resume:
            self._resume = False
            self.generator.bit_generator.state = self._start
        else:
            self.position = 0
            self._start = self.generator.bit_generator.state
        order = np.arange(self._samples)
        if self.shuffle:
            self.generator.shuffle(order)
        while self.position < len(self):
            self.position += 1
            yield self._batch(order, self.position - 1)
        self.position = 0
        self.epoch += 1
        self._start = self.generator.bit_generator.state

    def _batch(self, order: np.ndarray, i: int) -> Any:
        if self.batchsize is None:
            return _take(self.data, int(order[i]))
        places = order[i * self.batchsize : (i + 1) * self.batchsize]
        if self._collate is None:
            return _take(self.data, places)
        samples = [_take(self.data, int(place)) for place in places]
        return samples if self._collate is False else self._collate(samples)

    def state_dict(self) -> dict[str, Any]:
        """The place in the epoch, and the generator that its order is drawn from."""
        return {
            "samples": self._samples,
            "position": self.position,
            "epoch": self.epoch,
            "generator": dict(self._start),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Goes on from a saved place.

        Raises `StateError` if there were other samples or another kind of generator.
        """
        mine = self.generator.bit_generator.state["bit_generator"]
        if int(saved["samples"]) != self._samples or saved["generator"]["bit_generator"] != mine:
            raise StateError(
                f"DataLoader: the saved place is in {saved['samples']} samples, shuffled by "
                f"{saved['generator']['bit_generator']}; here are {self._samples} and a {mine}. "
                "Nothing was changed."
            )
        self.position, self.epoch = int(saved["position"]), int(saved["epoch"])
        self._start = dict(saved["generator"])
        self.generator.bit_generator.state = self._start
        self._resume = True

    def __repr__(self) -> str:
        size = "single samples" if self.batchsize is None else f"batches of {self.batchsize}"
        return f"DataLoader({self._samples} samples, {size}{', shuffled' if self.shuffle else ''})"


def _samples_in(data: Any) -> int:
    """The number of samples, the same in every part."""
    if isinstance(data, (tuple, Mapping)):
        parts = list(data.values() if isinstance(data, Mapping) else data)
        counts = [_samples_in(part) for part in parts]
        if not counts or len(set(counts)) != 1:
            raise ShapeError(
                f"DataLoader: the parts hold {counts} samples, expected one number. Samples lie on "
                "the last axis of an array."
            )
        return counts[0]
    if isinstance(data, np.ndarray):
        if data.ndim == 0:
            raise ShapeError("DataLoader: the data has no axes, expected samples on the last one.")
        return data.shape[-1]
    return len(data)


def _take(data: Any, places: int | np.ndarray) -> Any:
    """One sample, or the samples at several places."""
    if isinstance(data, Mapping):
        return {key: _take(part, places) for key, part in data.items()}
    if isinstance(data, tuple):
        parts = (_take(part, places) for part in data)
        return type(data)(*parts) if hasattr(data, "_fields") else tuple(parts)
    if isinstance(data, np.ndarray):
        return np.take(data.T, places, axis=0).T
    return data[places] if isinstance(places, int) else [data[int(i)] for i in places]


def batch(samples: Sequence[Any]) -> Any:
    """Samples as one batch: arrays stacked on a new last axis, numbers as an array.

    Tuples and dicts are gone through.  Raises `ShapeError` if the samples differ in shape or form.
    """
    if not len(samples):
        raise ShapeError("batch: there are no samples.")
    first = samples[0]
    if isinstance(first, Mapping):
        _check_alike([isinstance(s, Mapping) and s.keys() == first.keys() for s in samples])
        return {key: batch([s[key] for s in samples]) for key in first}
    if isinstance(first, tuple):
        _check_alike([isinstance(s, tuple) and len(s) == len(first) for s in samples])
        parts = [batch(part) for part in zip(*samples, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    arrays = [np.asarray(peek(s)) for s in samples]
    _check_alike([a.shape == arrays[0].shape for a in arrays])
    return np.array([a.T for a in arrays]).T


def _check_alike(alike: list[bool]) -> None:
    if not all(alike):
        raise ShapeError(
            f"batch: sample {alike.index(False)} differs from sample 0 in shape or form. Sequences "
            "of several lengths go through batchseq or padded."
        )


def unbatch(array: Any) -> list[np.ndarray]:
    """The samples of a batch: copies along the last axis, the inverse of `batch`."""
    return unstack(array, dims=-1)


def unstack(array: Any, *, dims: int) -> list[np.ndarray]:
    """Copies of the slices along axis `dims`."""
    return [np.array(part) for part in np.moveaxis(np.asarray(peek(array)), dims, 0)]


def unsqueeze(array: Any, *, dims: int) -> np.ndarray:
    """The array with a new axis of size 1 at `dims`."""
    return np.expand_dims(peek(array), dims)


def chunk(x: Any, n: int | None = None, *, size: Any = None, dims: int = -1) -> list[Any]:
    """x cut in `n` parts, or in parts of `size` elements; the last may be smaller.

    x     an array, cut along axis `dims` into views of it; or any other sequence, cut by slices
    size  a number, or a list of sizes that add up to the length

    Raises `ValueError` unless one of n and size is given, or if the sizes do not add up.
    """
    if (n is None) == (size is None):
        raise ValueError("chunk: give the number of parts n, or their size=, and not both.")
    if isinstance(x, np.ndarray):
        length = x.shape[dims]
    else:
        length = len(x)
    if n is not None:
        _check_count("chunk", "n", n)
        size = max(-(-length // n), 1)
    if isinstance(size, (int, np.integer)):
        _check_count("chunk", "size", size)
        ends = [*range(0, length, size), length]
    else:
        ends = [0, *np.cumsum(size).tolist()]
        if ends[-1] != length or min(size, default=0) < 0:
            raise ValueError(f"chunk: the sizes add up to {ends[-1]}, expected {length}.")
    slices = [slice(a, b) for a, b in pairwise(ends)]
    if isinstance(x, np.ndarray):
        return [np.moveaxis(np.moveaxis(x, dims, 0)[s], 0, dims) for s in slices]
    return [x[s] for s in slices]


def rpad_constant(x: Any, n: int | Sequence[int], val: float = 0, *, dims: Any = None) -> Any:
    """x with `val` appended until its axes have at least `n` elements.

    n     one number, or one for each axis of `dims`
    dims  an axis or several, by default all
    """
    array = np.asarray(peek(x))
    axes = range(array.ndim) if dims is None else [dims] if isinstance(dims, int) else list(dims)
    sizes = [n] * len(axes) if isinstance(n, (int, np.integer)) else list(n)
    widths = [(0, 0)] * array.ndim
    for axis, wanted in zip(axes, sizes, strict=True):
        widths[axis] = (0, max(int(wanted) - array.shape[axis], 0))
    return np.pad(array, widths, constant_values=val)


def batchseq(seqs: Sequence[Any], val: float = 0, n: int | None = None) -> list[np.ndarray]:
    """Sequences of several lengths as one list of steps, each the batch of all, padded by `val`.

    seqs  each (T,), which gives steps (B,), or (F, T) or a list of T arrays (F,), which gives
          steps (F, B)
    n     steps to pad to, by default those of the longest; a longer sequence is an error
    """
    array, _ = padded(seqs, val, n)
    return unbatch(array)


def padded(
    seqs: Sequence[Any], val: float = 0, n: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Sequences of several lengths as one array, and their lengths: `m(X, lengths=lengths)`.

    Arguments as for `batchseq`.  Returns (B, T) or (F, B, T), laid out as kernels read it, and the
    lengths (B,).  Raises `ShapeError` if the sequences differ in more than length.
    """
    arrays = [_sequence(s) for s in seqs]
    if not arrays:
        raise ShapeError("padded: there are no sequences.")
    if len({a.shape[:-1] for a in arrays}) != 1:
        shapes = [a.shape for a in arrays]
        raise ShapeError(f"padded: the sequences have shapes {shapes}, expected one (F, any).")
    lengths = np.array([a.shape[-1] for a in arrays])
    steps = int(lengths.max()) if n is None else n
    if steps < lengths.max():
        raise ShapeError(f"padded: a sequence has {lengths.max()} steps, more than n = {n}.")
    shape = (steps, len(arrays), *arrays[0].shape[-2::-1])
    out = np.full(shape, val, np.result_type(*arrays))
    for i, a in enumerate(arrays):
        out[: a.shape[-1], i] = a.T
    return out.T, lengths


def _sequence(seq: Any) -> np.ndarray:
    if isinstance(seq, (list, tuple)) and len(seq) and np.ndim(peek(seq[0])):
        return batch(seq)
    array = np.asarray(peek(seq))
    if array.ndim not in (1, 2):
        raise ShapeError(f"padded: a sequence has shape {array.shape}, expected (T,) or (F, T).")
    return array


def mask_of(lengths: Any, steps: int | None = None) -> np.ndarray:
    """The mask (B, T) of sequences of these lengths: True at their real steps.

    steps  T, by default the longest
    """
    lengths = np.asarray(lengths)
    return np.arange(lengths.max(initial=0) if steps is None else steps) < lengths[:, None]


def onehot(x: Any, labels: Sequence[Any], default: Any = None, *, dtype: Any = bool) -> np.ndarray:
    """A column (n,), 1 at the place of `x` among the n labels and 0 elsewhere.

    default  the label that stands for all that are not among them; without one they raise
             `ValueError`
    """
    return _hot(np.array(_place(x, _places(labels), default)), len(labels), dtype)


def onehotbatch(
    xs: Any, labels: Sequence[Any], default: Any = None, *, dtype: Any = bool
) -> np.ndarray:
    """One-hot columns of many: (B,) gives (n, B), (B, T) gives (n, B, T).

    xs     an array, a list or a string, of labels
    dtype  bool as in Flux; float32 saves layers from converting the array at every use

    Otherwise as `onehot`.
    """
    if _is_range(labels) and default is None:
        index = np.asarray(peek(xs))
        if index.dtype.kind in "iu" and (
            not index.size or (index.min() >= 0 and index.max() < len(labels))
        ):
            return _hot(index, len(labels), dtype)
    array = np.array(list(xs)) if isinstance(xs, str) else np.asarray(peek(xs))
    places = _places(labels)
    flat = [_place(x, places, default) for x in array.ravel().tolist()]
    return _hot(np.array(flat, np.intp).reshape(array.shape), len(labels), dtype)


def _is_range(labels: Any) -> bool:
    return isinstance(labels, range) and labels.start == 0 and labels.step == 1


def _places(labels: Sequence[Any]) -> dict[Any, int]:
    listed = np.asarray(labels).tolist() if hasattr(labels, "dtype") else list(labels)
    places = {label: i for i, label in enumerate(listed)}
    if len(places) != len(listed):
        raise ValueError("onehot: a label is there twice.")
    return places


def _place(x: Any, places: dict[Any, int], default: Any) -> int:
    x = x.item() if isinstance(x, (np.generic, np.ndarray)) else x
    if x in places:
        return places[x]
    if default is None or default not in places:
        raise ValueError(
            f"onehot: {x!r} is not among the {len(places)} labels. Pass default=, one of them, for "
            "what is unknown."
        )
    return places[default]


def _hot(index: np.ndarray, n: int, dtype: Any) -> np.ndarray:
    """Columns of n, 1 at the index; in memory each column lies together."""
    out = np.zeros((index.size, n), dtype)
    out[np.arange(index.size), index.T.ravel()] = 1
    return out.reshape(*index.shape[::-1], n).T


def onecold(y: Any, labels: Sequence[Any] | None = None) -> Any:
    """The label of the largest element of each column: the inverse of `onehotbatch`.

    y       (n,), (n, B) or (n, B, T): one-hot columns, probabilities or logits
    labels  by default 0 to n - 1

    Returns one label for (n,), else an array (B,) or (B, T).  The first of equals counts.
    """
    array = np.asarray(peek(y))
    if array.ndim == 0 or not array.shape[0]:
        raise ShapeError(f"onecold: y has shape {array.shape}, expected classes on axis 0.")
    index = array.argmax(axis=0)
    if labels is None:
        return index if index.ndim else int(index)
    if len(labels) != array.shape[0]:
        raise ShapeError(
            f"onecold: y has {array.shape[0]} classes, there are {len(labels)} labels."
        )
    if not index.ndim:
        return labels[int(index)]
    listed = list(labels) if isinstance(labels, str) else labels
    return np.asarray(listed)[index]
