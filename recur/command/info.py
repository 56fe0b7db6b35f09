"""`recur info`: what a file holds."""

from __future__ import annotations

import argparse

from recur.errors import FormatError
from recur.io import safetensors
from recur.io.model import EXTRA, load
from recur.module import summary


def add_to(subcommands: argparse._SubParsersAction) -> None:
    parser = subcommands.add_parser(
        "info",
        help="show what a model file holds",
        description="Show the layers, parameters and arrays of a model file.",
    )
    parser.add_argument("file", metavar="MODEL", help="a .safetensors file")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    header = safetensors.read_header(arguments.file)
    metadata = header.metadata
    if metadata.get("format") == "recur":
        kind = "checkpoint" if "checkpoint" in metadata else "model"
        print(f"a {kind} written by recur {metadata.get('recur_version', 'unknown')}")
        try:
            print(summary(load(arguments.file)))
        except FormatError as error:
            print(error)
    else:
        print("arrays in the safetensors format")
    for name, entry in header.entries.items():
        if not name.startswith(EXTRA):
            print(f"{name}  {entry.dtype} {entry.shape}")
    own = {key: text for key, text in metadata.items() if key not in ("model", "checkpoint")}
    for key, text in own.items():
        print(f"{key}: {text if len(text) <= 70 else text[:70] + '...'}")
