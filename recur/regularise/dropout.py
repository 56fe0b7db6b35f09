"""`LockedDropout` and `EmbeddingDropout`: one mask for all steps of a window."""

from __future__ import annotations

from typing import Any

import numpy as np

from recur import ops
from recur.errors import ShapeError
from recur.layers import Embedding
from recur.layers.dropout import probability
from recur.module import is_active, label, register, shape_after
from recur.regularise.masks import WindowMasks, scaled
from recur.tape import peek


@register("LockedDropout")
class LockedDropout(WindowMasks):
    """y_t = x_t * mask / (1 - p), one mask (F, B) for all steps of a window (Gal and Ghahramani
    2016, "variational dropout"; Merity, Keskar and Socher 2018).

    x (F,), (F, B), (F, B, T), or a list of steps; y has its shape.  Each entry of the mask is 0
    with probability p.  It is drawn at the first step of a scope and serves until the scope ends,
    `reset(model)` or `resample(model)`, whether steps come one by one or as a sequence; input of
    another size gets a mask of its own.  `active` is None (on inside a scope), True or False.

    Raises `ValueError` for p outside [0, 1], `ShapeError` for an input of other axes.
    """

    positional = ("p",)
    takes_lists = True

    def __init__(
        self, p: float, *, active: bool | None = None, rng: np.random.Generator | None = None
    ) -> None:
        super().__init__(active, rng)
        self.p = probability("LockedDropout", p)

    def __call__(self, x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return [self._apply(step) for step in x]
        return self._apply(x)

    def _apply(self, x: Any) -> Any:
        if self.p == 0 or not is_active(self):
            return x
        array = np.asarray(peek(x))
        if not 1 <= array.ndim <= 3:
            raise ShapeError(
                f"{self!r}: x has shape {array.shape}, expected (features,), (features, batch) or "
                "(features, batch, time). Nothing was changed."
            )
        step = array.shape[:2]
        # Memory as a step has it: the samples one after the other.
        mask = self.mask_of(step, lambda: self.draw(self.p, step[::-1]).T)
        dtype = array.dtype if array.dtype.kind == "f" else np.dtype(np.float32)
        factor = scaled(mask, self.p, dtype)
        return ops.multiply(x, factor[:, :, None] if array.ndim == 3 else factor)

    def describe(self) -> str:
        return f"LockedDropout({self.p:g})"

    def output_shape(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        (shape,) = shapes
        return shape

    def config(self) -> dict[str, Any]:
        return {"p": self.p, "active": self.active}


@register("EmbeddingDropout")
class EmbeddingDropout(WindowMasks):
    """y = embedding(x) * mask[x] / (1 - p): whole words are dropped, each of the vocabulary with
    probability p (Gal and Ghahramani 2016; Merity, Keskar and Socher 2018).

    embedding  an `Embedding` (V => F), which stays as it is: a decoder tied to it drops nothing
    x, y       as for the embedding; a word is dropped wherever it stands in the window

    One mask (V,) a window, `active` and errors as for `LockedDropout`.
    """

    positional = ("embedding", "p")
    takes_lists = True

    def __init__(
        self,
        embedding: Embedding,
        p: float,
        *,
        active: bool | None = None,
        rng: np.random.Generator | None = None,
    ) -> None:
        if not isinstance(embedding, Embedding):
            raise TypeError(
                f"EmbeddingDropout: the layer is a {type(embedding).__name__}, expected an "
                "Embedding."
            )
        super().__init__(active, rng)
        self.embedding = embedding
        self.p = probability("EmbeddingDropout", p)

    @property
    def weight(self) -> Any:
        """The embedding's (F, V)."""
        return self.embedding.weight

    def __call__(self, x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return [self._apply(step) for step in x]
        return self._apply(x)

    def _apply(self, x: Any) -> Any:
        if self.p == 0 or not is_active(self):
            return self.embedding(x)
        weight = self.embedding.weight
        words = weight.shape[1]
        mask = self.mask_of("words", lambda: self.draw(self.p, (words,)))
        factor = scaled(mask, self.p, weight.dtype)
        array = np.asarray(peek(x))
        if array.dtype.kind in "iu":
            y = self.embedding(x)  # which refuses an index out of range
            return ops.multiply(y, factor[array])
        # One-hot columns: of each, the entry of its word.
        return self.embedding(ops.multiply(x, factor.reshape(-1, *(1,) * (array.ndim - 1))))

    def parts(self) -> list[tuple[str, Any]]:
        return [("", self.embedding)]

    def describe(self) -> str:
        return f"EmbeddingDropout({label(self.embedding)}, {self.p:g})"

    def output_shape(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        return shape_after(self.embedding, *shapes)

    def config(self) -> dict[str, Any]:
        return {"embedding": self.embedding, "p": self.p, "active": self.active}
