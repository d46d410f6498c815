"""The pages: links lead somewhere, commands compose, settings and files exist; README has true
counts and a refusal.
"""

import collections
import dataclasses
import fnmatch
import functools
import importlib
import itertools
import re
import shlex
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from jax.sharding import AbstractMesh, AxisType, use_abstract_mesh
from omegaconf import OmegaConf

from docs.site import api_page, ops_page, settings_page
from shardlib.shardtypes import ShardError
from shardwright.cluster.chips import chip_of
from shardwright.inspect.planning import mesh_sizes, planned_change
from shardwright.modeling.attention_calls import describe_attention
from shardwright.modeling.model import load_model
from shardwright.models import delta, gpt2, mla
from shardwright.program.step import trace_step
from shardwright.settings.settings import made
from shardwright.tools.plan.screen import as_text
from shardwright.tools.verify import VerifyConfig
from tests.programs.corpus import RIGHT, WRONG
from tests.support.edits import BUGS, catcher
from tests.support.recipes import SOURCE, module_of
from tests.support.shipped import load

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "tests").rglob("*.md")])
YOURS = {"mine.py", "mixing.py", "model/mine.yaml", "my_schedules.py", "script.py", "__main__.py"}
"""Files that a page has its reader write, or that many folders have."""
NOT_OURS = ("pip", "pytest")


def blocks(text: str) -> list[tuple[str, str]]:
    """Language and content of each fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def prose(text: str) -> str:
    """The text without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def spans(text: str) -> list[str]:
    """Inline code."""
    return re.findall(r"`([^`\n]+(?:\n[^`\n]+)?)`", prose(text))


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", x.lower()).replace(" ", "-") for x in headings}


def broken_links(page: Path, text: str) -> list[str]:
    broken = []
    for link in re.findall(r"\]\((?!\w+://)([^)\s]+)\)", prose(text)):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.is_file() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


def test_the_index_has_every_page():
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs/README.md").read_text()))
    assert linked == {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}


def command_lines(text: str) -> list[str]:
    """What follows `python -m` in each command of a page's blocks and inline code; `shardwright x`
    is tools.x.
    """
    of_blocks = [block.replace("\\\n", "") for language, block in blocks(text) if not language]
    found = []
    for line in [*"\n".join(of_blocks).split("\n"), *(x.replace("\n", " ") for x in spans(text))]:
        line = re.sub(r"^shardwright (?=\w)(?!train)", "python -m tools.", line)
        line = re.sub(r"^shardwright (?=train)", "python -m ", line)
        _, is_command, rest = re.sub(r"<[\w ,]+>", "name", line).partition("python -m ")
        if is_command:
            found.append(rest.replace("\\|", "|"))
    return found


def commands(text: str) -> list[list[str]]:
    """Words of each command in a page."""
    words = [shlex.split(line, comments=True) for line in command_lines(text)]
    return [[*itertools.takewhile(lambda x: x not in ("&", "|", ";", "&&"), x)] for x in words]


def source_files(module: str) -> list[Path]:
    """The source of a program: a file, or a folder with a __main__.py."""
    path = ROOT.joinpath(*module.split("."))
    file = path.with_suffix(".py")
    return [file] if file.exists() else sorted(path.glob("*.py"))


def first_values(overrides: list[str]) -> list[str]:
    """Overrides with the first value of each that is swept."""
    parsed = OverridesParser.create().parse_overrides(overrides)
    return [
        f"{o.key_or_group}={next(iter(o.sweep_string_iterator()))}"
        if o.is_sweep_override()
        else text
        for o, text in zip(parsed, overrides, strict=True)
    ]


def check_run(flags: dict[str, str], overrides: list[str]) -> None:
    """Composes a run's configuration."""
    if "--config-dir" in flags:  # its files are the reader's own
        overrides = [o for o in overrides if not o.startswith("model=")]
    own = [o.removeprefix("verify.") for o in overrides if o.startswith("verify.")]
    made(VerifyConfig, OmegaConf.from_dotlist(own))
    load(flags["--config-name"], *(o for o in overrides if not o.startswith(("verify.", "hydra"))))


