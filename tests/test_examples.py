"""Every Python example in the README, the docs and the docstrings runs and shows what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import recur

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in page.parts),
]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
FENCE = re.compile(r"^( *)```python *\n(.*?)^ *``` *$", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> Iterator[tuple[int, str]]:
    """The Python blocks of a page, each with the number of lines before it."""
    for match in FENCE.finditer(text):
        indent, block = match.groups()
        yield (
            text.count("\n", 0, match.start(2)),
            re.sub(rf"^{indent}", "", block, flags=re.MULTILINE),
        )


def run(page: str, text: str, names: dict[str, object]) -> None:
    """Run the blocks of a page from top to bottom over one set of names."""
    for line, block in blocks(text):
        if ">>>" in block:
            example = doctest.DocTestParser().get_doctest(block, names, page, page, line)
            report: list[str] = []
            runner = doctest.DocTestRunner(optionflags=FLAGS)
            runner.run(example, out=report.append, clear_globs=False)
            assert not runner.failures, "".join(report)
            names.update(example.globs)
        else:
            exec(compile("\n" * line + block, page, "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_examples_of_a_page_run_and_show_what_it_says(page, in_tmp_path):
    run(str(page), page.read_text(encoding="utf-8"), {"__name__": "__main__"})


def test_the_examples_in_docstrings_show_what_they_say(in_tmp_path):
    modules = [name for _, name, _ in pkgutil.walk_packages(recur.__path__, "recur.")]
    assert "recur.tape" in modules
    for name in modules:
        result = doctest.testmod(importlib.import_module(name), optionflags=FLAGS)
        assert result.failed == 0, f"{name}: see the report above"


# The runner itself: blocks are found, share names, and a wrong one fails.

PAGE = """
```python
x = 20
```

1. in a list

   ```python
   >>> x + 1
   21

   ```

```text
x = undefined
```
"""


def test_the_blocks_of_a_page_share_their_names():
    assert [line for line, _ in blocks(PAGE)] == [2, 8]
    run("page", PAGE, {})


def test_an_example_that_shows_something_else_fails():
    with pytest.raises(AssertionError, match=r"Expected:\n +22"):
        run("page", PAGE.replace("21", "22"), {})


def test_a_block_that_raises_points_at_its_line_of_the_page():
    with pytest.raises(ZeroDivisionError) as raised:
        run("page", PAGE.replace("x = 20", "x = 1 / 0"), {})
    assert raised.traceback[-1].lineno == 2
