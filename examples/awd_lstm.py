"""AWD-LSTM, a word-level language model with every regulariser of its paper.

Merity, Keskar and Socher 2018, Regularizing and optimizing LSTM language models: three layers with
dropped recurrent weights, locked dropout on input, between layers and on output, embedding dropout,
tied weights, penalties on activations (AR and TAR), windows of varying length with a rate to match,
gradient clipping, and NT-ASGD.  It reads the docstrings and comments of the running Python's
standard library, word by word.

    python examples/awd_lstm.py                                  half a minute
    python examples/awd_lstm.py --checkpoint awd.safetensors     Ctrl-C, the same line goes on
    python examples/awd_lstm.py --without weight-drop
    python examples/awd_lstm.py --ablation --seeds 3             the table of what each is worth

The sizes are small, so that this is a matter of minutes on one core; the paper's are arguments of
`Settings`.
"""

from __future__ import annotations

import argparse
import ast
import io
import itertools
import math
import re
import sysconfig
import tokenize
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import recur
from recur import (
    ASGD,
    LSTM,
    ClipNorm,
    Embedding,
    EmbeddingDropout,
    LockedDropout,
    Module,
    NonMonotonicTrigger,
    OptimiserChain,
    TiedDense,
    WeightDecay,
    WeightDrop,
    activity_penalty,
    averaged,
    temporal_activity_penalty,
)
from recur.losses import logitcrossentropy
from recur.train import History, train

# ---------------------------------------------------------------------- text

_WORD = re.compile(r"[a-z]+(?:'[a-z]+)?|[0-9]+|[^\sa-z0-9]")
_NO_TEXT = {"test", "tests", "idle_test", "site-packages", "encodings", "lib2to3"}
UNKNOWN, END = "<unk>", "<end>"


def prose(source: str) -> Iterator[str]:
    """The docstrings of a Python source, then its comments, those on following lines as one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""
    comment: list[str] = []
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                yield " ".join(comment)
                comment = []
            comment.append(token.string.strip("#! "))
            last = token.start[0]
    yield " ".join(comment)


def words(pieces: Iterable[str]) -> list[str]:
    """Words, numbers and signs in lower case, each piece followed by END."""
    found: list[str] = []
    for piece in pieces:
        split = _WORD.findall(piece.lower())
        found += [*split, END] if split else []
    return found


def standard_library(training: int, held_out: int) -> tuple[list[str], list[str]]:
    """Words to train on and words held out, from different files of the standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in root.rglob("*.py") if not _NO_TEXT & set(path.parts)]
    kept: list[str] = []
    trained: list[str] = []
    # By a checksum of the name: mixed, and yet in one order everywhere.
    for path in sorted(paths, key=lambda p: zlib.crc32(p.relative_to(root).as_posix().encode())):
        if len(trained) >= training:
            break
        try:
            found = words(prose(path.read_text(encoding="utf-8")))
        except (SyntaxError, UnicodeDecodeError, tokenize.TokenError):
            continue  # a template, or a sample of bad syntax
        (kept if len(kept) < held_out else trained).extend(found)
    return trained[:training], kept[:held_out]


class Vocabulary:
    """The most frequent words and their numbers; 0 is any other word."""

    def __init__(self, text: Iterable[str], size: int) -> None:
        counts = Counter(text)
        # Alphabetically among equals, so that the numbers do not depend on the order of files.
        common = sorted(counts, key=lambda word: (-counts[word], word))[: size - 1]
        self.words = [UNKNOWN, *common]
        self._numbers = {word: i for i, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, text: Iterable[str]) -> np.ndarray:
        return np.array([self._numbers.get(word, 0) for word in text])


