"""A server of its own process, and the model that the tests of the server share."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

import recur
from recur import LSTM, Chain, Dense

PACKAGES = ("starlette", "uvicorn", "websockets", "prometheus_client")
needs_server = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in PACKAGES),
    reason="needs the extra serve",
)


def model():
    """The same model in every process."""
    rng = np.random.default_rng(3)
    return Chain(LSTM(5, 8, rng=rng), Dense(8, 3, rng=rng))


class Server:
    """`recur serve` of that model."""

    def __init__(self, folder, *arguments, port=0, store=None, file=None):
        self.folder = folder
        self.file = file or folder / "model.safetensors"
        if not self.file.exists():
            recur.save(model(), self.file)
        self.store = store or folder / "streams.db"
        self.arguments = [str(a) for a in arguments]
        self.port = port
        self.start()

    def start(self):
        """Starts the process, again on the same port; waits until it takes connections."""
        command = [sys.executable, "-m", "recur", "serve", str(self.file), "--port", str(self.port)]
        self.process = subprocess.Popen(
            [*command, "--store", str(self.store), *self.arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "RECUR_NUM_THREADS": "1"},
        )
        line = self.process.stdout.readline()
        assert " at http://" in line, f"the server did not start: {line!r}"
        self.address = line.split()[-1]
        self.port = int(self.address.rpartition(":")[2])

    def kill(self):
        """Ends it at once."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()

    def terminate(self):
        """Ends it in order; returns the exit code."""
        self.process.terminate()
        try:
            return self.process.wait(20)
        finally:
            self.process.stdout.close()


@contextlib.contextmanager
def serving(folder, *arguments, **more):
    server = Server(folder, *arguments, **more)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.kill()
