"""The pictures of the docs are what their script makes, and every page finds its own."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if "_build" not in page.parts]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("pictures", DOCS / "pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_picture_is_what_the_script_draws(script):
    assert {f"{name}.svg" for name in script.PICTURES} == {
        path.name for path in script.FOLDER.iterdir()
    }
    for name, make in script.PICTURES.items():
        committed = (script.FOLDER / f"{name}.svg").read_text(encoding="utf-8")
        assert make().svg == committed, f"{name}: run python docs/pictures.py"


def test_every_picture_and_page_that_a_page_names_is_there():
    for page in PAGES:
        words = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", words):
            assert (page.parent / target).exists(), f"{page.name} names {target}"


def test_every_picture_is_shown_on_a_page(script):
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [name for name in script.PICTURES if f"pictures/{name}.svg" not in text] == []
