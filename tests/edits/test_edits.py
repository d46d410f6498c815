"""The edits of edits.toml, each made in a copy of the source: types, a check of a run, or a test
catches it.
"""

import re

import pytest

from tests.support.edits import EDITS, GATES, Edit, copied, refusal, run_tests
from tests.support.gauntlet_page import page
from tests.support.recipes import ROOT

SHORT = (
    "a weight is stored in the other axis order",
    "the embedding is not gathered",
    "the MLP's output is not reduced",
    "the + of a product is left out",
    "each device takes its own maximum",
    "NVIDIA/Megatron-LM#7452, finding on gathered logits",
    "a number of the mesh of the run",
    "devices of the machine, in an optimizer",
    "scores divided by this device's heads",
    "the embedding is scaled in what stages run alone",
)
"""Edits that types and the check reject in seconds, for different reasons."""


def caught_by(*gates: str) -> list[Edit]:
    return [
        edit
        for edit in EDITS.values()
        if edit.changes and any(getattr(edit, gate) for gate in gates)
    ]


# ---- types and the check of a run ----------------------------------------------------------------


def rejected() -> list:
    """The edits that types or the check reject, with their configurations.

    All are slow but the first configuration of SHORT, and of the first edit with each problem.
    """
    found = []
    problems: set[str] = set()
    for edit in caught_by("type", "exact"):
        marks = [] if edit.id in SHORT else [pytest.mark.long(every_case=True)]
        marks += [pytest.mark.quick] * (edit.id in SHORT and bool(edit.type))
        problem = re.sub(r"`.*?`|\d+|'.*?'", "", edit.type or edit.exact)
        is_new = edit.id in SHORT or problem not in problems
        problems.add(problem)
        for i, config in enumerate(edit.config):
            more = [pytest.mark.slow] * (i > 0 or not is_new)
            found.append(pytest.param(edit, config, id=f"{edit}, {config}", marks=[*marks, *more]))
    return found


@pytest.mark.parametrize(("edit", "config"), rejected())
def test_types_reject_it_or_the_check_at_its_line(edit, config):
    gate = "type" if edit.type else "exact"
    problem = ".*?".join(map(re.escape, getattr(edit, gate).split("…")))
    found, text = refusal(edit, config)
    assert found == gate, text
    assert re.search(problem, text, re.DOTALL), text
    assert gate == "type" or edit.is_named_in(text), text


@pytest.mark.slow
@pytest.mark.parametrize("edit", caught_by("test"), ids=str)
def test_the_check_accepts_what_is_the_same_on_all_meshes(edit):
    for config in edit.config:
        assert refusal(edit, config)[0] == "", "say so in edits.toml"


# ---- tests ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("edit", caught_by("test"), ids=str)
def test_a_test_fails(edit, tmp_path):
    """In a copy of the repository."""
    done = run_tests(copied(tmp_path / "copy"), [edit.test], edit.files)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed" in done.stdout


# ---- the collection ------------------------------------------------------------------------------


@pytest.mark.quick
def test_an_edit_has_its_place_and_what_catches_it():
    for edit in EDITS.values():
        assert all(text != (ROOT / file).read_text() for file, text in edit.files.items()), edit
        gates = [gate for gate in GATES if getattr(edit, gate)]
        assert len(gates) == bool(edit.changes) or edit.session, edit
        assert bool(edit.why) == (not edit.changes), edit
        assert bool(edit.bug) == (edit.kind in {*"abcde"}), edit
        file, _, name = edit.test.partition("::")
        assert not name or f"def {name}(" in (ROOT / file).read_text(), edit


@pytest.mark.quick
def test_the_page_is_made_of_the_collection():
    """Else run `python -m tests.support.gauntlet_page > docs/gauntlet.md`."""
    assert (ROOT / "docs/gauntlet.md").read_text() == page()


@pytest.mark.quick
def test_what_can_be_expressed_is():
    """Of kinds a, b and c; the others wait for a part that the repository lacks, or have no known
    cause.
    """
    assert sum(bool(edit.changes) and edit.kind in {*"abc"} for edit in EDITS.values()) >= 78
