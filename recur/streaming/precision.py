"""`drift`: how far two models come apart in a long stream."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from recur.errors import ShapeError
from recur.module import label
from recur.streaming.stream import Stream
from recur.tape import peek


class Drift(NamedTuple):
    """How far the outputs of two models lie apart, step by step.  Printed as a table.

    worst  (T,): the largest absolute difference of a step's outputs
    mean   (T,): the mean absolute difference of a step's outputs
    size   the mean absolute output of the first model, over all steps
    """

    worst: np.ndarray
    mean: np.ndarray
    size: float

    def __str__(self) -> str:
        lines = [f"{'steps':>15}  {'largest':>9}  {'mean':>9}  difference"]
        first = 0
        while first < len(self.mean):
            last = min(max(10 * first, 10), len(self.mean))
            worst, mean = self.worst[first:last].max(), self.mean[first:last].mean()
            lines.append(f"{f'{first + 1} to {last}':>15}  {worst:9.2e}  {mean:9.2e}")
            first = last
        return "\n".join([*lines, f"mean output {self.size:.2e}"])


def drift(model: Any, compressed: Any, xs: Any) -> Drift:
    """What `compress` changes in a long stream: both models from their rest on the same inputs.

    xs  the steps of one stream, (n_in, T), or indices (T,) for a model that begins with an
        `Embedding`.  10,000 steps show whether differences grow

    Neither model's state is moved, and nothing is recorded.  Raises `ShapeError` for other inputs,
    or without a step; `StateError` for a model that cannot stream.
    """
    X = np.asarray(peek(xs))
    first, second = Stream(model), Stream(compressed)
    y = np.asarray(first.run(X), np.float64)
    if y.shape[-1] == 0:
        raise ShapeError(f"drift: xs has shape {X.shape}, expected at least one step.")
    other = second.run(X)
    if other.shape != y.shape:
        raise ShapeError(
            f"drift: {label(model)} answers {y.shape}, {label(compressed)} {other.shape}, expected "
            "two models whose answers have one shape."
        )
    apart = np.abs(other - y).reshape(-1, y.shape[-1])
    return Drift(apart.max(0), apart.mean(0), float(np.abs(y).mean()))
