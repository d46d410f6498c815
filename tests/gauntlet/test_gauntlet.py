"""Each bug of bugs.toml, made in a copy of the source: what catches it.

The first gate is tracing, on a mesh without devices. The second is tools.verify, which must name the tensor. What
neither can tell, because it is as wrong on one device, a test of the suite must catch. docs/gauntlet.md is the table.
"""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType

from shardwright.modeling.model import load_model
from shardwright.run.step import trace_step
from shardwright.tools.verify.__main__ import small
from tests.support.gauntlet_page import page
from tests.support.proofs import found_soon
from tests.support.recipes import train_with
from tests.support.shipped import load
from tests.support.verifying import verify

ROOT = Path(__file__).parents[2]
DATA = tomllib.loads(Path(__file__).with_name("bugs.toml").read_text())
CONFIGS, BUGS = DATA["configs"], {bug["number"]: bug for bug in DATA["bug"]}
IN_PROCESS = {
    "train.py",
    "shardwright/models/gpt2.py",
    "shardwright/models/moe.py",
    "shardwright/optimizers/muon.py",
    "shardwright/modeling/context.py",
    "shardwright/modeling/forward.py",
    "shardwright/run/stages.py",
}
"""Files of which train.py can be given an edited copy without another process."""
DEVICES = 8
SHORT = 4


def config_of(bug: dict) -> dict:
    return CONFIGS[bug.get("config", "llama")]


def edited(bug: dict) -> dict[str, str]:
    """The files that the bug is in, with the bug, by their paths."""
    texts: dict[str, str] = {}
    for edit in bug["edit"]:
        file = edit.get("file", "train.py")
        text = texts.setdefault(file, (ROOT / file).read_text())
        assert text.count(edit["old"]) == 1, (
            f"{bug['number']}: {file} has this {text.count(edit['old'])} times: {edit['old']}"
        )
        texts[file] = text.replace(edit["old"], edit["new"])
    return texts


# ---- tracing ------------------------------------------------------------------------------------------------------


def refusal(files: dict[str, str], config: dict, by: str | None) -> str | None:
    """The message with which tracing refuses the steps of the edited `files`, or None. `by` is what it should have."""
    c = load(config["name"], *config["overrides"], f"mesh.p={2 if config['mesh'].count('x') == 3 else 1}")
    small(c, DEVICES)
    named = dict(re.findall(r"([b-wyz])(\d+)", config["mesh"]))
    sizes = [int(size) for size in named.values() or config["mesh"].split("x")]
    axes = tuple(named) or ("p", "r", "d", "t")[-len(sizes) :]
    mesh = AbstractMesh(tuple(sizes), axes, axis_types=(AxisType.Explicit,) * len(axes))
    with jax.sharding.use_abstract_mesh(mesh), train_with(files) as train:
        for file in files.keys() & {"shardwright/models/gpt2.py", "shardwright/models/moe.py"}:
            c.model.module = f"changed_{Path(file).stem}"
        if c.model.module == "train":
            c.model.module = train.__name__
        try:
            step = trace_step(c, load_model(c.model), mesh, spec=train.SPEC)
            return found_soon(step, lambda text: by is not None and by in text) or None
        except Exception as error:  # of any class: JAX's own ShardingTypeError is none that can be named
            return str(error)


def in_process(bug: dict) -> bool:
    return "edit" in bug and {edit.get("file", "train.py") for edit in bug["edit"]} <= IN_PROCESS


def traced() -> list:
    """The bugs that can be traced here. SHORT that are refused for different reasons have no marker."""
    seen, found = set(), []
    for number, bug in BUGS.items():
        if in_process(bug):
            refused = bug.get("caught") == "tracing"
            marker = pytest.mark.long(every_case=True) if refused else pytest.mark.slow
            new = refused and bug["by"] not in seen and len(seen) < SHORT
            found.append(pytest.param(number, marks=[] if new else [marker]))
            seen.update([bug["by"]] * refused)
    return found


@pytest.mark.parametrize("number", traced())
def test_tracing_refuses_what_it_is_said_to(number):
    bug = BUGS[number]
    by = bug["by"] if bug.get("caught") == "tracing" else None
    message = refusal(edited(bug), config_of(bug), by)
    if by is not None:
        assert message is not None, "tracing accepts it"
        assert by in message
    else:
        assert message is None, f"tracing refuses it now: say so in bugs.toml. {message}"


