"""tools/report on metrics written by hand, whose figures are known: the table, the plots, several runs."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tools.report.__main__ import Config, show_report
from tools.report.comparing import compare, remarks
from tools.report.plots import panels_of
from tools.report.reading import find_runs, read_run, smoothed

ROOT = Path(__file__).parents[2]


def config(**training) -> dict:
    training = {"batch_size": 2, "seq_len": 5, "steps": 4} | training
    rate = training.pop("learning_rate", 0.001)
    return {
        "model": {"vocab": 64, "layers": 2},
        "optimizer": {"learning_rate": rate, "warmup_steps": 1},
        "mesh": {"r": 1, "d": -1, "t": training.pop("t", 1)},
        "data": {"filespec": "data.zarr"},
        "training": training,
        "hardware": {"name": "CPU"},
        "paths": {"root_working_dir": "runs", "model_name": "its own"},
    }


def write(directory: Path, losses=(4.0, 3.0, 2.0, 1.0), seconds=0.5, events=(), tail="", **settings) -> Path:
    """A run of ten tokens a step; the first step has no time, as after any start."""
    directory.mkdir(parents=True)
    lines = []
    for step, loss in enumerate(losses):
        line = {"step": step, "loss": loss, "tokens": 10 * (step + 1)}
        if step:
            line |= {"seconds": seconds, "tokens_per_second": 10 / seconds, "mfu": 0.2 / seconds}
        lines.append(line)
    lines += [{"step": len(losses) - 1} | event for event in events]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    (directory / "config.yaml").write_text(json.dumps(config(**settings)))
    return directory


def printed(width: int = 200, **settings) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        show_report(Config(**settings), console)
    return console.export_text()


VALIDATION = {"event": "validation", "loss": 1.5, "bits_per_byte": 0.75}
MEMORY = {"event": "memory", "peak_memory_bytes": 3 * 2**30, "source": "device"}


def test_settings_that_change_no_figure_are_no_columns(tmp_path):
    quiet, loud = (
        read_run(write(tmp_path / name, **of), smooth=50)
        for name, of in {
            "quiet": {},
            "loud": {"sample_interval": 5, "sample_top_k": 3, "log_interval": 2, "checkpoint_interval": 7, "seed": 4},
        }.items()
    )
    assert compare([quiet, loud], sort="loss").differing == ["training.seed"]


def test_the_figures_are_those_of_the_metrics(tmp_path):
    directory = write(tmp_path / "run", seconds=0.5, events=[MEMORY, VALIDATION])
    r = read_run(directory, smooth=50)
    assert r.values == {
        "steps": 4,
        "tokens": 40,
        "ms/step": 500,
        "tokens/s": 20,
        "MFU": 0.4,
        "time": 1.5,
        "loss": 1.0,  # a tenth of four steps is less than one: nothing is averaged
        "min": 1.0,
        "val": 1.5,
        "bits/byte": 0.75,
        "memory": 3 * 2**30,
    }
    assert r.notes == []
    assert r.total_steps == 4


def test_slow_steps_and_validations_do_not_count_as_speed(tmp_path):
    directory = write(tmp_path / "run", losses=[3.0] * 21)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    lines[3]["seconds"] = 9.0  # as a profiled step
    lines[10]["seconds"] = 60.0  # as a step with a validation beside it
    lines.append({"step": 10, "event": "validation", "loss": 3.5})
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    values = read_run(directory, 50).values
    assert values["ms/step"] == 500
    assert values["time"] == pytest.approx(19 * 0.5 + 9.0)


def test_averages_against_a_loop():
    losses = np.random.default_rng(0).normal(3, 1, 57)
    losses[20] = np.nan
    for most, window in ((3, 3), (50, 5)):
        expected = [losses[max(0, i - window + 1) : i + 1].mean() for i in range(57)]
        np.testing.assert_allclose(smoothed(losses, most), expected, rtol=1e-12)


def test_only_what_differs_is_a_column(tmp_path):
    write(tmp_path / "a", learning_rate=0.001, t=1)
    write(tmp_path / "b", learning_rate=0.003, t=2)
    c = compare([read_run(d, 50) for d in find_runs([str(tmp_path)])], "loss")
    assert c.differing == ["optimizer.learning_rate", "mesh.t"]
    assert [c.header(name) for name in c.differing] == ["learning_rate", "mesh.t"]
    assert c.metrics == ["loss", "tokens/s", "ms/step", "MFU", "steps", "time", "min", "tokens"]
    heads = printed(run=str(tmp_path), output=str(tmp_path / "o.html")).splitlines()[:2]
    assert " ".join(heads).split() == ["learning_", "#", "rate", "mesh.t", *c.metrics]


@pytest.mark.parametrize("doubted", ["", "MFU is not to be trusted: the peak was 1 GFLOP/s"])
def test_an_mfu_that_a_run_doubts_is_not_the_best(doubted, tmp_path):
    for name, seconds in (("a", 0.5), ("b", 1.0)):
        kept = write(tmp_path / name, seconds=seconds) / "source" / "0000000000"
        kept.mkdir(parents=True)
        (kept / "provenance.json").write_text(json.dumps({"mfu_doubt": doubted} if doubted and name == "a" else {}))
    c = compare([read_run(tmp_path / name, 50) for name in "ab"], "loss")
    assert c.best("tokens/s") == {str(tmp_path / "a")}
    assert c.best("MFU") == (set() if doubted else {str(tmp_path / "a")})
    assert any("in doubt, in run 1;" in text for text in remarks(c)) == bool(doubted)


def test_an_mfu_of_a_measured_peak_is_not_printed_as_the_best(tmp_path):
    """A run that was interrupted did not measure its peak again, so it could not doubt it."""
    sources = {"a": "measured here: the best of several 2048 x 2048 products", "b": "8 x 989 TFLOP/s, the maker's"}
    for name, seconds in (("a", 0.5), ("b", 1.0)):
        kept = write(tmp_path / name, seconds=seconds) / "source" / "0000000000"
        kept.mkdir(parents=True)
        (kept / "provenance.json").write_text(json.dumps({"run": {"peak_source": sources[name]}}))
    console = Console(width=200, record=True, force_terminal=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        show_report(Config(run=str(tmp_path), output=str(tmp_path / "o.html")), console)
    text = console.export_text(styles=True)
    assert re.search(r"\x1b\[1;32m\s*20\.0\b", text)  # tokens/s
    assert "40.0%" in text
    assert not re.search(r"\x1b\[1;32m\s*40\.0%", text)
    assert "in doubt, in run 1; tokens/s can be" in text


@pytest.mark.parametrize(
    ("sort", "order"),
    [
        ("loss", "bca"),
        ("tokens/s", "acb"),  # more is better
        ("ms/step", "acb"),
        ("learning_rate", "cba"),
        ("optimizer.learning_rate", "cba"),
        ("run", "abc"),
    ],
)
def test_sorted_best_first_and_unknown_last(tmp_path, sort, order):
    write(tmp_path / "a", [3.0] * 4, 0.1, learning_rate=0.1)
    write(tmp_path / "b", [1.0] * 4, 0.9, learning_rate=0.01)
    write(tmp_path / "c", [2.0] * 4, 0.3, learning_rate=0.001)
    write(tmp_path / "d", ["NaN"], learning_rate=9.0)  # one step: a loss that is none, and no speed
    c = compare([read_run(d, 50) for d in find_runs([str(tmp_path)])], sort)
    assert "".join(r.directory.name for r in c.runs) == order + "d"


def test_the_best_are_marked_and_ties_are_none(tmp_path):
    write(tmp_path / "a", [2.0] * 4, 0.1)
    write(tmp_path / "b", [1.0] * 4, 0.1)
    c = compare([read_run(d, 50) for d in find_runs([str(tmp_path)])], "loss")
    assert c.best("loss") == {str(tmp_path / "b")}
    assert c.best("tokens/s") == set()
    assert c.best("steps") == set()


def test_runs_that_broke_off_are_compared_and_said(tmp_path):
    write(tmp_path / "whole", events=[VALIDATION, MEMORY])
    write(tmp_path / "half", [4.0, "NaN", 2.0], tail='{"step": 3, "lo', steps=1000)
    write(tmp_path / "empty", [])
    (tmp_path / "nothing").mkdir()
    (write(tmp_path / "without") / "config.yaml").unlink()
    (write(tmp_path / "corrupt") / "config.yaml").write_text("model: [")
    text = printed(run=str(tmp_path), output=str(tmp_path / "out.html"))
    said = {line.split()[1].split("/")[-1]: line for line in text.splitlines() if len(line.split()) > 1}
    assert "unfinished: 3 of 1,000 steps" in said["half"]
    assert "1 unreadable line in metrics.jsonl" in said["half"]
    assert "loss not finite at 1 step, first at step 2" in said["half"]
    assert "no validation; no record of peak memory" in said["half"]
    assert "3/1,000" in text
    assert "no step was logged" in said["empty"]
    assert "the run did not start" in said["nothing"]
    assert "no config.yaml" in said["without"]
    assert "config.yaml cannot be read" in said["corrupt"]
    assert said["whole"].split() == [said["whole"].split()[0], "whole"]
    page = (tmp_path / "out.html").read_text()
    for name in ("whole", "half", "without", "corrupt", "empty", "nothing"):
        assert name in page


def test_pipes_in_the_place_of_files_are_not_waited_for(tmp_path):
    write(tmp_path / "whole")
    for name in ("metrics.jsonl", "config.yaml"):
        directory = write(tmp_path / f"without {name}")
        (directory / name).unlink()
        os.mkfifo(directory / name)
    out = printed(run=str(tmp_path))
    assert "metrics.jsonl cannot be read: it is a pipe or a device, and no file" in out
    assert "config.yaml cannot be read" in out


def test_the_page_is_not_written_through_a_link(tmp_path):
    (tmp_path / "key").write_text("secret")
    (write(tmp_path / "run") / "report.html").symlink_to(tmp_path / "key")
    with pytest.raises(ValueError, match=r"report.html is a link, or no file\. Remove it, or give output="):
        printed(run=str(tmp_path / "run"))
    assert (tmp_path / "key").read_text() == "secret"


def test_runs_by_directory_pattern_and_sweep(tmp_path):
    for name in ("sweep/a", "sweep/b", "single", "other"):
        write(tmp_path / name)
    (tmp_path / "sweep" / "multirun.yaml").touch()
    names = lambda *patterns: [str(d.relative_to(tmp_path)) for d in find_runs([str(tmp_path / p) for p in patterns])]
    assert names("sweep", "single", "sweep/b") == ["sweep/a", "sweep/b", "single"]
    assert names("s*") == ["single", "sweep/a", "sweep/b"]
    with pytest.raises(ValueError, match="non\\*': there is no run"):
        names("non*")


@pytest.mark.long
def test_the_table_fits_the_terminal_and_says_what_did_not(tmp_path):
    for t in (1, 2):
        write(tmp_path / str(t), events=[VALIDATION, MEMORY], t=t, learning_rate=t / 1000)
    text = printed(width=60, run=str(tmp_path), output=str(tmp_path / "o.html"))
    table, rest = text.split("Too narrow for: ")
    assert max(len(line.rstrip()) for line in table.splitlines()) <= 60
    assert table.splitlines()[1].split() == ["#", "rate", "mesh.t", "loss", "val", "bits/byte", "tokens/s"]
    assert rest.startswith("ms/step, MFU, memory, steps, time, min, tokens; they are in the file.")
    assert "3.00 GiB" in printed(width=120, run=str(tmp_path), output=str(tmp_path / "o.html"))


def test_memory_that_was_predicted_is_marked(tmp_path):
    write(tmp_path / "run", events=[MEMORY | {"source": "compiler"}])
    text = printed(run=str(tmp_path / "run"), output=str(tmp_path / "o.html"))
    assert "~3.00 GiB" in text
    assert "predicted by the compiler" in text


def test_the_page_is_the_same_for_the_same_runs(tmp_path):
    write(tmp_path / "a", events=[VALIDATION, MEMORY])
    for name in ("first", "second"):
        printed(run=str(tmp_path), output=str(tmp_path / f"{name}.html"))
    assert (tmp_path / "first.html").read_bytes() == (tmp_path / "second.html").read_bytes()


def test_each_run_has_one_colour(tmp_path):
    for i in range(9):
        write(tmp_path / str(i), [4.0 - 0.1 * i] * 4, events=[VALIDATION, MEMORY], learning_rate=(i + 1) / 100)
    c = compare([read_run(d, 50) for d in find_runs([str(tmp_path)])], "learning_rate")
    panels = panels_of(c, 50)
    lines = [trace["line"] for trace in panels[0].traces if trace["mode"] == "lines"]
    style = lambda line: (line["color"], line["dash"])
    assert len({style(line) for line in lines}) == 9
    for panel in panels:
        assert panel.is_shared
        for trace in panel.traces:
            of_run = lines[int(trace["legendgroup"])]
            assert (
                trace["name"]
                == f"{int(trace['legendgroup']) + 1}  learning_rate={(int(trace['legendgroup']) + 1) / 100:g}"
            )
            if trace["mode"] == "markers":
                assert trace["marker"]["color"] == of_run["color"]
            else:
                assert style(trace["line"]) == style(of_run)


def test_equal_curves_can_both_be_seen(tmp_path):
    for t in (1, 2):
        write(tmp_path / str(t), t=t)
    c = compare([read_run(d, 50) for d in find_runs([str(tmp_path)])], "mesh.t")
    dashes = [trace["line"]["dash"] for trace in panels_of(c, 50)[0].traces if "opacity" not in trace]
    assert dashes == ["solid", "dash"]


def test_the_circle_of_a_validation_is_at_the_end_of_its_step(tmp_path):
    for name in "ab":
        write(tmp_path / name, seconds=2.0, events=[VALIDATION | {"step": 2}])
    c = compare([read_run(d, 50) for d in find_runs([str(tmp_path)])], "run")
    circles = [trace for panel in panels_of(c, 50)[:3] for trace in panel.traces if trace.get("mode") == "markers"]
    assert [tuple(trace["x"]) for trace in circles] == [(3,), (3,), (30,), (30,), (4,), (4,)]  # steps, tokens, seconds
    assert [tuple(trace["y"]) for trace in circles] == [(1.5,)] * 6


def test_metrics_of_the_users_own_are_plotted(tmp_path):
    for name, layers in (("a", 2), ("b", 3)):
        lines = [
            {"step": i, "loss": 3 - i, "noise": 0.5 * i, "stream": [i + j for j in range(layers)]} for i in range(4)
        ]
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    c = compare([read_run(d, 50) for d in find_runs([str(tmp_path)])], "loss")
    *_, noise, stream = panels_of(c, 50)
    assert [panel.title for panel in (noise, stream)] == ["noise", "stream: mean of 3 layers, and each"]
    assert [len(panel.traces) for panel in (noise, stream)] == [2, 1 + 2 + 1 + 3]
    np.testing.assert_array_equal(noise.traces[0]["y"], [0, 0.5, 1, 1.5])
    mean, *of_layers = stream.traces[3:]
    np.testing.assert_array_equal(mean["y"], [1, 2, 3, 4])
    np.testing.assert_array_equal(of_layers[2]["y"], [2, 3, 4, 5])
    assert of_layers[2]["name"] == "2  b, layer 2"


@pytest.mark.long
def test_many_runs_and_long_ones(tmp_path):
    for i in range(12):
        write(tmp_path / str(i), list(3 + np.exp(-np.arange(4000 + 100 * i) / 500)), 0.1, learning_rate=i / 100)
    text = printed(run=str(tmp_path), sort="learning_rate", output=str(tmp_path / "o.html"))
    assert len([line for line in text.splitlines() if "0:0" in line]) == 12
    c = compare([read_run(d, 50) for d in find_runs([str(tmp_path)])], "loss")
    lines = [trace for panel in panels_of(c, 50)[:3] for trace in panel.traces]
    assert len(lines) == 36
    assert {len(line["x"]) for line in lines} == {1500}  # thinned out, ends kept
    assert max(line["x"][-1] for line in lines[:12]) == 5100


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"run": None}, "run is None; give directories"),
        ({"sort": "speed"}, "sort is 'speed'; the columns are loss, tokens/s"),
        ({"output": "x.txt"}, r"output is x.txt; its name must end in .html"),
        ({"smooth": 0}, "smooth is 0; it must be at least 1"),
    ],
)
def test_wrong_settings_are_refused(tmp_path, settings, message):
    write(tmp_path / "run")
    with pytest.raises(ValueError, match=message):
        show_report(Config(**{"run": str(tmp_path / "run")} | settings))


def test_nothing_to_compare(tmp_path):
    write(tmp_path / "run", [])
    write(tmp_path / "other", [])
    with pytest.raises(ValueError, match=r"(?s)no run has done a step.*run: no step was logged"):
        show_report(Config(run=str(tmp_path)))


def test_the_command_line(tmp_path):
    write(tmp_path / "runs" / "a", learning_rate=0.1)
    write(tmp_path / "runs" / "b", [math.e] * 4)
    program = [sys.executable, "-m", "tools.report", "run=[runs/a,runs/b]", "sort=tokens/s"]
    done = subprocess.run(program, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Report: runs/report.html" in done.stdout
    assert sorted(p.name for p in tmp_path.rglob("*")) == sorted(
        ["runs", "a", "b", "report.html", *["config.yaml", "metrics.jsonl"] * 2]
    )


EVIL = "\x1b]0;owned\x07\u202e[bold]<script>alert(1)</script>\"'&"
"""What a terminal, rich and a browser would each obey."""


def test_names_of_strangers_are_text_on_the_terminal_and_in_the_files(tmp_path):
    runs = []
    for i, value in enumerate((EVIL, "plain")):
        name = EVIL.replace("/", "") if i == 0 else "b"
        runs.append(write(tmp_path / name, events=[VALIDATION | {EVIL: EVIL}]))
        saved = json.loads((runs[-1] / "config.yaml").read_text())
        saved["model"][EVIL] = value
        (runs[-1] / "config.yaml").write_text(json.dumps(saved))
        lines = [json.loads(line) for line in (runs[-1] / "metrics.jsonl").read_text().splitlines()]
        lines = [line | {EVIL: 1.0} if "event" not in line else line for line in lines]
        (runs[-1] / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = printed(run=str(tmp_path), output=str(tmp_path / "a.html"))
    assert not {"\x1b", "\x07", "\u202e"} & set(text)
    assert "[bold]<script>" in text
    page = (tmp_path / "a.html").read_text()
    shown = page[page.index("</head>") :] if "</head>" in page else page
    assert "<script>alert" not in shown
    assert f'"{EVIL}' not in shown


END = {"event": "end", "state": "stopped", "why": "SIGTERM"}
BUBBLE = {"event": "step_bubble", "step_bubble": 0.25}


def test_what_is_known_after_the_end_does_not_hide_it(tmp_path):
    r = read_run(write(tmp_path / "stopped", events=[END, BUBBLE], steps=9), 50)
    assert (r.state, r.why, r.values["bubble"]) == ("stopped", "SIGTERM", 0.25)
    resumed = write(tmp_path / "resumed", events=[END, BUBBLE], steps=9, tail='{"step": 4, "loss": 0.5}\n')
    assert read_run(resumed, 50).state == "broke off"
