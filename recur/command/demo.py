"""`recur demo`: learn the text of Python's own library in two minutes, then write more of it."""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import time
from itertools import islice
from pathlib import Path
from typing import TextIO

import numpy as np

from recur.command.arguments import at_least, count
from recur.command.baselines import OrderTwo, compressed_bits
from recur.command.characters import CharacterModel, new
from recur.command.learning import NATS, learn
from recur.command.text import Alphabet, standard_library
from recur.files import write_atomically
from recur.module import params, seed
from recur.train import Event, History

HIDDEN, EMBEDDING = 192, 48
BATCH, STEPS = 32, 32
LEARNING_RATE = 1e-2


def add_to(subcommands: argparse._SubParsersAction) -> None:
    parser = subcommands.add_parser(
        "demo",
        help="learn the text of Python's own library, then stream more of it",
        description="Train a character model on the source of the running Python's standard "
        "library, compare it with simpler models, and stream new text from it.  Ctrl-C at any time "
        "leaves a model that loads.",
    )
    add = parser.add_argument
    add("--folder", default="recur-demo", help="where model, curve and log go (%(default)s)")
    add("--updates", type=count, default=3000, help="at most (%(default)s)")
    add("--seconds", type=at_least(1.0), default=120.0, help="of training at most (%(default)g)")
    add("--length", type=count, default=600, help="characters to stream (%(default)s)")
    add("--seed", type=int, default=0, help="of all random numbers (%(default)s)")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    folder = Path(arguments.folder)
    folder.mkdir(parents=True, exist_ok=True)
    seed(arguments.seed)
    rng = np.random.default_rng(arguments.seed)
    model = new(Alphabet.of_source_code(), "lstm", HIDDEN, 1, EMBEDDING, 0.0, rng)
    path = folder / "model.safetensors"
    model.save(path)  # from here on there is always a model to load
    with open(folder / "log.txt", "w", encoding="utf-8") as file:
        _demonstrate(model, path, _Log(file), rng, arguments)


def _demonstrate(
    model: CharacterModel,
    path: Path,
    log: _Log,
    rng: np.random.Generator,
    arguments: argparse.Namespace,
) -> None:
    size = sum(p.size for p in params(model.chain))
    log(f"{model.chain}, {size:,} parameters")
    training, held_out = standard_library()
    text, kept = model.alphabet.encode(training), model.alphabet.encode(held_out)
    log(
        f"text: Python's standard library, {len(text):,} characters to learn from and "
        f"{len(kept):,} of other files held out"
    )
    order_two = OrderTwo(text, len(model.alphabet), model.start).bits(kept)
    baselines = {"two characters of context": order_two, **compressed_bits(held_out)}
    history = _learn(model, text, kept, path, log, arguments)
    rows = {"this model": model.bits(kept), **baselines}
    log("bits per held-out character:")
    for name, bits in rows.items():
        log(f"  {name:26} {bits:.3f}")
    _draw(history, rows, path.with_name("learning-curve.png"), log)
    _stream(model, rng, log, arguments.length)
    log(f"written: {path} and {path.with_name('log.txt')}")
    log(f'try: {_command()} sample {path} --prompt "def "')


def _command() -> str:
    """`recur`, or the script that runs if the shell would not find it by its name."""
    script = Path(sys.argv[0])
    return str(script) if script.stem == "recur" and not shutil.which("recur") else "recur"


def _learn(
    model: CharacterModel,
    text: np.ndarray,
    held_out: np.ndarray,
    path: Path,
    log: _Log,
    arguments: argparse.Namespace,
) -> History:
    pace = _Pace(arguments.updates, arguments.seconds)

    def after(event: Event) -> bool:
        if event.kind == "validation":
            model.save(path)
            log.write(f"{event.step * BATCH * STEPS} characters: {event.loss / NATS:.3f} bits")
        return pace.done(event.step) >= 1.0

    try:
        history = learn(
            model,
            text,
            _excerpts(held_out),
            batch=BATCH,
            steps=STEPS,
            updates=arguments.updates,
            learning_rate=lambda step: LEARNING_RATE * pace.factor(step),
            validate_every=100,
            callbacks=(after,),
        )
    finally:
        model.save(path)  # after Ctrl-C too: the update under way was completed first
    speed = history.steps * BATCH * STEPS / history.seconds
    log(f"{history.steps} updates in {history.seconds:.0f} s, {speed:,.0f} characters a second")
    return history


def _excerpts(text: np.ndarray) -> np.ndarray:
    """A thousand characters from each tenth of the text: from many files, and soon read."""
    return np.concatenate([part[:1000] for part in np.array_split(text, 10)])


class _Pace:
    """How much of the training is done: the count of updates or the clock, whichever is ahead."""

    def __init__(self, updates: int, seconds: float) -> None:
        self.updates = updates
        self.seconds = seconds
        self.started = time.monotonic()

    def done(self, step: int) -> float:
        return max(step / self.updates, (time.monotonic() - self.started) / self.seconds)

    def factor(self, step: int) -> float:
        """Of the learning rate: up within fifty updates, then down along a cosine."""
        falling = (1 + math.cos(math.pi * min(self.done(step), 1.0))) / 2
        return min(1.0, (step + 1) / 50) * (0.02 + 0.98 * falling)


class _Log:
    """Prints lines and keeps them in a file."""

    def __init__(self, file: TextIO) -> None:
        self.file = file

    def __call__(self, line: str) -> None:
        print(line, flush=True)
        self.write(line)

    def write(self, line: str) -> None:
        self.file.write(line + "\n")
        self.file.flush()


def _stream(model: CharacterModel, rng: np.random.Generator, log: _Log, length: int) -> None:
    prompt = "def "
    log(f"{length} new characters, each from the state that the one before has left:\n")
    characters: list[str] = []
    seconds = 0.0
    stream = model.stream(prompt, 0.7, rng)
    print(prompt, end="")
    while len(characters) < length:
        started = time.perf_counter()
        characters += islice(stream, 1)
        seconds += time.perf_counter() - started
        print(characters[-1], end="", flush=True)
    print("\n")
    log.write(prompt + "".join(characters) + "\n")
    log(f"{1e6 * seconds / length:.0f} microseconds a character")


def _draw(history: History, rows: dict[str, float], path: Path, log: _Log) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        log('no learning curve drawn: pip install "recur[cli]" brings matplotlib')
        return
    characters = BATCH * STEPS
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    bits = np.array(history.losses) / NATS
    axes.plot(np.arange(1, len(bits) + 1) * characters, bits, lw=0.5, label="training")
    if history.validations:
        steps, losses = np.array(history.validations).T
        axes.plot(steps * characters, losses / NATS, "o-", label="held out, ten excerpts")
    end = history.steps * characters
    axes.plot(end, rows["this model"], "k*", ms=12, zorder=3, label="held out, all of it")
    for number, (name, level) in enumerate(list(rows.items())[1:]):
        axes.axhline(level, ls="--", color=f"C{number + 2}", label=name)
    axes.set(xlabel="characters read", ylabel="bits per character")
    axes.set_ylim(1.5, min(bits.max(), 5.0) if len(bits) else 5.0)
    axes.legend()
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=120))
    log(f"drawn: {path}")
