"""The session of docs/agents.md: each edit has the verdict and the check that the page shows, at
its line.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.edits import EDITS, copied
from tests.support.recipes import ROOT

SESSION = sorted((edit for edit in EDITS.values() if edit.session), key=lambda edit: edit.session)
PAGE = (ROOT / "docs/agents.md").read_text()
COMMAND = ["-m", "tools.check", "--config-name=local_test_synthetic", "check.output=json"]
COMMAND.append("check.against=null")
ROWS = re.findall(r"^\| (.*?) \| (.*) \|$", PAGE.rpartition("|---|---|\n")[2], re.M)
"""Each edit of the page's table, and what the page says of it."""


@pytest.mark.quick
def test_the_page_has_each_edit_with_its_verdict():
    expected = [
        (edit.id, f"**rejected** by `{edit.check}`" if edit.check else "accepted")
        for edit in SESSION
    ]
    expected += [("the same, with its remedy", "accepted")]
    assert [(name, said.partition(":")[0]) for name, said in ROWS] == expected
    assert len(ROWS) > 10


def check(directory: Path) -> tuple[int, dict]:
    """Exit status of tools.check in a checkout, and what it says."""
    environment = os.environ | {"PYTHONPATH": str(directory)}
    options = {"cwd": directory, "env": environment, "timeout": 300}
    done = subprocess.run([sys.executable, *COMMAND], capture_output=True, text=True, **options)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.returncode, json.loads(done.stdout.strip().rpartition("\n")[2])


@pytest.mark.long
def test_a_wrong_edit_is_rejected_at_its_line_until_its_remedy(tmp_path):
    """Others: tests/edits."""
    edit = EDITS["QK-norm: one norm for all heads of a query"]
    ((file, text),) = edit.files.items()
    checkout = copied(tmp_path / "checkout")
    (checkout / file).write_text(text)
    status, found = check(checkout)
    assert (status, found["verdict"], found["checks"][-1]["name"]) == (1, "rejected", edit.check)
    place, _, number = found["place"].partition(":")
    assert int(number) in edit.lines[place], found["place"]
    assert f'"problem": {json.dumps(found["problem"])},' in PAGE
    assert f'"remedy": {json.dumps(found["remedy"])}\n' in PAGE
    (checkout / file).write_text(edit.fix.apply(text))
    status, found = check(checkout)
    assert (status, found["verdict"]) == (0, "accepted")
