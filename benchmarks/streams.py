"""Long runs of live streams: what a step costs with a store, and whether anything grows.

python benchmarks/streams.py                     # 10,000 streams, 1,000 steps at a time, in memory
python benchmarks/streams.py --store sqlite      # every step written to a file
python benchmarks/streams.py --steps 1000000     # soak: memory must stay flat
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from recur import LSTM, Chain, Dense
from recur.streaming import MemoryStore, SQLiteStore, StreamPool

REPORTS = 10


def memory() -> float:
    """The process's memory in MiB."""
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text().split()[1]) * resource.getpagesize() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=1_000, help="streams that step together")
    parser.add_argument("--steps", type=int, default=100_000, help="steps of streams, in all")
    parser.add_argument("--store", choices=["none", "memory", "sqlite"], default="none")
    parser.add_argument("--growth", type=float, default=8.0, help="MiB that are allowed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = {"none": None, "memory": MemoryStore()}.get(options.store)
        if options.store == "sqlite":
            store = SQLiteStore(Path(folder) / "streams.db")
        grown = soak(options, store)
        if store is not None:
            store.close()
    return 0 if grown <= options.growth else 1


def soak(options: argparse.Namespace, store: object) -> float:
    """Steps random subsets; prints one line of JSON a tenth; returns the growth in MiB."""
    rng = np.random.default_rng(0)
    model = Chain(LSTM(64, 128, rng=rng), Dense(128, 16, rng=rng))
    pool = StreamPool(model, capacity=options.streams, store=store)
    names = [str(i) for i in range(options.streams)]
    for name in names:
        pool.open(name)
    X = rng.standard_normal((options.batch, 64)).astype(np.float32).T
    calls = max(options.steps // options.batch, REPORTS)
    first = None
    for report in range(REPORTS):
        times = []
        for _ in range(calls // REPORTS):
            some = [names[i] for i in rng.permutation(options.streams)[: options.batch]]
            begun = time.perf_counter()
            pool.step(some, X)
            times.append(time.perf_counter() - begun)
        now = memory()
        first = now if first is None else first  # the first tenth warms up
        print(json.dumps({
            "steps": (report + 1) * len(times) * options.batch,
            "us_a_step": round(float(np.median(times)) / options.batch * 1e6, 3),
            "p99_ms_a_call": round(float(np.quantile(times, 0.99)) * 1e3, 3),
            "MiB": round(now, 1),
        }), flush=True)  # fmt: skip
    assert first is not None
    return memory() - first


if __name__ == "__main__":
    sys.exit(main())
