"""One time step of live streams, outside a scope."""

import itertools

import numpy as np

import recur
from recur import _kernels

LAYERS = {"RNN": recur.RNN, "LSTM": recur.LSTM, "GRU": recur.GRU}
SIZES = [(16, 32), (64, 128), (128, 256), (256, 512), (512, 1024)]
STREAM = [25, 25, 25]  # hidden sizes of a model that is stepped once an audio frame


def numbers(*shape, dtype="float32", seed=0):
    """Normal numbers, features first, laid out as layers read them."""
    return np.random.default_rng(seed).standard_normal(shape[::-1]).astype(dtype).T


class Step:
    """`m(x)` for one stream."""

    param_names = ("cell", "size", "dtype")
    params = (list(LAYERS), SIZES, ["float32", "float64"])

    def setup(self, cell, size, dtype):
        self.m = LAYERS[cell](*size, dtype=dtype)
        self.x = numbers(size[0], dtype=dtype)
        for _ in range(3):
            self.m(self.x)

    def time_step(self, cell, size, dtype):
        self.m(self.x)


class Streams:
    """`m(x)` for many streams side by side."""

    param_names = ("cell", "size", "batch", "dtype")
    params = (list(LAYERS), SIZES[1:3], [4, 16, 64], ["float32", "float64"])

    def setup(self, cell, size, batch, dtype):
        self.m = LAYERS[cell](*size, dtype=dtype)
        self.x = numbers(size[0], batch, dtype=dtype)
        for _ in range(3):
            self.m(self.x)

    def time_step(self, cell, size, batch, dtype):
        self.m(self.x)


class ChainStep:
    """A whole model a call, and for comparison its kernels alone, called one by one."""

    def setup(self):
        sizes = [STREAM[0], *STREAM]
        layers = [recur.LSTM(a, b) for a, b in itertools.pairwise(sizes)]
        head = recur.Dense(STREAM[-1], 3)
        self.m = recur.Chain(*layers, head)
        self.x = numbers(STREAM[0])
        for _ in range(3):
            self.m(self.x)
        self.kernels = [
            _kernels.LSTMKernel(*(recur.value(w) for w in (r.cell.Wi, r.cell.Wh, r.cell.b)))
            for r in layers
        ]
        self.head = _kernels.AffineKernel(recur.value(head.weight), recur.value(head.bias))
        self.states = [tuple(np.zeros((2, 1, n), np.float32)) for n in STREAM]
        self.row, self.out = self.x[None], np.empty((1, 3), np.float32)

    def time_chain(self):
        self.m(self.x)

    def time_kernels(self):
        x = self.row
        for kernel, state in zip(self.kernels, self.states, strict=True):
            x = kernel.step(x, *state, out=state)[0]
        self.head.apply(x, out=self.out)


class Decay:
    """A thousand steps on zeros from a state that dies away slowly through subnormal numbers."""

    param_names = ("start",)
    params = ([1.0, 1e-39],)

    def setup(self, start):
        self.m = recur.LSTM(64, 128, forget_bias=5.0)
        self.state = tuple(np.full((128, 1), start, np.float32) for _ in "hc")
        self.quiet = np.zeros((64, 1, 1000), np.float32)

    def time_quiet_steps(self, start):
        self.m.state = self.state
        self.m(self.quiet)
