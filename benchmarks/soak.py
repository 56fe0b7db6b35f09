"""Long runs of live streams that must hold: prints what they find, exits with 1 if one does not.

python benchmarks/soak.py                                       # a quarter of an hour
python benchmarks/soak.py --kills 2 --steps 20000 --rate 4      # does it run at all?
python benchmarks/soak.py load --steps 9000000                  # half an hour of load

kills   S8: `kill -9` at random moments, half of them on a pool of 200 streams, half on a server
        with 300 sockets; every answer is compared with that of a single process
growth  S12: 10^6 steps of 10,000 streams in a pool; memory must stay flat
load    S10, S18: 10^6 steps of 500 sockets in windows, each evenly paced at first, then as fast as
        answers come: neither the mean batch and throughput of the latter, nor latency of the
        former, nor what the server computes for a step, nor its memory may decay (see `judge`)
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
WINDOWS = 50
DECAY = 0.05  # of batches and of the server's work, from the first window to the last, is allowed
SLOWER = 0.25  # of throughput and latency: they swing with whatever else the machine does
CHANCE = 3.0  # Kendall's z from which on a change is none
LEAK = 1.0  # MiB in the second half, when all that is kept for good has been made


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


def trend(values):
    """The change from the first value to the last along the Theil-Sen line, and how sure it is.

    The line's slope is the median of the slopes between all pairs (Sen 1968): up to 29 % of the
    values may be anything.  The second number is Kendall's z: the change's sign is chance in one of
    740 runs without a trend if it lies beyond 3 (Mann 1945).
    """
    import numpy as np

    values = np.asarray(values, float)
    n = len(values)
    i, j = np.triu_indices(n, 1)
    slopes = (values[j] - values[i]) / (j - i)
    z = np.sign(slopes).sum() / np.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    return float(np.median(slopes)) * (n - 1), float(z)


def judge(windows):
    """What the windows of a load say about decay: figures, and "held".

    batch       of the full load: the change of its logarithm along the line may be no worse than
                `DECAY`.  With 50 windows the line's change has a standard error of half a window's
                noise: up to 4 % of it hide no decay of 10 %, and show none that is not there
    work        processor time of the server for a step, by that of the client for an answer, which
                is the same work all along: a machine that is slower for a while makes both longer.
                It may not rise by more than `DECAY`, unless that is chance
    the others  throughput and latency: as work, by `SLOWER`
    MiB         `GROWTH` from the first window to the last, `LEAK` in the second half

    "noise" is how far the windows are off the line.
    """
    import numpy as np

    found, held = {}, True
    work = [w["server_us"] / w["client_us"] for w in windows]
    columns = {name: [w[name] for w in windows] for name in ("batch", "most_a_second", "p50_ms",
                                                             "p99_ms")}  # fmt: skip
    for name, values in (columns | {"work": work}).items():
        logs = np.log(values)
        change, z = trend(logs)
        off = logs - change * np.arange(len(logs)) / max(len(logs) - 1, 1)
        noise = 1.4826 * float(np.median(np.abs(off - np.median(off))))
        found[name] = {"change": round(float(np.expm1(change)), 4), "z": round(z, 2),
                       "noise": round(noise, 4)}  # fmt: skip
        if name in ("batch", "most_a_second"):
            change, z = -change, -z
        limit = DECAY if name in ("batch", "work") else SLOWER
        decayed = change > np.log1p(limit)
        held &= not (decayed and (name == "batch" or z > CHANCE))
    memory = [w["server_MiB"] for w in windows]
    grown, leak = memory[-1] - memory[0], trend(memory[len(memory) // 2 :])[0]
    found["MiB"] = {"grown": round(grown, 2), "second_half": round(leak, 2)}
    return found | {"held": held and grown <= GROWTH and leak <= LEAK}


def load(options):
    seconds = options.steps / STREAMS / options.rate
    command = [sys.executable, HERE / "streams_serve.py", "--long", "--streams", str(STREAMS)]
    command += ["--rate", str(options.rate), "--seconds", str(seconds)]
    command += ["--windows", str(options.windows)]
    done = subprocess.Popen([str(c) for c in command], stdout=subprocess.PIPE, text=True)
    windows = []
    for line in done.stdout:
        windows.append(json.loads(line))
        say("load", **windows[-1])
    if done.wait() or not windows:
        say("load", failed=done.returncode)
        return False
    found = judge(windows)
    answers = sum(w["answers"] for w in windows)
    say("load", answers=answers, **found)
    return found["held"] and answers >= options.steps


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
    parser.add_argument("--windows", type=int, default=WINDOWS, help="of the load")
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
