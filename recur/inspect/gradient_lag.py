"""How far back gradients reach."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from recur.cells import Cell
from recur.errors import ShapeError
from recur.inspect.gradcheck import Surroundings
from recur.recurrent import layers_of, truncate
from recur.recurrent.state import named_leaves
from recur.tape import Tape, Tensor, peek


class GradientLag:
    """Norms of dL_t/dh_{t-k}: one row for each loss, one column for each lag k, from 0.

    at      (n,) the steps t of the losses, counted from 1
    array   (n, K) the norm over all states together; NaN where t - k lies before the first step
    parts   the same for each part of each state, by its path: "layers.0.state.h"
    mean, spread  (K,) over the losses that reach back that far: mean and standard deviation
    truncate_every  where history was cut, or None
    """

    def __init__(
        self, at: Sequence[int], parts: dict[str, np.ndarray], truncate_every: int | None
    ) -> None:
        self.at = np.array(at)
        self.parts = parts
        self.array = np.sqrt(sum(np.square(norms) for norms in parts.values()))
        self.mean = np.nanmean(self.array, axis=0)
        self.spread = np.nanstd(self.array, axis=0)
        self.truncate_every = truncate_every

    def within(self, window: int) -> float:
        """The share of the mean norms, summed over lags, that a window of so many steps keeps."""
        total = self.mean.sum()
        return float(self.mean[:window].sum() / total) if total else 1.0

    def __repr__(self) -> str:
        losses, lags = self.array.shape
        return (
            f"GradientLag({losses} loss{'es' * (losses != 1)}, lags 0 to {lags - 1}: "
            f"mean {self.mean[0]:.3g} to {self.mean[-1]:.3g})"
        )

    def plot(self, axes: Any = None, *, window: int | None = None) -> Any:
        """Draws mean and spread by lag and returns the matplotlib axes.

        axes    where to draw; None makes a figure, `axes.figure`
        window  marks the lags that truncation to so many steps keeps: `tbptt`'s k2.  None: the
                `truncate_every` of the run, if there was one

        Raises `ImportError` without matplotlib.
        """
        if axes is None:
            axes = _new_axes()
        lags = np.arange(len(self.mean))
        seen = self.mean > 0  # exact zeros have no place on a logarithmic axis
        low = np.maximum(self.mean - self.spread, self.mean / 10)
        axes.fill_between(
            lags[seen],
            low[seen],
            (self.mean + self.spread)[seen],
            color="#1f6feb",
            alpha=0.18,
            linewidth=0,
            label="spread over losses",
        )
        axes.plot(lags[seen], self.mean[seen], color="#1f6feb", marker="o", ms=3, label="mean")
        if seen.any():
            axes.set_yscale("log")
        window = self.truncate_every if window is None else window
        if window is not None:
            axes.axvline(window - 0.5, color="#d1242f", label=f"a window of {window} steps ends")
            axes.axvspan(
                window - 0.5, max(len(lags), window) - 0.5, color="#d1242f", alpha=0.06, linewidth=0
            )
        axes.set_xlim(-0.5, max(len(lags), window or 0) - 0.5)
        axes.set_xlabel("lag k, in steps back from the loss")
        axes.set_ylabel(r"norm of $dL_t / dh_{t-k}$")
        axes.legend()
        return axes


def gradient_lag(
    model: Callable[..., Any],
    xs: Any,
    loss: Callable[[Any, int], Any],
    *,
    at: Iterable[int] | None = None,
    truncate_every: int | None = None,
) -> GradientLag:
    """How much of each loss's gradient comes from k steps back: the norms of dL_t/dh_{t-k}.

    model  called on one step after the other, from the state that it has
    xs     a sequence (n_in, B, T), or a list of T steps
    loss   `loss(y, t)`: y is the output of step t, counted from 1; returns one number
    at     the steps that have a loss; None: every step
    truncate_every  cuts history after every k steps, as a training loop may do: lags that lie
           behind a cut are then exactly 0

    h is the state of every recurrent layer after a step, and all its uses count: as output and in
    the steps that follow.  The norm is over features and batch (Frobenius).  The numbers are exact,
    of one run and one sweep for each loss, which keeps the T steps in memory.  States, generators
    and masks are put back at the end; no `.grad` is touched.

    Raises `ValueError` if the model has no recurrent layer, or `at` names a step that xs lacks;
    `ShapeError` for xs of other axes.
    """
    layers = layers_of(model)
    if not layers:
        raise ValueError("gradient_lag: the model has no recurrent layer.")
    steps = _steps(xs, list(layers.values()))
    wanted = sorted(set(range(1, len(steps) + 1) if at is None else at))
    if not wanted or not 1 <= wanted[0] <= wanted[-1] <= len(steps):
        raise ValueError(
            f"gradient_lag: losses are asked for at steps {wanted}, xs has the steps 1 to "
            f"{len(steps)}."
        )
    surroundings = Surroundings((model, loss))
    try:
        with _read_as_steps(layers.values()), Tape() as tape:
            losses = []
            states: list[dict[str, Tensor]] = []
            for t, (x, index) in enumerate(steps[: wanted[-1]], start=1):
                y = model(x)
                y = y if index is None else y[index]
                states.append(_recorded(layers))
                if t in wanted:
                    losses.append(loss(y, t))
                if truncate_every and t % truncate_every == 0:
                    truncate(model)
            parts = _norms(tape, wanted, losses, states)
    finally:
        surroundings.put_back()
    return GradientLag(wanted, parts, truncate_every)


def _steps(xs: Any, layers: list[Any]) -> list[tuple[Any, Any]]:
    """Each step as the model is to be called on it, and the index that gives its own output."""
    if not isinstance(xs, (list, tuple)):
        array = np.asarray(peek(xs))
        if array.ndim != 3:
            raise ShapeError(
                f"gradient_lag: xs has shape {array.shape}, expected a sequence (features, batch, "
                "time) or a list of steps."
            )
        time = 1 if layers[0].layout == "ftb" else 2
        return [(step, None) for step in np.moveaxis(array, time, 0)]
    if any(np.ndim(peek(x)) != 1 for x in xs):
        return [(x, None) for x in xs]
    ours = [isinstance(layer.cell, Cell) for layer in layers]
    if not any(ours):
        return [(x, None) for x in xs]
    if not all(ours):
        raise ShapeError(
            "gradient_lag: the steps are vectors, and some cells are functions. Give the steps a "
            "batch axis: x[:, None]."
        )
    # A batch of one: there the output of a cell is its state, not a vector made of it.
    return [(np.asarray(peek(x))[:, None], (slice(None), 0)) for x in xs]


@contextmanager
def _read_as_steps(layers: Iterable[Any]) -> Iterator[None]:
    """While open, (features, batch) is one step for layers of any layout."""
    layouts = [(layer, layer.layout) for layer in layers]
    try:
        for layer, _ in layouts:
            layer.layout = "fbt"
        yield
    finally:
        for layer, layout in layouts:
            layer.layout = layout


def _recorded(layers: dict[str, Any]) -> dict[str, Tensor]:
    """Every recorded part of every state, by path."""
    parts: dict[str, Tensor] = {}
    for path, layer in layers.items():
        if not layer.at_start:
            for name, leaf in named_leaves(layer.state, f"{path}.state" if path else "state"):
                if isinstance(leaf, Tensor):
                    parts[name] = leaf
    return parts


def _norms(
    tape: Tape, at: list[int], losses: list[Any], states: list[dict[str, Tensor]]
) -> dict[str, np.ndarray]:
    names = dict.fromkeys(name for parts in states for name in parts)
    norms = {name: np.full((len(at), at[-1]), np.nan) for name in names}
    for row, (t, loss) in enumerate(zip(at, losses, strict=True)):
        asked = [(name, s, states[s][name]) for s in range(t) for name in states[s]]
        grads = tape.gradient(loss, [tensor for _, _, tensor in asked], keep_graph=True)
        for name in names:
            norms[name][row, :t] = 0
        for (name, s, _), grad in zip(asked, grads, strict=True):
            norms[name][row, t - 1 - s] = np.linalg.norm(grad.astype(np.float64))
    return norms


def _new_axes() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'plot draws with matplotlib: pip install "recur[cli]". The numbers are in .array.'
        ) from error
    return Figure(figsize=(6.4, 4.0), layout="constrained").subplots()
