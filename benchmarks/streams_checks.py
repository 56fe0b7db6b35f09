"""Timings that live streams are to hold; each prints one line of JSON and fails nothing.

python benchmarks/streams_checks.py                  # loop and subnormals, half a minute
python benchmarks/streams_checks.py loop             # S13
python benchmarks/streams_checks.py subnormals       # S14
python benchmarks/streams_checks.py steps --against v0.1.0     # S21: builds that commit, minutes

loop        100 threads that each run a stream in blocks, and an asyncio loop that is to tick every
            millisecond: how late it comes, p99, beside the same without threads, and with threads
            that hash for as long.  Wanted: at most 1 ms more than without
subnormals  10^6 steps of input 0 after input that sounds like speech, beside 10^6 steps of that
            input: what a step costs.  Wanted: at most 1.05 times as much
steps       one step of an LSTM and a GRU, this recur beside that of another commit (the last
            release, once there is one): nine processes of each take turns; the ratio of medians.
            Wanted: at most 1.10
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAIRS = 9
ROUNDS = 5

STEPS = """
import json, statistics, time
import numpy as np
import recur
from recur import GRU, LSTM
found = {"file": recur.__file__}
for layer in (LSTM, GRU):
    for size in ((16, 32), (64, 128)):
        m = layer(*size, rng=np.random.default_rng(0))
        x = np.random.default_rng(1).standard_normal(size[0]).astype(np.float32)
        for _ in range(1000):
            m(x)
        times = []
        for _ in range(15):
            begun = time.perf_counter()
            for _ in range(2000):
                m(x)
            times.append((time.perf_counter() - begun) / 2000)
        found[f"{layer.__name__} {size}"] = statistics.median(times) * 1e6
print(json.dumps(found))
"""


def say(check, **found):
    print(json.dumps({"check": check, **found}), flush=True)


def loop(options):
    """S13: how late a loop comes that ticks every millisecond, in ms."""
    import numpy as np

    from recur import LSTM, Stream

    rng = np.random.default_rng(0)
    model = LSTM(64, 128, rng=rng)
    X = rng.standard_normal((100, 64)).astype(np.float32).T

    async def ticks(seconds):
        late, due = [], time.perf_counter()
        while len(late) < seconds * 1000:
            due = max(due + 1e-3, time.perf_counter())
            await asyncio.sleep(due - time.perf_counter())
            late.append(time.perf_counter() - due)
        return float(np.quantile(late, 0.99)) * 1e3

    def streams():
        stream, out = Stream(model), np.empty((100, 128), np.float32).T
        return lambda: stream.run(X, out)

    def took(call):
        begun = time.perf_counter()
        call()
        return time.perf_counter() - begun

    block = statistics.median(took(streams()) for _ in range(100))
    data = bytes(1 << 20)  # as much of it as is hashed, without Python's lock, in the same time
    data = data[: int(len(data) * block / statistics.median(
        took(lambda: hashlib.sha256(data).digest()) for _ in range(20)))]  # fmt: skip

    def hashes():
        return lambda: hashlib.sha256(data).digest()

    def work(make, stop):
        call = make()
        while not stop.is_set():
            call()
            time.sleep(options.pause)

    found = {"alone": [], "streams": [], "hashes": []}
    for _ in range(ROUNDS):
        for name, make in (("alone", None), ("streams", streams), ("hashes", hashes)):
            stop = threading.Event()
            count = options.threads if make else 0
            threads = [threading.Thread(target=work, args=(make, stop)) for _ in range(count)]
            for thread in threads:
                thread.start()
            found[name].append(asyncio.run(ticks(options.seconds)))
            stop.set()
            for thread in threads:
                thread.join()
    stall = statistics.median(a - b for a, b in zip(found["streams"], found["alone"], strict=True))
    say("S13 loop", threads=options.threads, us_a_block=round(block * 1e6),
        **{f"p99_ms_{name}": round(statistics.median(p99), 3) for name, p99 in found.items()},
        p99_ms_more=round(stall, 3))  # fmt: skip


def subnormals(options):
    """S14: what a step on silence costs, beside one on speech."""
    import numpy as np

    from recur import GRU, LSTM, Stream

    rng = np.random.default_rng(0)
    block = 1000
    envelope = np.abs(np.sin(np.arange(block) / 50))
    speech = (rng.standard_normal((64, block)) * envelope).astype(np.float32)
    silence = np.zeros_like(speech)
    for layer in (LSTM, GRU):
        stream, times = Stream(layer(64, 128, rng=rng)), {}
        for name, X in (("speech", speech), ("silence", silence)):
            times[name] = []
            for _ in range(options.steps // block):
                begun = time.perf_counter()
                stream.run(X)
                times[name].append(time.perf_counter() - begun)
        us = {name: statistics.median(t) / block * 1e6 for name, t in times.items()}
        say("S14 subnormals", layer=layer.__name__, steps=options.steps,
            us_speech=round(us["speech"], 3), us_silence=round(us["silence"], 3),
            ratio=round(us["silence"] / us["speech"], 3))  # fmt: skip


def steps(options):
    """S21: this recur's steps beside those of another commit."""
    if not options.against:
        sys.exit("streams_checks: steps needs --against, a commit of this repository.")
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "other"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", "-q", tree, options.against], check=True)
        try:
            build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
            subprocess.run(build, cwd=tree, check=True, stdout=sys.stderr)
            times = {"this": [], "other": []}
            for _ in range(PAIRS):
                for name in times:
                    path = {"PYTHONPATH": str(tree)} if name == "other" else {}
                    done = subprocess.run(
                        [sys.executable, "-c", STEPS], check=True, capture_output=True,
                        text=True, cwd=folder,
                        env={**os.environ, "RECUR_NUM_THREADS": "1", **path},
                    )  # fmt: skip
                    times[name].append(json.loads(done.stdout))
        finally:
            subprocess.run([*git, "remove", "--force", tree], check=True)
    files = {name: some[0].pop("file") for name, some in times.items()}
    if not files["other"].startswith(str(tree)) or files["this"].startswith(str(tree)):
        raise RuntimeError(f"the same recur was measured twice: {files}")
    for case in times["this"][0]:
        this, other = (statistics.median(t[case] for t in times[n]) for n in ("this", "other"))
        say("S21 steps", case=case, against=options.against, us=round(this, 3),
            us_other=round(other, 3), ratio=round(this / other, 3),
            slower=this > 1.1 * other)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    checks = {"loop": loop, "subnormals": subnormals, "steps": steps}
    parser.add_argument("checks", nargs="*", default=["loop", "subnormals"], metavar="CHECK",
                        help=f"of {', '.join(checks)}")  # fmt: skip
    parser.add_argument("--against", help="a commit, for steps")
    parser.add_argument("--seconds", type=float, default=2.0, help="of loop, 15 times")
    parser.add_argument("--threads", type=int, default=100, help="of loop")
    parser.add_argument("--pause", type=float, default=0.1, help="seconds between two blocks")
    parser.add_argument("--steps", type=int, default=1_000_000, help="of subnormals")
    options = parser.parse_args()
    os.environ["RECUR_NUM_THREADS"] = "1"  # before any import
    for name in options.checks:
        if name not in checks:
            parser.error(f"no check is called {name}")
        checks[name](options)


if __name__ == "__main__":
    main()
