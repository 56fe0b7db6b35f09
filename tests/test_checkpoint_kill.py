"""A training process that is killed outright at any moment goes on as if it had never stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from recur.io.model import load

pytestmark = pytest.mark.skipif(os.name == "nt", reason="there is no SIGKILL")

RUN = """
import hashlib, json, sys
import numpy as np
import recur
from recur.data import windows
from recur.gradients import withgradient
from recur.io.model import save
from recur.layers import Chain, Dense, Dropout
from recur.losses import mse
from recur.module import seed
from recur.optim import Adam, Cosine, ClipNorm, OptimiserChain, setup
from recur.recurrent import LSTM
from recur.train import train

path, final = sys.argv[1:]
seed(1)
rng = np.random.default_rng(0)
model = Chain(LSTM(4, 24, rng=rng), Dropout(0.2, rng=rng), Dense(24, 2, rng=rng))
stream = np.random.default_rng(1).standard_normal((6, 1500)).astype(np.float32)
data = windows((stream[:4], stream[4:]), batch=5, steps=10)
opt = setup(OptimiserChain(ClipNorm(1.0), Adam(Cosine(0.01, 0.001, 120))), model)

def ready(event):
    if event.step == 1:
        print("ready", flush=True)

history = train(
    lambda m, x, y: mse(m(x), y), model, data, opt, epochs=4, accumulate=1, callbacks=ready,
    validation=lambda m: float(np.mean(m(stream[:4, None, :50]) ** 2)), validate_every=7,
    checkpoint=path, checkpoint_every=1, resume=True, progress=False,
)
save(model, final, include_state=True)
print(json.dumps([history.losses, history.validations]), flush=True)
"""


def start(folder: Path, name: str) -> subprocess.Popen:
    checkpoint, final = folder / f"{name}.checkpoint", folder / f"{name}.safetensors"
    return subprocess.Popen(
        [sys.executable, "-c", RUN, str(checkpoint), str(final)],
        cwd=folder,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen) -> list:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def test_a_run_killed_again_and_again_ends_with_the_same_numbers(tmp_path):
    began = time.monotonic()
    expected = finish(start(tmp_path, "whole"))
    length = time.monotonic() - began
    rng = np.random.default_rng(2)
    seen = 0
    for _ in range(6):
        process = start(tmp_path, "killed")
        process.stdout.readline()  # "ready", or the end of a run that is already done
        time.sleep(rng.uniform(0.0, 0.2 * length))
        process.kill()
        process.communicate()
        load(tmp_path / "killed.checkpoint")  # whole, whenever it was
        seen += 1
    assert seen == 6
    assert finish(start(tmp_path, "killed")) == expected
    whole, killed = (tmp_path / f"{name}.safetensors" for name in ("whole", "killed"))
    assert whole.read_bytes() == killed.read_bytes()