# ---- tools.verify -------------------------------------------------------------------------------------------------


def write(files: dict[str, str], directory: Path) -> None:
    """Writes the edited files, with the other files of the packages that they are in, and configs/ beside them."""
    (directory / "configs").symlink_to(ROOT / "configs")
    for file, text in files.items():
        package = Path(file).parts[0]
        if package != file and not (directory / package).exists():
            shutil.copytree(ROOT / package, directory / package, ignore=shutil.ignore_patterns("__pycache__"))
        (directory / file).write_text(text)


def verified(bug: dict, directory: Path, *overrides: str) -> subprocess.CompletedProcess:
    write(edited(bug), directory)
    config = config_of(bug)
    settings = ["training.compute_dtype=f32", f"verify.meshes=[{config['mesh']}]"]
    return verify(directory, *config["overrides"], *settings, *overrides, name=config["name"])


def caught_by(check: str) -> list[int]:
    """Numbers of the bugs that a check catches."""
    return [number for number, bug in BUGS.items() if bug.get("caught") == check]


LONG = (12, 34)
"""Bugs for which all of tools.verify is run in the long tests: a wrong gradient, and one under zigzag order."""


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=pytest.mark.long if n in LONG else pytest.mark.slow) for n in caught_by("verify")]
)
def test_verify_names_the_tensor(number, tmp_path):
    done = verified(BUGS[number], tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    line = next(line for line in done.stdout.splitlines() if "the first tensor that differs is" in line)
    assert BUGS[number]["by"] in line
    if config_of(BUGS[number])["mesh"].count("x") == 2:  # nothing within the schedule of stages is compared
        assert f"{BUGS[number]['edit'][0]['file']}:" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("number", [number for number in caught_by("tracing") if not in_process(BUGS[number])])
def test_tracing_refuses_edits_of_other_packages_too(number, tmp_path):
    done = verified(BUGS[number], tmp_path, "verify.only_types=true")
    assert done.returncode == 1, done.stdout + done.stderr
    assert BUGS[number]["by"] in done.stderr


# ---- tests --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("number", caught_by("test"))
def test_a_test_fails(number, tmp_path):
    """In a copy of the repository."""
    skipped = shutil.ignore_patterns("__pycache__", ".*", "runs", "*.egg-info")
    shutil.copytree(ROOT, tmp_path / "copy", ignore=skipped, symlinks=True)
    for file, text in edited(BUGS[number]).items():
        (tmp_path / "copy" / file).write_text(text)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", BUGS[number]["by"]]
    done = subprocess.run(command, cwd=tmp_path / "copy", capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed" in done.stdout


# ---- the data -----------------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_every_bug_of_the_survey_is_there():
    assert [bug["number"] for bug in DATA["bug"]] == list(range(1, len(BUGS) + 1))
    for number, bug in BUGS.items():
        assert bug["class"] in "abcde", number
        assert {"upstream", "bug"} <= bug.keys() <= {
            "number", "class", "upstream", "bug", "here", "config", "caught", "by", "edit", "why", "spmd",
        }, number  # fmt: skip
        assert ("why" in bug) is ("caught" not in bug), f"{number}: a reason if it is not caught, and only then"
        assert ("caught" in bug) is ("by" in bug), number
        assert bug.get("caught") in (None, "tracing", "verify", "test"), number


@pytest.mark.quick
def test_the_page_is_made_of_the_data():
    """Else run `python -m tests.support.gauntlet_page > docs/gauntlet.md`."""
    assert (ROOT / "docs/gauntlet.md").read_text() == page()


@pytest.mark.quick
def test_the_edits_and_the_tests_fit_the_source():
    for bug in BUGS.values():
        if "edit" in bug:
            assert all(text != (ROOT / file).read_text() for file, text in edited(bug).items())
        if bug.get("caught") == "test":
            file, _, name = bug["by"].partition("::")
            assert f"def {name}(" in (ROOT / file).read_text(), f"{bug['number']}: there is no {bug['by']}"


@pytest.mark.quick
def test_what_can_be_expressed_is():
    """Of classes a, b and c; the others wait for context parallelism, or have no cause."""
    assert sum("edit" in bug and bug["class"] in "abc" for bug in BUGS.values()) >= 78
