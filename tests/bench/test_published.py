"""Runs of others: tables that are no such table, strange rows, MFU as trainers count it, scaled
steps, calibration.
"""

import collections
import csv
import io
import json
import math

import pytest

from bench.plan.published import calibration, record, runs
from bench.plan.published.__main__ import lines, main
from shardwright.cluster.chips import chip_of
from shardwright.inspect.operation import Operation
from shardwright.inspect.plan.step import Facts, PlannedStep

HEADER = ",".join(runs.COLUMNS)
TINY = "x1,torchtitan,2/64/4 vocab 256,2 H100,d2,1,2,32,bf16,full,F,0.5,,,"
VTRAIN = ",".join(runs.VTRAIN.values())


@pytest.fixture(autouse=True)
def traced_once(monkeypatch, traced):
    """The step of a configuration on a mesh is traced once for all tables."""
    trace = runs._traced

    def once(run, save):
        key = repr((run.config, run.sizes, run.chip.name, save))
        traced[key] = traced.get(key) or trace(run, save)
        return traced[key]

    monkeypatch.setattr(runs, "_traced", once)


@pytest.fixture(scope="module")
def traced():
    return {}


def table_of(tmp_path, *lines: str) -> runs.Table:
    path = tmp_path / "runs.csv"
    path.write_text("\n".join(lines) + "\n")
    return runs.read(str(path))


def run_of(tmp_path, line: str) -> runs.Run:
    (run,) = table_of(tmp_path, HEADER, line).runs
    assert isinstance(run, runs.Run), run
    return run


@pytest.mark.parametrize(
    ("header", "named"),
    [
        (HEADER.replace(",mesh", ""), "no column 'mesh'"),
        (HEADER + ",mesh", "twice the column 'mesh'"),
        (VTRAIN.replace(",# layers", ""), "no column '# layers'"),
        ("", "no column 'id'"),
        ('"id', "not a table"),
    ],
)
def test_a_table_without_a_column_is_refused_by_name(tmp_path, header, named):
    with pytest.raises(ValueError, match=named) as refused:
        table_of(tmp_path, header, TINY)
    assert "\n" not in str(refused.value)


STRANGE = {
    "source": ["a trainer of which nobody knows"],
    "model": ["2/64", "2/64/0 vocab 256", "2/64/5 vocab 256", "2/64/4", "mixture of 8", ""],
    "chips": ["2 H900", "H100", "0 H100", "4 H100"],
    "mesh": ["d2 d1", "x2", "d-2", ""],
    "sequences_per_data_shard": ["1.5", "-1"],
    "accumulation": ["nan"],
    "seq_len": ["0", "1" * 30, "²"],
    "precision": ["float8 compiled", "int4"],
    "recompute": ["some"],
    "flops": ["Q"],
    "step_s": ["-1", "inf"],
    "mfu_percent": ["57%"],
    "memory_gb": ["much"],
}


def test_a_strange_row_has_no_plan_and_one_line_says_why(tmp_path, capsys):
    for column, value in (
        (column, value) for column, values in STRANGE.items() for value in values
    ):
        values = dict(zip(runs.COLUMNS, TINY.split(","), strict=True)) | {column: value}
        printed = list(lines(table_of(tmp_path, HEADER, ",".join(values.values()))))
        assert printed[1] == ",".join([*values.values(), "", "", "", ""])
        (line,) = capsys.readouterr().err.splitlines()
        assert "row 2 (x1)" in line
        assert column in line or value.lower().removeprefix("2 ") in line


def test_a_row_of_another_length_has_no_plan(tmp_path, capsys):
    table = table_of(tmp_path, HEADER, TINY + ",1,2", "a,b")
    assert [line.count(",") for line in lines(table)] == [18, 18, 18]  # as many as the header
    assert capsys.readouterr().err.count("values for 15 columns") == 2


def test_a_table_without_a_measured_row_calibrates_nothing(tmp_path):
    for row in (TINY.replace(",0.5,", ",,"), "a,b"):
        with pytest.raises(ValueError, match="no row can be planned and has a measured time"):
            list(calibration.calibrated(table_of(tmp_path, HEADER, row), 20))


