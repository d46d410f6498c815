"""The type checker: it finds planted faults, and none in a user's own model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.own_model import MINE

pytest.importorskip("basedpyright")

ROOT = Path(__file__).parents[2]
FAULTS = """
import train
from shardlib.shardtypes import f32, typed
from shardwright.modeling.weights import gain, matrix


def of_dims(x: f32["M/d F"]):
    return x * M


def names(w: train.TransformerLayer, x: f32["B M"]):
    return train.rms_norm(x, w.w_qq, "epsilon")


train.TransformerLayer(w_q=1)
typed(3)
"""


def problems(directory: Path, *files: Path) -> list[tuple[str, int, str]]:
    """File, line and rule of each error and warning in files, by pyright's settings `basic` and no
    others.
    """
    settings = {
        "typeCheckingMode": "basic",
        "include": [str(file) for file in files],
        "extraPaths": [str(ROOT)],
    }
    (directory / "pyrightconfig.json").write_text(json.dumps(settings))
    command = "basedpyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(directory)
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] == len(files), done.stderr
    told = [
        (Path(x["file"]).name, x["range"]["start"]["line"], x["rule"])
        for x in found["generalDiagnostics"]
    ]
    return [x for x in told if x[2] != "reportInvalidTypeVarUse"]


def test_faults_are_found_and_a_users_model_has_no_false_errors(tmp_path):
    """The faults: a dim's name as a value, an attribute that a class lacks, arguments of another
    type, missing ones.

    The other file is the model that docs/models.md begins with; `make lint` checks ours.
    """
    files = {
        tmp_path / "mine.py": MINE,
        tmp_path / "faults.py": FAULTS,
    }
    for file, text in files.items():
        file.write_text(text)
    lines = FAULTS.splitlines()
    found = [(file, lines[at].strip(), rule) for file, at, rule in problems(tmp_path, *files)]
    call = 'return train.rms_norm(x, w.w_qq, "epsilon")'
    expected = [
        ("return x * M", "reportUndefinedVariable"),
        (call, "reportAttributeAccessIssue"),
        (call, "reportArgumentType"),
        ("train.TransformerLayer(w_q=1)", "reportCallIssue"),
        ("typed(3)", "reportArgumentType"),
    ]
    assert sorted(found) == sorted(("faults.py", *fault) for fault in expected)
