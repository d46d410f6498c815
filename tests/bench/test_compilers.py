"""Programs of other chips: the options they are compiled by, and what is read from them."""

import gzip
import json

import pytest

from bench.plan import compilers, programs, trainers
from shardwright.inspect.operation import OPCODES, sent_in_ring
from shardwright.program.compiling import with_mesh
from tests.support.annotated_program import FACTS, TEXT


def test_figures_of_a_row():
    found, exposed = trainers.figures(with_mesh(TEXT, {"d": 4}), FACTS | {"peak_bytes": 2**30})
    assert found["GiB"] == 1
    assert found["GB sent"] > 0
    assert found["exposed"] == pytest.approx(1e3 * sum(exposed.values()) / found["time"])


def test_what_a_program_says():
    found = programs.reading(with_mesh(TEXT, {"d": 4}), FACTS)
    assert (found["state"], found["FLOPs"]) == (64, 2 * 4 * 4 * 4 * (1 + 8 + 1))
    assert found["sent"] == {
        ("train.py:10", op, "d"): 3 * 64 for op in ("all-gather", "reduce-scatter")
    }


def test_rows_that_are_there_are_left(tmp_path, monkeypatch, capsys):
    """The others are compiled one by one, and the command goes on where it was stopped."""
    started = []

    def run_apart(write, path, lower, chip, name):
        assert (write, lower) == (programs.write, compilers.lowered)
        started.append(f"{chip}.{name}")
        if len(started) == 2:
            raise ValueError("no such chip\nlast words")
        path.with_name(f"{path.name}.txt.gz").write_bytes(gzip.compress(b"a program"))
        path.with_name(f"{path.name}.json").write_text(json.dumps({"chip": chip}))

    near = {"h100": 1.009, "v5e": 1.02}
    monkeypatch.setattr(programs, "run_apart", run_apart)
    monkeypatch.setattr(
        compilers, "compare", lambda text, facts: ({"state": near[facts["chip"]]}, text, ["a line"])
    )
    options = ["--out", str(tmp_path), "--chips", "h100", "v5e", "--rows", "gpt2_d8"]
    with pytest.raises(SystemExit, match="not made: 1 rows"):
        compilers.main(options)
    said = capsys.readouterr().out
    assert "v5e.gpt2_d8 ValueError: no such chip\n" in said
    assert "state: 1 of 1 within 1 %" in said
    compilers.main([*options, "--lines"])
    assert started == ["h100.gpt2_d8", "v5e.gpt2_d8", "v5e.gpt2_d8"]
    said = capsys.readouterr().out
    assert "h100.gpt2_d8       state 1.0090  a program\n    a line\n" in said
    assert "state: 1 of 2 within 1 %" in said


@pytest.mark.parametrize(
    ("op", "bytes"), [("all_gather", 84), ("psum_scatter", 84), ("psum", 168), ("ppermute", 96)]
)
def test_bytes_that_a_plan_sends_are_those_of_a_ring(op, bytes):
    """Of two collectives of 48 bytes over 2 × 4 devices; a device of a ring sends 7 of its 8
    parts.
    """
    assert 2 * sent_in_ring(OPCODES[op], 48, 8) == bytes