def test_what_the_program_prints(tmp_path, capsys):
    """The table with its plans; of one without a measured row, that calibration needs one."""
    path = tmp_path / "runs.csv"
    path.write_text(f"{HEADER}\n{TINY.replace(',0.5,', ',,')}\n")
    main([str(path)])
    assert capsys.readouterr().out.splitlines()[0] == ",".join([HEADER, *runs.ADDED])
    with pytest.raises(SystemExit):
        main([str(path), "--calibrate"])
    assert "no row can be planned and has a measured time" in capsys.readouterr().err


def test_what_is_printed_is_read_again(tmp_path):
    table = table_of(tmp_path, HEADER, TINY, TINY.replace("x1", '"a, ""b"""'))
    printed = list(lines(table))
    again = table_of(tmp_path, *printed)
    assert (again.header, again.rows) == (table.header, table.rows)
    assert list(lines(again)) == printed
    step_s, rate, mfu, memory = (float(x) for x in printed[1].split(",")[-4:])
    assert rate == pytest.approx(2 * 2 * 32 / step_s / 2, rel=1e-3)
    assert 0 < mfu < 1
    assert 0 < memory < 1
    assert next(csv.reader(io.StringIO(printed[2])))[0] == 'a, "b"'


@pytest.mark.parametrize(
    ("line", "percent"),
    [  # step times, and the MFU that the trainers print beside them
        ("K1,KempnerForge,L8,1 H200,1,4,2,4096,bf16 compiled,full,F,3.13,,,", 57.8),
        ("K5,KempnerForge,L8,4 H200,t4,4,2,4096,bf16 compiled,full,F,1.30,,,", 34.7),
        ("J37,MaxText,L70,256 H200,r2 d128,2,1,8192,bf16,minimal_flash; no scan,F,15.516,,,", 51.4),
        ("F80,llm-foundry,24/2048/16 MPT-1b,8 H100,d8,14,1,2048,amp bf16,none,F,,45455,,", 41.82),
        (
            "F77,llm-foundry,12/768/12 MPT-125m,8 A100-80,d8,40,2,2048,amp bf16,none,F,,142830,,",
            44.79,
        ),
    ],
)
def test_mfu_is_that_of_the_trainer(tmp_path, line, percent):
    run = run_of(tmp_path, line)
    assert run.mfu(run.step_s) == pytest.approx(percent, rel=0.006)


def test_h_counts_half_of_attention(tmp_path):
    line = "x,MaxText,L8,8 H100,d8,1,1,8192,bf16,minimal_flash; no scan,{},1.0,,,"
    whole, half = (run_of(tmp_path, line.format(flops)).flops for flops in "FH")
    # Llama 3 8B without its table of embeddings: 32 layers of 218,112,000 (q, k, v, o and three of
    # the MLP, with two norms of 4096), a norm and the unembedding.
    multiplied = (
        32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096)
        + 4096
        + 128256 * 4096
    )
    assert whole == 6 * multiplied + 12 * 32 * 4096 * 8192
    assert half == 6 * multiplied + 6 * 32 * 4096 * 8192


def test_a_measured_rate_or_mfu_gives_the_step(tmp_path):
    by_rate = run_of(
        tmp_path, "F83,llm-foundry,32/4096/32 MPT-7b,8 H100,d8,6,1,2048,amp bf16,none,F,,10643,,"
    )
    by_mfu = run_of(
        tmp_path, "F83,llm-foundry,32/4096/32 MPT-7b,8 H100,d8,6,1,2048,amp bf16,none,F,,,46.44,"
    )
    # the trainer's own tokens a second, of all
    assert by_rate.step_s == pytest.approx(48 * 2048 / 85144, rel=1e-3)
    assert by_mfu.step_s == pytest.approx(by_rate.step_s, rel=2e-3)


def test_kendall_of_orders():
    assert calibration.kendall([1, 2, 3, 4], [10, 20, 30, 40]) == 1
    assert calibration.kendall([1, 2, 3, 4], [40, 30, 20, 10]) == -1
    assert calibration.kendall([1, 2, 3, 4], [10, 30, 20, 40]) == pytest.approx(4 / 6)
    assert math.isnan(calibration.kendall([1, 2], [1, 1]))


def made(
    tmp_path, n: int, flops: float, traffic: float, group: str
) -> tuple[runs.Run, PlannedStep]:
    """A run whose step multiplies and moves so much."""
    run = run_of(tmp_path, TINY)._replace(group=(group,), chip=chip_of("a100"), constants={})
    ops = [
        Operation("matmul", "", size=flops, dtype="bf16", shape=(1, 1, 1, int(flops / 2))),
        *[Operation("memory", str(i), traffic=traffic) for i in range(n)],
    ]
    return run, PlannedStep(ops, [], {"d": 1}, Facts(1, 1.0, "bf16", 1, 1), None)


