"""Runs the benchmarks of `suite/` without asv: a table of medians, and JSON.

python benchmarks/run.py --filter Step.time_step
python benchmarks/run.py --once              # each once: do they run at all?
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import pkgutil
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
THREAD_VARIABLES = ("RECUR_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")


class Benchmark(NamedTuple):
    """One method of one class of the suite, for one combination of the class's parameters."""

    owner: type
    method: str
    values: tuple

    @property
    def name(self) -> str:
        shown = ", ".join(map(str, self.values))
        module = self.owner.__module__.rpartition(".")[2]
        return f"{module}.{self.owner.__name__}.{self.method}" + (f"({shown})" if shown else "")

    @property
    def unit(self) -> str:
        return "s" if self.method.startswith("time_") else getattr(self.owner, "unit", "")

    def prepared(self) -> Callable[[], Any]:
        """The call to be measured, after the class's setup."""
        instance = self.owner()
        if hasattr(instance, "setup"):
            instance.setup(*self.values)
        method = getattr(instance, self.method)
        return lambda: method(*self.values)


def benchmarks(*patterns: str) -> Iterator[Benchmark]:
    """Those whose name contains one of `patterns` (all without one), in the order of the source."""
    if str(HERE) not in sys.path:
        sys.path.insert(0, str(HERE))
    suite = importlib.import_module("suite")
    for module in pkgutil.iter_modules(suite.__path__):
        names = vars(importlib.import_module(f"suite.{module.name}"))
        for owner in names.values():
            if isinstance(owner, type) and owner.__module__ == f"suite.{module.name}":
                for found in _of(owner):
                    if not patterns or any(pattern in found.name for pattern in patterns):
                        yield found


def _of(owner: type) -> Iterator[Benchmark]:
    methods = [name for name in vars(owner) if name.startswith(("time_", "track_"))]
    for method in methods:
        for values in itertools.product(*getattr(owner, "params", ())):
            yield Benchmark(owner, method, values)


def measure(benchmark: Benchmark, seconds: float, once: bool = False) -> dict[str, Any]:
    """{"value": median or tracked number, "unit": …}, for times also "quartiles" and "calls"."""
    call = benchmark.prepared()
    if benchmark.method.startswith("track_"):
        return {"value": call(), "unit": benchmark.unit}
    first = _timed(call, 1)
    if once:
        return {"value": first, "unit": "s", "calls": 1}
    calls = max(1, round(0.005 / max(min(first, _timed(call, 1)), 1e-7)))
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(samples) < 3:
        samples.append(_timed(call, calls))
    low, median, high = statistics.quantiles(samples, n=4)
    return {"value": median, "unit": "s", "quartiles": [low, high], "calls": calls * len(samples)}


def _timed(call: Callable[[], Any], calls: int) -> float:
    """Seconds a call."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def machine() -> dict[str, Any]:
    """Where the numbers come from."""
    import numpy
    import scipy

    import recur
    from recur import _kernels

    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": recur.get_num_threads(),
        "path": _kernels.cpu_path(),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "scipy": scipy.__version__,
        "recur": recur.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def shown(value: float, unit: str) -> str:
    """A number with four digits, seconds in the unit that fits."""
    if unit == "s" and value:
        for name, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
            if value * scale >= 1.0 or name == "µs":
                return f"{value * scale:.4g} {name}"
    return f"{value:.4g} {unit}".rstrip()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--filter",
        action="append",
        default=[],
        help="only benchmarks whose name contains this; given several times, one of these",
    )
    add("--seconds", type=float, default=0.5, help="of measuring, for each (%(default)g)")
    add("--once", action="store_true", help="run each once, which measures nothing well")
    add("--threads", type=int, default=1, help="of recur and of BLAS (%(default)s)")
    add("--json", help="also write the numbers to this file")
    given = parser.parse_args(arguments)
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(given.threads)))  # before any import
    results = {}
    for benchmark in benchmarks(*given.filter):
        result = measure(benchmark, given.seconds, given.once)
        results[benchmark.name] = result
        print(f"{shown(result['value'], result['unit']):>16}  {benchmark.name}", flush=True)
    if not results:
        parser.error(f"no benchmark's name contains {' or '.join(map(repr, given.filter))}")
    if given.json:
        report = {"machine": machine(), "results": results}
        Path(given.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
