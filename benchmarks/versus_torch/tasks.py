"""What both libraries are given: the same weights, the same data, the same list of tasks.

A library's module has `TASKS`, {name: builder}; `builder()` gives `(run, result)`.  `run()` is the
timed call, `result()` numbers that must be the same in both libraries, or None.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

ALPHABET, EMBEDDING, HIDDEN = 100, 48, 192  # the model of `recur demo`
BATCH, STEPS = 32, 32
RATE, CLIP = 1e-2, 1.0
CLASSES = 50

_rng = np.random.default_rng(0)


def uniform(*shape: int, bound: float) -> np.ndarray:
    return _rng.uniform(-bound, bound, shape).astype(np.float32)


def lstm_weights(n_in: int, n_out: int) -> list[np.ndarray]:
    """Wi (4H, I), Wh (4H, H), b (4H,), gates in the order i, f, g, o of both libraries."""
    k = n_out**-0.5
    shapes = ((4 * n_out, n_in), (4 * n_out, n_out), (4 * n_out,))
    return [uniform(*shape, bound=k) for shape in shapes]


EMBEDDING_WEIGHT = uniform(ALPHABET, EMBEDDING, bound=1.0)
CHARACTER_LSTM = lstm_weights(EMBEDDING, HIDDEN)
LOGITS = [uniform(ALPHABET, HIDDEN, bound=0.07), uniform(ALPHABET, bound=0.07)]
WINDOW = _rng.integers(0, ALPHABET, (2, BATCH, STEPS))

MIDDLE = lstm_weights(128, 256)
MIDDLE_HEAD = [uniform(CLASSES, 256, bound=0.06), uniform(CLASSES, bound=0.06)]
X = uniform(100, 16, 128, bound=1.0)  # time, batch, features
LABELS = _rng.integers(0, CLASSES, (100, 16))

LARGE = lstm_weights(650, 650)
X_LARGE = uniform(35, 20, 650, bound=1.0)
DY_LARGE = uniform(35, 20, 650, bound=1.0)


def measure(tasks: dict[str, Callable[[], Any]], threads: int, seconds: float) -> None:
    """Prints one line of JSON: {task: {"seconds": median of a call, "result": …}}."""
    report = {}
    for name, build in tasks.items():
        run, result = build()
        found = result()
        for _ in range(3):
            run()
        times: list[float] = []
        end = time.perf_counter() + seconds
        while len(times) < 3 or time.perf_counter() < end:
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        report[name] = {"seconds": statistics.median(times), "result": found}
    print(json.dumps({"threads": threads, "tasks": report}))


def arguments() -> tuple[int, float]:
    return int(sys.argv[1]), float(sys.argv[2])
