"""Sphinx's configuration for the documentation site, which `make docs` makes of the pages as they stand."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

project = "shardwright"
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "docs/tour.ipynb", "shardlib/README.md"]
html_title = "shardwright"
extensions = ["myst_nb"]
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


def _navigation(app, name: str, source: list[str]) -> None:
    """Adds the navigation to README: each kind of page that docs/README.md lists, then what is elsewhere."""
    if name != root_doc:
        return
    table = (ROOT / "docs/README.md").read_text().partition("## Pages")[2]
    sections = {"": ["docs/README"]}
    for kind, pages in re.findall(r"^\| ([a-z -]+) \| (\[.*)\|$", table, re.MULTILINE):
        sections[kind.capitalize()] = [f"docs/{page}" for page in re.findall(r"\]\((.*?)\.(?:md|ipynb)\)", pages)]
    sections["The source"] = ["shardlib/README", "CONTRIBUTING", "CHANGELOG"]
    for title, pages in sections.items():
        caption = f":caption: {title}" if title else ""
        source[0] += "\n".join(["\n```{toctree}", ":hidden:", caption, "", *pages, "```", ""])


def setup(app) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _navigation)
