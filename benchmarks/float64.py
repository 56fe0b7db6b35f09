"""The comparison's cases in recur alone, in float64 beside float32: python float64.py out.json

Limits are those of `peers/limits.py` with half the flops and twice the bytes in float64.  Taken
from --limits-from FILE, a JSON of `peers/run.py`, which was measured on the same machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

DTYPES = ("float32", "float64")
THREAD_VARIABLES = ("RECUR_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))


def limit(measured: dict[str, Any], case: Any, threads: int, itemsize: int) -> float:
    """Microseconds that a case takes at least, in numbers of `itemsize` bytes."""
    import limits

    wide = itemsize // 4
    flops = wide * case.flops() / measured["fma_gflops"][str(threads)] / 1e3
    passes = [(wide * size, times) for size, times in case.weight_passes()]
    bandwidth = [n * k / limits.bandwidth(measured, n, threads) for n, k in passes]
    return max(flops, sum(bandwidth) / 1e3)


def measure(case: Any, threads: int, seconds: float, rounds: int) -> dict[str, float]:
    """{dtype: microseconds of the fastest variant}, medians over all rounds; the variants of both
    dtypes take turns.
    """
    from adapters.recur_ import STORAGES, Adapter
    from cases import make_data

    runs: dict[tuple[str, str], Any] = {}
    for dtype in DTYPES:
        data = make_data(case, dtype)
        for name, build in Adapter(threads).variants(case).items():
            if name not in (*STORAGES, "m(X), tape"):  # float32 alone; a sequence among the loops
                runs[dtype, name] = build(case, data)[0]
    times: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    for turn in range(rounds):
        for key, run in runs.items():
            for _ in range(3 if turn == 0 and case.T * case.B < 1000 else 1):
                run()  # to warm up
            end = time.perf_counter() + seconds / rounds
            while True:
                start = time.perf_counter()
                run()
                times[key].append(time.perf_counter() - start)
                if time.perf_counter() >= end:
                    break
    medians = {key: statistics.median(found) * 1e6 for key, found in times.items()}
    return {dtype: min(us for key, us in medians.items() if key[0] == dtype) for dtype in DTYPES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("json", help="where the numbers go")
    add("--limits-from", required=True, help="a JSON of peers/run.py from this machine")
    add("--filter", default="", help="only cases whose id contains this")
    add("--threads", type=int, default=1)
    add("--seconds", type=float, default=0.2, help="of measuring a variant (%(default)g)")
    add("--rounds", type=int, default=3, help="turns of each variant (%(default)s)")
    given = parser.parse_args()
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(given.threads)))  # before any import
    import numpy as np
    from cases import GRID

    measured = json.loads(Path(given.limits_from).read_text())["limits"]
    rows = []
    for case in GRID:
        if case.workload == "growth" or given.filter not in case.id:
            continue
        row: dict[str, Any] = {"case": case.id, "threads": given.threads}
        found = measure(case, given.threads, given.seconds, given.rounds)
        for dtype, us in found.items():
            least = limit(measured, case, given.threads, np.dtype(dtype).itemsize)
            row[dtype] = {"us": us, "limit_us": least}
        rows.append(row)
        print(case.id, *(f"{us:.1f}" for us in found.values()), flush=True)
    Path(given.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
