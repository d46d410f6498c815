"""tools.verify names the line of a bug that is planted in train.py, on 2, 4 and 8 devices."""

import re

import pytest
from planted_bugs import ROOT, named

LEAST = 0.9
"""Share of the bugs whose line must be the first that is named."""


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_the_line_of_a_planted_bug_is_named_first(devices):
    source, wrong, count = (ROOT / "train.py").read_text(), [], 0
    for bug, said in named(devices):
        place = re.search(r"train\.py:(\d+)", said[0]) if said else None
        if place is None or int(place[1]) not in bug.planted(source)[1]:
            wrong.append((bug.name, said[:1]))
        count += 1
    assert count >= 12
    assert len(wrong) <= (1 - LEAST) * count, wrong
