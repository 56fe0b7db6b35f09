"""`recur sample`: new text from a character model, one character at a time."""

from __future__ import annotations

import argparse
import sys
from itertools import islice

import numpy as np

from recur.command.arguments import at_least, count
from recur.command.characters import CharacterModel


def add_to(subcommands: argparse._SubParsersAction) -> None:
    parser = subcommands.add_parser(
        "sample",
        help="stream new text from a character model",
        description="Stream new text from a model that `recur demo` or `recur train` wrote.",
    )
    parser.add_argument("model", metavar="MODEL", help="a .safetensors file")
    parser.add_argument("--prompt", default="", help="text to go on from")
    parser.add_argument("--length", type=count, default=500, help="characters (default 500)")
    parser.add_argument(
        "--temperature",
        type=at_least(0.0),
        default=0.7,
        help="1 draws as the model predicts, less is more careful, 0 takes the likeliest (0.7)",
    )
    parser.add_argument("--seed", type=int, help="for the same text again")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    model = CharacterModel.load(arguments.model)
    unknown = model.alphabet.unknown(arguments.prompt)
    if unknown:
        listed = ", ".join(map(repr, unknown))
        print(f"recur: the model's alphabet lacks {listed}; each reads as unknown", file=sys.stderr)
    rng = np.random.default_rng(arguments.seed)
    write = sys.stdout.write
    write(arguments.prompt)
    for character in islice(
        model.stream(arguments.prompt, arguments.temperature, rng), arguments.length
    ):
        write(character)
        sys.stdout.flush()
    write("\n")
