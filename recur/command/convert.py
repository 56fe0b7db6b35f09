"""`recur convert`: a model from one kind of file to another."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recur.command.files import is_safetensors
from recur.errors import RecurError
from recur.io import flux, model
from recur.ops import activation


def add_to(subcommands: argparse._SubParsersAction) -> None:
    parser = subcommands.add_parser(
        "convert",
        help="turn a Flux file into one of recur's, or a model into arrays for Julia",
        description="Read a model from a .bson or .jld2 file of Flux, or a .safetensors file of "
        "recur, and write it as .safetensors, or as .npz with the names and layout of Flux.state.",
    )
    add = parser.add_argument
    add("source", metavar="FROM", help="a .bson, .jld2 or .safetensors file")
    add("target", metavar="TO", help="a .safetensors or .npz file")
    add("--name", help="the variable of a Flux file that holds the model, or a part of it")
    add("--resume", action="store_true", help="keep the running state that is stored with it")
    add(
        "--act",
        action="append",
        type=_placed,
        default=[],
        metavar="PLACE=NAME",
        help="an activation that a Flux file does not hold, as layers.1.act=relu; once for each",
    )
    add(
        "--flux",
        default="0.16",
        choices=("0.14", "0.16"),
        help="the Flux that will read an .npz file; 0.14 stands for all whose layers keep states",
    )
    parser.set_defaults(run=_run)


def _placed(text: str) -> tuple[str, Callable[[Any], Any]]:
    """`layers.1.act=relu` as a place and the function."""
    place, _, name = text.partition("=")
    try:
        return place, activation(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _run(arguments: argparse.Namespace) -> None:
    kind = Path(arguments.target).suffix
    if kind not in (".safetensors", ".npz"):
        raise RecurError(f"{arguments.target}: expected a name that ends in .safetensors or .npz.")
    if is_safetensors(arguments.source):
        loaded = model.load(arguments.source)
    else:
        loaded = flux.load(arguments.source, arguments.name, arguments.resume, dict(arguments.act))
    if kind == ".npz":
        flux.save_npz(loaded, arguments.target, arguments.flux)
    else:
        model.save(loaded, arguments.target, include_state=arguments.resume)
    print(f"{arguments.target}: {loaded}")
