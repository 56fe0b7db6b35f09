"""Whole sequences forward, from a zero state, outside a scope."""

import recur

from .steps import LAYERS, SIZES, numbers


class Sequence:
    """`m(X)` for 100 steps."""

    param_names = ("cell", "size", "batch", "dtype")
    params = (list(LAYERS), SIZES[1:4], [1, 16, 64], ["float32", "float64"])

    def setup(self, cell, size, batch, dtype):
        self.m = LAYERS[cell](*size, dtype=dtype)
        self.X = numbers(size[0], batch, 100, dtype=dtype)

    def time_forward(self, cell, size, batch, dtype):
        recur.reset(self.m)
        self.m(self.X)


class LongSequence:
    """`m(X)` for 1000 steps of one sample, and the same through a thousand calls."""

    param_names = ("cell", "size")
    params = (["LSTM", "GRU"], SIZES[:2])

    def setup(self, cell, size):
        self.m = LAYERS[cell](*size)
        self.X = numbers(size[0], 1, 1000)
        self.xs = [self.X[:, 0, t] for t in range(1000)]

    def time_forward(self, cell, size):
        recur.reset(self.m)
        self.m(self.X)

    def time_steps(self, cell, size):
        m = self.m
        recur.reset(m)
        for x in self.xs:
            m(x)


class Lengths:
    """A batch of padded sequences, of which three quarters are real."""

    def setup(self):
        self.m = recur.LSTM(64, 128)
        self.X = numbers(64, 16, 100)
        self.lengths = [50 + 50 * b // 15 for b in range(16)]

    def time_lengths(self):
        recur.reset(self.m)
        self.m(self.X, lengths=self.lengths)

    def time_all(self):
        recur.reset(self.m)
        self.m(self.X)
