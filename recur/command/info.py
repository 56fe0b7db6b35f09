"""`recur info`: what a file holds."""

from __future__ import annotations

import argparse

from recur.command.files import is_safetensors
from recur.errors import FormatError
from recur.io import flux, safetensors
from recur.io.model import EXTRA, load
from recur.module import summary


def add_to(subcommands: argparse._SubParsersAction) -> None:
    parser = subcommands.add_parser(
        "info",
        help="show what a model file holds",
        description="Show the layers, parameters and arrays of a model file: one of recur's, any "
        "other .safetensors file, or a .bson or .jld2 file of Flux.",
    )
    parser.add_argument("file", metavar="MODEL", help="a .safetensors, .bson or .jld2 file")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    if is_safetensors(arguments.file):
        _show(arguments.file)
    else:
        print(flux.describe(arguments.file))


def _show(path: str) -> None:
    header = safetensors.read_header(path)
    metadata = header.metadata
    if metadata.get("format") == "recur":
        kind = "checkpoint" if "checkpoint" in metadata else "model"
        print(f"a {kind} written by recur {metadata.get('recur_version', 'unknown')}")
        try:
            print(summary(load(path)))
        except FormatError as error:
            print(error)
    else:
        print("arrays in the safetensors format")
    for name, entry in header.entries.items():
        if not name.startswith(EXTRA):
            print(f"{name}  {entry.dtype} {entry.shape}")
    for key, text in metadata.items():
        if key not in ("model", "checkpoint"):
            print(f"{key}: {text if len(text) <= 70 else text[:70] + '...'}")
