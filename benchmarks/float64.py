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


def measure(case: Any, dtype: str, threads: int, seconds: float) -> float:
    """Microseconds of the fastest variant, the median over its calls."""
    from adapters.recur_ import Adapter
    from cases import make_data

    medians = []
    for build in Adapter(threads).variants(case).values():
        run, _ = build(case, make_data(case, dtype))
        for _ in range(3):
            run()
        times: list[float] = []
        end = time.perf_counter() + seconds
        while len(times) < 3 or time.perf_counter() < end:
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        medians.append(statistics.median(times))
    return min(medians) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("json", help="where the numbers go")
    add("--limits-from", required=True, help="a JSON of peers/run.py from this machine")
    add("--filter", default="", help="only cases whose id contains this")
    add("--threads", type=int, default=1)
    add("--seconds", type=float, default=0.3, help="of measuring a variant (%(default)g)")
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
        for dtype in ("float32", "float64"):
            us = measure(case, dtype, given.threads, given.seconds)
            least = limit(measured, case, given.threads, np.dtype(dtype).itemsize)
            row[dtype] = {"us": us, "limit_us": least}
        rows.append(row)
        print(case.id, *(f"{row[d]['us']:.1f}" for d in ("float32", "float64")), flush=True)
    Path(given.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
