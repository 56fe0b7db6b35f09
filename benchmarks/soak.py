"""Long runs of live streams that must hold: prints what they find, exits with 1 if one does not.

python benchmarks/soak.py                                       # a quarter of an hour
python benchmarks/soak.py --kills 2 --steps 20000 --rate 4      # does it run at all?
python benchmarks/soak.py load --steps 9000000                  # half an hour of load

kills   S8: `kill -9` at random moments, half of them on a pool of 200 streams, half on a server
        with 300 sockets; every answer is compared with that of a single process
growth  S12: 10^6 steps of 10,000 streams in a pool; memory must stay flat
load    S10, S18: 10^6 steps of 500 sockets, evenly paced; the server's memory must stay flat, and
        the mean batch of the last tenth lie within 5 % of that of the first
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
AT_ONCE = 10  # kills of one store
GROWTH = 8.0  # MiB that are allowed
STREAMS = 500


def say(what, **found):
    print(json.dumps({"at": time.strftime("%Y-%m-%d %H:%M:%S"), "what": what, **found}), flush=True)


def kills(options):
    sys.path.insert(0, str(TESTS))
    from kills import kill_pools, kill_servers

    left, held = options.kills, True
    for seed in range(-(-options.kills // AT_ONCE)):
        some = min(left, AT_ONCE)
        left -= some
        kill = (kill_pools, kill_servers)[seed % 2]
        with tempfile.TemporaryDirectory() as folder:
            try:
                more = {} if kill is kill_pools else {"streams": 300, "pause": 0.4}
                say(kill.__name__, kills=some, answers=kill(Path(folder), seed, some, **more))
            except Exception as error:
                held = False
                say(kill.__name__, kills=some, failed=repr(error))
    return held


def memory():
    """The process's memory in MiB."""
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text().split()[1]) * resource.getpagesize() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def growth(options):
    import numpy as np

    from recur import LSTM, Chain, Dense
    from recur.streaming import StreamPool

    streams, batch = 10_000, 1000
    rng = np.random.default_rng(0)
    pool = StreamPool(Chain(LSTM(64, 128, rng=rng), Dense(128, 16, rng=rng)), capacity=streams)
    for i in range(streams):
        pool.open(i)
    X = rng.standard_normal((batch, 64)).astype(np.float32).T
    first = None
    for tenth in range(10):
        begun = time.perf_counter()
        for _ in range(max(options.steps // batch // 10, 1)):
            pool.step(rng.permutation(streams)[:batch].tolist(), X)
        took = time.perf_counter() - begun
        now = memory()
        first = now if first is None else first  # the first tenth warms up
        say("growth", tenth=tenth + 1, MiB=round(now, 2),
            us_a_step=round(took / max(options.steps // 10, batch) * 1e6, 3))  # fmt: skip
    return now - first <= GROWTH


def load(options):
    seconds = options.steps / STREAMS / options.rate
    command = [sys.executable, HERE / "streams_serve.py", "--long", "--streams", str(STREAMS)]
    command += ["--rate", str(options.rate), "--seconds", str(seconds)]
    done = subprocess.run([str(c) for c in command], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        say("load", failed=done.returncode)
        return False
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    for row in rows:
        say("load", **row)
    grown = rows[-1]["server_MiB"] - rows[0]["server_MiB"]
    decay = rows[-1]["batch"] / rows[0]["batch"]
    say("load", answers=sum(row["answers"] for row in rows), MiB_grown=round(grown, 2),
        last_batch_of_first=round(decay, 4))  # fmt: skip
    return grown <= GROWTH and decay >= 0.95


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = {"kills": kills, "growth": growth, "load": load}
    parser.add_argument("parts", nargs="*", default=list(parts), metavar="PART",
                        help=f"of {', '.join(parts)}; all without")  # fmt: skip
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--rate", type=float, default=7.0, help="steps a second of each socket")
    options = parser.parse_args()
    held = {}
    for part in options.parts:
        if part not in parts:
            parser.error(f"no part is called {part}")
        begun = time.perf_counter()
        held[part] = parts[part](options)
        say(part, held=held[part], seconds=round(time.perf_counter() - begun))
    say("all", held=all(held.values()))
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
