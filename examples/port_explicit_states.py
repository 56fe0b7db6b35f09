"""A script of Flux 0.16, whose layers remember nothing, ported: states go in and come out.

The network repeats what it read two steps before, over windows that continue each other; the state
is handed on by hand.  docs/how-to/port-from-flux.md shows it beside the Julia.

    python examples/port_explicit_states.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import recur
from recur import AdamW, Dense, LSTMCell, ops, scan, setup, update, withgradient
from recur.losses import mse


class Model:
    """A cell and a head: `(ys, state) = model(xs, state)`, xs (1, T, B) as Flux 0.16 has it."""

    def __init__(self) -> None:
        self.cell = LSTMCell(1, 12, forget_bias=0.0)
        self.dense = Dense(12, 1)

    def __call__(self, xs: Any, state: Any) -> tuple[Any, Any]:
        ys = []
        for t in range(xs.shape[1]):
            y, state = self.cell.step(xs[:, t, :], state)
            ys.append(self.dense(y))
        return ops.stack(ys, axis=1), state

    def at_once(self, xs: Any, state: Any) -> tuple[Any, Any]:
        """The same by one call of the kernel; `scan` has time last."""
        zs, state = scan(self.cell, xs.swapaxes(1, 2), state, return_state=True)
        return self.dense(zs).swapaxes(1, 2), state


def learn_from(model, opt, xs, ys, state):
    def loss(m):
        yhat, after = m(xs, state)
        return mse(yhat, ys), after

    (cost, state), g = withgradient(loss, model)
    update(opt, model, g)
    return cost, state


def learn(model: Model, windows: list[tuple[np.ndarray, np.ndarray]]) -> list[float]:
    """One update for each (xs, ys), windows that continue each other; the loss of each."""
    opt, losses = setup(AdamW(1e-2), model), []
    state = model.cell.initial_state()
    for xs, ys in windows:
        cost, state = learn_from(model, opt, xs, ys, state)
        losses.append(float(cost))
    return losses


def echoes(updates: int, rng: np.random.Generator) -> list[tuple[np.ndarray, np.ndarray]]:
    """Windows (1, 10, 16) of noise that continue each other, and the same two steps late."""
    noise = rng.uniform(-0.5, 0.5, (1, 10 * updates + 2, 16)).astype(np.float32)
    starts = range(0, 10 * updates, 10)
    return [(noise[:, i + 2 : i + 12], noise[:, i : i + 10]) for i in starts]


def main() -> None:
    recur.seed(0)
    losses = learn(Model(), echoes(500, np.random.default_rng(0)))
    for i in range(0, 500, 100):
        print(f"updates {i:3d} to {i + 99:3d}: mean loss {np.mean(losses[i : i + 100]):.5f}")


if __name__ == "__main__":
    main()
