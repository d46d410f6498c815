"""tools.check: its verdict, its exit status, and what it says of an edit against a commit."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, cast

import pytest

from shardlib.findings import NOT_DECIDED, WRONG
from shardlib.parsing import ShardError
from shardwright.cluster.chips import chip_of
from shardwright.cluster.devices import device_like
from shardwright.program.step import open_steps
from shardwright.tools import check as tool
from shardwright.tools.init.__main__ import TEMPLATE
from tests.support import tiny

ROOT = Path(__file__).parents[2]
NORM = "nx = rms_norm(x, mlp_norm, self.config.norm_epsilon)"


# ---- the program ---------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path) -> Path:
    """A project as `shardwright init` makes it."""
    directory = tmp_path / "project"
    for path in TEMPLATE.rglob("*.*"):
        if path.suffix in (".py", ".yaml"):
            target = directory / path.relative_to(TEMPLATE)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(path.read_text())
    return directory


def check(project: Path, *words: str, path: tuple[Path, ...] = (ROOT,)) -> tuple[int, str]:
    command = [sys.executable, "-m", "shardwright.tools.check", "--config-name=my_run", *words]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    options = {"cwd": project, "env": environment, "text": True, "timeout": 300}
    done = subprocess.run(command, capture_output=True, **options)
    return done.returncode, done.stdout + done.stderr


def found_in(text: str) -> dict:
    return json.loads(next(line for line in text.splitlines() if line.startswith("{")))


def line_of(file: Path, text: str) -> int:
    return file.read_text().partition(text)[0].count("\n") + 1


@pytest.mark.long
def test_an_activation_in_a_linked_folder_is_a_change_of_its_line(project, tmp_path):
    """A model in src that Python finds through a link, as by an editable install; a folder has the
    name of the ref.
    """
    (project / "src").mkdir()
    (project / "HEAD").mkdir()
    model = (project / "my_model.py").rename(project / "src/my_model.py")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "begin"]):
        subprocess.run([*git, *words], cwd=project, check=True)
    text = model.read_text()
    assert text.count("jax.nn.relu(up) ** 2") == 1
    model.write_text(text.replace("jax.nn.relu(up) ** 2", "jax.nn.silu(up)"))
    (tmp_path / "link").symlink_to(project)
    status, text = check(project, "check.output=json", path=(ROOT, tmp_path / "link/src"))
    found = found_in(text)
    assert (status, found["verdict"]) == (0, "accepted"), text
    difference = found["difference"]
    assert (difference["same_program"], difference["same_function"]) == (False, False)
    assert difference["lines"] == [f"src/my_model.py:{line_of(model, 'jax.nn.silu')}"]
    assert difference["parameters"] == 0
    assert len(json.dumps(found)) < 1500  # an agent reads it after each edit
    assert [each["name"] for each in found["checks"]] == ["types", "mesh", "causality", "compiled"]


@pytest.mark.long
@pytest.mark.parametrize("edited", ["model", "fork"])
def test_a_module_that_python_cannot_import_is_rejected_at_its_line(project, edited):
    if edited == "model":
        file, text, wrong = project / "my_model.py", NORM, f"{NORM})"
        source = file.read_text()
    else:
        file, text, wrong = project / "train.py", "import jax\n", "import nowhere\nimport jax\n"
        source = (ROOT / "train.py").read_text()
    file.write_text(source.replace(text, wrong, 1))
    status, said = check(project, "check.against=null", "check.output=json")
    found = found_in(said)
    place = f"{file.name}:{line_of(file, wrong.strip())}"
    assert (status, found["verdict"], found["place"]) == (1, "rejected", place)
    kind = "SyntaxError: " if edited == "model" else "ModuleNotFoundError: "
    assert found["problem"].startswith(kind)


@pytest.mark.long
def test_what_it_cannot_compare_with(project):
    status, text = check(project, "check.against=nowhere")
    assert status == 2
    assert "check.against is 'nowhere', neither a directory nor a commit" in text


# ---- parts ---------------------------------------------------------------------------------------


def test_a_file_that_python_finds_here_and_not_in_the_other_source_is_named(tmp_path, monkeypatch):
    for root in ("here", "there"):
        (tmp_path / root).mkdir()
        (tmp_path / root / "mine.py").write_text("")
    module = types.SimpleNamespace(__file__=f"{tmp_path}/here/mine.py")
    monkeypatch.setitem(sys.modules, "mine", cast(Any, module))
    tool.check_origin()
    monkeypatch.setenv(tool.COMPARED, f"{tmp_path}/here{os.pathsep}{tmp_path}/there")
    message = "Python imports .*/here/mine.py in place of the same file of that source"
    with pytest.raises(ValueError, match=message):
        tool.check_origin()


@pytest.mark.parametrize("context", [NOT_DECIDED, WRONG])
def test_what_may_be_right_is_not_certainly_wrong(context):
    error = ShardError("my_model.py:7: cumsum: reaches another block", "sum", context, place="")
    assert tool.rejection(error)["certain"] == (context == WRONG)


@pytest.mark.long
def test_the_compiled_step_is_as_written():
    """For this host's CPU. The compilers of other chips are not installed, or do not exist."""
    c = tiny.config(tiny.model(layers=1))
    c.hardware.strict, c.hardware.chip = True, "cpu"
    step, *_ = open_steps(c, {"d": 4, "t": 2}, device_like(chip_of("cpu")))
    found = tool.compiled(step)
    c.hardware.chip = "mi300x"
    other = tool.compiled(step)
    assert (found["ok"], found["lines"]) == (True, [])
    assert " collectives as written, " in found["text"]
    assert other["ok"] is None
    assert other["text"].startswith("not for mi300x here: ValueError: programs can be compiled ")