def test_a_fit_finds_the_constants_that_made_the_times(tmp_path):
    true = {"matmul_share": 0.45, "memory_share": 0.6, "launch_s": 2e-5}
    sizes = [(n, 10.0**a, 10.0**b) for n in (1, 50) for a in (11, 12.5, 14) for b in (6, 8, 10)]
    pairs = [made(tmp_path, *size, f"{i // 3}") for i, size in enumerate(sizes)]
    pairs = [
        (run._replace(step_s=calibration.seconds(run, step, true)), step) for run, step in pairs
    ]
    # By hand: 1e14 FLOPs at 0.45 of the 271.2e12 FLOP/s of products alone, 1e10 bytes at 0.6 of
    # 2.039e12 bytes/s, two launches.
    assert pairs[8][0].step_s == pytest.approx(
        1e14 / (0.45 * 271.2e12) + 1e10 / (0.6 * 2.039e12) + 4e-5
    )
    start = {"matmul_share": 0.7, "memory_share": 0.85, "launch_s": 3e-6}
    used = calibration.picked(pairs, 9)
    assert sorted(collections.Counter(run.group for run, _ in used).values()) == [1, 1, 1, 2, 2, 2]
    # each is drawn a little to where it began
    assert calibration.fit(pairs, start) == pytest.approx(true, rel=0.1)
    assert calibration.figures(pairs, {run.group: true for run, _ in pairs}).error < 1e-6


def test_only_trainers_whose_memory_is_described_have_one(tmp_path):
    """Ours would be wrong for the others."""
    line = "x1,{},2/64/4 vocab 256,2 H100,d2,1,2,32,bf16,full,F,0.5,,,1.0"
    table = table_of(
        tmp_path, HEADER, *(line.format(trainer) for trainer in ("torchtitan", "llm-foundry"))
    )
    printed = [row.split(",")[-1] for row in list(lines(table))[1:]]
    assert float(printed[0]) > 0
    assert printed[1] == ""


def test_a_table_ends_with_how_near_its_plans_are(tmp_path, capsys):
    """By hand: one row at half of its time, one at three times."""
    run = run_of(tmp_path, TINY)
    planned = calibration.seconds(run, runs.step_of(run), {})
    given = [
        TINY.replace(",0.5,", f",{planned * factor:.9g},").replace("x1", f"x{factor}")
        for factor in (2, 1 / 3)
    ]
    list(lines(table_of(tmp_path, HEADER, *given)))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "torchtitan: 2 rows, median 1.75, mean error 125.0 %, 0% inside the range, 80 % within 180 "
        "%"
    )


def test_trainers_are_held_out_in_turn(tmp_path):
    """Each is planned with what was fitted to the others: of a slow and a fast one, the fast one
    too slow.
    """
    pairs = [
        made(tmp_path, 1, 10.0**a, 1e3, group) for group in ("slow", "fast") for a in (12, 13, 14)
    ]
    true = {"slow": {"matmul_share": 0.3}, "fast": {"matmul_share": 0.6}}
    pairs = [
        (run._replace(step_s=calibration.seconds(run, step, true[run.group[0]])), step)
        for run, step in pairs
    ]
    turns = calibration.held_out(pairs, 100, {"matmul_share": 0.5}, folds=2)
    assert turns[("fast",)]["matmul_share"] == pytest.approx(0.3, rel=0.02)
    assert turns[("slow",)]["matmul_share"] == pytest.approx(0.6, rel=0.02)
    assert calibration.figures(
        [pair for pair in pairs if pair[0].group == ("fast",)], turns
    ).median == pytest.approx(2, rel=0.03)


# ---- what other trainers overlap -----------------------------------------------------------------


NEMO = "x1,NeMo,4/64/4 vocab 256,{},{},1,4,32,bf16,none,F,0.5,,,"


def planned(tmp_path, chips: str, mesh: str, ops: list[Operation]) -> float:
    """Seconds of a step of these operations, as NeMo runs it on a mesh."""
    run = run_of(tmp_path, NEMO.format(chips, mesh))._replace(constants={"interference": 0.5})
    step = PlannedStep(ops, [], dict(run.sizes), Facts(1, 1.0, "bf16", 4, 4), None)
    return runs.plan(run, step).seconds


