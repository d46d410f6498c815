"""The session of docs/agents.md: each edit has the verdict, the check and the line that the page shows."""

import re
from pathlib import Path

import pytest

from shardwright.tools.init.__main__ import TEMPLATE
from tests.support import agent_edits

EDITS = {edit["name"]: edit for edit in agent_edits.EDITS}


def rows() -> list[tuple[str, str]]:
    """Each edit of the page's table, and what the page says of it."""
    *_, recorded = agent_edits.RECORDED.findall(agent_edits.PAGE.read_text())
    table = re.findall(r"^\| *\d* *\| (.*?) \| (.*) \| [\d.]+ \| [\d.]+ \|$", recorded, re.M)
    assert len(table) > 10
    return table


@pytest.mark.quick
def test_the_page_has_each_edit_with_its_verdict():
    rejected = {name: f"**rejected** by `{edit['by']}` at " for name, edit in EDITS.items() if "by" in edit}
    expected = [*((name, rejected.get(name, "accepted")) for name in EDITS), ("10, with its remedy", "accepted")]
    assert [name for name, _ in rows()] == [name for name, _ in expected]
    for (name, text), (_, begin) in zip(rows(), expected, strict=True):
        assert text.startswith(begin), name


@pytest.mark.quick
def test_the_page_quotes_what_a_project_gets():
    assert (TEMPLATE / "AGENTS.md").read_text() in agent_edits.PAGE.read_text()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    return agent_edits.checkout(tmp_path_factory.mktemp("checkout"))


def check(checkout: Path, edit: dict, *more: list[str]) -> tuple[dict, list[str]]:
    """What tools.check says, and the lines of the edited file."""
    with agent_edits.edited(checkout, edit, *more) as text:
        status, found = agent_edits.check(checkout)
    assert status == (found["verdict"] == "rejected")
    return found, text.splitlines()


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("name", [name for name, edit in EDITS.items() if "by" in edit])
def test_a_wrong_edit_is_rejected_at_its_line(checkout, name):
    edit = EDITS[name]
    found, lines = check(checkout, edit)
    assert (found["verdict"], found["checks"][-1]["name"]) == ("rejected", edit["by"])
    file, _, number = found["place"].partition(":")
    line, text = lines[int(number) - 1], "\n".join(lines[int(number) - 1 :])
    assert file == edit["file"]
    assert text.find(edit["at"]) in range(len(line)), f"{found['place']}: {line}"
    said = dict(rows())[name].replace("`", "")
    assert found["problem"].replace("`", "") in said
    assert found["remedy"].replace("`", "") in said
    if "fix" in edit:
        assert check(checkout, edit, edit["fix"])[0]["verdict"] == "accepted"


@pytest.mark.long(every_case=True)
@pytest.mark.parametrize("name", [name for name, edit in EDITS.items() if "by" not in edit])
def test_a_right_edit_is_accepted_and_compared(checkout, name):
    edit = EDITS[name]
    found, lines = check(checkout, edit)
    assert found["verdict"] == "accepted"
    difference = found["difference"]
    assert difference["same_program"] == edit.get("same", False)
    new = [line.strip() for _, text in edit["change"] for line in text.splitlines()]
    changed = [lines[int(line.partition(":")[2]) - 1] for line in difference["lines"]]
    assert bool(changed) == edit["file"].endswith(".py")
    assert all(any(text in line for text in new) for line in changed), changed
