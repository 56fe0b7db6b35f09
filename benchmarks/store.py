"""What a store takes: writes and loads a second, bytes a stream.  The figures of
docs/how-to/scale-out.md are from here.

python benchmarks/store.py                      # SQLite, and Redis where redis-server is installed
python benchmarks/store.py --seconds 0.1        # does it run at all?

The streams are those of an LSTM (64, 128) with a Dense layer of 16.  One line of JSON for each
store and each number of streams that are written together:

writes     snapshots that are there already, saved in the store: streams a second
steps      numbered steps of a pool that writes every one of them (`Flush(steps=1)`): a second
loads      streams that come back from the store, each claimed by itself: a second
bytes      that the store takes for a stream, with all that it needs to find it
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import recur
from recur import LSTM, Chain, Dense
from recur.streaming import MemoryStore, RedisStore, SQLiteStore, StreamPool

BATCHES = (1, 64, 1000)


def rate(work: Callable[[], int], seconds: float) -> float:
    """The median over ten parts of how much `work` does a second."""
    work()
    rates = []
    for _ in range(10):
        done, begun = 0, time.perf_counter()
        while (took := time.perf_counter() - begun) < seconds / 10 or not done:
            done += work()
        rates.append(done / took)
    return float(np.median(rates))


def measure(
    name: str, store: Any, size: Callable[[], int], streams: int, seconds: float
) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(0)
    model = Chain(LSTM(64, 128, rng=rng), Dense(128, 16, rng=rng))
    pool = StreamPool(model, store=store, capacity=streams)
    before = size()
    names = [f"stream-{i:05}" for i in range(streams)]
    epochs = {id: store.claim(id).epoch for id in names}
    blank = StreamPool(model)
    blank.open("x")
    blank.step(["x"], np.ones((64, 1), np.float32), numbers=[1])
    snapshot = blank.snapshot("x")
    for begin in range(0, streams, 1000):
        store.save({id: (epochs[id], snapshot) for id in names[begin : begin + 1000]})
    each = (size() - before) / streams
    for id in names[:1000]:
        epochs[id] = pool.open(id, takeover=True)  # in memory, the others in the store alone
    for batch in BATCHES:

        def write(batch: int = batch) -> int:
            some = {names[i] for i in rng.integers(streams, size=batch)}
            store.save({id: (epochs[id], snapshot) for id in some})
            return len(some)

        def step(batch: int = batch) -> int:
            begin = int(rng.integers(1000 - batch + 1))
            some = names[begin : begin + batch]
            X = np.ones((batch, 64), np.float32).T
            pool.step(some, X, numbers=pool.steps(some) + 1)
            return batch

        yield {
            "store": name,
            "together": batch,
            "writes_a_second": round(rate(write, seconds)),
            "steps_a_second": round(rate(step, seconds)),
            "bytes_a_stream": round(each),
        }

    def load() -> int:
        id = names[int(rng.integers(1000, streams))]
        pool.open(id, takeover=True)
        pool.evict([id])
        return 1

    yield {"store": name, "loads_a_second": round(rate(load, seconds))}


@contextlib.contextmanager
def redis_server(folder: Path, *more: str) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
    process = subprocess.Popen([*command, "--save", "", *more], stdout=subprocess.DEVNULL)
    try:
        for _ in range(200):
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            time.sleep(0.05)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait(20)


def measure_redis(
    name: str, folder: Path, streams: int, seconds: float, *more: str
) -> Iterator[dict[str, Any]]:
    with redis_server(folder, *more) as url:
        store = RedisStore(url)
        yield from measure(
            name, store, lambda: store._redis.info()["used_memory"], streams, seconds
        )
        store.close()


def about() -> dict[str, Any]:
    found = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "recur": recur.__version__,
        "sqlite": sqlite3.sqlite_version,
    }
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        found["cpu"] = next((x.split(": ")[1] for x in lines if x.startswith("model name")), "?")
    if shutil.which("redis-server"):
        done = subprocess.run(["redis-server", "--version"], capture_output=True, text=True)
        found["redis"] = done.stdout.split("v=")[-1].split()[0]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="for each figure")
    parser.add_argument("--streams", type=int, default=10_000, help="in each store; 1,001 or more")
    options = parser.parse_args()
    rest = options.streams, options.seconds
    print(json.dumps(about()), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        runs = [measure("memory", MemoryStore(), lambda: 0, *rest)]
        for durable in (False, True):
            path = Path(folder) / f"streams-{durable}.db"
            store = SQLiteStore(path, durable=durable)

            def size(path: Path = path, store: SQLiteStore = store) -> int:
                store._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                return path.stat().st_size

            name = "sqlite, durable" if durable else "sqlite"
            runs.append(measure(name, store, size, *rest))
        if shutil.which("redis-server") and importlib.util.find_spec("redis"):
            runs.append(measure_redis("redis", Path(folder), *rest))
            runs.append(
                measure_redis("redis, appendonly", Path(folder), *rest, "--appendonly", "yes")
            )
        for run in runs:
            for row in run:
                print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
