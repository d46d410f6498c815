"""tools.check: the lines of a difference, of results written by hand."""

import json
from typing import Any, cast

import pytest

from shardwright.tools.check import compared, difference


def result(lines: dict[int, str], costs: dict[str, float]) -> dict:
    return {
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
    of = difference(moved, before)
    assert (of["lines"], of["seconds"]["of_line"]) == ([], 0)
    assert of["same_function"] is None, "two steps without results are taken for the same function"
    left = result({1: "x = 1", 4: "z = w"}, {"a.py:4 w_gate": 2.0})
    assert difference(left, before)["seconds"] == {
        "before": 3.0,
        "now": 2.0,
        "line": "a.py:2 (before)",
        "of_line": -1.0,
    }


class Ended:
    """A process that has printed a result."""

    def __init__(self, found: dict):
        self.found = found

    def communicate(self) -> tuple[str, str]:
        return f"a line\n{json.dumps(self.found)}\n", ""


@pytest.mark.parametrize("there", ["/a/copy", "/z/größer"])
def test_only_edited_lines_differ_wherever_the_source_lies(there):
    """A module beside the working directory is shown by its whole path; modules between both roots
    by theirs.
    """

    def found(root: str, text: str) -> dict:
        mine = [(f"{root}/src/b.py", i, f"x = {i}") for i in range(9)] + [
            (f"{root}/src/b.py", 9, text)
        ]
        lines = sorted([*mine, *(("/k/library.py", i, f"y = {i}") for i in range(9))])
        own = [f"{root}/src/b.py:{i}" for i in range(9)]
        costs = {"seconds": 9.0, "by_line": {"seconds": dict.fromkeys(own, 1.0)}}
        program = {"hash": text, "lines": lines}
        return {
            "verdict": "accepted",
            "program": program,
            "costs": costs,
            "parameters": 1,
            "results": {},
        }

    now, before = found("/m/mine", "z = 1"), found(there, "z = 2")
    of: Any = compared(now, cast(Any, Ended(before)), ("/m/mine", there))["difference"]
    assert of["lines"] == ["/m/mine/src/b.py:9"]
    assert of["seconds"]["of_line"] == 0
