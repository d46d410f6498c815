"""tools.check: the lines of a difference, of results written by hand."""

from shardwright.tools.check import difference


def result(lines: dict[int, str], costs: dict[str, float]) -> dict:
    return {
        "program": {"hash": str(lines), "lines": [("a.py", line, text) for line, text in lines.items()]},
        "costs": {"seconds": sum(costs.values()), "by_line": {line: [cost, 0] for line, cost in costs.items()}},
        "parameters": 1,
    }


def test_a_line_that_moves_keeps_its_costs_and_one_that_leaves_is_marked():
    before = result({1: "x = 1", 2: "y = x", 5: "z = w"}, {"a.py:2": 1.0, "a.py:5 w_gate": 2.0})
    moved = result({3: "x = 1", 4: "y = x", 7: "z = w"}, {"a.py:4": 1.0, "a.py:7 w_gate": 2.0})
    of = difference(moved, before)
    assert (of["lines"], of["seconds"]["of_line"]) == ([], 0)
    left = result({1: "x = 1", 4: "z = w"}, {"a.py:4 w_gate": 2.0})
    assert difference(left, before)["seconds"] == {
        "before": 3.0,
        "now": 2.0,
        "line": "a.py:2 (before)",
        "of_line": -1.0,
    }
