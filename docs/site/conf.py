"""Sphinx's configuration for the documentation site, which `make docs` builds from the pages as
they stand.
"""

import importlib.metadata
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHOWN = "docs/site/source"
"""Folder of the pages that show the source files that others link to. It is generated."""

smartquotes = False  # which turn -- of an option into a dash
project = "shardwright"
version = importlib.metadata.version("shardwright")
copyright = "the shardwright contributors, under the Apache License 2.0"
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "docs/*.ipynb", "shardlib/README.md", f"{SHOWN}/*.md"]
html_title = f"shardwright {version}"
extensions = ["myst_nb", "sphinx_copybutton"]
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_favicon = "static/icon.svg"
html_last_updated_fmt = "%Y-%m-%d"
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
# what is stored is shown; tests/repository/test_notebooks.py compares the tour with a run
nb_execution_mode = "off"
nb_merge_streams = True
# of the examples in docs/ops.md, whose results are not copied
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

LINK = re.compile(r"\]\(((?!\w+:)[^)#\s]+\.(?:py|yaml|yml|toml|txt|sh|patch))\)")
PAGE_LINK = re.compile(r"\[[\w./-]+\.md\]\(([\w./-]+\.md)")
COMMAND = re.compile(
    r"(\w+=\S+ )?"
    r"(python|python3|pip|make|shardwright|sbatch|srun|kubectl|gcloud|sky|git|cp|export)\b"
)
"""How blocks begin that a reader types."""
LANGUAGES = {
    ".py": "python",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".toml": "toml",
    ".sh": "bash",
}


def _title_of(page: Path) -> str:
    """The first heading of a page."""
    return next(
        line.removeprefix("# ") for line in page.read_text().splitlines() if line.startswith("# ")
    )


def _write_groups() -> list[str]:
    """Writes a page for each group of docs/README.md, with its pages below it in the sidebar.

    Returns their names.
    """
    names = []
    for group in (ROOT / "docs/README.md").read_text().split("\n## ")[1:]:
        caption, _, text = group.partition("\n")
        links = re.findall(r"\[([^]]+)\]\(([\w./-]+\.(?:md|ipynb))\)", text)
        pages = {
            (ROOT / "docs" / link).resolve().relative_to(ROOT): title
            for title, link in reversed(links)
        }
        titles = {page: " ".join(title.split()) for page, title in reversed(pages.items())}
        listed = "\n".join(
            f"{x[0].upper()}{x[1:]} </{page.with_suffix('')}>" for page, x in titles.items()
        )
        shown = re.sub(
            r"\]\(((?:\.\./)?)([\w./#-]+\))", lambda m: f"]({'/' if m[1] else '/docs/'}{m[2]}", text
        )
        name = f"group-{caption.lower().replace(' ', '-')}"
        (ROOT / SHOWN / f"{name}.md").write_text(
            f"# {caption}\n{shown}\n```{{toctree}}\n:hidden:\n\n{listed}\n```\n"
        )
        names.append(name)
    return names


def _navigation(app, name: str, source: list[str]) -> None:
    """Adds the sidebar to README, a group for each of docs/README.md, which is left out of it."""
    if name == root_doc:
        listed = "\n".join(f"/{SHOWN}/{group}" for group in app.config.groups)
        source[0] += f"\n```{{toctree}}\n:hidden:\n\n{listed}\n```\n"
    elif name == "docs/README":
        source[0] = f"---\norphan: true\n---\n\n{source[0]}"


def _name_links(app, name: str, source: list[str]) -> None:
    """Replaces names of pages, which links show in a repository, by the titles of these pages."""
    folder = Path(app.env.doc2path(name)).parent

    def titled(match: re.Match) -> str:
        page = (folder / match[1]).resolve()
        return f"[{_title_of(page)}]({match[1]}" if page.is_file() else match[0]

    source[0] = PAGE_LINK.sub(titled, source[0])


def _mark_commands(app, name: str, source: list[str]) -> None:
    """Highlights blocks without a language that are commands, so that they differ from what
    programs print.
    """
    source[0] = re.sub(
        r"^```\n((?:[^`\n].*\n|\n)*?)```$",
        lambda m: f"```bash\n{m[1]}```" if COMMAND.match(m[1]) else m[0],
        source[0],
        flags=re.MULTILINE,
    )


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
    config.groups = _write_groups()
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "shardlib/README.md"]
    targets = {
        (page.parent / link).resolve() for page in pages for link in LINK.findall(page.read_text())
    }
    for target in (path for path in targets if path.is_file() and path.is_relative_to(ROOT)):
        path = target.relative_to(ROOT)
        code = (
            f"```{{literalinclude}} /{path}\n:language: "
            f"{LANGUAGES.get(path.suffix, 'text')}\n:linenos:\n```\n"
        )
        (ROOT / SHOWN / _page_of(target)).write_text(
            f"---\norphan: true\n---\n\n# {path}\n\n{code}"
        )


def setup(app) -> None:
    """Called by Sphinx."""
    app.add_config_value("groups", [], "env")
    app.connect("config-inited", _write_source_pages)
    app.connect("source-read", _name_links)
    app.connect("source-read", _mark_commands)
    app.connect("source-read", _navigation)
    app.connect("source-read", _show_source)
