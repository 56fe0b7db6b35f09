"""The character model of Flux's model zoo, ported: two LSTMs learn a text and write more of it.

docs/how-to/port-from-flux.md shows it beside the Julia.

    python examples/port_char_rnn.py                    learns the source of a Python module
    python examples/port_char_rnn.py input.txt --columns 50
"""

from __future__ import annotations

import argparse
import inspect
import textwrap
from pathlib import Path

import numpy as np

import recur
from recur import LSTM, Adam, Chain, Dense, batchseq, chunk, onehot, onehotbatch, reset, setup
from recur import softmax as probabilities
from recur.losses import logitcrossentropy
from recur.train import train

STOP = "\x03"  # fills up the last columns, and is no character of the text


def batches(text: str, alphabet: list[str], columns: int, steps: int) -> list[tuple[list, list]]:
    """Windows of `steps` one-hot steps (n, columns), and the same one character later."""
    hot = onehotbatch(text, alphabet, dtype=np.float32)
    stop = onehot(STOP, alphabet)
    Xs, Ys = (
        chunk(batchseq(chunk(part, columns), stop), size=steps)
        for part in (hot[:, :-1], hot[:, 1:])
    )
    return list(zip(Xs, Ys, strict=True))


def network(n: int, hidden: int) -> Chain:
    return Chain(LSTM(n, hidden), LSTM(hidden, hidden), Dense(hidden, n))


def loss(m, xs, ys):
    reset(m)
    return sum(logitcrossentropy(m(x), y) for x, y in zip(xs, ys, strict=True))


def sample(m, alphabet: list[str], length: int, rng: np.random.Generator) -> str:
    reset(m)
    c, text = rng.choice(alphabet), []
    for _ in range(length):
        text.append(c)
        p = probabilities(m(onehot(c, alphabet)).astype(float))
        c = rng.choice(alphabet, p=p)
    return "".join(text)


def run(
    text: str, *, hidden: int = 128, columns: int = 10, steps: int = 50, epochs: int = 10
) -> tuple[Chain, list[str], list[float]]:
    """Learns the text: the model, its alphabet, and the loss of every update."""
    alphabet = [*dict.fromkeys(text), STOP]
    data = batches(text, alphabet, columns, steps)
    model = network(len(alphabet), hidden)
    opt = setup(Adam(1e-2), model)
    history = train(loss, model, data, opt, epochs=epochs)
    return model, alphabet, history.losses


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn a text character by character.")
    parser.add_argument("file", nargs="?", type=Path, help="a text; else a module of Python's own")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--columns", type=int, default=10, help="streams read side by side")
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()
    recur.seed(0)
    text = arguments.file.read_text() if arguments.file else inspect.getsource(textwrap)
    model, alphabet, _ = run(
        text, hidden=arguments.hidden, columns=arguments.columns, epochs=arguments.epochs
    )
    print(sample(model, alphabet, 300, np.random.default_rng(0)))


if __name__ == "__main__":
    main()
