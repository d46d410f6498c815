"""Builds the documentation site from the Markdown pages: `make docs`, or `python docs/site/build.py`.

The pages stay readable in the repository as they are. This program copies them, with links to source files turned into
links to pages that show those files, adds pages of docstrings, and gives all to Sphinx. Every warning is an error, so a
broken link fails.
"""

import posixpath
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from sphinx.cmd.build import main as sphinx

ROOT = Path(__file__).parents[2]
HOW_DO_I = "docs/README.md"
MOVED = {"README.md": "index.md", HOW_DO_I: "how-do-i.md", "CONTRIBUTING.md": "contributing.md"}
MOVED |= {"CHANGELOG.md": "changelog.md", "shardlib/README.md": "shardlib.md"}
"""Pages of the repository that have another name in the site. Those of docs/ keep theirs."""
SECTIONS = {
    "tutorial": "Tutorials",
    "how-to": "How-to",
    "reference": "Reference",
    "log of measurements": "Measurements",
}
"""Kinds of pages, as the table in docs/README.md names them, and the titles of their sections."""
MODULES = {
    "The program": ("train",),
    "Types and collectives": ("shardlib.shardtypes", "shardlib.shardops", "shardlib.layers", "jax_extra"),
    "Pipeline": ("shardlib.schedules", "shardlib.pipeline"),
    "Proof": ("shardlib.proof.check",),
    "Models": ("shardwright.modeling.model", "shardwright.modeling.weights", "shardwright.modeling.rules"),
    "Data": ("shardwright_data.flat_tokens", "shardwright_data.loader.batches"),
    "Settings": (
        "shardwright.run.config",
        "shardwright.modeling.settings",
        "shardwright.optimizers.config",
        "shardwright_data.loader.config",
        "shardwright.cluster.config",
        "shardwright.run.pipeline_config",
    ),
}
"""Modules whose docstrings the site shows, under the title of their page."""
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".sbatch": "bash"}
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
ABOUT = re.compile(r"\*(?:Tutorial|How-to|Reference|Log of measurements)\.\*\s+(.*?)(?:\n\n|\\n|\")", re.DOTALL)
"""What a page says of itself after its kind; in a notebook too, which is JSON."""
LINK = re.compile(r"(?<=\]\()[^)\s]+(?=\))")


class Site:
    """The pages of a site while they are written.

    Args:
        root: the repository.
        pages: directory for what Sphinx reads.
    """

    def __init__(self, root: Path, pages: Path):
        self.root, self.pages, self.broken = root, pages, []
        self._waiting: list[str] = []
        self._shown: set[str] = set()

    def write(self, name: str, text: str) -> None:
        """Writes a page."""
        path = self.pages / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def copy(self, page: str) -> str:
        """Copies a page of the repository, with the same lines. Returns its name in the site."""
        name = MOVED.get(page, page.removeprefix("docs/"))
        text, end, parts = (self.root / page).read_text(), 0, []
        for fence in FENCED.finditer(text):
            parts += [LINK.sub(self._target(page), text[end : fence.start()]), fence[0]]
            end = fence.end()
        self.write(name, "".join([*parts, LINK.sub(self._target(page), text[end:])]))
        return name

    def _target(self, page: str) -> Callable[[re.Match], str]:
        """What replaces a link of `page`."""

        def replaced(link: re.Match) -> str:
            path, sharp, anchor = link[0].partition("#")
            if not path or re.match(r"\w+:", path):
                return link[0]
            path = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
            if not (self.root / path).exists():
                self.broken.append(f"{page}: the link {link[0]} leads nowhere")
            elif path in MOVED or (path.startswith("docs/") and (self.root / path).is_file()):
                return MOVED.get(path, path.removeprefix("docs/")) + sharp + anchor
            else:
                self._waiting.append(path)
            return f"source/{path}.rst"

        return replaced

    def show_sources(self) -> None:
        """Writes a page for each source file and folder that a page links to, and for each file of such a folder."""
        while self._waiting:
            path = self._waiting.pop()
            if path in self._shown:
                continue
            self._shown.add(path)
            # `nosearch`: a search finds pages and docstrings.
            head = f":orphan:\n:nosearch:\n\n{path}\n{'=' * len(path)}\n\n"
            if (self.root / path).is_dir():
                files = sorted(file for file in (self.root / path).iterdir() if file.suffix in LANGUAGES)
                self._waiting += [f"{path}/{file.name}" for file in files]
                lines = "".join(f"* :doc:`{file.name} </source/{path}/{file.name}>`\n" for file in files)
            else:
                code = (self.root / path).read_text().splitlines()
                language = LANGUAGES.get(Path(path).suffix, "text")
                lines = f".. code-block:: {language}\n   :linenos:\n\n" + "\n".join(f"   {line}" for line in code)
            self.write(f"source/{path}.rst", head + lines + "\n")

    def section(self, name: str, title: str, pages: list[str], words: str = "") -> str:
        """Writes a page that lists others, each with the sentence at its head. Returns its name."""
        lines = [f"# {title}", "", words, ""]
        for page in pages:
            text = (self.pages / page).read_text()
            about = ABOUT.search(text)
            lines += [f"- [](/{page})" + (f": {' '.join(about[1].split())}" if about else "")]
        self.write(name, "\n".join([*lines, "", *toctree(pages)]))
        return name


