"""What `conftest.py` promises to the other tests, on small suites of their own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SKIPS = """
import pytest

@pytest.mark.oracle
def test_skips_itself():
    pytest.importorskip("a_package_that_is_not_installed")
"""
SKIPS_AS_A_WHOLE = """
import pytest

pytest.importorskip("a_package_that_is_not_installed")

@pytest.mark.oracle
def test_is_never_reached():
    pass
"""
EXPECTS_A_FAILURE = """
import pytest

@pytest.mark.oracle
@pytest.mark.xfail(strict=True)
def test_fails_as_expected():
    raise AssertionError
"""
IMPORTS = """
import subprocess, sys

def test_here():
    import recur

def test_in_a_process_of_its_own():
    subprocess.run([sys.executable, "-c", "import recur"], check=True)
"""


def run(folder: Path, test: str, *options: str) -> tuple[int, str]:
    """Run a suite of one file beside a copy of the real conftest.py."""
    tests = folder / "tests"
    tests.mkdir(exist_ok=True)
    shutil.copy(Path(__file__).with_name("conftest.py"), tests)
    (tests / "test_it.py").write_text(test)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = oracle: compares\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("test", [SKIPS, SKIPS_AS_A_WHOLE])
def test_a_skip_passes_by_itself_and_fails_where_no_skips_are_allowed(tmp_path, test):
    assert run(tmp_path, test)[0] in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    code, output = run(tmp_path, test, "--no-skips")
    assert code != 0
    assert "skipped under --no-skips" in output


def test_an_expected_failure_is_no_skip(tmp_path):
    assert run(tmp_path, EXPECTS_A_FAILURE, "--no-skips")[0] == 0


def test_a_package_lying_unbuilt_beside_the_tests_is_not_imported(tmp_path):
    (tmp_path / "recur").mkdir()
    (tmp_path / "recur" / "__init__.py").write_text("raise RuntimeError('unbuilt')")
    code, output = run(tmp_path, IMPORTS)
    assert code == 0, output
