"""Paced load on `recur serve`: WebSocket streams on this machine, each at a fixed rate.

python benchmarks/streams_serve.py --streams 100 --rate 10 --seconds 30
python benchmarks/streams_serve.py --streams 500 --rate 10 --seconds 1800    # do batches decay?
python benchmarks/streams_serve.py --streams 1,100,1000,10000                # one after the other

Every stream sends a step when its time has come, whether or not the last was answered; latency is
measured from then on, so that a server that falls behind cannot hide it.  One line of JSON each:
quantiles in ms, answers a second, mean batch size in the first and the last tenth, and the server's
own share (time in the pool) of the mean.  Needs recur[serve].
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np

import recur
from recur import LSTM, Chain, Dense
from recur.serve.protocol import pack_frame

N_IN = 64
OPENING = 100  # connections that are opened at once


async def one_stream(address, rate, seconds, begin, phase, latencies):
    import websockets

    async with websockets.connect(address, max_queue=None, ping_interval=None) as socket:
        await socket.send('{"open": null}')
        await socket.recv()
        OPENED.release()
        x = np.random.default_rng(int(phase * 1e9)).standard_normal(N_IN)
        due = []

        async def send():
            await begin.wait()
            start = time.perf_counter() + phase / rate
            for n in range(int(seconds * rate)):
                when = start + n / rate
                await asyncio.sleep(max(when - time.perf_counter(), 0))
                due.append(when)
                await socket.send(pack_frame(n + 1, x))

        sending = asyncio.create_task(send())
        for n in range(int(seconds * rate)):
            await socket.recv()
            latencies.append(time.perf_counter() - due[n])
        await sending


OPENED: asyncio.Semaphore


async def load(address, streams, rate, seconds):
    """Latencies of all answers in seconds, and how long it took."""
    global OPENED
    OPENED = asyncio.Semaphore(OPENING)
    begin, latencies, tasks = asyncio.Event(), [], []
    socket = address.replace("http", "ws") + "/v1/ws"
    for i in range(streams):
        await OPENED.acquire()
        work = one_stream(socket, rate, seconds, begin, i / streams, latencies)
        tasks.append(asyncio.create_task(work))
    for _ in range(OPENING):
        await OPENED.acquire()
    sizes = asyncio.create_task(watch(address, seconds))
    begun = time.perf_counter()
    begin.set()
    await asyncio.gather(*tasks)
    return np.array(latencies), time.perf_counter() - begun, await sizes


async def watch(address, seconds):
    """Mean batch size and time in the pool, in the first and in the last tenth of the time."""
    found = []
    for wait in (seconds / 10, seconds * 8 / 10):
        await asyncio.sleep(wait)
        recent = await asyncio.to_thread(fetch, f"{address}/v1/recent")
        found.append([float(np.mean(recent[key] or [0])) for key in ("sizes", "seconds")])
    return found


def fetch(url):
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", default="1,100,1000", help="comma-separated")
    parser.add_argument("--rate", type=float, default=10.0, help="steps a second of each")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--store", default="memory")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        recur.save(Chain(LSTM(N_IN, 128, rng=rng), Dense(128, 16, rng=rng)), file)
        for streams in map(int, options.streams.split(",")):
            command = [sys.executable, "-m", "recur", "serve", str(file), "--port", "0"]
            server = subprocess.Popen(
                [*command, "--store", options.store], stdout=subprocess.PIPE, text=True
            )
            try:
                address = server.stdout.readline().split()[-1]
                work = load(address, streams, options.rate, options.seconds)
                latencies, took, (first, last) = asyncio.run(work)
            finally:
                server.terminate()
                server.wait()
            p50, p99, p999 = np.quantile(latencies, [0.5, 0.99, 0.999]) * 1e3
            print(json.dumps({
                "streams": streams,
                "rate": options.rate,
                "answers_a_second": round(len(latencies) / took, 1),
                "p50_ms": round(p50, 2),
                "p99_ms": round(p99, 2),
                "p999_ms": round(p999, 2),
                "batch_first_tenth": round(first[0], 2),
                "batch_last_tenth": round(last[0], 2),
                "pool_ms_a_batch": round(last[1] * 1e3, 3),
                "mean_ms": round(float(latencies.mean()) * 1e3, 2),
            }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
