"""What text costs without a network: a model of two characters of context, and two compressors."""

from __future__ import annotations

import bz2
import lzma

import numpy as np


class OrderTwo:
    """Predicts a character from the two before it, by counts and Witten-Bell interpolation.

        P(c | ab) = (N(abc) + U(ab) P(c | b)) / (N(ab) + U(ab))

    N counts in the training text, U(ab) is how many different characters follow ab there; P(c | b)
    is made the same way from P(c), and P(c) from the uniform distribution.  The text counts as
    preceded by two characters `start`.

    Source: Witten and Bell 1991, "The zero-frequency problem", method C; Chen and Goodman 1998,
    section 2.5, for the interpolated form.
    """

    def __init__(self, numbers: np.ndarray, size: int, start: int) -> None:
        """`numbers` is the training text, (n,) int64 below `size`.  Memory grows with size**3."""
        self.start = start
        self._size = size
        triples = np.bincount(self._triples(numbers), minlength=size**3).reshape((size,) * 3)
        pairs = triples.sum(axis=0)
        p = np.full(size, 1.0 / size)
        for counts in (pairs.sum(axis=0), pairs, triples):
            p = self._interpolate(counts, p)
        self._log2 = np.log2(p).reshape(-1)

    def bits(self, numbers: np.ndarray) -> float:
        """The mean cost of a character of this text, in bits."""
        return -float(self._log2[self._triples(numbers)].mean())

    def _triples(self, numbers: np.ndarray) -> np.ndarray:
        """Each character with the two before it, as one number."""
        padded = np.concatenate([[self.start, self.start], numbers])
        return (padded[:-2] * self._size + padded[1:-1]) * self._size + padded[2:]

    @staticmethod
    def _interpolate(counts: np.ndarray, lower: np.ndarray) -> np.ndarray:
        """P(c | context) over the last axis; a context never seen takes it from `lower`."""
        unique = (counts > 0).sum(axis=-1, keepdims=True)
        total = counts.sum(axis=-1, keepdims=True) + unique
        return np.where(total > 0, (counts + unique * lower) / np.maximum(total, 1), lower)


def compressed_bits(text: str) -> dict[str, float]:
    """What each compressor at its best setting makes of one character of `text`, in bits."""
    data = text.encode()
    sizes = {
        "bz2": len(bz2.compress(data, 9)),
        "lzma": len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)),
    }
    return {name: 8.0 * size / max(len(text), 1) for name, size in sizes.items()}
