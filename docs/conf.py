"""Sphinx: `pip install -e ".[docs]" && sphinx-build -W -b html docs docs/_build`."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import docstrings  # noqa: E402

import dsv4cp  # noqa: E402

project = "dsv4cp"
author = "the dsv4cp authors"
copyright = "the dsv4cp authors, Apache-2.0"
version = release = dsv4cp.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
autodoc_typehints = "none"  # arrays are Any in the signatures; the docstrings say what they are
html_theme = "furo"
html_title = f"dsv4cp {release}"
html_theme_options = {"navigation_with_keys": True}
nitpicky = True
linkcheck_ignore = [r"https://github\.com/.*/edit/"]


def setup(app):
    """Docstrings are plain text: docstrings.py makes reStructuredText of them."""
    app.connect("autodoc-process-docstring", lambda app, what, name, obj, options, lines: docstrings.convert(lines))
