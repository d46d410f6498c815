"""tools.check: its verdict, its exit status, and what it says of an edit against a commit."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, cast

import pytest

from shardwright.tools import check as tool
from shardwright.tools.init.__main__ import TEMPLATE

ROOT = Path(__file__).parents[2]
ALONE = "\n    def layer(self, x, w, tokens, attention):\n        return x + self.mlp(x, w)\n"
"""Leaves attention out of a model, whose trace takes half of the time then."""
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
    model.write_text(model.read_text() + ALONE)
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
    assert f"  program  changed: {difference['lines'][0]}" in tool.as_text(found).splitlines()
    assert len(json.dumps(found)) < 1500  # an agent reads it after each edit
    assert [each["name"] for each in found["checks"]] == ["types", "mesh", "causality", "compiled"]


@pytest.mark.long
def test_a_module_that_python_cannot_import_is_rejected_at_its_line(project):
    file = project / "my_model.py"
    file.write_text(file.read_text().replace(NORM, f"{NORM})", 1))
    status, said = check(project, "check.against=null", "check.output=json")
    found = found_in(said)
    place = f"{file.name}:{line_of(file, NORM)}"
    assert (status, found["verdict"], found["place"]) == (1, "rejected", place)
    assert found["problem"].startswith("SyntaxError: ")


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


# ---- the difference of two results ---------------------------------------------------------------


def result(lines: dict[int, str], costs: dict[str, float]) -> dict:
    """A result of a file a.py with these lines, and with seconds by line."""
    return {
        "verdict": "accepted",
        "program": {
            "hash": str(lines),
            "lines": [("a.py", line, text) for line, text in lines.items()],
        },
        "costs": {"seconds": sum(costs.values()), "by_line": {"seconds": costs, "bytes": {}}},
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
