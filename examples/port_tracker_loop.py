"""A loop of the Tracker era (Flux 0.8), ported: back!, update!, truncate!, and on it goes.

The network follows a signal that never ends and says what comes next.  Every 20 steps it learns,
and forgets how it came to its state, but not the state.  docs/how-to/port-from-flux.md shows it
beside the Julia.

    python examples/port_tracker_loop.py
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

import recur
from recur import (
    LSTM,
    Adam,
    Chain,
    Dense,
    Tape,
    glorot_uniform,
    setup,
    truncate,
    update,
    value,
    zero_grad,
)
from recur.losses import mse


def network() -> Chain:
    return Chain(LSTM(1, 16, learn_init=True, bias_init=glorot_uniform), Dense(16, 1))


def follow(m: Chain, signal: Iterable[tuple[np.ndarray, np.ndarray]]) -> list[float]:
    """Learns along the signal; the loss of every 20 steps."""
    opt, losses = setup(Adam(0.01), m), []
    with Tape() as tape:
        total = 0.0
        for t, (x, y) in enumerate(signal, 1):
            total = total + mse(m(x), y)
            if t % 20 == 0:
                tape.backward(total)
                update(opt, m)
                zero_grad(m)
                truncate(m)
                losses.append(float(value(total)))
                total = 0.0
    return losses


def wave(steps: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Two sines of incommensurable periods, and at every step the value of the next."""
    t = np.arange(steps + 1)
    v = (0.5 * np.sin(t / 3) + 0.3 * np.sin(t / 7.1)).astype(np.float32)
    return [(v[i : i + 1], v[i + 1 : i + 2]) for i in range(steps)]


def main() -> None:
    recur.seed(0)
    losses = follow(network(), wave(6000))
    for i in range(0, 300, 60):
        print(f"windows {i:3d} to {i + 59:3d}: mean loss {np.mean(losses[i : i + 60]):.4f}")


if __name__ == "__main__":
    main()
