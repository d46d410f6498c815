"""A session of an agent that edits the model: what tools.check says of each edit, and after how
long.

The edits are made in a copy of the checkout, a repository of its own.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support.edits import EDITS, Edit, copied
from tests.support.recipes import ROOT

SESSION = sorted((edit for edit in EDITS.values() if edit.session), key=lambda edit: edit.session)
PAGE = ROOT / "docs/agents.md"
COMMAND = ["-m", "tools.check", "--config-name=local_test_synthetic", "check.output=json"]


def checkout(directory: Path) -> Path:
    """A repository in `directory` with the sources of this checkout, in one commit."""
    copy = copied(directory / "checkout")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "begin"]):
        subprocess.run([*git, *words], cwd=copy, check=True)
    return copy


@contextlib.contextmanager
def edited(directory: Path, edit: Edit, with_fix: bool = False) -> Iterator[None]:
    """Context in which a checkout has an edit, or also the change that follows its remedy."""
    ((file, text),) = edit.files.items()
    if with_fix:
        text = edit.fix.apply(text)
    path = directory / file
    before = path.read_text()
    path.write_text(text)
    try:
        yield
    finally:
        path.write_text(before)


def check(directory: Path, *words: str, **environment: str) -> tuple[int, dict]:
    """Exit status of tools.check in a checkout, and what it says."""
    environment = os.environ | {"PYTHONPATH": str(directory)} | environment
    command = [sys.executable, *COMMAND, *words]
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.returncode, json.loads(done.stdout.strip().rpartition("\n")[2])


def verdict(found: dict) -> str:
    """What the page says of a result."""
    if found["verdict"] == "rejected":
        return f"**rejected** by `{found['checks'][-1]['name']}`"
    than, of = found["difference"], found["difference"]["bytes"]
    if than["same_program"]:
        return "accepted: no change to the program"
    lines = len(than["lines"])
    parts = [f"{lines} line{'s' * (lines > 1)} changed"] if lines else []
    parts += [f"memory {of['now'] / of['before'] - 1:+.1%}"] if of["now"] != of["before"] else []
    parts += [f"{than['parameters']:+,} parameters"] if than["parameters"] else []
    return "accepted: " + ", ".join(parts or ["changed"])


RECORDED = re.compile(r"```json\n.*?```|^Recorded on .*?\n(?=\n[^|\n])", re.DOTALL | re.MULTILINE)
"""The recorded parts of the page: a block of JSON, and the table with the line before it."""
