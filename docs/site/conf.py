"""Sphinx's configuration for the documentation site, which `make docs` makes of the pages as they stand."""

project = "shardwright"
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "docs/*.ipynb", "shardlib/README.md"]
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
nb_execution_mode = "off"  # what is stored is shown; tests/repository/test_tour.py compares the tour with a run
nb_merge_streams = True


def _navigation(app, name: str, source: list[str]) -> None:
    """Adds a navigation of all pages to README."""
    if name == root_doc:
        pages = "docs/README\ndocs/*\nshardlib/README\nCONTRIBUTING\nCHANGELOG"
        source[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n\n{pages}\n```\n"


def setup(app) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _navigation)