def streams(numbers: np.ndarray, batch: int) -> np.ndarray:
    """One text as `batch` texts beside each other (batch, n); what is left over is cut off."""
    return numbers[: len(numbers) // batch * batch].reshape(batch, -1)


class Windows:
    """(x, y) windows of varying length over streams (B, n): y is x one word later.

    A length is drawn from normal(base, 5), for one window in twenty from normal(base / 2, 5), and
    at least 5.  `rate` is a schedule for an optimiser: the rate of the window that was given last,
    eta for a window of `base` steps and in proportion for others, since the loss is a mean over
    steps.
    """

    def __init__(self, text: np.ndarray, base: int, eta: float, varies: bool, seed: int) -> None:
        self.text = text
        self.base, self.eta, self.varies = base, eta, varies
        self.generator = np.random.default_rng(seed)
        self.position = 0
        self.steps = base

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        last = self.text.shape[1] - 1
        while self.position < last:
            start = self.position
            self.steps = min(self._length(), last - start)
            self.position += self.steps
            stop = self.position
            yield self.text[:, start:stop], self.text[:, start + 1 : stop + 1]
        self.position = 0

    def _length(self) -> int:
        if not self.varies:
            return self.base
        base = self.base if self.generator.random() < 0.95 else self.base / 2
        return max(5, round(self.generator.normal(base, 5)))

    def rate(self, step: int) -> float:
        return self.eta * self.steps / self.base

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "steps": self.steps}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.position, self.steps = saved["position"], saved["steps"]


# ---------------------------------------------------------------------- model


@dataclass(frozen=True)
class Settings:
    """Sizes, rates and what is dropped with which probability."""

    vocabulary: int = 1000
    embedding: int = 48
    hidden: int = 96
    layers: int = 3
    batch: int = 8
    steps: int = 30
    eta: float = 5.0
    clip: float = 0.25
    decay: float = 1.2e-6
    drop_words: float = 0.05
    drop_input: float = 0.2
    drop_between: float = 0.1
    drop_output: float = 0.2
    drop_weights: float = 0.2
    alpha: float = 2.0
    beta: float = 1.0
    averaging: bool = True
    varying: bool = True
    patience: int = 3  # validations without gain after which averaging starts


# What `--without` and the ablation take away.
PARTS: dict[str, dict[str, Any]] = {
    "weight-drop": {"drop_weights": 0.0},
    "locked-dropout": {"drop_input": 0.0, "drop_between": 0.0, "drop_output": 0.0},
    "embedding-dropout": {"drop_words": 0.0},
    "penalties": {"alpha": 0.0, "beta": 0.0},
    "averaging": {"averaging": False},
    "varying-windows": {"varying": False},
}


def without(settings: Settings, parts: Iterable[str]) -> Settings:
    for part in parts:
        settings = replace(settings, **PARTS[part])
    return settings


class AWDLSTM(Module):
    """Words (B, T) to scores of the next word (V, B, T), the recurrent states carried on."""

    def __init__(self, settings: Settings, rng: np.random.Generator) -> None:
        s = settings
        self.words = EmbeddingDropout(
            Embedding(s.vocabulary, s.embedding, init=_small_uniform, rng=rng),
            s.drop_words,
            rng=rng,
        )
        self.input = LockedDropout(s.drop_input, rng=rng)
        # The last layer is as wide as an embedding: its output meets the tied table.
        sizes = [s.embedding, *[s.hidden] * (s.layers - 1), s.embedding]
        self.layers = [
            WeightDrop(LSTM(n_in, n_out, rng=rng), "Wh", s.drop_weights, rng=rng)
            for n_in, n_out in itertools.pairwise(sizes)
        ]
        self.between = [LockedDropout(s.drop_between, rng=rng) for _ in range(s.layers - 1)]
        self.output = LockedDropout(s.drop_output, rng=rng)
        self.decoder = TiedDense(self.words)

    def features(self, x: np.ndarray) -> tuple[Any, Any]:
        """The last layer's output (F, B, T), without and with dropout."""
        h = self.input(self.words(x))
        for layer, drop in zip(self.layers, [*self.between, None], strict=True):
            h = layer(h)
            if drop is not None:
                h = drop(h)
        return h, self.output(h)

    def __call__(self, x: np.ndarray) -> Any:
        return self.decoder(self.features(x)[1])


def _small_uniform(*dims: int, rng: np.random.Generator) -> np.ndarray:
    return rng.uniform(-0.1, 0.1, dims)


def cost(model: AWDLSTM, x: np.ndarray, y: np.ndarray, settings: Settings) -> tuple[Any, Any]:
    """(what is minimised, the mean cross entropy alone) of a window."""
    raw, dropped = model.features(x)
    entropy = logitcrossentropy(model.decoder(dropped), y)
    total = entropy
    if settings.alpha:
        total = total + activity_penalty(dropped, settings.alpha)
    if settings.beta and x.shape[1] > 1:
        total = total + temporal_activity_penalty(raw, settings.beta)
    return total, entropy


