"""`recur eval`: what a text costs a character model."""

from __future__ import annotations

import argparse

from recur.command.baselines import compressed_bits
from recur.command.characters import CharacterModel
from recur.command.text import read_text
from recur.errors import RecurError


def add_to(subcommands: argparse._SubParsersAction) -> None:
    parser = subcommands.add_parser(
        "eval",
        help="measure a character model on a text",
        description="Measure the bits per character that a model needs for a text, beside bz2 and "
        "lzma.",
    )
    parser.add_argument("model", metavar="MODEL", help="a .safetensors file")
    parser.add_argument("texts", metavar="TEXT", nargs="+", help="text files, read in this order")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    model = CharacterModel.load(arguments.model)
    text = read_text(arguments.texts)
    if not text:
        raise RecurError(f"{arguments.texts[0]}: no text to measure.")
    numbers = model.alphabet.encode(text)
    unknown = int((numbers == 0).sum())
    print(f"{len(text)} characters, {unknown} of them outside the model's alphabet")
    rows = {"model": model.bits(numbers), **compressed_bits(text)}
    for name, bits in rows.items():
        print(f"{name:8} {bits:.3f} bits per character")
