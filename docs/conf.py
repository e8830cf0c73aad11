"""Build the manual: the pages of docs/, and the public names with their docstrings. Run `make docs`."""

from __future__ import annotations

import re
from typing import Any

project = "autopar"
author = "the autopar authors"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
# Docstrings quote names as Markdown does.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_class_signature = "separated"
html_theme = "furo"
html_title = "autopar"
# A page that a search engine or a reader opens alone fetches nothing from elsewhere.
html_show_sphinx = False


def restructured(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Have a docstring read as reStructuredText: what it indents, tables and formulas, stands as it is."""
    shown: list[str] = []
    literal = False
    for before, line in zip(["", *lines], lines, strict=False):
        indented = line.startswith("    ")
        if indented and not literal and not before.strip():
            shown += ["::", ""]
        literal = indented or (literal and not line.strip())
        shown.append(line if indented or line.startswith(">>>") else _escaped(line))
    lines[:] = shown


def _escaped(line: str) -> str:
    """Return a line with names in backticks as they are, and stars and bars outside of them as themselves."""
    parts = re.split(r"(`[^`]*`)", line)
    for number, part in enumerate(parts):
        if not part.startswith("`"):
            part = re.sub(r"([*|])", r"\\\1", part)
            parts[number] = "\\ " + part if number and part[:1].isalnum() else part
    return "".join(parts)


def link_to_first_page(app: Any, name: str, source: list[str]) -> None:
    """Have links to the README lead to the first page, which shows it."""
    source[0] = source[0].replace("](../README.md", "](index.md")


def name_other_files(app: Any, path: Any, name: str, content: list[str]) -> None:
    """Name the files of the project that are no pages, instead of linking to them."""
    content[0] = re.sub(r"\[([^\]]+)\]\((?:CONTRIBUTING\.md|CHANGELOG\.md|LICENSE)\)", r"\1", content[0])


def setup(app: Any) -> None:
    """Have Sphinx call what is above."""
    app.connect("autodoc-process-docstring", restructured)
    app.connect("source-read", link_to_first_page)
    app.connect("include-read", name_other_files)
