"""Forward and backward with all gradients, heads, optimisers, dropped weights, memory."""

import sys

import numpy as np

import recur
from recur.losses import logitcrossentropy

from .package import output_of
from .steps import LAYERS, SIZES, numbers

T = 100


def window(m, X, dY, **options):
    """One forward and backward of sum(Y * dY), gradients into `.grad` and of X."""
    recur.reset(m)
    with recur.Tape() as tape:
        x = tape.watch(X)
        tape.backward(m(x, **options), dY, accumulate=False)


class Train:
    """A layer over 100 steps: the tape by hand, and the natural `withgradient`."""

    param_names = ("cell", "size", "batch", "dtype")
    params = (list(LAYERS), SIZES[1:4], [1, 16, 64], ["float32", "float64"])

    def setup(self, cell, size, batch, dtype):
        self.m = LAYERS[cell](*size, dtype=dtype)
        self.X, self.dY = (numbers(n, batch, T, dtype=dtype) for n in size)

    def time_tape(self, cell, size, batch, dtype):
        window(self.m, self.X, self.dY)

    def time_withgradient(self, cell, size, batch, dtype):
        def loss(m, X):
            recur.reset(m)
            return (m(X) * self.dY).sum()

        recur.withgradient(loss, self.m, self.X)


class Remat:
    """States kept at every k-th step only, the others computed again."""

    param_names = ("every",)
    params = ([None, 10, 32],)

    def setup(self, every):
        self.m = recur.LSTM(128, 256)
        self.X, self.dY = (numbers(n, 16, 4 * T) for n in (128, 256))

    def time_window(self, every):
        window(self.m, self.X, self.dY, remat=every)


class Loop:
    """A loop over steps through the tape."""

    param_names = ("cell", "size", "batch")
    params = (list(LAYERS), [(16, 32), (128, 256)], [1, 16])

    def setup(self, cell, size, batch):
        self.m = LAYERS[cell](*size)
        self.X, self.dY = (numbers(n, batch, T) for n in size)

    def time_loop(self, cell, size, batch):
        recur.reset(self.m)
        with recur.Tape() as tape:
            x = tape.watch(self.X)
            y = recur.ops.stack([self.m(x[:, :, t]) for t in range(T)], -1)
            tape.backward(y, self.dY, accumulate=False)

    def time_sequence(self, cell, size, batch):
        window(self.m, self.X, self.dY)


class Head:
    """What a Dense head and softmax cross entropy add to an LSTM(128 => 256), 50 classes."""

    param_names = ("batch",)
    params = ([1, 16, 64],)

    def setup(self, batch):
        self.lstm = recur.LSTM(128, 256)
        self.m = recur.Chain(self.lstm, recur.Dense(256, 50))
        self.X, self.dY = numbers(128, batch, T), numbers(256, batch, T)
        self.labels = np.random.default_rng(0).integers(0, 50, (batch, T))

    def time_layer(self, batch):
        recur.reset(self.lstm)
        recur.gradient(lambda m: (m(self.X) * self.dY).sum(), self.lstm)

    def time_layer_and_head(self, batch):
        recur.reset(self.m)
        recur.gradient(lambda m: logitcrossentropy(m(self.X), self.labels), self.m)


class Optimiser:
    """One update of an LSTM(128 => 256)."""

    param_names = ("rule", "parameters")
    params = (["Adam", "Descent", "ClipNorm, Adam"], ["separate", "flat"])

    def setup(self, rule, parameters):
        self.m = recur.LSTM(128, 256)
        if parameters == "flat":
            recur.flatten_parameters(self.m)
        self.grads = recur.gradient(lambda m: m(numbers(128, 4, 5)).sum(), self.m)
        rules = {
            "Adam": recur.Adam,
            "Descent": recur.Descent,
            "ClipNorm, Adam": lambda: recur.OptimiserChain(recur.ClipNorm(1.0), recur.Adam()),
        }
        self.state = recur.setup(rules[rule](), self.m)

    def time_update(self, rule, parameters):
        recur.update(self.state, self.m, self.grads)


class DroppedWeights:
    """A window with and without a mask on the recurrent weight."""

    param_names = ("size", "dropped")
    params = ([(64, 128), (128, 256), (650, 650)], [False, True])

    def setup(self, size, dropped):
        layer = recur.LSTM(*size)
        self.m = recur.WeightDrop(layer, "cell.Wh", 0.5) if dropped else layer
        self.X, self.dY = numbers(size[0], 16, 35), numbers(size[1], 16, 35)

    def time_window(self, size, dropped):
        recur.reset(self.m)
        recur.gradient(lambda m: (m(self.X) * self.dY).sum(), self.m)


# Run in a process of its own, for a peak that is nobody else's: T, remat.
PEAK = """
import resource, sys
import numpy as np
import recur
T, every = int(sys.argv[1]), eval(sys.argv[2])
m = recur.LSTM(128, 256)
X, dY = np.ones((T, 16, 128), np.float32).T, np.ones((T, 16, 256), np.float32).T
for _ in range(2):
    recur.reset(m)
    with recur.Tape() as tape:
        x = tape.watch(X)
        tape.backward(m(x, remat=every), dY, accumulate=False)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


class Memory:
    """What one more step of LSTM(128 => 256), batch 16, adds to the peak of a training process."""

    param_names = ("every",)
    params = ([None, 32],)
    unit = "KiB a step"
    steps = (100, 500)

    def track_a_step(self, every):
        peaks = [self._peak(steps, every) for steps in self.steps]
        return (peaks[1] - peaks[0]) / (self.steps[1] - self.steps[0])

    def _peak(self, steps, every):
        command = [sys.executable, "-c", PEAK, str(steps), repr(every)]
        kib = int(output_of(command))
        return kib / 1024 if sys.platform == "darwin" else kib
