"""Sphinx's configuration for the documentation site, which `make docs` makes of the pages as they stand."""

import dataclasses
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

project = "shardwright"
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "docs/tour.ipynb", "docs/site/modules.rst", "shardlib/README.md"]
html_title = "shardwright"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b5c8a", "color-brand-content": "#0b5c8a"},
    "dark_css_variables": {"color-brand-primary": "#7cc4ec", "color-brand-content": "#7cc4ec"},
}
highlight_language = "text"
pygments_style = "friendly"
pygments_dark_style = "github-dark"

myst_heading_anchors = 4
nb_execution_mode = "off"  # its outputs are stored; tests/repository/test_tour.py compares them with those of a run
nb_merge_streams = True

add_module_names = False
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
suppress_warnings = ["ref.python"]  # names in annotations, which Sphinx takes for links, may belong to several classes


def _marked_up(words: str) -> str:
    """Words as reStructuredText, from words with code in single backticks."""
    parts = re.split(r"(`[^`]+`)", words)
    for i, part in enumerate(parts):
        if i % 2:  # code; an escaped space lets anything follow
            parts[i] = f"`{part}`" + "\\ " * bool(re.match(r"\S", parts[i + 1]))
        else:  # a star or a bar begins markup, and an underscore at the end of a word is a link
            parts[i] = re.sub(r"([*|]|(?<=\w)_(?=\W))", r"\\\1", part)
    return "".join(parts)


def _as_rst(app, what, name, obj, options, lines: list[str]) -> None:
    """Turns a docstring as this project writes it into reStructuredText.

    It marks code, examples, which are paragraphs indented more than the text before them, and columns of text.
    """
    indent = lambda line: len(line) - len(line.lstrip())
    found, above, in_example = [], 0, False
    for paragraph in filter(str.strip, "\n".join(lines).split("\n\n")):
        rows = paragraph.split("\n")
        if min(map(indent, rows)) > above or re.search(r"\S {3,}\S", paragraph):
            found += [] if in_example else [" " * above + ".. code-block:: default", ""]
            found += [" " * 4 + row for row in rows]
            in_example = True
        else:
            found += _marked_up(paragraph).split("\n")
            above, in_example = indent(rows[-1]), False
        found.append("")
    lines[:] = found
    if what in ("attribute", "data"):  # else napoleon takes what is before a colon in the first line for the type
        lines.insert(0, "")


def _signature(app, what, name, obj, options, signature, returns):
    """The fields of a dataclass are shown one by one, with their docstrings."""
    return ("", None) if what == "class" and dataclasses.is_dataclass(obj) else None


def _is_skipped(app, what, name, obj, skip, options) -> bool | None:
    """Leaves out functions of other packages that are values of fields."""
    return True if getattr(obj, "__module__", "").startswith("jax") else None


def _navigation(app, name: str, source: list[str]) -> None:
    """Adds the navigation to README: each kind of page that docs/README.md lists, then what is elsewhere."""
    if name != root_doc:
        return
    table = (ROOT / "docs/README.md").read_text().partition("## Pages")[2]
    sections = {"": ["docs/README"]}
    for kind, pages in re.findall(r"^\| ([a-z -]+) \| (\[.*)\|$", table, re.MULTILINE):
        sections[kind.capitalize()] = [f"docs/{page}" for page in re.findall(r"\]\((.*?)\.(?:md|ipynb)\)", pages)]
    sections["The source"] = ["docs/site/modules", "shardlib/README", "CONTRIBUTING", "CHANGELOG"]
    for title, pages in sections.items():
        caption = f":caption: {title}" if title else ""
        source[0] += "\n".join(["\n```{toctree}", ":hidden:", caption, "", *pages, "```", ""])


def setup(app) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _navigation)
    app.connect("autodoc-process-docstring", _as_rst, priority=100)
    app.connect("autodoc-process-signature", _signature)
    app.connect("autodoc-skip-member", _is_skipped)
