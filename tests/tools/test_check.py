"""tools.check: its verdict, its exit status, and what it says of an edit against a commit."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardlib.findings import NOT_DECIDED, WRONG
from shardlib.parsing import ShardError
from shardwright.tools import check as tool
from shardwright.tools.init.__main__ import TEMPLATE

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
NORM = "nx = rms_norm(x, mlp_norm, self.config.norm_epsilon)"
EDITS = {
    "an activation": ("jax.nn.relu(up) ** 2", "jax.nn.silu(up)"),
    "a parenthesis too many": (NORM, f"{NORM})"),
}


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A project as `shardwright init` makes it, committed."""
    directory = tmp_path_factory.mktemp("project")
    for path in TEMPLATE.rglob("*.*"):
        if path.suffix in (".py", ".yaml"):
            target = directory / path.relative_to(TEMPLATE)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(path.read_text())
    subprocess.run(["git", "init", "-q"], cwd=directory, check=True)
    return commit(directory)


def commit(directory: Path) -> Path:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["add", "."], ["commit", "-qm", "begin"]):
        subprocess.run([*git, *words], cwd=directory, check=True)
    return directory


def check(project: Path, *words: str, path: tuple[Path, ...] = (ROOT,)) -> tuple[int, str]:
    command = [sys.executable, "-m", "shardwright.tools.check", "--config-name=my_run", *words]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stdout + done.stderr


def edited(project: Path, edit: str, *words: str) -> tuple[int, dict]:
    """The result on an edit of the project's model."""
    model, (old, new) = project / "my_model.py", EDITS[edit]
    before = model.read_text()
    assert before.count(old) == 1
    try:
        model.write_text(before.replace(old, new))
        status, text = check(project, "check.output=json", *words)
        return status, json.loads(next(line for line in text.splitlines() if line.startswith("{")))
    finally:
        model.write_text(before)


def test_an_activation_is_a_change_of_its_line(project):
    status, found = edited(project, "an activation")
    line = (project / "my_model.py").read_text().partition("jax.nn.relu")[0].count("\n") + 1
    assert (status, found["difference"]["same_program"], found["difference"]["lines"]) == (
        0,
        False,
        [f"my_model.py:{line}"],
    )
    assert found["difference"]["parameters"] == 0
    assert len(json.dumps(found)) < 1500  # an agent reads it after each edit
    assert [each["name"] for each in found["checks"]] == ["types", "mesh", "causality", "compiled"]


def test_a_module_that_python_cannot_import_is_rejected_at_its_line(project):
    status, found = edited(project, "a parenthesis too many")
    line = (project / "my_model.py").read_text().partition(NORM)[0].count("\n") + 1
    assert (status, found["verdict"], found["place"]) == (1, "rejected", f"my_model.py:{line}")
    assert found["problem"].startswith("SyntaxError: ")


def test_a_fork_that_python_cannot_import_is_rejected_at_its_line(project, tmp_path):
    fork = Path(shutil.copytree(project, tmp_path / "fork")) / "train.py"
    fork.write_text(
        (ROOT / "train.py").read_text().replace("import jax\n", "import jax\nimport nowhere\n", 1)
    )
    status, text = check(fork.parent, "check.against=null", "check.output=json")
    found = json.loads(next(line for line in text.splitlines() if line.startswith("{")))
    line = fork.read_text().partition("import nowhere")[0].count("\n") + 1
    assert (status, found["verdict"], found["place"]) == (1, "rejected", f"train.py:{line}")


FINDER = """
import importlib.util, sys

class Finder:
    def find_spec(name, *_):
        return importlib.util.spec_from_file_location(name, FILE) if name == "my_model" else None

sys.meta_path.insert(0, Finder)
"""


@pytest.mark.parametrize("by", ["a folder", "a link", "a finder"])
def test_a_model_in_src_is_that_of_the_commit(project, tmp_path, by):
    """An editable install finds it by a folder in a .pth file, or by a finder.

    A folder has the name of the ref.
    """
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    folders = {
        "a folder": tmp_path / "mine/src",
        "a link": tmp_path / "link/src",
        "a finder": tmp_path,
    }
    mine = Path(shutil.copytree(project, tmp_path / "mine"))
    (mine / "src").mkdir()
    (mine / "HEAD").mkdir()
    model = (mine / "my_model.py").rename(mine / "src/my_model.py")
    commit(mine)
    model.write_text(model.read_text().replace(*EDITS["an activation"]))
    (tmp_path / "sitecustomize.py").write_text(f"FILE = {str(model)!r}\n{FINDER}")
    _, text = check(mine, "check.output=json", path=(ROOT, folders[by]))
    found = json.loads(text.strip().rpartition("\n")[2])
    if by != "a finder":
        line = model.read_text().partition("jax.nn.silu")[0].count("\n") + 1
        assert (found["difference"]["same_program"], found["difference"]["lines"]) == (
            False,
            [f"src/my_model.py:{line}"],
        )
    else:
        assert (
            f"Python imports {model} in place of the same file of that source" in found["unknown"]
        )


@pytest.mark.parametrize("context", [NOT_DECIDED, WRONG])
def test_what_may_be_right_is_not_certainly_wrong(context):
    error = ShardError("my_model.py:7: cumsum: reaches another block", "sum", context, place="")
    assert tool.rejection(error)["certain"] == (context == WRONG)


def test_the_compiled_step_is_as_written(project):
    """For this host's CPU. The compilers of other chips are not installed, or do not exist."""
    words = "check.compile=true", "hardware.strict=true", "check.against=null", "check.output=json"
    status, text = check(project, *words)
    found = json.loads(text.strip().rpartition("\n")[2])["checks"][-1]
    assert (status, found["name"], found["ok"], found["lines"]) == (0, "compiled", True, [])
    assert " collectives as written, " in found["text"]
    status, text = check(project, *words[:3], "hardware.chip=mi300x")
    assert status == 0
    assert (
        "compiled   –        not for mi300x here: ValueError: programs can be compiled ahead for "
        "h100," in text
    )


def test_what_it_cannot_check(project):
    assert check(project, "model.layrs=3")[0] == 2
    status, text = check(project, "check.against=nowhere")
    assert status == 2
    assert "check.against is 'nowhere', neither a directory nor a commit" in text


def test_the_screen_has_80_columns(project):
    status, text = check(project)
    assert status == 0
    assert "  program  no change" in text
    assert max(map(len, text.splitlines())) <= 80
