"""Programs of other chips, read: XLA's own prediction of one by hand; rows that are there are not made again."""

import gzip
import json
import subprocess

import pytest
from hlo_texts import HEAD

from bench.plan import compilers
from bench.plan.clock import Clock
from bench.plan.compare import sent
from shardwright.compiled.hlo import parse, with_mesh
from shardwright.compiled.step import describe
from shardwright.plan.work import Op

US = 1e-6
COST = ', backend_config={{"reification_cost":[{{"exec_time_us":9,"name":""}},{{"exec_time_us":{},"name":"sol"}}]}}'
AT = ', metadata={{op_name="jit(f)/{}" stack_frame_id={}}}'
GEMM = (
    'custom-call(%{}, %{}), custom_call_target="__cublas$lt$matmul", backend_config={{{{"gemm_backend_config":'
    '{{{{"dot_dimension_numbers":{{{{"lhs_contracting_dimensions":["{}"],"rhs_contracting_dimensions":["{}"],'
    '"lhs_batch_dimensions":[{}],"rhs_batch_dimensions":[{}]}}}}}}}},"reification_cost":[{{{{"exec_time_us":{{}}}}}}]}}}}'
)
PRODUCT = GEMM.format("x", "x", 1, 0, "", "")
BATCHED = GEMM.format("b", "b", 2, 1, '"0"', '"0"')
ALL = "replica_groups={{0,1,2,3}}"
TEXT = f"""{HEAD}%f (p: f32[4,4]) -> f32[4,4] {{
  %p = f32[4,4]{{1,0}} parameter(0)
  ROOT %n = f32[4,4]{{1,0}} negate(%p)
}}

%cond (c.5: f32[4,4]) -> pred[] {{
  ROOT %less = pred[] constant(true)
}}

%body (c: (s32[], f32[4,4])) -> (s32[], f32[4,4]) {{
  %c = (s32[], f32[4,4]{{1,0}}) parameter(0)
  %step = f32[4,4]{{1,0}} fusion(%c), kind=kLoop, calls=%f{AT.format("add", 3)}{COST.format(10)}
  ROOT %t = (s32[], f32[4,4]{{1,0}}) tuple(%c, %step)
}}

%idle (c.2: f32[4,4]) -> f32[4,4] {{
  ROOT %c.2 = f32[4,4]{{1,0}} parameter(0)
}}

%task (c.3: f32[4,4]) -> f32[4,4] {{
  %c.3 = f32[4,4]{{1,0}} parameter(0)
  ROOT %done.3 = f32[4,4]{{1,0}} fusion(%c.3), kind=kLoop, calls=%f{AT.format("task_forward/add", 3)}{COST.format(60)}
}}

%body.2 (c.4: f32[4,4]) -> f32[4,4] {{
  %c.4 = f32[4,4]{{1,0}} parameter(0)
  ROOT %one = f32[4,4]{{1,0}} conditional(%c.4, %c.4, %c.4), true_computation=%task, false_computation=%idle{AT.format("cond", 1)}
}}

ENTRY %main (x: f32[4,4], b: f32[8,4,4]) -> f32[4,4] {{
  %x = f32[4,4]{{1,0}} parameter(0){AT.format("", 1).replace("jit(f)/", "state.weights.w")}
  %b = f32[8,4,4]{{1,0}} parameter(1){AT.format("", 1).replace("jit(f)/", "batch.tokens")}
  %g = (f32[4,4]{{1,0}}, f32[16,4]{{1,0}}) all-gather-start(%x), {ALL}, dimensions={{0}}{AT.format("gather", 2)}{COST.format(100)}
  %early = f32[4,4]{{1,0}} {PRODUCT.format(40)}{AT.format("dot", 3)}
  %g.1 = f32[16,4]{{1,0}} all-gather-done(%g)
  %many = f32[8,4,4]{{2,1,0}} {BATCHED.format(5000)}{AT.format("dot", 3)}
  %wide = f64[4,4]{{1,0}} {PRODUCT.format(7000)}{AT.format("dot", 3)}
  %loop = (s32[], f32[4,4]{{1,0}}) while(%x), condition=%cond, body=%body, backend_config={{"known_trip_count":{{"n":"3"}}}}
  %ticks = f32[4,4]{{1,0}} while(%x), condition=%cond, body=%body.2, backend_config={{"known_trip_count":{{"n":"6"}}}}
  %s = (f32[16,4]{{1,0}}, f32[4,4]{{1,0}}) reduce-scatter-start(%g.1), {ALL}, dimensions={{0}}{AT.format("scatter", 2)}, backend_config={{"reification_cost":[]}}
  ROOT %s.1 = f32[4,4]{{1,0}} reduce-scatter-done(%s)
}}
"""  # noqa: E501
FACTS = {"chip": "h100", "name": "84m_d8", "ticks": 6, "of_device": 4, "of_any": {"forward": 5}}
ROOFLINE = (8 * 3 * 64 + 4 * 64) / 1e6  # bytes of a batched product and of one with wider results, at 1e6 a second


