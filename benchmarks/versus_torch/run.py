"""Trains and runs whole models in recur and in PyTorch, on the same weights and data.

    python benchmarks/versus_torch/run.py --envs DIR --json tasks.json

`DIR/recur/bin/python` and `DIR/torch/bin/python` are interpreters that have the libraries; without
--envs this one is used.  The libraries take turns, each time in a new process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
LIBRARIES = ("recur", "torch")
THREAD_VARIABLES = ("RECUR_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")


def run_once(library: str, envs: str | None, threads: int, seconds: float) -> dict[str, Any]:
    """{task: {"seconds": …, "result": …}} of one process."""
    python = Path(envs, library, "bin", "python") if envs else Path(sys.executable)
    command = [str(python), str(HERE / f"with_{library}.py"), str(threads), str(seconds)]
    settings = os.environ | dict.fromkeys(THREAD_VARIABLES, str(threads))
    done = subprocess.run(command, env=settings, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])["tasks"]


def check(reports: dict[str, list[dict[str, Any]]]) -> None:
    """Raises AssertionError unless both libraries computed the same."""
    first = {library: runs[0] for library, runs in reports.items()}
    for task, row in first["recur"].items():
        if row["result"] is not None and task in first["torch"]:
            np.testing.assert_allclose(
                row["result"], first["torch"][task]["result"], rtol=2e-3, atol=1e-4, err_msg=task
            )


def medians(runs: list[dict[str, Any]]) -> dict[str, float]:
    return {task: statistics.median(run[task]["seconds"] for run in runs) for task in runs[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--envs", help="folder of one virtual environment per library")
    add("--threads", default="1,2", help="thread counts (%(default)s)")
    add("--rounds", type=int, default=5, help="processes of each library (%(default)s)")
    add("--seconds", type=float, default=0.3, help="of measuring a task (%(default)g)")
    add("--json", default="tasks.json", help="where the numbers go (%(default)s)")
    given = parser.parse_args()
    out = {}
    for threads in map(int, given.threads.split(",")):
        reports: dict[str, list[dict[str, Any]]] = {library: [] for library in LIBRARIES}
        for turn in range(given.rounds):
            for library in LIBRARIES if turn % 2 == 0 else LIBRARIES[::-1]:
                reports[library].append(run_once(library, given.envs, threads, given.seconds))
        check(reports)
        out[str(threads)] = {library: medians(runs) for library, runs in reports.items()}
        for library, rows in out[str(threads)].items():
            for task, seconds in rows.items():
                print(f"{threads} {library:6} {seconds * 1e6:12,.1f} µs  {task}", flush=True)
    Path(given.json).write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
