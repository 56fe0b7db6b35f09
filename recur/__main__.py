"""The `recur` command, also as `python -m recur`."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with the given arguments (those of the process) and return its exit code.

    0 done; 1 could not be done, as one sentence on the error stream says; 2 the arguments make no
    sense; 130 interrupted (Ctrl-C); 141 whoever read the output has gone.
    """
    try:
        from recur.command import run  # inside, so that Ctrl-C during the import is quiet too

        return run(argv)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
