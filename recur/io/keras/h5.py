"""Arrays in the HDF5 files of Keras, read with care.

h5py opens what a file links to, other files among it, and allocates what a dataset claims to hold.
So links must be hard ones, and datasets must lie in the file itself and be no larger than it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np

from recur.errors import FormatError

_ROOTS = ("layers", "_layer_checkpoint_dependencies")  # the second until Keras 2.15
_DAMAGED = (OSError, RuntimeError, LookupError, ValueError, TypeError, AttributeError)


def import_h5py() -> Any:
    """The package; raises `ImportError` that names the extra."""
    try:
        import h5py
    except ImportError:
        raise ImportError(
            'Files of Keras need the package h5py: pip install "recur[keras]".'
        ) from None
    return h5py


@contextmanager
def opened(file: BinaryIO) -> Iterator[Tree]:
    """The tree of an HDF5 file.  Whatever HDF5 complains about becomes a `FormatError`."""
    h5py = import_h5py()
    size = file.seek(0, 2)
    file.seek(0)
    try:
        with h5py.File(file, "r") as root:
            yield Tree(h5py, root, size)
    except FormatError:
        raise
    except _DAMAGED as error:
        raise FormatError(f"not an HDF5 file of Keras, or damaged: {error}") from error


class Tree:
    """A group of an HDF5 file."""

    def __init__(self, h5py: Any, group: Any, size: int) -> None:
        self.h5py, self.group, self.size = h5py, group, size

    def get(self, path: str) -> Any:
        """The group or dataset at `path` below, or None."""
        found = self.group
        for name in path.split("/"):
            if not isinstance(found, self.h5py.Group) or name not in found:
                return None
            if not isinstance(found.get(name, getlink=True), self.h5py.HardLink):
                raise FormatError(f"{path} is a link to somewhere else, which is not followed.")
            found = found[name]
        return found

    def below(self, path: str) -> Tree | None:
        found = self.get(path)
        return Tree(self.h5py, found, self.size) if isinstance(found, self.h5py.Group) else None

    def array(self, path: str) -> np.ndarray | None:
        """The array at `path` below, or None."""
        found = self.get(path)
        if not isinstance(found, self.h5py.Dataset):
            return None
        if found.is_virtual or found.external:
            raise FormatError(f"{path} lies in another file, which is not read.")
        if found.dtype.kind != "f" or found.nbytes > self.size:
            raise FormatError(
                f"{path} is {found.dtype} of shape {found.shape}, no array of floats."
            )
        return np.asarray(found[()])

    def text(self, name: str) -> str | None:
        """An attribute that is text."""
        found = self.group.attrs.get(name)
        return _text(found) if isinstance(found, (str, bytes)) else None

    def texts(self, name: str) -> list[str] | None:
        """An attribute that is a list of texts; a long one is cut into pieces name0, name1, ..."""
        found = self.group.attrs.get(name)
        if found is not None:
            return [_text(item) for item in np.asarray(found).reshape(-1).tolist()]
        pieces: list[str] = []
        while (piece := self.group.attrs.get(f"{name}{len(pieces)}")) is not None:
            pieces.append(piece)
        if not pieces:
            return None
        return [_text(item) for piece in pieces for item in np.asarray(piece).reshape(-1).tolist()]


def _text(found: Any) -> str:
    return found.decode("utf-8", "replace") if isinstance(found, bytes) else str(found)


class NewWeights:
    """Arrays by place, as Keras 3 writes them: `layers/lstm_1/cell/vars/0`."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        found = [root for root in _ROOTS if tree.get(root) is not None]
        if not found:
            raise FormatError("the HDF5 file has no group layers, as Keras writes it.")
        self.root = found[0]

    def take(self, place: str, counts: Sequence[int]) -> list[np.ndarray]:
        """The arrays of the layer at `place`: as many as one of `counts` says."""
        found: list[np.ndarray] = []
        while (array := self._tree.array(f"{place}/vars/{len(found)}")) is not None:
            found.append(array)
        if len(found) not in counts:
            raise FormatError(f"{place} holds {len(found)} arrays, expected {counts[-1]}.")
        return found

    def enter(self, name: str) -> None:
        """Layers are found by their places."""

    def leave(self) -> None:
        """Layers are found by their places."""


class OldWeights:
    """Arrays by layer, in a row, as Keras 2 writes them."""

    root = ""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree.below("model_weights") or tree
        names = self._tree.texts("layer_names")
        if names is None:
            raise FormatError("the HDF5 file has no list layer_names, as Keras writes it.")
        self.names = names
        self.version = self._tree.text("keras_version") or tree.text("keras_version") or "1"
        self._left: deque[np.ndarray] = deque()

    def arrays(self, layer: str) -> list[np.ndarray]:
        """All arrays of a layer."""
        group = self._tree.below(layer)
        names = None if group is None else group.texts("weight_names")
        if group is None or names is None:
            raise FormatError(f"the HDF5 file has no weights for the layer {layer!r}.")
        found = [group.array(name) for name in names]
        if any(array is None for array in found):
            raise FormatError(f"the layer {layer!r} lacks an array that it names.")
        return [array for array in found if array is not None]

    def enter(self, name: str) -> None:
        self._left = deque(self.arrays(name))

    def take(self, place: str, counts: Sequence[int]) -> list[np.ndarray]:
        """The next arrays of the layer that was entered."""
        if len(self._left) < counts[-1]:
            raise FormatError(f"the layer holds too few arrays, expected {counts[-1]} more.")
        return [self._left.popleft() for _ in range(counts[-1])]

    def leave(self) -> None:
        if self._left:
            raise FormatError(f"the layer holds {len(self._left)} arrays too many.")
