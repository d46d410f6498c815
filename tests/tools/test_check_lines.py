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


def test_the_memory_line_is_one_that_grew():
    """Bytes at the peak and at most: the peak moves from line 1 to lines 2 and 3, of which 3 is as large as before."""
    lines = {1: "x = loss(y)", 2: "y = a", 3: "z = b"}
    before, now = result(lines, {}), result(lines, {})
    before["costs"] |= {"bytes": 9, "by_line": {"a.py:1": [0, 9, 9], "a.py:2": [0, 0, 2], "a.py:3": [0, 0, 7]}}
    now["costs"] |= {"bytes": 12, "by_line": {"a.py:1": [0, 0, 9], "a.py:2": [0, 5, 5], "a.py:3": [0, 7, 7]}}
    assert difference(now, before)["bytes"] == {"before": 9, "now": 12, "line": "a.py:2", "of_line": 3}
    assert difference(before, now)["bytes"] == {"before": 12, "now": 9, "line": "a.py:2", "of_line": -3}
    now["costs"]["by_line"]["a.py:2"] = [0, 5, 2]  # nothing grew: what there is lives longer
    assert difference(now, before)["bytes"]["line"] == ""