def evaluate(model: AWDLSTM, text: np.ndarray, steps: int = 70) -> float:
    """The mean cross entropy of every next word of streams (B, n), the state carried through."""
    recur.reset(model)
    total = 0.0
    last = text.shape[1] - 1
    for start in range(0, last, steps):
        stop = min(start + steps, last)
        entropy = logitcrossentropy(model(text[:, start:stop]), text[:, start + 1 : stop + 1])
        total += float(entropy) * (stop - start)
    return total / last


# ---------------------------------------------------------------------- training


@dataclass
class Run:
    """A trained model, its optimiser and its losses."""

    model: AWDLSTM
    opt: Any
    history: History
    held_out: float  # perplexity


def learn(
    training: np.ndarray,
    held_out: np.ndarray,
    settings: Settings,
    *,
    updates: int,
    seed: int = 0,
    checkpoint: str | None = None,
    checkpoint_every: int = 20,
    progress: bool = True,
    callbacks: Iterable[Any] = (),
) -> Run:
    """Train on numbers of words; goes on from the checkpoint if there is one."""
    recur.seed(seed)
    model = AWDLSTM(settings, np.random.default_rng(seed))
    windows = Windows(
        streams(training, settings.batch), settings.steps, settings.eta, settings.varying, seed
    )
    rule = OptimiserChain(WeightDecay(settings.decay), ClipNorm(settings.clip), ASGD(windows.rate))
    opt = recur.setup(rule, model)
    test = streams(held_out, 10)

    def validation(model: AWDLSTM) -> float:
        with averaged(opt):
            return evaluate(model, test)

    def shown(event: Any) -> str:
        if event.kind == "validation":
            return f"update {event.step}: held-out perplexity {math.exp(event.loss):.1f}"
        return f"loss {event.loss:.3f}"

    trigger = [NonMonotonicTrigger(settings.patience)] if settings.averaging else []
    history = train(
        lambda model, x, y: cost(model, x, y, settings)[0],
        model,
        windows,
        opt,
        epochs=updates,  # more than there will be: `updates` ends the run
        updates=updates,
        validation=validation,
        validate_every=max(1, updates // 20),
        callbacks=[*trigger, *callbacks],
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every,
        resume=True,
        generators={"windows": windows.generator},
        progress=shown if progress else False,
    )
    return Run(model, opt, history, math.exp(validation(model)))


def ablation(
    training: np.ndarray, held_out: np.ndarray, settings: Settings, updates: int, seeds: int
) -> Iterator[tuple[str, list[float]]]:
    """Held-out perplexities of the whole model, of it without each part, and without any."""
    variants = {"all of it": [], **{f"without {part}": [part] for part in PARTS}}
    variants["without any"] = list(PARTS)
    for name, parts in variants.items():
        yield (
            name,
            [
                learn(
                    training,
                    held_out,
                    without(settings, parts),
                    updates=updates,
                    seed=seed,
                    progress=False,
                ).held_out
                for seed in range(seeds)
            ],
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--updates", type=int, default=1500)
    parser.add_argument("--words", type=int, default=8_000, help="how many to train on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", help="a file to write, and to go on from")
    parser.add_argument("--without", nargs="*", choices=PARTS, default=[])
    parser.add_argument("--ablation", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    settings = without(Settings(), args.without)
    trained, kept = standard_library(args.words, args.words * 2 // 5)
    vocabulary = Vocabulary(trained, settings.vocabulary)
    training, held_out = vocabulary.encode(trained), vocabulary.encode(kept)
    if args.ablation:
        print(f"{args.updates} updates, {args.seeds} seeds, held-out perplexity, mean and spread")
        for name, found in ablation(training, held_out, settings, args.updates, args.seeds):
            print(f"{name:28}{np.mean(found):8.1f} ± {np.std(found):.1f}", flush=True)
        return
    try:
        run = learn(
            training,
            held_out,
            settings,
            updates=args.updates,
            seed=args.seed,
            checkpoint=args.checkpoint,
        )
    except KeyboardInterrupt:
        parser.exit(130, "stopped; with --checkpoint the same command goes on from here\n")
    unigrams = np.bincount(training, minlength=len(vocabulary)) + 1
    guess = -np.log(unigrams / unigrams.sum())[held_out].mean()
    print(f"held-out perplexity {run.held_out:.1f}, by word frequency alone {math.exp(guess):.1f}")


if __name__ == "__main__":
    main()