def toctree(pages: list[str], *options: str) -> list[str]:
    """Lines that put pages below this one in the navigation."""
    return ["```{toctree}", ":hidden:", *options, "", *pages, "```", ""]


def slug(title: str) -> str:
    """Name of a page with this title."""
    return title.lower().replace(" ", "-")


def write_pages(root: Path, pages: Path) -> list[str]:
    """Writes all pages of the site, for Sphinx. Returns a line for each broken link."""
    site = Site(root, pages)
    shutil.copytree(root / "docs", pages, ignore=shutil.ignore_patterns("*.md", "site"))
    site.copy("README.md")
    top = [site.copy(HOW_DO_I)]
    # In its table Sphinx writes the titles of what is linked, in place of the names of files.
    tasks = (pages / top[0]).read_text()
    site.write(top[0], re.sub(r"\[[\w-]+\.(?:md|ipynb)\]\(", "[](", tasks))
    table = (root / HOW_DO_I).read_text().partition("## Pages")[2]
    for kind, title in SECTIONS.items():
        (row,) = re.findall(rf"^\| {kind} \|(.*)\|$", table, re.MULTILINE)
        names = [site.copy(f"docs/{name}") for name in re.findall(r"\]\(([\w-]+\.(?:md|ipynb))\)", row)]
        top += names if len(names) == 1 else [site.section(f"{slug(title)}.md", title, names)]
    for title, modules in MODULES.items():
        heads = [f"{name}\n{'-' * len(name)}\n\n.. automodule:: {name}\n" for name in modules]
        site.write(f"modules/{slug(title)}.rst", f"{title}\n{'=' * len(title)}\n\n" + "\n".join(heads))
    names = [f"modules/{slug(title)}.rst" for title in MODULES]
    top.insert(-1, site.section("docstrings.md", "Modules", names, "The docstrings of what a change calls."))
    project = [site.copy(name) for name in ("shardlib/README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    with (pages / "index.md").open("a") as index:
        index.write("\n" + "\n".join([*toctree(top), *toctree(project, ":caption: The project")]))
    site.show_sources()
    return site.broken


def build(root: Path, output: Path) -> int:
    """Builds the site of the repository `root`. Returns the exit status.

    Args:
        root: the repository.
        output: directory for the site. It is replaced if the build succeeds.
    """
    with tempfile.TemporaryDirectory() as scratch:
        pages, made = Path(scratch) / "pages", Path(scratch) / "html"
        broken = write_pages(root, pages)
        options = ["-q", "-W", "--keep-going", "-c", str(Path(__file__).parent), "-d", f"{scratch}/doctrees"]
        failed = sphinx([*options, str(pages), str(made)])
        for line in broken:
            print(line, file=sys.stderr)
        if failed or broken:
            return 1
        shutil.rmtree(output, ignore_errors=True)
        shutil.copytree(made, output)
    print(output / "index.html")
    return 0


if __name__ == "__main__":
    sys.exit(build(ROOT, Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "docs/site/html").absolute()))
