"""Showing how training goes: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

_SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Shows the latest text beside a count of steps.

    A bar where `file` is a terminal and tqdm is installed (`pip install "recur[cli]"`), else a line
    every ten seconds and a last one at the end, as a log wants it.
    """

    def __init__(self, total: int | None, done: int, file: TextIO | None = None) -> None:
        self._file = file or sys.stderr
        self._total = total
        self._done = done
        self._text = ""
        self._bar = self._new_bar()
        self._printed_at = time.monotonic()
        self._printed = done

    def _new_bar(self) -> Any:
        if not self._file.isatty():
            return None
        try:
            from tqdm import tqdm
        except ImportError:
            return None
        return tqdm(
            total=self._total, initial=self._done, unit="step", file=self._file, dynamic_ncols=True
        )

    def step(self, done: int, text: str) -> None:
        """Say that `done` steps are done, with `text` beside it."""
        before, self._done, self._text = self._done, done, text
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(done - before)
        elif time.monotonic() - self._printed_at >= _SECONDS_BETWEEN_LINES:
            self._print()

    def line(self, text: str) -> None:
        """Print one line that stays."""
        if self._bar is not None:
            self._bar.write(text, file=self._file)
        else:
            print(text, file=self._file, flush=True)

    def close(self) -> None:
        """Ends the bar, or prints the last line."""
        if self._bar is not None:
            self._bar.close()
        elif self._done > self._printed:
            self._print()

    def _print(self) -> None:
        of = "" if self._total is None else f"/{self._total}"
        print(f"step {self._done}{of}: {self._text}", file=self._file, flush=True)
        self._printed_at, self._printed = time.monotonic(), self._done
