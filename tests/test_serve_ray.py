"""The deployment on Ray Serve, with replicas on this machine."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from serving import needs_server

import recur.serve.ray

pytestmark = needs_server

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs the extra ray"
)


@needs_ray
def test_s19_no_stream_notices_that_a_replica_is_killed_or_that_their_number_changes(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = Path(__file__).with_name("ray_driver.py")
    done = subprocess.run(
        [sys.executable, driver, tmp_path, tmp_path / "streams.db", str(port)],
        env={
            **os.environ,
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "OPENBLAS_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.strip().splitlines()) == 5, done.stdout


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r'pip install "recur\[ray\]"'):
        recur.serve.ray.deploy(recur.serve.ray.Deployment("m", "s"))


def test_a_module_attribute_that_is_none_is_refused():
    with pytest.raises(AttributeError, match="no attribute 'Router'"):
        _ = recur.serve.ray.Router
