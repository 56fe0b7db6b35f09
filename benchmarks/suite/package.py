"""What it costs to have recur: import and disk."""

import subprocess
import sys
import tempfile
from importlib.resources import files

import recur


def output_of(command):
    """What a process prints, run away from a checkout, whose unbuilt recur would be found first."""
    options = {"capture_output": True, "text": True, "check": True}
    return subprocess.run(command, cwd=tempfile.gettempdir(), **options).stdout


class Import:
    """Seconds that `import recur` adds to a process, over NumPy and scipy.linalg."""

    unit = "s"
    repeats = 5

    def track_import(self):
        base = "import time, numpy, scipy.linalg; t = time.perf_counter()"
        command = [sys.executable, "-c", f"{base}; import recur; print(time.perf_counter() - t)"]
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
