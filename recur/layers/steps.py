"""`FinalStep`: a sequence's last output."""

from __future__ import annotations

from typing import Any

import numpy as np

from recur import ops
from recur.errors import ShapeError
from recur.layers.dense import size
from recur.module import Module, register
from recur.tape import Operand, peek


@register("FinalStep")
class FinalStep(Module):
    """y = x[:, :, -1]: what the layer before gave at the end of each sequence.

    x (n, B, T), or a list of steps, gives (n, B), or one step; lengths= (B,) and mask= (B, T) give
    each sample's last real step.  A single step, (n,) or (n, B), is given back as it is: a stream's
    last step is the one that it has just made.

    n_forward  after a `Bidirectional`: the rows from this one on are those of the layer that runs
               backwards, which ends at the first real step

    Raises `ShapeError` for an empty sequence, or a sample without real steps.
    """

    takes_lists = True

    def __init__(self, n_forward: int | None = None) -> None:
        if n_forward is not None and n_forward != 0:
            n_forward = size("FinalStep", "n_forward", n_forward)
        self.n_forward = n_forward

    def __call__(self, x: Any, *, lengths: Any = None, mask: Any = None) -> Any:
        if isinstance(x, (list, tuple)):
            if not x or lengths is not None or mask is not None:
                x = ops.stack(list(x), -1) if x else np.empty((1, 1, 0))
            else:
                return self._joined(x[-1], x[0])
        x = x if isinstance(x, Operand) else np.asarray(x)
        if x.ndim < 3:
            return x
        if x.ndim > 3 or x.shape[2] == 0:
            raise ShapeError(
                f"{self!r}: x has shape {tuple(x.shape)}, expected (features, batch, time) with at "
                "least one step. Nothing was changed."
            )
        first, last = self._ends(x.shape, lengths, mask)
        if first is None:
            return self._joined(x[:, :, -1], x[:, :, 0])
        samples = np.arange(x.shape[1])
        return self._joined(x[:, samples, last], x[:, samples, first])

    def _joined(self, last: Any, first: Any) -> Any:
        if self.n_forward is None:
            return last
        return ops.concatenate([last[: self.n_forward], first[self.n_forward :]])

    def _ends(self, shape: tuple[int, ...], lengths: Any, mask: Any) -> tuple[Any, Any]:
        """The first and the last real step of each sample, (B,) each, or None for all alike."""
        if lengths is not None:
            mask = np.arange(shape[2]) < np.asarray(peek(lengths))[:, None]
        if mask is None:
            return None, None
        real = np.asarray(peek(mask), bool)
        if real.shape != shape[1:] or not real.any(axis=1).all():
            raise ShapeError(
                f"{self!r}: the mask has shape {real.shape}, expected {shape[1:]} (batch, time) "
                "with a real step in every row. Nothing was changed."
            )
        return real.argmax(axis=1), shape[2] - 1 - real[:, ::-1].argmax(axis=1)

    def describe(self) -> str:
        return "FinalStep()" if self.n_forward is None else f"FinalStep(n_forward={self.n_forward})"

    def output_shape(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        return shapes[0][:2]

    def config(self) -> dict[str, Any]:
        return {"n_forward": self.n_forward}
