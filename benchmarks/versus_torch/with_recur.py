"""The tasks in recur."""

import numpy as np
import tasks
from tasks import ALPHABET, EMBEDDING, HIDDEN, STEPS

import recur
from recur.losses import logitcrossentropy
from recur.streaming import Stream


def lstm(n_in, n_out, weights):
    layer = recur.LSTM(n_in, n_out)
    layer.cell.Wi, layer.cell.Wh, layer.cell.b = weights
    return layer


def dense(weights):
    layer = recur.Dense(weights[0].shape[1], weights[0].shape[0])
    layer.weight, layer.bias = weights
    return layer


def character_model():
    embedding = recur.Embedding(ALPHABET, EMBEDDING)
    embedding.weight = tasks.EMBEDDING_WEIGHT.T
    model = recur.Chain(
        embedding, lstm(EMBEDDING, HIDDEN, tasks.CHARACTER_LSTM), dense(tasks.LOGITS)
    )
    recur.flatten_parameters(model)
    return model


def training():
    model = character_model()
    rule = recur.OptimiserChain(recur.ClipNorm(tasks.CLIP), recur.Adam(tasks.RATE))
    state = recur.setup(rule, model)
    x, y = tasks.WINDOW
    grads = None

    def run():
        nonlocal grads
        recur.reset(model)
        loss, grads = recur.withgradient(lambda m: logitcrossentropy(m(x), y), model, into=grads)
        recur.update(state, model, grads)
        return float(loss)

    return run, lambda: [run() for _ in range(3)]


def sampling(step=lambda model: model):
    def build():
        call = step(character_model())
        characters = [np.array([int(c)]) for c in tasks.WINDOW[0, 0]]
        t = 0

        def run():
            nonlocal t
            t = (t + 1) % STEPS
            return call(characters[t])

        return run, lambda: run()[:3, 0].tolist()

    return build


def adam():
    model = lstm(128, 256, tasks.MIDDLE)
    recur.flatten_parameters(model)
    grads = recur.gradient(lambda m: m(tasks.X.T).sum(), model)
    state = recur.setup(recur.Adam(tasks.RATE), model)

    def run():
        recur.update(state, model, grads)

    def result():
        run()
        return recur.value(model.cell.Wh)[0, :3].tolist()

    return run, result


def layer():
    model, X = lstm(128, 256, tasks.MIDDLE), tasks.X.T

    def run():
        recur.reset(model)
        return recur.gradient(lambda m: m(X).sum(), model)

    return run, lambda: run()["cell.Wh"][0, :3].tolist()


def layer_and_head():
    model = recur.Chain(lstm(128, 256, tasks.MIDDLE), dense(tasks.MIDDLE_HEAD))
    X, labels = tasks.X.T, tasks.LABELS.T

    def run():
        recur.reset(model)
        return recur.withgradient(lambda m: logitcrossentropy(m(X), labels), model)

    return run, lambda: float(run()[0])


def large(dropped):
    def build():
        model = lstm(650, 650, tasks.LARGE)
        if dropped:
            model = recur.WeightDrop(model, "cell.Wh", 0.5)
        X, dY = tasks.X_LARGE.T, tasks.DY_LARGE.T

        def run():
            recur.reset(model)
            return recur.withgradient(lambda m: (m(X) * dY).sum(), model)

        return run, lambda: None if dropped else float(run()[0])

    return build


TASKS = {
    "character model, one training window": training,
    "character model, one character": sampling(),
    "character model, one character, Stream": sampling(Stream),
    "Adam, LSTM(128 => 256)": adam,
    "LSTM(128 => 256), T 100, B 16": layer,
    "the same with Dense and cross entropy": layer_and_head,
    "LSTM(650 => 650), T 35, B 20": large(False),
    "the same with dropped recurrent weights": large(True),
}

if __name__ == "__main__":
    threads, seconds = tasks.arguments()
    recur.set_num_threads(threads)
    tasks.measure(TASKS, threads, seconds)
