"""The kernels' arithmetic again on every other CPU path that this machine can run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recur import _kernels

HERE = Path(__file__).parent
FILES = sorted(f.name for f in HERE.glob("test_kernels_*.py") if f.name != Path(__file__).name)

# What runs the same code on every path: checks of arguments, the environment, the pool's processes.
SHARED = (
    *("refused", "fit", "flag_has_no_default", "named", "environment"),
    *("share_a_kernel", "first_backwards", "forked", "idle"),
)
CHOSEN = " and ".join(f"not {word}" for word in SHARED)


@pytest.mark.skipif("RECUR_ARCH" in os.environ, reason="this run is of one path alone")
@pytest.mark.parametrize("path", [p for p in _kernels.cpu_paths() if p != _kernels.cpu_path()])
def test_the_kernels_tests_pass_on_this_path(path, tmp_path):
    options = ["-q", "-x", "-p", "no:cacheprovider", "-k", CHOSEN]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *FILES],
        cwd=HERE,
        env={**os.environ, "RECUR_ARCH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-4000:]
    assert " passed" in ran.stdout
