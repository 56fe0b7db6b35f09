"""One version everywhere, and a changelog that a reader can follow."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import recur
from recur._version import __version__

ROOT = Path(__file__).resolve().parents[1]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
HEADS = re.findall(r"^## (.+)$", CHANGELOG, re.MULTILINE)


def test_recur_tells_its_version():
    assert recur.__version__ == __version__
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", __version__)


def test_the_installed_version_is_that_of_the_code():
    try:
        assert version("recur") == __version__
    except PackageNotFoundError:
        pytest.skip("recur is on the path, but not installed")


def test_the_citation_names_the_same_version():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.+)$", citation, re.MULTILINE) == [__version__]


def test_the_changelog_keeps_an_unreleased_head():
    assert HEADS[0] == "Unreleased"


def test_every_release_in_the_changelog_has_a_date_and_they_run_backwards():
    releases = [re.fullmatch(r"(\d+)\.(\d+)\.(\d+) \((\d{4}-\d\d-\d\d)\)", h) for h in HEADS[1:]]
    assert None not in releases, HEADS
    keys = [(*map(int, match.groups()[:3]), match[4]) for match in releases if match]
    assert keys == sorted(keys, reverse=True)


def test_a_released_version_has_its_section_and_a_development_version_has_news():
    if ".dev" in __version__:
        unreleased = CHANGELOG.split("## Unreleased")[1].split("\n## ")[0]
        assert re.search(r"^- ", unreleased, re.MULTILINE), "nothing under Unreleased"
    else:
        assert any(head.startswith(f"{__version__} (") for head in HEADS)
