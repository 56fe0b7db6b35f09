"""How Sphinx builds the docs, out of these pages and the docstrings of the installed recur."""

import re

from recur._version import __version__

project = "recur"
author = "The recur authors"
project_copyright = "2026, The recur authors"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"recur {release}"

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

default_role = "code"  # a name between single backticks in a docstring is code
autodoc_member_order = "bysource"
autodoc_typehints = "signature"


# Docstrings list arrays and options as they are read in an editor, `name  what it is`, with further
# lines indented.  For Sphinx such a list becomes a definition list, and an indented block is code.

_ITEM = re.compile(r"(?P<name>\S(?:\S| (?! ))*) {2,}(?P<words>\S.*)")


def _definitions(block: list[str]) -> list[str] | None:
    """A paragraph of `name  what it is` as a definition list; None if it is no such list."""
    if block[0].startswith(" ") or not _ITEM.fullmatch(block[0]):
        return None
    column = min(match.start("words") for line in block if (match := _ITEM.fullmatch(line)))
    out: list[str] = []
    for line in block:
        match = _ITEM.fullmatch(line)
        if match is None and not line.startswith(" ") and line[column - 1 : column] == " ":
            out += ["", f"``{line[: column - 1]}``", f"   {_plain(line[column:])}"]
        elif match is not None and not line.startswith(" "):
            out += ["", f"``{match['name']}``", f"   {_plain(match['words'])}"]
        elif line.startswith(" "):
            out.append(f"   {_plain(line.strip())}")
        else:
            return None
    return [*out, ""]


def _plain(line: str) -> str:
    """A line in which a star or a trailing underscore is itself."""
    parts = line.split("`")
    parts[::2] = [re.sub(r"[*|]|_(?=\W|$)", r"\\\g<0>", part) for part in parts[::2]]
    return "`".join(parts)


def _process(app, what, name, obj, options, lines):
    paragraphs: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            paragraphs[-1].append(line)
        elif paragraphs[-1]:
            paragraphs.append([])
    out: list[str] = []
    for block in paragraphs:
        if not block:
            continue
        if all(line.startswith(" ") for line in block):
            announced = len(out) > 1 and out[-2].endswith("::")
            out += [*block, ""] if announced else ["::", "", *block, ""]
        elif block[0].startswith(">>>"):
            out += [*block, ""]
        else:
            out += _definitions(block) or [*map(_plain, block), ""]
    lines[:] = out


def setup(app):
    app.connect("autodoc-process-docstring", _process)
