"""recur: the natural API, and the fastest public ones where those are others.

The benchmark's arrays are time-major and row-major, so their `.T` is what recur reads: features
first, (I, B, T), without a copy.
"""

import functools

import numpy as np

import recur
from recur.streaming import Stream, StreamPool

STORAGES = ("bfloat16", "float16", "int8")  # of `recur.compress`: rows of their own, not peers
REMAT = 32
LAYER = {"rnn": recur.RNN, "lstm": recur.LSTM, "gru": recur.GRU}


def loaded(layer, cell, p):
    """`layer` with one layer's weights of the benchmark, whose gate order is recur's, too."""
    layer.cell.Wi, layer.cell.Wh = p["wi"], p["wh"]
    b = p["bi"] + p["bh"]
    if cell == "gru":  # the candidate's recurrent bias lies inside the reset gate
        n = 2 * layer.cell.n_out
        b[n:] = p["bi"][n:]
        layer.cell.bh = p["bh"][n:]
    layer.cell.b = b
    return layer


def build(case, data):
    """(model, its recurrent layers)."""
    options = {"recurrent_bias": True} if case.cell == "gru" else {}
    layers = [
        loaded(LAYER[case.cell](n_in, n_out, dtype=data["x"].dtype, **options), case.cell, p)
        for (n_in, n_out), p in zip(case.layer_dims(), data["layers"], strict=True)
    ]
    return (layers[0] if len(layers) == 1 else recur.Chain(*layers)), layers


def rows(y):
    """An output as the benchmark wants it, (T, B, H) or (B, H)."""
    return np.asarray(y).T


def named(layers, gradient_of):
    """The weights' gradients under the benchmark's names; both biases have the same one."""
    return [
        {
            name: gradient_of(weight)
            for name, weight in (("wi", r.cell.Wi), ("wh", r.cell.Wh), ("bi", r.cell.b))
        }
        for r in layers
    ]


class Adapter:
    def __init__(self, threads):
        recur.set_num_threads(threads)

    def versions(self):
        return {"recur": recur.__version__}

    def variants(self, case):
        if case.workload == "step":
            found = {
                "m(x)": self.step,
                "stream(x)": self.stream,
                "stream(x, out)": self.stream_out,
            }
            return found | {s: functools.partial(self.step, storage=s) for s in STORAGES}
        if case.stepping:
            return {
                "m(x)": self.step,
                "pool.step(slots, X, out=)": self.pool,
            }
        if case.workload == "seq":
            found = {"m(X)": self.seq, "scan(cell, X)": self.scan}
            return found | ({"stream.run(X, out)": self.stream_run} if case.B == 1 else {})
        if case.workload == "growth":  # memory is read per process: one for each
            return {
                "tape.backward": self.train_tape,
                f"tape.backward, remat={REMAT}": functools.partial(self.train_tape, remat=REMAT),
            }
        if case.workload == "loop":
            return {
                "m(x) loop, withgradient": self.loop,
                "m(x) loop, tape": self.loop_tape,
                "m(X), tape": self.train_tape,  # no loop: what it would cost as one sequence
            }
        return {"withgradient": self.train, "tape.backward": self.train_tape}

    # -- steps: one stream gives vectors, many give (features, streams)
    def _stepper(self, case, data, call, reset):
        xs = [x[0] if case.B == 1 else x.T for x in data["x"]]
        t = 0

        def run():
            nonlocal t
            y = call(xs[t])
            t = (t + 1) & 7
            return y

        def outputs():
            nonlocal t
            reset()
            t = 0
            return {"y": np.stack([rows(run()).reshape(case.B, case.H) for _ in range(8)])}

        return run, outputs

    def step(self, case, data, storage=None):
        m, _ = build(case, data)
        if storage:
            m = recur.compress(m, storage)
        return self._stepper(case, data, m, lambda: recur.reset(m))

    def stream(self, case, data):
        s = Stream(build(case, data)[0])
        return self._stepper(case, data, s, s.reset)

    def stream_out(self, case, data):
        s = Stream(build(case, data)[0])
        out = np.empty(case.H, data["x"].dtype)
        run, _ = self._stepper(case, data, lambda x: s(x, out), s.reset)

        def outputs():
            s.reset()
            steps = [s(x[0], out).copy() for x in data["x"]]
            return {"y": np.stack(steps).reshape(8, case.B, case.H)}

        return run, outputs

    def pool(self, case, data):
        pool = StreamPool(build(case, data)[0], capacity=case.B)
        for name in range(case.B):
            pool.open(name)
        slots = pool.slots(range(case.B))
        out = np.empty((case.B, case.H), data["x"].dtype).T

        def reset():
            pool.reset(slots)

        run, _ = self._stepper(case, data, lambda x: pool.step(slots, x, out=out), reset)

        def outputs():
            reset()
            return {"y": np.stack([rows(pool.step(slots, x.T, out=out)).copy() for x in data["x"]])}

        return run, outputs

    # -- sequences
    def seq(self, case, data):
        m, _ = build(case, data)
        X = data["x"].T

        def run():
            recur.reset(m)
            return m(X)

        return run, lambda: {"y": rows(run())}

    def scan(self, case, data):
        cell = build(case, data)[0].cell
        X = data["x"].T

        def run():
            return recur.scan(cell, X)

        return run, lambda: {"y": rows(run())}

    def stream_run(self, case, data):
        s = Stream(build(case, data)[0])
        X = data["x"].T
        out = np.empty((case.T, 1, case.H), data["x"].dtype).T

        def run():
            s.reset()
            return s.run(X, out)

        return run, lambda: {"y": rows(run()).copy()}

    # -- training: the gradient of sum(y * dy) for all weights and the input
    def _natural(self, case, data, forward):
        m, layers = build(case, data)
        X, dY = data["x"].T, data["dy"].T

        def loss(m, X):
            recur.reset(m)
            y = forward(m, X)
            return (y * dY).sum(), y

        def run():
            return recur.withgradient(loss, m, X)

        def outputs():
            (_, y), (of_m, dX) = run()
            return {"y": rows(y), "dx": rows(dX), "grads": named(layers, lambda p: of_m[p])}

        return run, outputs

    def _fast(self, case, data, forward, **options):
        """The output's gradient is given, and weights' gradients are overwritten in place."""
        m, layers = build(case, data)
        X, dY = data["x"].T, data["dy"].T

        def run():
            recur.reset(m)
            with recur.Tape() as tape:
                x = tape.watch(X)
                y = forward(m, x, **options)
                tape.backward(y, dY, accumulate=False)
            return y, x.grad

        def outputs():
            y, dX = run()
            return {
                "y": rows(recur.value(y)),
                "dx": rows(dX),
                "grads": named(layers, lambda p: p.grad),
            }

        return run, outputs

    def train(self, case, data):
        return self._natural(case, data, sequence)

    def train_tape(self, case, data, **options):
        return self._fast(case, data, sequence, **options)

    def loop(self, case, data):
        return self._natural(case, data, step_by_step)

    def loop_tape(self, case, data):
        return self._fast(case, data, step_by_step)


def sequence(m, X, **options):
    return m(X, **options)


def step_by_step(m, X):
    return recur.ops.stack([m(X[:, :, t]) for t in range(X.shape[2])], -1)
