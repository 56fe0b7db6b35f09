"""What all tests share: which recur is under test, seeded numbers, the two dtypes, oracles.

`tests/` is on the path (pyproject.toml), so that a test may `import twins`.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# The installed package is under test.  `python -m pytest` puts the working folder on the path, and
# there lies an unbuilt recur/.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

import hypothesis  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

hypothesis.settings.register_profile(
    "recur", deadline=None, derandomize=True, database=None, print_blob=True
)
hypothesis.settings.load_profile("recur")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", help="a file of acceptance cases in place of the project's own")
    parser.addoption(
        "--no-skips",
        action="store_true",
        help="a test that skips itself fails (where every oracle is meant to be installed)",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and item.config.option.no_skips:
        report.outcome = "failed"
        report.longrepr = f"skipped under --no-skips: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    holds_oracles = isinstance(collector, pytest.Module) and "oracle" in collector.path.read_text()
    if report.skipped and holds_oracles and collector.config.option.no_skips:
        report.outcome = "failed"
        report.longrepr = f"skipped under --no-skips: {report.longrepr}"
    return report


@pytest.fixture(scope="session", autouse=True)
def _away_from_the_checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run in an empty folder: a Python that a test starts looks first where it is started."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("work"))
    yield
    os.chdir(before)


@pytest.fixture(params=["float32", "float64"])
def dtype(request: pytest.FixtureRequest) -> np.dtype:
    """Run the test once in each dtype that recur computes in."""
    return np.dtype(request.param)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator seeded by the test's name: the same numbers in any order and any selection."""
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


@pytest.fixture
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Run the test inside an empty folder of its own."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
