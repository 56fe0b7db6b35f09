"""Models for the tests of live streams, and inputs that fit them."""

from __future__ import annotations

import numpy as np

import recur
from recur import (
    GRU,
    LSTM,
    RNN,
    Chain,
    Dense,
    Dropout,
    Embedding,
    GRUv3,
    LayerNorm,
    Parallel,
    Recur,
    SkipConnection,
    WeightDrop,
)


def models(dtype=np.float32, rng=None):
    """One model of every kind that a stream knows, by name."""
    rng = np.random.default_rng(7) if rng is None else rng
    new = {"dtype": dtype, "rng": rng}
    drop = WeightDrop(LSTM(5, 6, **new), "Wh", 0.5)
    tied = GRU(5, 5, **new)
    return {
        "RNN": RNN(5, 6, recur.relu, **new),
        "LSTM": LSTM(5, 6, **new),
        "LSTM with peepholes": LSTM(5, 6, peepholes=True, gate_act="hard_sigmoid", **new),
        "GRU": GRU(5, 6, recurrent_bias=True, **new),
        "GRUv3": GRUv3(5, 6, **new),
        "learned start": LSTM(5, 6, init_state=(np.full(6, 0.3), np.full(6, -0.2)),
                              learn_init=True, **new),
        "own activation": RNN(5, 6, recur.softsign, **new),
        "two layers": Chain(LSTM(5, 7, **new), GRU(7, 4, **new), Dense(4, 3, **new)),
        "head": Chain(GRU(5, 6, **new), Dense(6, 4, recur.tanh, **new), LSTM(4, 3, **new),
                      Dense(3, 2, recur.sigmoid, **new)),
        "gelu head": Chain(LSTM(5, 6, **new), Dense(6, 4, recur.gelu, **new), recur.softmax),
        "norm": Chain(LSTM(5, 6, **new), LayerNorm(6, dtype=dtype), Dense(6, 2, **new)),
        "dropout": Chain(LSTM(5, 6, **new), Dropout(0.5), Dense(6, 2, **new)),
        "weight drop": Chain(drop, Dense(6, 2, **new)),
        "characters": Chain(Embedding(11, 4, **new), LSTM(4, 6, **new), Dense(6, 11, **new)),
        "function": Chain(lambda x: x * 2, LSTM(5, 6, **new), lambda y: y[:3]),
        "skip": Chain(SkipConnection(GRU(5, 5, **new), "+"), Dense(5, 2, **new)),
        "parallel": Chain(Parallel(recur.vcat, RNN(5, 2, **new), Dense(5, 3, **new)),
                          LSTM(5, 4, **new)),
        "one layer twice": Chain(tied, tied, Dense(5, 2, **new)),
        "named": Chain(body=LSTM(5, 6, **new), head=Dense(6, 1, **new)),
        "own cell": Recur(recur.extra_cells.MGUCell(5, 6, **new)),
    }  # fmt: skip


NAMES = tuple(models())


def inputs(name, shape, rng, dtype=np.float32):
    """Random inputs: (n_in, *shape), or indices of that shape."""
    if name == "characters":
        return rng.integers(0, 11, shape)
    return rng.standard_normal((*shape[::-1], 5)).astype(dtype).T
