"""The session of docs/agents.md: each edit has the verdict and the check that the page shows, at
its line.
"""

import json
import re
from pathlib import Path

import pytest

from tests.support import agent_edits

EDITS = {edit.id: edit for edit in agent_edits.SESSION}


def rows() -> list[tuple[str, str]]:
    """Each edit of the page's table, and what the page says of it."""
    *_, recorded = agent_edits.RECORDED.findall(agent_edits.PAGE.read_text())
    table = re.findall(r"^\| (.*?) \| (.*) \|$", recorded.partition("|---|---|\n")[2], re.M)
    assert len(table) > 10
    return table


def without_percents(text: str) -> str:
    """The text without the digits of percentages, in which versions of jax differ."""
    return re.sub(r"[\d.]+%", "%", text)


@pytest.mark.quick
def test_the_page_has_each_edit_with_its_verdict():
    rejected = {
        name: f"**rejected** by `{edit.check}`" for name, edit in EDITS.items() if edit.check
    }
    expected = [
        *((name, rejected.get(name, "accepted")) for name in EDITS),
        ("the same, with its remedy", "accepted"),
    ]
    assert [(name, said.partition(":")[0]) for name, said in rows()] == expected


@pytest.fixture
def checkout(tmp_path) -> Path:
    return agent_edits.checkout(tmp_path)


WRONG = "QK-norm: one norm for all heads of a query"


@pytest.mark.long
def test_a_wrong_edit_is_rejected_at_its_line_until_its_remedy_which_is_compared(checkout):
    """Others: tests/edits."""
    edit = EDITS[WRONG]
    with agent_edits.edited(checkout, edit):
        status, found = agent_edits.check(checkout)
    assert (status, found["verdict"], found["checks"][-1]["name"]) == (1, "rejected", edit.check)
    file, _, number = found["place"].partition(":")
    assert int(number) in edit.lines[file], found["place"]
    assert f'"problem": {json.dumps(found["problem"])},' in agent_edits.PAGE.read_text()
    assert f'"remedy": {json.dumps(found["remedy"])}\n' in agent_edits.PAGE.read_text()
    with agent_edits.edited(checkout, edit, with_fix=True):
        status, found = agent_edits.check(checkout)
    assert (status, found["verdict"]) == (0, "accepted")
    said = dict(rows())["the same, with its remedy"]
    assert without_percents(agent_edits.verdict(found)) == without_percents(said)
    assert found["difference"]["same_program"] == edit.same
    assert found["difference"]["lines"]