# ---- the difference of two results ---------------------------------------------------------------


def result(lines: dict[int, str], costs: dict[str, float], root="") -> dict:
    """A result of a file a.py with these lines, and with seconds by line."""
    by_line = {"seconds": {f"{root}{line}": x for line, x in costs.items()}, "bytes": {}}
    return {
        "verdict": "accepted",
        "program": {
            "hash": str(lines),
            "lines": [(f"{root}a.py", line, text) for line, text in lines.items()],
        },
        "costs": {"seconds": sum(costs.values()), "by_line": by_line},
        "parameters": 1,
        "results": {},
    }


def test_a_line_that_moves_keeps_its_costs_and_one_that_leaves_is_marked():
    before = result({1: "x = 1", 2: "y = x", 5: "z = w"}, {"a.py:2": 1.0, "a.py:5 w_gate": 2.0})
    moved = result({3: "x = 1", 4: "y = x", 7: "z = w"}, {"a.py:4": 1.0, "a.py:7 w_gate": 2.0})
    of = tool.difference(moved, before)
    assert (of["lines"], of["seconds"]["of_line"]) == ([], 0)
    assert of["same_function"] is None, "two steps without results are taken for the same function"
    left = result({1: "x = 1", 4: "z = w"}, {"a.py:4 w_gate": 2.0})
    expected = {"before": 3.0, "now": 2.0, "line": "a.py:2 (before)", "of_line": -1.0}
    assert tool.difference(left, before)["seconds"] == expected


class Ended:
    """A process that has printed a result."""

    def __init__(self, found: dict):
        self.found = found

    def communicate(self) -> tuple[str, str]:
        return f"a line\n{json.dumps(self.found)}\n", ""


@pytest.mark.parametrize("there", ["/a/copy", "/z/größer"])
def test_only_edited_lines_differ_wherever_the_source_lies(there):
    """A module beside the working directory is shown by its whole path; modules between both roots
    by theirs.
    """

    def found(root: str, text: str) -> dict:
        lines = {i: f"x = {i}" for i in range(9)} | {9: text}
        made = result(lines, {f"a.py:{i}": 1.0 for i in range(9)}, f"{root}/src/")
        made["program"]["lines"] += [("/k/library.py", i, f"y = {i}") for i in range(9)]
        made["program"]["lines"].sort()
        return made

    process = cast(Any, Ended(found(there, "z = 2")))
    of: Any = tool.compared(found("/m/mine", "z = 1"), process, ("/m/mine", there))["difference"]
    assert of["lines"] == ["/m/mine/src/a.py:9"]
    assert of["seconds"]["of_line"] == 0


SCREEN = """\
types      ok       fine  (0.2 s)
causality  –        not known: it is long  (1.5 s)
  one more line
plan       ok       3.00 s a step, 3.00 GiB of 4.00 GiB, 7 parameters
against HEAD (1234567)
  program  changed: a.py:3
  function differs: loss, weights, …
  time     2.00 s → 3.00 s   +50.0%   a.py:3 +1.00 s
  memory   1.00 GiB → 3.00 GiB   +200.0%   a.py:3 +2.00 GiB
  params   -2"""


def test_the_screen():
    checks = [{"name": "types", "ok": True, "text": "fine", "seconds": 0.21}]
    long = {"text": "not known: it is long", "lines": ["one more line"], "seconds": 1.5}
    checks.append({"name": "causality", "ok": None} | long)
    costs = {"seconds": 3.0, "bytes": 3 * 2**30, "memory_bytes": 2**32, "fits": True}
    difference = {
        "same_program": False,
        "lines": ["a.py:3"],
        "same_function": False,
        "results": ["loss", "weights", "metrics"],
        "seconds": {"before": 2.0, "now": 3.0, "line": "a.py:3", "of_line": 1.0},
        "bytes": {"before": 2**30, "now": 3 * 2**30, "line": "a.py:3", "of_line": 2 * 2**30},
        "parameters": -2,
    }
    found = {"checks": checks, "costs": costs, "parameters": 7, "against": "HEAD (1234567)"}
    assert tool.as_text(found | {"difference": difference}) == SCREEN
    last = tool.as_text(found | {"difference": {"same_program": True}}).splitlines()[-1]
    assert last == "  program  no change"
    assert tool.as_text(found | {"unknown": "no"}).splitlines()[-1] == "  –        no"
