"""Makes the pictures of the docs: `python docs/pictures.py` writes them anew.

Each is what `inspect.draw` shows of a few lines that really ran.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from recur import GRU, LSTM, Chain, Dense, Recur, Tape, reset, truncate
from recur.inspect import Picture, draw
from recur.losses import mse

FOLDER = Path(__file__).parent / "explanation" / "pictures"
PICTURES: dict[str, Callable[[], Picture]] = {}

x = np.ones((2, 4), np.float32)


def picture(make: Callable[[], Picture]) -> Callable[[], Picture]:
    PICTURES[make.__name__.replace("_", "-")] = make
    return make


def placement(use: Callable[[Recur, Tape], None]) -> Callable[[], Picture]:
    """A row of the placement table: what `use` does with a layer that learns its init."""

    def make() -> Picture:
        m = GRU(2, 3, learn_init=True)
        with Tape(log=True) as tape:
            use(m, tape)
        return draw(tape, legend=False)

    make.__name__ = use.__name__
    picture(make)
    return make


# One layer, one idea.


@picture
def three_steps() -> Picture:
    m = Chain(LSTM(2, 3, learn_init=True), GRU(3, 3), Dense(3, 1))
    target = np.zeros((1, 4))
    with Tape(log=True) as tape:
        loss = mse(m(x), target) + mse(m(x), target)
        tape.backward(loss)
        truncate(m)
        tape.backward(mse(m(x), target))
    return draw(tape)


@picture
def three_hundred_steps() -> Picture:
    m = Chain(LSTM(2, 3, learn_init=True), GRU(3, 3), Dense(3, 1))
    target = np.zeros((1, 4))
    with Tape(log=True) as tape:
        loss = 0.0
        for t in range(1, 301):
            loss = loss + mse(m(x), target)
            if t % 50 == 0:
                tape.backward(loss)
                truncate(m)
                loss = 0.0
    return draw(tape)


@picture
def handed_over() -> Picture:
    encoder, decoder = GRU(2, 3), GRU(2, 3)
    with Tape(log=True) as tape:
        for _ in range(3):
            encoder(x)
        decoder.state = encoder.state
        tape.backward(mse(decoder(x), 0) + mse(decoder(x), 0))
    return draw(tape, {"encoder": encoder, "decoder": decoder})


@picture
def inside_a_sequence() -> Picture:
    m = GRU(2, 3, learn_init=True)
    with Tape(log=True) as tape:
        tape.backward(mse(m(np.ones((2, 4, 6)), truncate_every=2), 0))
    return draw(tape)


# The rows of the placement table.


@placement
def new_layer(m: Recur, tape: Tape) -> None:
    m(x)
    tape.backward(mse(m(x), 0))


@placement
def reset_inside(m: Recur, tape: Tape) -> None:
    reset(m)
    m(x)
    tape.backward(mse(m(x), 0))


@placement
def reset_between(m: Recur, tape: Tape) -> None:
    first = mse(m(x), 0)
    reset(m)
    tape.backward(first + mse(m(x), 0))


@picture
def second_gradient() -> Picture:
    m = GRU(2, 3, learn_init=True)
    m(x)
    with Tape(log=True) as tape:
        m(x)
        tape.backward(mse(m(x), 0))
    return draw(tape, legend=False)


@placement
def warm_up_inside(m: Recur, tape: Tape) -> None:
    for _ in range(2):
        m(x)
    tape.backward(mse(m(x), 0))


@placement
def truncate_first(m: Recur, tape: Tape) -> None:
    truncate(m)
    m(x)
    tape.backward(mse(m(x), 0))


@placement
def truncate_between(m: Recur, tape: Tape) -> None:
    early = mse(m(x), 0)
    truncate(m)
    tape.backward(early + mse(m(x), 0))


@placement
def truncate_after_the_loss(m: Recur, tape: Tape) -> None:
    m(x)
    loss = mse(m(x), 0)
    truncate(m)
    tape.backward(loss)


@placement
def reset_after_truncate(m: Recur, tape: Tape) -> None:
    m(x)
    truncate(m)
    reset(m)
    tape.backward(mse(m(x), 0))


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, make in PICTURES.items():
        make().save(FOLDER / f"{name}.svg")


if __name__ == "__main__":
    main()