def test_xlas_prediction_of_a_program_by_hand():
    """The wait for the gather, less the product meanwhile; three turns; five of six ticks; all of the scatter."""
    program = parse(with_mesh(TEXT, {"d": 4}))
    clock = Clock(program, describe(program), 8e6 / 8, 1e15, FACTS)
    total = clock.seconds(program.entry)
    scatter = 100 * US * 400 / 374
    assert total == pytest.approx((40 + 60 + 3 * 10 + 5 * 60) * US + ROOFLINE + scatter, rel=1e-9)
    assert clock.lines["train.py:10"] == pytest.approx(60 * US + scatter)
    assert sum(clock.lines.values()) == pytest.approx(total)


def test_a_row_has_what_its_program_says():
    row = compilers.reading(with_mesh(TEXT, {"d": 4}), FACTS)
    assert row["state_bytes"] == 64
    assert row["flops"] == {"train.py:20": 2 * 4 * 4 * 4 * (1 + 8 + 1)}
    sent = [(x["line"], x["op"], x["axes"], x["dtype"], x["times"], x["sent_bytes"]) for x in row["collectives"]]
    assert sent == [
        ("train.py:10", "all-gather", "d", "f32", 1, 3 * 64),
        ("train.py:10", "reduce-scatter", "d", "f32", 1, 3 * 64),
    ]


def test_rows_that_are_there_are_left(tmp_path, monkeypatch, capsys):
    """The others are compiled one by one, and the command goes on where it was stopped."""
    started = []

    def run(command, **_):
        started.append(command[command.index("--only") + 1] + "." + command[command.index("--configs") + 1])
        failed = started[-1] == "v5e.gpt2_d8" and len(started) == 2
        (tmp_path / f"{started[-1]}.json").write_text("{}") if not failed else None
        return subprocess.CompletedProcess(command, int(failed), "", "a line\nValueError: no such chip\nlast words")

    monkeypatch.setattr(subprocess, "run", run)
    options = ["--out", str(tmp_path), "--only", "h100,v5e", "--configs", "gpt2_d8"]
    with pytest.raises(SystemExit, match=r"not compiled: v5e\.gpt2_d8"):
        compilers.main(options)
    assert "v5e.gpt2_d8 ValueError: no such chip" in capsys.readouterr().out
    compilers.main(options)
    assert started == ["h100.gpt2_d8", "v5e.gpt2_d8", "v5e.gpt2_d8"]


def test_programs_are_read_again_without_a_compiler(tmp_path):
    with gzip.open(tmp_path / "h100.84m_d8.txt.gz", "wt") as file:
        file.write(with_mesh(TEXT, {"d": 4}))
    row = tmp_path / "h100.84m_d8.json"
    row.write_text(json.dumps(FACTS | {"peak_bytes": 5, "state_bytes": 0}))
    compilers.main(["--out", str(tmp_path), "--only", "h100", "--configs", "84m_d8", "--again"])
    found = json.loads(row.read_text())
    assert (found["peak_bytes"], found["state_bytes"]) == (5, 64)


def test_a_name_that_is_not_known(tmp_path, capsys):
    with pytest.raises(SystemExit):
        compilers.main(["--out", str(tmp_path), "--only", "h1000"])
    assert "--only has h1000; choose of h100, h200, v5e, v6e, v7x" in capsys.readouterr().err


@pytest.mark.parametrize(("op", "bytes"), [("all_gather", 84), ("psum_scatter", 84), ("psum", 168), ("ppermute", 96)])
def test_bytes_that_a_plan_sends_are_those_of_a_ring(op, bytes):
    """Of two collectives of 48 bytes over 2 × 4 devices; a device of a ring sends 7 of its 8 parts."""
    planned = Op("train.py:1", "", "", "collective", op, 2.0, 0.0, 0.0, axes=("r", "d"), bytes=48.0)
    assert sent(planned, {"p": 3, "r": 2, "d": 4, "t": 5}) == bytes
