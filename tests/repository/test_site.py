"""The documentation site: every link in what Sphinx makes leads somewhere, and a broken one fails the build."""

import contextlib
import html.parser
import importlib.util
import io
import urllib.parse
from pathlib import Path

import pytest

pytest.importorskip("sphinx", reason="`make docs` installs it, and `.ci/run` makes the site")
# Sphinx warns its own extensions of what it will change.
pytestmark = [
    pytest.mark.slow,  # `make docs`, which `.ci/run` makes, builds the same pages, and fails for most links
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning"),
]

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("build_of_the_site", ROOT / "docs/site/build.py")
site = importlib.util.module_from_spec(spec)
spec.loader.exec_module(site)


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


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("site") / "html"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert site.build(ROOT, output) == 0
    assert printed.getvalue().splitlines()[-1] == str(output / "index.html")
    return output


def test_every_link_leads_somewhere(built):
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
    assert seen > 5000
    navigation = set(pages[built / "index.html"].links)
    assert {f"{path.stem}.html" for path in (ROOT / "docs").glob("*.md")} - {"README.html"} <= navigation
    assert "train.Llama.layer" in {name for page in pages.values() for name in page.ids}
    assert not [link for page in pages.values() for link in page.fetched if link.startswith("http")]


BROKEN = {
    "[a](nowhere.md)": "docs/seqax.md: the link nowhere.md leads nowhere",
    "[a](../nowhere.py)": "docs/seqax.md: the link ../nowhere.py leads nowhere",
    "[a](report.md#nowhere)": "seqax.md:",
    "![a](pipeline/nowhere.svg)": "docs/seqax.md: the link pipeline/nowhere.svg leads nowhere",
}


@pytest.mark.parametrize("link", BROKEN)
def test_a_broken_link_fails(tmp_path, capsys, monkeypatch, link):
    """In a small repository, which has a page of each kind."""
    pages = dict(zip(site.SECTIONS, ("seqax.md", "report.md", "loading.md", "measurements.md"), strict=True))
    for name in (*site.MOVED, *(f"docs/{page}" for page in pages.values())):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n\n*Reference.* Words.\n")
    rows = "".join(f"| {kind} | [{page}]({page}) |\n" for kind, page in pages.items())
    with (tmp_path / site.HOW_DO_I).open("a") as index:
        index.write(f"\n## Pages\n\n| kind | pages |\n|---|---|\n{rows}")
    monkeypatch.setattr(site, "MODULES", {"Helpers": ("jax_extra",)})
    assert site.build(tmp_path, tmp_path / "html") == 0, capsys.readouterr().err
    with (tmp_path / "docs/seqax.md").open("a") as page:
        page.write(f"\n{link}\n")
    assert site.build(tmp_path, tmp_path / "other") == 1
    assert BROKEN[link] in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
