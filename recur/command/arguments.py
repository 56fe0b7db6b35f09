"""Types of arguments that more than one subcommand takes."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def count(text: str) -> int:
    """A whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def at_least(least: float, below: float = float("inf")) -> Callable[[str], float]:
    """A number from `least` up to, but not including, `below`."""

    def number(text: str) -> float:
        value = float(text)
        if not least <= value < below:
            raise argparse.ArgumentTypeError(f"{text} is not in [{least:g}, {below:g})")
        return value

    return number
