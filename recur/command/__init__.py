"""The `recur` command: one module a subcommand, and what they share."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from recur._version import __version__
from recur.command import convert, demo, evaluate, info, sample, serve, training
from recur.errors import RecurError

_SUBCOMMANDS = (demo, training, sample, serve, evaluate, info, convert)


def run(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code; errors become one sentence, no traceback."""
    arguments = parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may lack a character of a text
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except (RecurError, FloatingPointError) as error:
        return _fail(str(error))
    except MemoryError:
        return _fail("not enough memory. Try a smaller --hidden or --batch.")
    return 0


def parser() -> argparse.ArgumentParser:
    """The parser of all arguments; each subcommand adds its own."""
    top = argparse.ArgumentParser(
        prog="recur", description="Train, sample and look into recurrent networks."
    )
    top.add_argument("--version", action="version", version=f"recur {__version__}")
    subcommands = top.add_subparsers(metavar="COMMAND", required=True)
    for module in _SUBCOMMANDS:
        module.add_to(subcommands)
    return top


def _fail(sentence: str) -> int:
    print(f"recur: {sentence}", file=sys.stderr)
    return 1
