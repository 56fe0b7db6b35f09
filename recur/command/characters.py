"""Character models: a network over an alphabet, in one file, and what is done with it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from recur.command.text import Alphabet
from recur.errors import FormatError
from recur.files import AnyPath
from recur.io import model as models
from recur.io import safetensors
from recur.layers import Chain, Dense, Dropout, Embedding
from recur.losses import logitcrossentropy
from recur.recurrent import GRU, LSTM, RNN, GRUv3, reset

CELLS = {"rnn": RNN, "lstm": LSTM, "gru": GRU, "gruv3": GRUv3}
_METADATA = "alphabet"


@dataclass
class CharacterModel:
    """A chain that turns numbers of characters into logits of the next, and its alphabet.

    A text counts as preceded by a newline, so that its first character is predicted as well.
    """

    chain: Any
    alphabet: Alphabet

    @property
    def start(self) -> int:
        """The number of the newline that a text counts as preceded by."""
        return int(self.alphabet.encode("\n")[0])

    @property
    def metadata(self) -> dict[str, str]:
        """What a file needs besides the chain: the alphabet."""
        return {_METADATA: json.dumps(self.alphabet.characters[1:])}

    def save(self, path: AnyPath) -> None:
        """Writes a file that `load` reads, and `recur.load` too, as a chain."""
        models.save(self.chain, path, metadata=self.metadata)

    @classmethod
    def load(cls, path: AnyPath) -> CharacterModel:
        """Raises FormatError as `recur.load`, and if the model is none of characters."""
        arrays, metadata = safetensors.read(path)
        chain: Any = models.unpack(arrays, metadata, str(path))
        try:
            model = cls(chain, Alphabet(json.loads(metadata[_METADATA])))
            reset(chain)
            size = np.shape(chain(np.array([model.start])))
            if size != (len(model.alphabet), 1):
                raise ValueError(f"{len(model.alphabet)} characters, but an output of {size}")
        except (LookupError, ValueError, TypeError, RecursionError) as error:
            raise FormatError(
                f"{path}: no character model ({error}). `recur demo` and `recur train TEXT` make "
                "them."
            ) from None
        reset(chain)
        return model

    def bits(self, text: np.ndarray, streams: int = 16, steps: int = 128) -> float:
        """The mean cost of a character of `text` (numbers, one after the other), in bits.

        The text is read as up to `streams` streams side by side, each from the start state, which
        costs a little at the head of each.  The chain is left at its start.
        """
        reset(self.chain)
        streams = max(1, min(streams, len(text) // 1000))
        length = -(-len(text) // streams)
        padded = np.zeros(streams * length, np.int64)
        padded[: len(text)] = text
        targets = padded.reshape(streams, length)
        inputs = np.concatenate([np.full((streams, 1), self.start), targets[:, :-1]], axis=1)
        real = (np.arange(streams * length) < len(text)).reshape(streams, length)
        nats = 0.0
        for at in range(0, length, steps):
            part = np.s_[:, at : at + steps]
            logits = self.chain(inputs[part])
            costs = logitcrossentropy(logits, targets[part], agg=lambda x: x)
            nats += float(np.sum(costs[real[part]], dtype=np.float64))
        reset(self.chain)
        return nats / math.log(2) / max(len(text), 1)

    def stream(self, prompt: str, temperature: float, rng: np.random.Generator) -> Iterator[str]:
        """New characters without end, one step of the chain each, after the prompt was read.

        temperature  1 draws from the model's distribution, less is more careful, 0 takes the
                     likeliest character
        """
        reset(self.chain)
        logits = self.chain(np.array([self.start]))
        for number in self.alphabet.encode(prompt):
            logits = self.chain(np.array([number]))
        while True:
            number = _draw(logits[:, 0], temperature, rng)
            yield self.alphabet.characters[number]
            logits = self.chain(np.array([number]))


def new(
    alphabet: Alphabet,
    cell: str,
    hidden: int,
    layers: int,
    embedding: int,
    dropout: float,
    rng: np.random.Generator,
) -> CharacterModel:
    """An untrained model: embedding, recurrent layers with dropout after each, and logits."""
    parts: list[Any] = [Embedding(len(alphabet), embedding, rng=rng)]
    width = embedding
    for _ in range(layers):
        parts.append(CELLS[cell](width, hidden, rng=rng))
        if dropout:
            parts.append(Dropout(dropout, rng=rng))
        width = hidden
    return CharacterModel(Chain(*parts, Dense(width, len(alphabet), rng=rng)), alphabet)


def loss(chain: Any, inputs: np.ndarray, targets: np.ndarray) -> Any:
    """The mean cost of a character in nats; both arrays are (B, T) numbers."""
    return logitcrossentropy(chain(inputs), targets)


def shifted(text: np.ndarray, start: int) -> np.ndarray:
    """What a model has just read when it predicts each character of `text`."""
    return np.concatenate([[start], text[:-1]])


def _draw(logits: np.ndarray, temperature: float, rng: np.random.Generator) -> int:
    logits = logits[1:].astype(np.float64)  # 0 is UNKNOWN, which nobody writes
    if temperature == 0.0:
        return int(np.argmax(logits)) + 1
    weights = np.exp((logits - logits.max()) / temperature).cumsum()
    return int(np.searchsorted(weights, rng.random() * weights[-1], side="right")) + 1
