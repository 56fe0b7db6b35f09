"""Sequence to sequence with beam search: a model that learns to write words backwards.

An encoder reads the source; its last state becomes the decoder's first; the decoder writes the
target letter by letter.  Training hands the state over inside the scope, so that gradient flows
from the decoder into the encoder.  Writing keeps the best few beginnings, and `reindex` lets the
decoder's state follow them: columns are repeated, reordered and dropped as beginnings are.

    python examples/seq2seq_beam.py
    python examples/seq2seq_beam.py --updates 200 --width 8
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import numpy as np

import recur
from recur import LSTM, Adam, Chain, ClipNorm, Dense, Embedding, OptimiserChain
from recur.losses import logitcrossentropy

LETTERS = "abcdef"
END = len(LETTERS)  # ends every target, and stands before its first letter
SYMBOLS = END + 1


class Seq2Seq:
    """An encoder and a decoder, of which the one starts where the other stops."""

    def __init__(self, hidden: int, rng: np.random.Generator, symbols: int = SYMBOLS) -> None:
        self.encoder = Chain(Embedding(symbols, 16, rng=rng), LSTM(16, hidden, rng=rng))
        self.decoder = Chain(
            Embedding(symbols, 16, rng=rng),
            LSTM(16, hidden, rng=rng),
            Dense(hidden, symbols, rng=rng),
        )

    def read(self, source: np.ndarray, lengths: np.ndarray | None = None) -> None:
        """Encodes a source (B, T) of whole numbers and hands the state over to the decoder."""
        recur.reset(self)
        self.encoder(source, lengths=lengths)  # padding leaves each sample's last state alone
        self.decoder.layers[1].state = self.encoder.layers[1].state

    def scores(self, batch: Batch) -> Any:
        """Logits (symbols, B, T) of every target symbol, given the ones before it."""
        self.read(batch.source, batch.source_lengths)
        return self.decoder(batch.shifted)


class Batch(NamedTuple):
    """Words and what they are to become, as whole numbers.

    source   (B, S) padded, source_lengths (B,)
    target   (B, T) with END after the last letter; mask (B, T) is True up to there
    shifted  (B, T) what the decoder reads: END, then the target without its last symbol
    """

    source: np.ndarray
    source_lengths: np.ndarray
    target: np.ndarray
    mask: np.ndarray
    shifted: np.ndarray


def batch_of(words: list[np.ndarray]) -> Batch:
    """The task: each word backwards."""
    source, lengths = recur.padded(words)
    target, target_lengths = recur.padded([np.append(word[::-1], END) for word in words], val=END)
    mask = np.arange(target.shape[1]) < target_lengths[:, None]
    shifted = np.concatenate([np.full((len(words), 1), END), target[:, :-1]], axis=1)
    return Batch(source.astype(int), lengths, target.astype(int), mask, shifted.astype(int))


def some_words(count: int, rng: np.random.Generator, longest: int = 5) -> list[np.ndarray]:
    return [rng.integers(0, len(LETTERS), rng.integers(1, longest + 1)) for _ in range(count)]


def loss(model: Seq2Seq, batch: Batch) -> Any:
    return logitcrossentropy(model.scores(batch), batch.target, mask=batch.mask)


def train(model: Seq2Seq, updates: int, rng: np.random.Generator) -> list[float]:
    opt = recur.setup(OptimiserChain(ClipNorm(1.0), Adam(0.01)), model)
    losses = []
    for _ in range(updates):
        batch = batch_of(some_words(64, rng))
        value, grads = recur.withgradient(lambda m, batch=batch: loss(m, batch), model)
        recur.update(opt, model, grads)
        losses.append(float(value))
    return losses


class Hypothesis(NamedTuple):
    """A written target, without END, and the logarithm of its probability (END included)."""

    symbols: list[int]
    score: Any


def beam_search(
    model: Seq2Seq, source: np.ndarray, *, width: int, longest: int, end: int = END
) -> list[Hypothesis]:
    """The best complete targets for one source (S,), best first, at most `width` of them.

    `width` beginnings are kept at a time.  Inside a scope the scores are recorded: their gradient
    goes back through the decoder, through every reordering of its state, and into the encoder.
    """
    model.read(source[None])
    written: list[list[int]] = [[]]
    totals: Any = np.zeros(1)  # log-probability of each beginning
    finished: list[Hypothesis] = []
    for step in range(longest + 1):
        last = np.array([symbols[-1] if symbols else end for symbols in written])
        candidates = recur.ops.logsoftmax(model.decoder(last)) + totals  # (symbols, beginnings)
        numbers = np.array(recur.value(candidates))
        if step == longest:  # now all must end
            numbers[np.arange(len(numbers)) != end] = -np.inf
        beams, chosen = [], []
        for rank, flat in enumerate(np.argsort(-numbers, axis=None)[: 2 * width]):
            symbol, beam = np.unravel_index(flat, numbers.shape)
            if symbol != end:
                if len(beams) < width and step < longest:
                    beams.append(int(beam))
                    chosen.append(int(symbol))
            elif rank < width:
                finished.append(Hypothesis(written[beam], candidates[symbol, beam]))
        finished.sort(key=lambda hypothesis: -float(recur.value(hypothesis.score)))
        del finished[width:]
        if not beams or _decided(finished, numbers[chosen, beams], width):
            break
        totals = candidates[np.array(chosen), np.array(beams)]
        written = [[*written[beam], symbol] for beam, symbol in zip(beams, chosen, strict=True)]
        recur.reindex(model.decoder, beams)  # the state follows the beginnings
    return finished


def _decided(finished: list[Hypothesis], running: np.ndarray, width: int) -> bool:
    """Whether no beginning can still get among the best: scores only fall."""
    return len(finished) == width and running.max() <= float(recur.value(finished[-1].score))


def text(symbols: Any) -> str:
    return "".join(LETTERS[symbol] for symbol in symbols)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=600)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    model = Seq2Seq(options.hidden, rng)
    losses = train(model, options.updates, rng)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} after {options.updates} updates")
    words = some_words(200, rng)
    right = 0
    for number, word in enumerate(words):
        best, *others = beam_search(model, word, width=options.width, longest=8)
        right += best.symbols == list(word[::-1])
        if number < 5:
            rest = ", ".join(f"{text(h.symbols)} {np.exp(h.score):.1%}" for h in others)
            print(f"{text(word):>6} -> {text(best.symbols):<6} {np.exp(best.score):.1%}; {rest}")
    print(f"{right} of {len(words)} new words written backwards without a mistake")


if __name__ == "__main__":
    main()
