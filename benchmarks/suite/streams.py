"""Live streams: one, in blocks, and pools of them."""

from __future__ import annotations

import numpy as np

from recur import LSTM
from recur.streaming import Stream, StreamPool

SIZES = [(16, 32), (64, 128), (128, 256)]


class StreamStep:
    """One stream: a step a call, and 480 steps a call."""

    params = (SIZES,)
    param_names = ("size",)

    def setup(self, size):
        n_in, n_out = size
        rng = np.random.default_rng(0)
        self.stream = Stream(LSTM(n_in, n_out, rng=rng))
        self.x = rng.standard_normal(n_in).astype(np.float32)
        self.X = rng.standard_normal((480, n_in)).astype(np.float32).T
        self.out = np.empty((480, n_out), np.float32).T
        for _ in range(3):
            self.stream(self.x)

    def time_step(self, size):
        self.stream(self.x)

    def time_block_of_480(self, size):
        self.stream.run(self.X, self.out)


class Pool:
    """A step of a pool by slots: all streams, and one in a hundred of them."""

    params = (SIZES, [1, 10, 64, 100, 1000, 10_000])
    param_names = ("size", "streams")

    def setup(self, size, streams):
        n_in, n_out = size
        rng = np.random.default_rng(0)
        self.pool = StreamPool(LSTM(n_in, n_out, rng=rng), capacity=streams)
        for name in range(streams):
            self.pool.open(name)
        few = rng.permutation(streams)[: max(streams // 100, 1)].tolist()
        self.all, self.few = self.pool.slots(range(streams)), self.pool.slots(few)
        self.X = rng.standard_normal((streams, n_in)).astype(np.float32).T
        self.some = np.ascontiguousarray(self.X[:, : len(few)].T).T
        self.out = np.empty((streams, n_out), np.float32).T
        self.out_of_some = np.empty((len(few), n_out), np.float32).T

    def time_step(self, size, streams):
        self.pool.step(self.all, self.X, out=self.out)

    def time_step_of_one_in_a_hundred(self, size, streams):
        self.pool.step(self.few, self.some, out=self.out_of_some)
