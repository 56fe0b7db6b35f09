"""What truncation does to learning: a network must remember its first input for a while.

One bit comes in at the first step and is asked for at the last; noise comes in between.  The loss
at the last step reaches back `window` steps, and what came before counts as a value.  The value of
the state still carries some of the bit across the cut, by the chance of the first weights, so that
even a window that does not reach the bit may learn to keep what is left of it.  The study counts
how many updates each window takes, and shows how fast gradients fade before training starts.

    python examples/truncation_study.py
    python examples/truncation_study.py --delay 12 --windows 3 6 12 --updates 2000
    python examples/truncation_study.py --plot lags.png
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import numpy as np

import recur
from recur import GRU, Adam, Chain, ClipNorm, Dense, OptimiserChain
from recur.inspect import GradientLag, gradient_lag
from recur.losses import logitbinarycrossentropy

CHECK_EVERY = 25  # updates


class Trial(NamedTuple):
    """What came of one window."""

    updates: int | None  # until 99 % of the bits were remembered; None if that never was so
    right: float  # the share that was remembered in the end


def network(seed: int) -> Chain:
    rng = np.random.default_rng(seed)
    return Chain(GRU(2, 16, rng=rng), Dense(16, 1, rng=rng))


def sequences(delay: int, batch: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Inputs (2, batch, delay), a bit at the first step and noise; the bits (1, batch)."""
    bits = rng.integers(0, 2, (1, batch))
    X = np.zeros((2, batch, delay), np.float32)
    X[0, :, 0] = 2 * bits - 1
    X[1] = 0.3 * rng.standard_normal((batch, delay))
    return X, bits.astype(np.float32)


def loss(model: Chain, X: np.ndarray, bits: np.ndarray, window: int) -> Any:
    """Of the last step's answer; its gradient reaches `window` steps back."""
    start = max(0, X.shape[-1] - window)
    recur.reset(model)
    with recur.paused():  # what no gradient is to reach need not be recorded
        model(X[..., :start])
    return logitbinarycrossentropy(model(X[..., start:])[..., -1], bits)


def share_right(model: Chain, X: np.ndarray, bits: np.ndarray) -> float:
    logits = recur.reset(model)(X)[..., -1]
    return float(np.mean((logits > 0) == (bits > 0.5)))


def trial(window: int, delay: int, updates: int, seed: int) -> Trial:
    rng = np.random.default_rng(seed)
    model = network(seed)
    opt = recur.setup(OptimiserChain(ClipNorm(1.0), Adam(0.01)), model)
    held_out = sequences(delay, 500, rng)
    right = 0.0
    for done in range(1, updates + 1):
        batch = sequences(delay, 32, rng)
        grads = recur.gradient(lambda m, batch=batch: loss(m, *batch, window), model)
        recur.update(opt, model, grads)
        if done % CHECK_EVERY == 0 or done == updates:
            right = share_right(model, *held_out)
            if right >= 0.99:
                return Trial(done, right)
    return Trial(None, right)


def fading(delay: int, seed: int) -> GradientLag:
    """How far back the last step's loss reaches in the network before training, without a cut."""
    X, bits = sequences(delay, 500, np.random.default_rng(seed))
    return gradient_lag(network(seed), X, lambda y, t: logitbinarycrossentropy(y, bits), at=[delay])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--delay", type=int, default=12, help="steps from the bit to the question")
    parser.add_argument("--windows", type=int, nargs="+", default=[2, 4, 6, 8, 10, 12])
    parser.add_argument("--updates", type=int, default=1500, help="at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", metavar="FILE", help="draw how gradients fade (matplotlib)")
    options = parser.parse_args()
    lag = fading(options.delay, options.seed)
    print(f"a bit is shown at step 1 and asked for at step {options.delay}\n")
    print("window  of the gradient  updates until it is remembered")
    for window in options.windows:
        done = trial(window, options.delay, options.updates, options.seed)
        count = f"not after {options.updates}" if done.updates is None else str(done.updates)
        print(f"{window:>6}  {lag.within(window):>15.3%}  {count} ({done.right:.1%} right)")
    if options.plot:
        lag.plot().figure.savefig(options.plot)


if __name__ == "__main__":
    main()