def check_tool(module: str, overrides: list[str]) -> None:
    """Merges a tool's settings into its Config."""
    is_folder = ROOT.joinpath(*module.split("."), "__main__.py").exists()
    of = importlib.import_module(f"shardwright.{module}{'.__main__' if is_folder else ''}")
    # a prompt is read as it is
    given = [o for o in overrides if not o.startswith(("hydra", "prompt="))]
    try:
        made(of.Settings, OmegaConf.from_dotlist(given))
    except ValueError as error:
        if not str(error).startswith("no value for"):  # which the configuration has
            raise


def check_command(words: list[str]) -> None:
    """Raises unless the command names a program that exists and settings that it has."""
    module, *arguments = [word.replace("$id", "0") for word in words]
    if module in NOT_OURS:
        assert all((ROOT / word).exists() for word in arguments if word.startswith("tests/"))
        return
    files = source_files(module)
    assert files, f"there is no {module}"
    flags = dict(word.partition("=")[::2] for word in arguments if word.startswith("--"))
    overrides = [word for word in arguments if not word.startswith("-")]
    if "--multirun" in flags:
        overrides = first_values(overrides)
    of_readers = flags.get("--config-name") in ("name", "my_run")
    if arguments in ([], ["--help"]) or any("…" in word for word in arguments) or of_readers:
        return
    config = flags.get("--config-name", module.rpartition(".")[2])
    if module in ("train", "tools.verify"):
        assert "--config-name" in flags, f"{module} needs a configuration"
        check_run(flags, overrides)
    elif (ROOT / f"tools/configs/{config}.yaml").exists():
        check_tool(module, overrides)
    else:  # argparse
        text = "".join(path.read_text() for path in files)
        assert all(flag.removeprefix("--") in text for flag in flags), f"{module} lacks {flags}"


