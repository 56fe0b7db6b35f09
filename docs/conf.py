"""How Sphinx builds the docs, out of these pages and the docstrings of the installed recur."""

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
