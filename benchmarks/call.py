"""What one step costs, from a call in the process to one through a Ray cluster.

python benchmarks/call.py                    # without the rows of Ray where Ray is not installed
python benchmarks/call.py --seconds 0.1      # does it run at all?

One client steps one stream of an LSTM (64, 128) with a Dense layer of 16, each step after the
answer to the last: the median in microseconds, one line of JSON a row.  The servers write every
step to an SQLite file before they answer it, as is the default.  Needs recur[serve].
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import recur
from recur import LSTM, Chain, Dense, Stream
from recur.serve.client import AsyncStream, Client
from recur.streaming import SQLiteStore, StreamPool

PORT = 18_123


def median(step: Callable[[], Any], seconds: float) -> float:
    """Microseconds of a step."""
    times = []
    step()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    return float(np.median(times) * 1e6)


def say(what: str, us: float) -> None:
    print(json.dumps({"what": what, "us": round(us, 1)}), flush=True)


def over_http(what: str, address: str, x: np.ndarray, seconds: float) -> None:
    with Client(address) as client:
        stream = client.open()
        say(what, median(lambda: stream.step(x), seconds))


def over_socket(what: str, address: str, x: np.ndarray, seconds: float) -> None:
    async def work() -> float:
        times = []
        async with AsyncStream(address) as stream:
            await stream.step(x)
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                begun = time.perf_counter()
                await stream.step(x)
                times.append(time.perf_counter() - begun)
        return float(np.median(times) * 1e6)

    say(what, asyncio.run(work()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="for each row")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    model = Chain(LSTM(64, 128, rng=rng), Dense(128, 16, rng=rng))
    x = rng.standard_normal(64).astype(np.float32)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "model.safetensors"
        recur.save(model, file)
        stream = Stream(model)
        say("Stream", median(lambda: stream(x), options.seconds))
        for title, store in (("pool", None), ("pool, SQLite", SQLiteStore(folder / "a.db"))):
            pool = StreamPool(model, store=store)
            pool.open("a")
            say(title, median(lambda pool=pool: pool.step(["a"], x[:, None]), options.seconds))
            if store is not None:
                store.close()
        command = [sys.executable, "-m", "recur", "serve", str(file), "--port", "0"]
        # Elsewhere than among the sources, whose recur is not the one that is installed.
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder)
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split()[-1]
            over_http("recur serve, HTTP", address, x, options.seconds)
            over_socket("recur serve, WebSocket", address, x, options.seconds)
        finally:
            server.terminate()
            server.wait()
        if importlib.util.find_spec("ray"):
            through_ray(file, folder, x, options.seconds)


def through_ray(file: Path, folder: Path, x: np.ndarray, seconds: float) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    from recur.serve.ray import Deployment, deploy, remove

    what = Deployment(str(file), str(folder / "ray.db"))
    address = deploy(what, replicas=2, port=PORT, cpus=0.1)
    over_http("Ray Serve, HTTP", address, x, seconds)
    over_socket("Ray Serve, WebSocket", address, x, seconds)
    remove()
    ray.shutdown()


if __name__ == "__main__":
    main()
