"""`recur train`: a character model of your own text."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from recur.command.arguments import at_least, count
from recur.command.characters import CELLS, CharacterModel, new
from recur.command.learning import NATS, learn
from recur.command.text import Alphabet, read_text
from recur.errors import RecurError
from recur.module import params, seed
from recur.optim import Cosine, Warmup


def add_to(subcommands: argparse._SubParsersAction) -> None:
    parser = subcommands.add_parser(
        "train",
        help="train a character model on text files",
        description="Train a character model and write it to a file that `recur sample`, `recur "
        "eval` and recur.load read.  Ctrl-C stops after the update under way and writes the model; "
        "--resume goes on from the checkpoint beside it, as it does after a kill.",
    )
    add = parser.add_argument
    add("texts", metavar="TEXT", nargs="+", help="text files (UTF-8), read in this order")
    add("--output", default="model.safetensors", help="where the model goes (%(default)s)")
    add("--cell", choices=sorted(CELLS), default="lstm", help="%(default)s")
    add("--hidden", type=count, default=256, help="units of each layer (%(default)s)")
    add("--layers", type=count, default=1, help="recurrent layers (%(default)s)")
    add("--embedding", type=count, default=64, help="size of a character's vector (%(default)s)")
    add("--dropout", type=at_least(0.0, 1.0), default=0.0, help="after each layer (%(default)s)")
    add("--steps", type=count, default=32, help="characters of a window (%(default)s)")
    add("--batch", type=count, default=32, help="streams side by side (%(default)s)")
    add("--epochs", type=count, default=1, help="passes over the text (%(default)s)")
    add("--learning-rate", type=at_least(0.0), default=1e-2, help="of Adam, falling (%(default)s)")
    add("--clip", type=at_least(0.0), default=1.0, help="norm of the gradient (%(default)s)")
    add("--held-out", type=at_least(0.0, 1.0), default=0.05, help="share of the text (%(default)s)")
    add("--checkpoint-every", type=count, default=200, help="updates (%(default)s)")
    add("--resume", action="store_true", help="go on from the checkpoint, if there is one")
    add("--seed", type=int, default=0, help="of all random numbers (%(default)s)")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    text = read_text(arguments.texts)
    held_out = max(int(arguments.held_out * len(text)), 1)
    window = arguments.batch * arguments.steps
    if len(text) - held_out <= window:
        raise RecurError(
            f"{', '.join(arguments.texts)}: {len(text)} characters are too few for "
            f"{arguments.batch} streams of {arguments.steps} steps. Lower --batch or --steps, or "
            "give more text."
        )
    seed(arguments.seed)
    Path(arguments.output).parent.mkdir(parents=True, exist_ok=True)
    alphabet = Alphabet.of(text)
    numbers = alphabet.encode(text)
    model = new(
        alphabet,
        arguments.cell,
        arguments.hidden,
        arguments.layers,
        arguments.embedding,
        arguments.dropout,
        np.random.default_rng(arguments.seed),
    )
    size = sum(p.size for p in params(model.chain))
    print(f"{len(text):,} characters, {len(alphabet)} different ones; {size:,} parameters")
    _train(model, numbers[:-held_out], numbers[-held_out:], arguments)


def _train(
    model: CharacterModel, text: np.ndarray, held_out: np.ndarray, arguments: argparse.Namespace
) -> None:
    output = Path(arguments.output)
    checkpoint = output.with_suffix(".checkpoint.safetensors")
    updates = arguments.epochs * len(text) // (arguments.batch * arguments.steps)
    decay = Cosine(arguments.learning_rate, arguments.learning_rate / 50, updates)
    try:
        history = learn(
            model,
            text,
            held_out,
            batch=arguments.batch,
            steps=arguments.steps,
            epochs=arguments.epochs,
            learning_rate=Warmup(50, decay),
            clip=arguments.clip,
            checkpoint=checkpoint,
            checkpoint_every=arguments.checkpoint_every,
            resume=arguments.resume,
        )
    except KeyboardInterrupt:
        model.save(output)
        print(f"\nstopped; the model so far is {output}, --resume goes on", file=sys.stderr)
        raise
    model.save(output)
    print(f"{output}: {history.validations[-1][1] / NATS:.3f} bits per held-out character")
