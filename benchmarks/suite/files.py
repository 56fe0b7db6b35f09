"""Files of Flux: what reading one costs beside reading its bytes.  The tests' writer makes them."""

from __future__ import annotations

import sys
import tempfile
import time
import tracemalloc
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from recur.io import flux

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))


class FluxFile:
    """Two LSTM layers of as many units as inputs: 1 MB with 128 of them, 300 MB with 2165."""

    params = (["bson", "jld2"], [(128,), (2165,)])
    param_names = ("kind", "units")
    unit = "times the file"

    def track_time_of_read(self, kind, units):
        with _written(kind, *units) as path:
            pairs = [(_seconds(flux.read, path), _seconds(Path.read_bytes, path)) for _ in range(7)]
        ours, plain = map(min, zip(*pairs, strict=True))
        return ours / plain

    def track_memory_of_read(self, kind, units):
        with _written(kind, *units) as path:
            return _peak(flux.read, path) / path.stat().st_size

    def track_memory_of_load(self, kind, units):
        with _written(kind, *units) as path:
            return _peak(flux.load, path) / path.stat().st_size


@contextmanager
def _written(kind, units):
    """The path of a file that is there for as long as the block runs."""
    from flux_models import Layer, chain
    from julia_writer import bson_file, jld2_file

    rng = np.random.default_rng(0)
    layers = [Layer("LSTM", units, units, rng, start=False).layer("0.16") for _ in range(2)]
    write = {"bson": bson_file, "jld2": jld2_file}[kind]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"model.{kind}")
        path.write_bytes(write(model=chain(*layers)))
        yield path


def _seconds(read, path):
    start = time.perf_counter()
    read(path)
    return time.perf_counter() - start


def _peak(read, path):
    """Bytes in use at most, those of the result included."""
    tracemalloc.start()
    try:
        read(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
