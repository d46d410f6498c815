"""Edits of edits.toml, made in a copy of the source: types or the check of a run reject them.

`python -m tests.support.edits` makes all of them.
"""

import pytest

from bench import free_train
from tests.support.edits import BUGS, EDITS, GATES, Gone, catcher, wrong_verdict
from tests.support.recipes import ROOT, SOURCE

SHORT = (
    "a weight is stored in the other axis order",
    "the embedding is not gathered",
    "the MLP's output is not reduced",
    "the + of a product is left out",
    "each device takes its own maximum",
    "NVIDIA/Megatron-LM#7452, finding on gathered logits",
)
"""Edits that types reject in seconds, for different reasons."""
LONG = (
    "devices of the machine, in an optimizer",
    "the embedding is scaled in what stages run alone",
    "one device's noise",
    "softmax of local heads",
    "a stage sums over p behind the types",
    "NVIDIA-NeMo/Automodel#1260",
)
"""Edits of several configurations, of which the check rejects the first four."""


@pytest.mark.parametrize(
    "id",
    [
        *(pytest.param(id, marks=pytest.mark.quick) for id in SHORT),
        *(pytest.param(id, marks=pytest.mark.long) for id in LONG),
    ],
)
def test_types_or_the_check_reject_it(id):
    edit = EDITS[id]
    try:
        assert edit.files
    except Gone as error:
        pytest.skip(f"no place: {error}")
    assert not wrong_verdict(edit, edit.config[0])


# ---- the collection ------------------------------------------------------------------------------


@pytest.mark.quick
def test_an_edit_has_its_place_and_what_catches_it():
    """All but 1 in 20 have one: correct the others in edits.toml."""
    gone = []
    for edit in EDITS.values():
        try:
            assert all(text != (ROOT / file).read_text() for file, text in edit.files.items()), edit
        except Gone as error:
            gone.append(f"{edit}: {error}")
        gates = [gate for gate in GATES if getattr(edit, gate)]
        assert len(gates) == bool(edit.changes) or edit.session, edit
        assert bool(edit.why) == (not edit.changes), edit
        assert bool(edit.bug) == (edit.kind in {*"abcde"}), edit
        file, _, name = edit.test.partition("::")
        assert not name or f"def {name}(" in (ROOT / file).read_text(), edit
    print(*gone, sep="\n")
    assert len(gone) <= len(EDITS) / 20


@pytest.mark.quick
def test_the_page_has_the_counts_of_the_collection():
    """Of each kind, and of all."""
    page, rows = (ROOT / "docs/gauntlet.md").read_text(), []
    for kinds in (*"abcde", "abcde"):
        ours = [edit for edit in BUGS if edit.kind in kinds]
        caught = [[catcher(edit) for edit in ours].count(gate) for gate in GATES]
        tried = [edit.spmd for edit in ours if edit.spmd]
        rows.append([len(ours), sum(caught), *caught, len(tried), tried.count("refused")])
    table = page.partition("## Counts")[2].partition("## Examples")[0].strip().splitlines()[2:]
    assert [[*map(int, line.split(" | ")[1:])] for line in table] == rows
    bugs, planted, types, exact, test, tried, _ = rows[-1]
    assert f"Of {bugs} bugs that ran silently in other frameworks, {planted} could be" in page
    assert f"{types + exact} of these before its first step; a test finds the other {test}." in page
    assert f"The other {bugs - planted} concern" in page
    assert f"We wrote {tried} of" in page


def test_edits_find_their_places_in_what_computes_the_same():
    """Renamed variables, split lines and swapped statements."""
    *_, (_, source) = free_train.edited(SOURCE, 0)
    own = [edit for edit in EDITS.values() if {x.file for x in edit.changes} == {"train.py"}]
    gone = []
    for edit in own:
        text = source
        try:
            for change in edit.changes:
                text = change.apply(text)
        except Gone as error:
            gone.append(f"{edit}: {error}")
    assert len(gone) <= len(own) / 20, gone
