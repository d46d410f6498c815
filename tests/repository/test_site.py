"""The documentation site: every link in what Sphinx makes leads somewhere, and a broken one fails the build."""

import html.parser
import shutil
import subprocess
import sys
import urllib.parse
from pathlib import Path

import pytest

pytest.importorskip("sphinx", reason="`make docs` installs it, and `.ci/run` makes the site")
pytestmark = pytest.mark.slow  # `make docs`, which `.ci/run` makes, builds the same pages, and fails for most links

ROOT = Path(__file__).parents[2]


def build(root: Path, output: Path) -> subprocess.CompletedProcess:
    """What `make docs` runs, for a copy of the repository."""
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-c", "docs/site", ".", str(output)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True)


class Page(html.parser.HTMLParser):
    """Links, and what they can lead to, of an HTML page."""

    def __init__(self, path: Path):
        super().__init__()
        self.links, self.ids, self.fetched = [], set(), []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids |= {attrs[name] for name in ("id", "name") if attrs.get(name)}
        if tag == "a" and "href" in attrs:
            self.links.append(attrs["href"])
        self.fetched += [attrs[name] for name in ("src",) if name in attrs]
        if tag == "link" and attrs.get("rel") in ("stylesheet", "icon", "prefetch"):
            self.fetched.append(attrs["href"])


def test_every_link_leads_somewhere(tmp_path):
    built = tmp_path / "html"
    done = build(ROOT, built)
    assert done.returncode == 0, done.stderr
    pages = {path: Page(path) for path in built.rglob("*.html")}
    broken, seen = [], 0
    for path, page in pages.items():
        for link in [*page.links, *page.fetched]:
            address = urllib.parse.urlsplit(link)
            if address.scheme in ("http", "https", "data", "mailto"):
                continue
            seen += 1
            target = (path.parent / urllib.parse.unquote(address.path)).resolve() if address.path else path
            if not target.exists() or (address.fragment and address.fragment not in pages[target].ids):
                broken.append(f"{path.relative_to(built)}: {link}")
    assert broken == []
    assert seen > 500
    navigation = set(pages[built / "README.html"].links)
    assert {f"docs/{path.stem}.html" for path in (ROOT / "docs").glob("*.md")} <= navigation
    assert not [link for page in pages.values() for link in page.fetched if link.startswith("http")]


BROKEN = ["[a](nowhere.md)", "[a](../nowhere.py)", "[a](report.md#nowhere)", "![a](nowhere.svg)"]


@pytest.mark.parametrize("link", BROKEN)
def test_a_broken_link_fails(tmp_path, link):
    """In a small repository."""
    shutil.copytree(ROOT / "docs/site", tmp_path / "docs/site", ignore=shutil.ignore_patterns("html"))
    for name in ("README.md", "docs/README.md", "docs/seqax.md", "docs/report.md"):
        (tmp_path / name).write_text("# A page\n\n[Another](/docs/seqax.md)\n")
    with (tmp_path / "docs/seqax.md").open("a") as page:
        page.write(f"\n{link}\n")
    done = build(tmp_path, tmp_path / "html")
    assert done.returncode != 0
    assert "docs/seqax.md:5: WARNING" in done.stderr
