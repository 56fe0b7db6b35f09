"""A seq-to-one model as the guide of Flux 0.14 builds it, ported: warm up, then ask once.

The network reads a sequence step by step and is asked only at the last: the sum of what it has
read.  docs/how-to/port-from-flux.md shows it beside the Julia.

    python examples/port_seq_to_one.py
"""

from __future__ import annotations

import numpy as np

import recur
from recur import RNN, Adam, Chain, Dense, reset, setup, update, withgradient
from recur.losses import mse


def network() -> Chain:
    return Chain(RNN(2, 5, learn_init=True), Dense(5, 1))


def loss(m, xs, y):
    reset(m)
    for x in xs[:-1]:
        m(x)  # warm-up: the state counts, the output does not
    return mse(m(xs[-1]), y)


def learn_from(m, opt, xs, y):
    cost, g = withgradient(lambda m: loss(m, xs, y), m)
    update(opt, m, g)
    return cost


def learn(m: Chain, data: list[tuple[list[np.ndarray], np.ndarray]]) -> list[float]:
    """One update for each (steps, target); the loss of each."""
    opt = setup(Adam(1e-2), m)
    return [float(learn_from(m, opt, xs, y)) for xs, y in data]


def sums(updates: int, rng: np.random.Generator) -> list[tuple[list[np.ndarray], np.ndarray]]:
    """Four steps (2, 32) each, and a tenth of the sum of their first row, (1, 32)."""
    batches = [rng.standard_normal((4, 2, 32)).astype(np.float32) for _ in range(updates)]
    return [(list(xs), xs[:, :1].sum(axis=0) / 10) for xs in batches]


def main() -> None:
    recur.seed(0)
    losses = learn(network(), sums(500, np.random.default_rng(0)))
    for i in range(0, 500, 100):
        print(f"updates {i:3d} to {i + 99:3d}: mean loss {np.mean(losses[i : i + 100]):.5f}")


if __name__ == "__main__":
    main()
