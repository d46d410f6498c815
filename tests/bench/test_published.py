"""Published runs of others: their table, MFU as trainers count it, calibration, and the page."""

import json

import pytest

from bench.plan.published import calibration, record, runs
from bench.plan.published.__main__ import lines, main
from shardwright.cluster.chips import chip_of

HEADER = ",".join(runs.COLUMNS)
TINY = "x1,torchtitan,2/64/4 vocab 256,2 H100,d2,1,2,32,bf16,full,F,0.5,,,"


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


def test_what_the_program_prints(tmp_path, capsys):
    """The table with its plans; of one without a measured row, that calibration needs one."""
    path = tmp_path / "runs.csv"
    path.write_text(f"{HEADER}\n{TINY.replace(',0.5,', ',,')}\n")
    main([str(path)])
    assert capsys.readouterr().out.splitlines()[0] == ",".join([HEADER, *runs.ADDED])
    with pytest.raises(SystemExit):
        main([str(path), "--calibrate"])
    assert "no row can be planned and has a measured time" in capsys.readouterr().err


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


# ---- what other trainers overlap -----------------------------------------------------------------


NEMO = "x1,NeMo,4/64/4 vocab 256,{},{},1,4,32,bf16,none,F,0.5,,,"


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