@pytest.mark.long
def test_commands_compose(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    pages = {tuple(words): page for page in PAGES for words in commands(page.read_text())}
    for words, page in pages.items():
        try:
            check_command([*words])
        except Exception as error:
            raise AssertionError(f"{page}: python -m {shlex.join(words)}: {error}") from error


@functools.cache
def known_settings() -> set[str]:
    """Names of the settings that docs/settings.md has, and of the other models."""
    own = {field.name for c in (mla, delta, gpt2) for field in dataclasses.fields(c.ModelConfig)}
    page = (ROOT / "docs/settings.md").read_text()
    return {*re.findall(r'<a id="(.*?)">', page), *(f"model.{name}" for name in own)}


def is_setting(name: str) -> bool:
    """`*` matches any part of a name. Sections of tools alone are not known."""
    sections = {setting.partition(".")[0] for setting in known_settings()}
    return name.partition(".")[0] not in sections or any(
        fnmatch.fnmatch(setting, name) or fnmatch.fnmatch(name, setting)
        for setting in known_settings()
    )


def unknown_settings(text: str) -> list[str]:
    words = [word for span in spans(text) for word in span.split() if not word.endswith(".json")]
    matches = [re.fullmatch(r"'?(\w+\.[a-z_*][\w.*<>]*?)(=.*|:)?", word) for word in words]
    return [m[0] for m in matches if m and not is_setting(m[1])]


@functools.cache
def entries() -> set[str]:
    """What the repository has at its top."""
    rooms = {path.parent.name for path in ROOT.glob("*/*.py")}
    return rooms | {"configs", "constraints", "docs", "launch", "tests"}


def missing_files(page: Path, text: str) -> list[str]:
    found, roots = [], (ROOT, ROOT / "shardwright/tools/init/template")
    for word in (word for span in spans(text) for word in span.split()):
        if not re.fullmatch(r"[\w.\-/*]+", word) or word in YOURS:
            continue
        if "/" in word:
            is_ours = word.split("/")[0] in entries()
            exists = is_ours and any([*root.glob(word), *root.glob(f"{word}.py")] for root in roots)
        else:
            is_ours = word.endswith((".py", ".md"))
            exists = any((at / word).exists() for at in (*roots, page.parent))
        if is_ours and not exists:
            found.append(word)
    return found


def test_what_pages_name_exists():
    for page in PAGES:
        text = page.read_text()
        assert broken_links(page, text) == [], page
        assert missing_files(page, text) == [], page
        assert page.name == "CHANGELOG.md" or unknown_settings(text) == [], page
        assert re.findall(r"\w+\.py:\d+", prose(text)) == [], f"{page}: a line number"


@pytest.mark.parametrize(
    ("page", "program"), [("settings", settings_page), ("ops", ops_page), ("api", api_page)]
)
def test_a_page_made_from_docstrings_is_that_of_its_program(page, program):
    assert (ROOT / f"docs/{page}.md").read_text() == program.page(), (
        f"python -m {program.__name__} > docs/{page}.md"
    )


def test_the_counts_are_those_of_the_programs_and_of_the_gauntlet():
    right, wrong = len(RIGHT), len(WRONG)
    caught = collections.Counter(catcher(bug) for bug in BUGS if bug.changes)
    assert set(caught) == {"type", "exact", "test"}
    rows = {
        f"{wrong} small programs with one planted error": f"{wrong} rejected",
        f"{right} correct programs": f"{right} accepted",
        f"{caught.total()} silent bugs that were reported in other frameworks "
        "([docs/gauntlet.md](docs/gauntlet.md))": (
            f"{caught['type']} rejected by types, {caught['exact']} by the check before the "
            f"first step, {caught['test']} only by tests of this repository"
        ),
    }
    table = re.findall(
        r"^\| (\d+ .*?) \| (.*?) \|$", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    assert dict(table) == rows


def traced(source: str) -> None:
    """Traces what `make demo` traces on a CPU that multiplies in bf16, with a changed train.py."""
    c = load("local_test_synthetic", "training.compute_dtype=bf16")
    sizes = (c.mesh.r, 8 // c.mesh.r // c.mesh.t, c.mesh.t)
    mesh = AbstractMesh(sizes, ("r", "d", "t"), axis_types=(AxisType.Explicit,) * 3)
    with module_of(source) as train, use_abstract_mesh(mesh):
        c.model.module = train.__name__
        step = trace_step(c, load_model(c.model), spec=train.SPEC)
        describe_attention(step)
        assert step.traced


@pytest.mark.long
def test_the_first_change_and_its_refusal():
    found = blocks((ROOT / "README.md").read_text())
    good, wrong = (block for language, block in found if language == "diff")
    (message,) = (block for language, block in found if block.startswith("train.py:"))
    source = SOURCE
    for diff in (good, wrong):
        before, after = (
            "".join(f"{x[1:]}\n" for x in diff.splitlines() if x[0] in (sign, " ")) for sign in "-+"
        )
        assert source.count(before) == 1
        source = source.replace(before, after)
        if diff == good:
            traced(source)
    with pytest.raises(ShardError) as refused:
        traced(source)
    shown = str(refused.value).removeprefix(f"{refused.value.place}: ")
    # after the place, whose line number moves with each change
    assert shown.split() == message.split()[1:]


@functools.cache
def shown(command: str) -> str:
    """What `python -m tools.plan` prints for these arguments, without what would help."""
    name, *overrides = shlex.split(command)
    c = load(name, *overrides)
    return as_text(planned_change(c, mesh_sizes(c, None), chip_of(c.hardware.chip), {}), name)


@pytest.mark.long
@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="other jax traces a few operations more, by a percent"
)
@pytest.mark.parametrize("page", ["README.md", "docs/plan.md", "docs/performance.md"])
def test_what_a_page_quotes_of_a_plan_is_what_the_program_shows(page, monkeypatch):
    """Each block after a command of tools.plan for one mesh has lines of its output, in their order,
    up to the lines of train.py that they name.
    """

    def lines_of(text: str) -> list[str]:
        lines = (re.sub(r"\s*\btrain\.py:\d+.*", "", line) for line in text.splitlines())
        return [" ".join(line.split()) for line in lines]

    monkeypatch.setenv("COLUMNS", "80")
    quoted = re.findall(
        r"```\npython -m tools\.plan --config-name=(\w[^\n]*)\n```\n\n```\n(.*?)```",
        (ROOT / page).read_text(),
        re.DOTALL,
    )
    assert quoted
    for command, block in quoted:
        if "plan.compare" in command:
            continue
        rest = iter(lines_of(shown(command)))
        block = block.partition("What would help")[0]
        assert [line for line in lines_of(block) if line and line not in rest] == []
