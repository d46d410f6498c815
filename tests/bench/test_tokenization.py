"""The benchmark's plan of 10¹² tokens: its hours are those of its rates."""

import sys
from pathlib import Path

import pytest

from bench import tokenization

ROOT = Path(__file__).parents[2]


def tables(text):
    """Titles, and the numbers by name of row, of the benchmark's two tables in a text."""
    found = []
    for start in ("| million tokens/s of a core |", "| 10¹² tokens |"):
        title, _, *rows = text[text.index(start) :].split("\n\n")[0].strip().splitlines()
        cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
        found.append((title, {name: [float(x) for x in numbers] for name, *numbers in cells}))
    return found


def check(found):
    (_, rates), (_, plan) = found
    assert rates.keys() == plan.keys() == {"bytes", "BPE"}
    for name, (tokenizing, merging, _, text, disk) in rates.items():
        hours = 1e6 / tokenizing / 3600
        expected = [text, disk, hours, hours / 64, hours / 256, hours / 1024, 1e6 / merging / 3600]
        for had, want, slack in zip(
            plan[name], expected, [0.01, 0.01, 1, 0.06, 0.06, 0.06, 0.06], strict=True
        ):
            assert abs(had - want) <= slack + 0.02 * want


@pytest.mark.long
def test_the_benchmark(monkeypatch, capsys):
    """On the shorter text: its tables agree with each other."""
    monkeypatch.setattr(
        tokenization, "TEXT", ROOT / "shardwright/shipped/austen_validation.jsonl.xz"
    )
    monkeypatch.setattr(tokenization, "SHARDS", 2)
    monkeypatch.setattr(tokenization, "BATCH", 2)
    monkeypatch.setattr(tokenization, "SEQ_LEN", 256)
    monkeypatch.setattr(sys, "argv", ["bench.tokenization"])
    tokenization.main()
    text = capsys.readouterr().out
    found = tables(text)
    check(found)
    assert found[0][1]["bytes"][3] == pytest.approx(1.0, abs=0.1)  # with what JSON adds
