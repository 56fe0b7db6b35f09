"""Processes that are killed with `kill -9` at random moments, and what must hold afterwards."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import numpy as np
from serving import model, serving

import recur
from recur.streaming import SQLiteStore, Stream, StreamPool

CHILD = """
import sys
import numpy as np
import recur
from recur.streaming import SQLiteStore, StreamPool

count = int(sys.argv[4])
pool = StreamPool(recur.load(sys.argv[1]), store=SQLiteStore(sys.argv[2]))
names = [f"s{i}" for i in range(count)]
for name in names:
    if name not in pool:
        pool.open(name)
rng = np.random.default_rng(int(sys.argv[3]))
while True:
    some = rng.permutation(count)[: rng.integers(1, 40)]
    chosen = [names[i] for i in some]
    at = pool.steps(chosen)
    # The input of step n of stream i depends on n and i alone.
    x = np.sin(np.arange(1, 6)[:, None] * (at + 1) + some).astype(np.float32)
    y = pool.step(chosen, x, numbers=at + 1)
    lines = [f"{i} {n} {row.tobytes().hex()}" for i, n, row in zip(some, at + 1, y.T)]
    sys.stdout.write("\\n".join(lines) + "\\n")
    sys.stdout.flush()
"""


def inputs(i, T):
    """Steps 1 to T of stream i, (5, T)."""
    return np.sin(np.arange(1, 6)[:, None] * np.arange(1, T + 1) + i).astype(np.float32)


def kill_pools(folder, seed, kills, streams=200):
    """A process that steps a pool with a store, killed and started again `kills` times.

    Asserts that no step that was answered is lost or taken again, and that every answer is that of
    a single process.
    """
    rng = np.random.default_rng(seed)
    recur.save(model(), folder / "m.safetensors")
    script, store = folder / "child.py", folder / "s.db"
    script.write_text(CHILD)
    seen = {}
    for attempt in range(kills):
        log = folder / "answers"
        arguments = [folder / "m.safetensors", store, f"{seed}{attempt}", streams]
        with open(log, "wb") as out:
            command = [sys.executable, script, *map(str, arguments)]
            process = subprocess.Popen(command, stdout=out)
            deadline = time.monotonic() + 60
            while log.stat().st_size < 4000 and time.monotonic() < deadline:
                assert process.poll() is None
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.2))
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        *whole, _ = log.read_text().split("\n")  # the last line may be cut short
        assert len(whole) > 10
        for line in whole:
            i, n, answer = line.split()
            assert (int(i), int(n)) not in seen, "a step that was answered was taken again"
            seen[int(i), int(n)] = bytes.fromhex(answer)
    pool = StreamPool(model(), store=SQLiteStore(store))
    last = {}
    for i, n in seen:
        last[i] = max(n, last.get(i, 0))
    for i in range(streams):
        at = int(pool.steps([f"s{i}"])[0])
        assert at >= last.get(i, 0), "an answered step was lost"
        X = inputs(i, at + 1)
        Y = Stream(model()).run(X)
        assert np.array_equal(pool.step([f"s{i}"], X[:, -1:])[:, 0], Y[:, -1])
        for n in range(1, at + 1):
            assert seen.get((i, n), Y[:, n - 1].tobytes()) == Y[:, n - 1].tobytes(), (i, n)
    pool.store.close()
    return len(seen)


def kill_servers(folder, seed, kills, streams=200, pause=0.2):
    """A server with `streams` sockets, killed and started again `kills` times.

    Asserts that the clients go on by themselves, that every answer is that of a single process, and
    that every stream stands where its client is.
    """
    from recur.serve.client import AsyncStream, Client

    rng = np.random.default_rng(seed)
    answers = [[] for _ in range(streams)]
    with serving(folder) as server:

        async def one(i, over):
            async with AsyncStream(server.address, patience=90) as stream:
                while not over.is_set() or not answers[i]:
                    n = len(answers[i]) + 1
                    answers[i].append(await stream.step(inputs(i, n)[:, -1]))
                    await asyncio.sleep(rng.uniform(0, pause))
                return stream.id, stream.token

        async def trouble(over):
            for _ in range(kills):
                enough = sum(map(len, answers)) + streams  # they are all under way again
                while sum(map(len, answers)) < enough:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(rng.uniform(0, 0.3))
                server.kill()
                await asyncio.to_thread(server.start)
            await asyncio.sleep(0.3)
            over.set()

        async def work():
            over = asyncio.Event()
            _, *ends = await asyncio.gather(trouble(over), *[one(i, over) for i in range(streams)])
            return ends

        ends = asyncio.run(work())
        for i, mine in enumerate(answers):
            expected = Stream(model()).run(inputs(i, len(mine)))
            assert np.array_equal(np.stack(mine, 1), expected), f"stream {i}"
        with Client(server.address) as client:
            for mine, (id, token) in list(zip(answers, ends, strict=True))[::20]:
                assert client.resume(id, token).steps == len(mine)
    return sum(map(len, answers))
