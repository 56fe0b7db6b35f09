"""How far models with weights in fewer bits drift from float32: python drift.py out.json

Streams of 10,000 steps of normal numbers, by `recur.drift`; the largest and mean difference of
outputs in spans of growing length.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

import recur

STORAGES = ("bfloat16", "float16", "int8")
MODELS = {
    "LSTM(128 => 256)": lambda rng: recur.LSTM(128, 256, rng=rng),
    "GRU(128 => 256)": lambda rng: recur.GRU(128, 256, rng=rng),
    "LSTM(64 => 128), LSTM(128 => 128), Dense(128 => 16)": lambda rng: recur.Chain(
        recur.LSTM(64, 128, rng=rng), recur.LSTM(128, 128, rng=rng), recur.Dense(128, 16, rng=rng)
    ),
}


def spans(found: recur.streaming.Drift) -> list[dict[str, Any]]:
    """Steps 1 to 10, 11 to 100, and so on."""
    rows, first = [], 0
    while first < len(found.mean):
        last = min(max(10 * first, 10), len(found.mean))
        largest, mean = found.worst[first:last].max(), found.mean[first:last].mean()
        steps = f"{first + 1} to {last}"
        rows.append({"steps": steps, "largest": float(largest), "mean": float(mean)})
        first = last
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", help="where the numbers go")
    parser.add_argument("--steps", type=int, default=10_000)
    given = parser.parse_args()
    rows = []
    for name, make in MODELS.items():
        model = make(np.random.default_rng(0))
        n_in = int(name.partition("(")[2].partition(" ")[0])
        X = np.random.default_rng(1).standard_normal((n_in, given.steps)).astype(np.float32)
        for storage in STORAGES:
            found = recur.drift(model, recur.compress(model, storage), X)
            row = {"model": name, "storage": storage, "size": found.size, "spans": spans(found)}
            rows.append(row)
            print(name, storage, row["spans"][-1], flush=True)
    Path(given.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
