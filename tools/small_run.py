"""A small run of every kind of kernel, for `make valgrind`: sizes that fill no register evenly."""

import itertools

import numpy as np

import recur
from recur.losses import logitcrossentropy
from recur.streaming import Stream, StreamPool

N_IN, N_OUT, BATCH, STEPS, CLASSES = 5, 19, 3, 4, 7
LAYERS = (recur.RNN, recur.LSTM, recur.GRU, recur.GRUv3)


def train(layer, dtype, rng, **options):
    """Forward, loss, backward and an update of a layer and its head."""
    model = recur.Chain(
        layer(N_IN, N_OUT, dtype=dtype, rng=rng),
        recur.Dense(N_OUT, CLASSES, dtype=dtype, rng=rng),
    )
    recur.flatten_parameters(model)
    state = recur.setup(recur.OptimiserChain(recur.ClipNorm(1.0), recur.Adam(1e-3)), model)
    X = rng.standard_normal((STEPS, BATCH, N_IN)).astype(dtype).T
    labels = rng.integers(0, CLASSES, (BATCH, STEPS))

    def loss(m):
        y = m.layers[0](X, **options)
        return logitcrossentropy(m.layers[1](y), labels)

    value, grads = recur.withgradient(loss, model)
    recur.update(state, model, grads)
    assert np.isfinite(value)
    return model


def loop(model, dtype, rng):
    """The same step by step, through the tape's sinks."""
    xs = rng.standard_normal((STEPS, BATCH, N_IN)).astype(dtype)
    recur.reset(model)
    recur.gradient(lambda m: sum((m(x.T) ** 2).sum() for x in xs), model)


def stream(model, rng):
    """One stream and a pool of them, in float32 and with the weights in fewer bits."""
    X = rng.standard_normal((N_IN, STEPS)).astype(np.float32)
    forms = [recur.compress(model, s) for s in ("bfloat16", "float16", "int8")]
    for m in (model, *forms):
        one = Stream(m)
        for t in range(STEPS):
            one(X[:, t])
        one.run(X)
        pool = StreamPool(m, capacity=STEPS)
        for name in range(STEPS):
            pool.open(name)
        assert np.isfinite(pool.step(range(STEPS), X)).all()


def main():
    rng = np.random.default_rng(0)
    for threads, layer, dtype in itertools.product((1, 2), LAYERS, (np.float32, np.float64)):
        recur.set_num_threads(threads)
        model = train(layer, dtype, rng)
        train(layer, dtype, rng, lengths=[STEPS, 1, 2])
        train(layer, dtype, rng, remat=2)
        loop(model, dtype, rng)
        recur.reset(model)
        if dtype is np.float32:
            stream(model, rng)
    print("recur: a small run of", recur.__version__)


if __name__ == "__main__":
    main()
