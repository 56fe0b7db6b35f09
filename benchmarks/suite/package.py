"""What it costs to have recur: import and disk."""

import os
import subprocess
import sys
import tempfile
from importlib.resources import files

import recur


def output_of(command):
    """What a process prints, run away from a checkout, whose unbuilt recur would be found first."""
    # An installed package has byte code: without it every import would compile the sources anew.
    env = {name: x for name, x in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    options = {"capture_output": True, "text": True, "check": True, "env": env}
    return subprocess.run(command, cwd=tempfile.gettempdir(), **options).stdout


class Import:
    """CPU seconds that `import recur` adds to a process, over NumPy and scipy.linalg.

    The least of several processes; a first one has written the byte code.
    """

    unit = "s"
    repeats = 5

    def track_import(self):
        base = "import time, numpy, scipy.linalg; t = time.process_time()"
        command = [sys.executable, "-c", f"{base}; import recur; print(time.process_time() - t)"]
        output_of(command)
        return min(float(output_of(command)) for _ in range(self.repeats))


class Disk:
    """Bytes of the package, compiled kernels included, byte code left out."""

    unit = "MB"

    def track_package(self):
        return sum(_sizes(files(recur))) / 1e6


def _sizes(folder):
    for entry in folder.iterdir():
        if entry.is_dir():
            if entry.name != "__pycache__":
                yield from _sizes(entry)
        elif not entry.name.endswith((".c", ".h", ".pyx", ".pxi")):
            yield entry.stat().st_size