SHAPE = (1, 10000, 10000, 10000)
MATMUL = Operation("matmul", "", "", "forward", 4.0, 2e12, "bf16", shape=SHAPE, loop=1)
WAITED = Operation("collective", "all_gather", "", "forward", bytes=1e9, timing="waited")
GATHER = WAITED._replace(count=4.0, axes=("t",), loop=1)


def test_messages_inside_matmuls_cost_a_share_of_their_time(tmp_path):
    computed = planned(tmp_path, "4 H100", "t4", [MATMUL])
    alone = 4 * chip_of("h100").collective_s("all_gather", 1e9, {"t": 4}, ("t",))
    share = (planned(tmp_path, "4 H100", "t4", [MATMUL, GATHER]) - computed) / alone
    assert share == pytest.approx(16 / 132 + 1 / 5 / 4, abs=0.002)


def test_gradients_are_summed_beside_computation(tmp_path):
    """Over r and c, slowing it by `interference` of their time: 1 GB, as ours is half of it over c,
    and in f32.
    """
    ours = WAITED._replace(what="psum", phase="backward", axes=("r",))
    computed = planned(tmp_path, "16 H100", "d8 c2", [MATMUL])
    alone = chip_of("h100").collective_s("psum", 1e9, {"r": 8, "c": 2}, ("r", "c"))
    assert planned(tmp_path, "16 H100", "d8 c2", [MATMUL, ours]) - computed == pytest.approx(
        0.5 * alone
    )


def test_a_distributed_optimizer_updates_a_part_and_copies_nothing(tmp_path):
    update = Operation("memory", "f32[1]", traffic=1e11)
    accumulated = update._replace(count=4.0, loop=1)
    of_weights = GATHER._replace(axes=("c",), timing="ahead")
    computed = planned(tmp_path, "16 H100", "d8 c2", [MATMUL])
    chip = chip_of("h100")
    one = 1e11 / 16 / (chip.memory_bandwidth * chip.memory_share) + chip.launch_s
    assert planned(tmp_path, "16 H100", "d8 c2", [MATMUL, update]) - computed == pytest.approx(one)
    assert planned(tmp_path, "16 H100", "d8 c2", [MATMUL, accumulated, of_weights]) == computed


def test_chunks_of_layers_shorten_the_wait_for_stages(tmp_path):
    """To a quarter with four: (p - 1) / (m v) of the time computed (arXiv 2104.04473, section
    2.2.2).
    """
    one, four = (run_of(tmp_path, NEMO.format("2 H100", f"p2{chunks}")) for chunks in ("", " v4"))
    step = runs.step_of(one)
    first, last = runs.plan(one, step), runs.plan(four, step)
    assert last.bubble == pytest.approx(first.bubble / 4)
    assert first.seconds - last.seconds == pytest.approx(0.75 * first.bubble)


# ---- constants, figures and the page -------------------------------------------------------------


KEPT = json.loads(record.FIGURES.read_text())


def test_the_figures_are_of_these_sources():
    assert KEPT["digest"] == record.digest(), (
        f"plans of published runs may have changed: run {record.COMMAND}"
    )


def test_the_page_and_the_constants_are_those_of_the_figures():
    page = record.PAGE.read_text()
    assert record.with_tables(page, KEPT) == page
    for name, values in KEPT["constants"].items():
        assert vars(chip_of("h100"))[name] == pytest.approx(values["used"], rel=1e-3)
        assert (
            f"{values['fitted']:.3g}" in chip_of("h100").sources[name]
            or values["used"] == values["fitted"]
        )


def test_nothing_is_fitted_to_the_runs_that_are_held_out():
    fitted, unseen = (runs.read(str(path)) for path in (record.TABLE, record.HELD_OUT))
    planned = [run for run in unseen.runs if isinstance(run, runs.Run)]
    assert len(planned) == len(unseen.rows)
    assert not {tuple(row[1:]) for row in fitted.rows} & {tuple(row[1:]) for row in unseen.rows}
    assert collections.Counter(map(record.mesh_of, planned)) == {"t": 8, "p": 6, "d": 6, "c": 2}


def test_a_digest_ignores_comments_and_docstrings():
    code = '"""Text."""\nx = 1  # why\n\n\ndef f():\n    """More\n    text."""\n    return "kept"\n'
    assert record._code(code) == 'x = 1\ndef f():\n    return "kept"'
