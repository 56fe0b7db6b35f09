"""Text as numbers: an alphabet, and text that every machine with Python has."""

from __future__ import annotations

import os
import string
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from recur.errors import RecurError

UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class Alphabet:
    """Characters and their numbers, 0 for any character that is not among them.

    `characters` is kept in code-point order, without repeats; `UNKNOWN` comes before them.
    """

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = UNKNOWN + "".join(sorted(set(characters) - {UNKNOWN}))
        self._points = np.array([ord(c) for c in self.characters[1:]], np.uint32)

    def __len__(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> np.ndarray:
        """The number of each character, int64 of shape (len(text),)."""
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
        numbers = np.searchsorted(self._points, points)
        found = np.append(self._points, 0)[numbers] == points
        return np.where(found, numbers + 1, 0)

    def unknown(self, text: str) -> str:
        """The characters of `text` that are not among these, each once."""
        return "".join(c for c in dict.fromkeys(text) if not self.encode(c)[0])

    def decode(self, numbers: Iterable[int]) -> str:
        """The text whose `encode` gives these numbers; 0 becomes `UNKNOWN`."""
        return "".join(self.characters[int(number)] for number in numbers)

    @classmethod
    def of(cls, text: str, least: int = 1) -> Alphabet:
        """The characters that occur at least `least` times in `text`."""
        return cls(c for c, count in Counter(text).items() if count >= least)

    @classmethod
    def of_source_code(cls) -> Alphabet:
        """ASCII as it is printed, with newline and tab: known before any text is read."""
        return cls(string.ascii_letters + string.digits + string.punctuation + " \n\t")


def read_text(paths: Iterable[str | os.PathLike[str]]) -> str:
    """The files' text, one after the other; line ends become newlines, bad UTF-8 `UNKNOWN`."""
    parts = []
    for path in paths:
        with open(path, encoding="utf-8", errors="replace") as file:
            parts.append(file.read())
    return "".join(parts)


_LEFT_OUT = {
    "encodings",  # tables of characters, hardly text
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
}


def standard_library(
    root: str | os.PathLike[str] | None = None,
    *,
    held_out: int = 200_000,
    training: int = 16_000_000,
) -> tuple[str, str]:
    """Training text and held-out text: the source of the running Python's standard library.

    Split by file, the same way on every machine.  `held_out` and `training` bound the number of
    characters; of one file at most an eighth of `held_out` is held out, and what is left of it is
    not trained on either.

    Raises RecurError if there are too few sources, as in a Python that ships only compiled files.
    """
    root = Path(root or sysconfig.get_path("stdlib"))
    # By a checksum of the name: mixed, and yet the same order everywhere.
    paths = sorted(_sources(root), key=lambda path: (_mixed(path, root), path))
    kept: list[str] = []
    trained: list[str] = []
    kept_size = trained_size = 0
    for path in paths:
        if trained_size >= training:
            break
        text = read_text([path])
        if kept_size < held_out:
            kept.append(text[: min(held_out // 8, held_out - kept_size)])
            kept_size += len(kept[-1])
        else:
            trained.append(text[: training - trained_size])
            trained_size += len(trained[-1])
    if trained_size < held_out:
        raise RecurError(
            f"{root} holds only {kept_size + trained_size} characters of Python source, too few "
            "to learn from. Train on text of your own with `recur train TEXT`."
        )
    return "".join(trained), "".join(kept)


def _mixed(path: Path, root: Path) -> int:
    return zlib.crc32(path.relative_to(root).as_posix().encode())


def _sources(root: Path) -> Iterator[Path]:
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if name not in _LEFT_OUT]
        for name in files:
            if name.endswith(".py") and not name.startswith("test_"):
                yield Path(folder, name)
