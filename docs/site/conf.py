"""Sphinx's configuration for the documentation site, which `make docs` builds from the pages as they stand."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHOWN = "docs/site/source"
"""Folder of the pages that show the source files that others link to. It is generated."""

project = "shardwright"
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "docs/*.ipynb", "shardlib/README.md", f"{SHOWN}/*.md"]
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

LINK = re.compile(r"\]\(((?!\w+:)[^)#\s]+\.(?:py|yaml|yml|toml|txt|sh|patch))\)")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".sh": "bash", ".patch": "diff"}


def _navigation(app, name: str, source: list[str]) -> None:
    """Adds the sidebar to README: the groups of docs/README.md, with the pages that each lists."""
    if name == root_doc:
        source[0] += "\n```{toctree}\n:hidden:\n\ndocs/README\n```\n"
        for group in (ROOT / "docs/README.md").read_text().split("\n## ")[1:]:
            caption, _, text = group.partition("\n")
            links = [Path(link) for link in re.findall(r"\]\(([\w./-]+\.(?:md|ipynb))\)", text)]
            pages = dict.fromkeys((ROOT / "docs" / link).resolve().relative_to(ROOT).with_suffix("") for link in links)
            listed = "\n".join(map(str, pages))
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{listed}\n```\n"


def _show_source(app, name: str, source: list[str]) -> None:
    """Leads links to source files to pages that show them."""
    folder = Path(app.env.doc2path(name)).parent

    def shown(match: re.Match) -> str:
        target = (folder / match[1]).resolve()
        page = ROOT / SHOWN / _page_of(target)
        return f"](/{page.relative_to(ROOT)})" if page.exists() else match[0]

    if not name.startswith(SHOWN):
        source[0] = LINK.sub(shown, source[0])


def _page_of(path: Path) -> str:
    return str(path.relative_to(ROOT)).replace("/", "-") + ".md"


def _write_source_pages(app, config) -> None:
    """Writes a page for each source file that a page links to."""
    (ROOT / SHOWN).mkdir(exist_ok=True)
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "shardlib/README.md"]
    targets = {(page.parent / link).resolve() for page in pages for link in LINK.findall(page.read_text())}
    for target in (path for path in targets if path.is_file() and path.is_relative_to(ROOT)):
        path = target.relative_to(ROOT)
        code = f"```{{literalinclude}} /{path}\n:language: {LANGUAGES.get(path.suffix, 'text')}\n:linenos:\n```\n"
        (ROOT / SHOWN / _page_of(target)).write_text(f"---\norphan: true\n---\n\n# {path}\n\n{code}")


def setup(app) -> None:
    """Called by Sphinx."""
    app.connect("config-inited", _write_source_pages)
    app.connect("source-read", _navigation)
    app.connect("source-read", _show_source)
