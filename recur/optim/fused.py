"""Rules that a compiled kernel runs in one pass over memory, with the bits of their `apply`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from recur import _kernels
from recur.optim.rules import Adam, AdamW, Descent, Momentum, Rule, State

# x -= rule.apply(state, x, scale * g, t), all of them vectors
Update = Callable[[State, np.ndarray, np.ndarray, int, float], None]


def fused(rule: Rule, dtype: np.dtype) -> Update | None:
    """The update of a rule as one kernel call a block, or None if no kernel does it."""
    if dtype not in (np.float32, np.float64):
        return None
    # by the very type: a subclass may have another step
    if type(rule) is Descent:
        return lambda state, x, g, t, scale: _kernels.descent_update(
            x, g, rate=rule.eta, scale=scale
        )
    if type(rule) is Momentum:
        return lambda state, x, g, t, scale: _kernels.momentum_update(
            x, g, state["velocity"], rate=rule.eta, rho=rule.rho, scale=scale
        )
    if type(rule) is Adam:
        return lambda state, x, g, t, scale: _adam(rule, 0.0, state, x, g, t, scale)
    if type(rule) is AdamW:
        decay = rule.eta * rule.lambda_ if rule.couple else rule.lambda_
        return lambda state, x, g, t, scale: _adam(rule, decay, state, x, g, t, scale)
    return None


def _adam(
    rule: Adam | AdamW,
    decay: float,
    state: State,
    x: np.ndarray,
    g: np.ndarray,
    t: int,
    scale: float,
) -> None:
    _kernels.adam_update(
        x,
        g,
        state["mean"],
        state["square"],
        rate=rule.eta / (1 - rule.beta[0] ** t),
        beta=rule.beta,
        correction=1 / (1 - rule.beta[1] ** t),
        epsilon=rule.epsilon,
        decay=decay,
        scale=scale,
    )
