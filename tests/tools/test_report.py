"""tools.report on metrics written by hand, whose figures are known: the table, the plots, several
runs, Markdown.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from shardwright.tools.report.__main__ import Settings, show_report
from shardwright.tools.report.comparing import compare_runs
from shardwright.tools.report.plots import averaged, panels_of
from shardwright.tools.report.reading import find_runs, read_run

VALIDATION = {"event": "validation", "loss": 1.5, "bits_per_byte": 0.75}
MEMORY = {"event": "memory", "peak_memory_bytes": 3 * 2**30, "source": "device"}
END = {"event": "end", "state": "stopped", "why": "SIGTERM"}
BUBBLE = {"event": "step_bubble", "step_bubble": 0.25}


def config(**training) -> dict:
    training = {"batch_size": 2, "seq_len": 5, "steps": 4} | training
    rate = training.pop("learning_rate", 0.001)
    return {
        "model": {"vocab": 64, "layers": 2},
        "optimizer": {"learning_rate": rate, "warmup_steps": 1},
        "mesh": {"r": 1, "d": -1, "t": training.pop("t", 1)},
        "data": {"filespec": "data.zarr"},
        "training": training,
        "paths": {"root_working_dir": "runs", "model_name": "its own"},
    }


def write_lines(directory: Path, lines: list[dict], tail: str = "") -> None:
    (directory / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + tail
    )


def write(
    directory: Path, losses=(4.0, 3.0, 2.0, 1.0), seconds=0.5, events=(), tail="", **settings
) -> Path:
    """A run of ten tokens a step; the first step has no time, as after any start."""
    directory.mkdir(parents=True)
    lines = []
    for step, loss in enumerate(losses, 1):
        line = {"step": step, "loss": loss, "tokens": 10 * step}
        if step > 1:
            line |= {"seconds": seconds, "tokens_per_second": 10 / seconds, "mfu": 0.2 / seconds}
        lines.append(line)
    write_lines(directory, lines + [{"step": len(losses)} | event for event in events], tail)
    (directory / "config.yaml").write_text(json.dumps(config(**settings)))
    return directory


def compared(directory: Path, sort: str | None = "loss"):
    return compare_runs([read_run(run) for run in find_runs([str(directory)])], sort)


def printed(width: int = 200, **settings) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        show_report(Settings(**settings), console)
    return console.export_text()


def test_the_figures_are_those_of_the_metrics(tmp_path):
    r = read_run(write(tmp_path / "run", seconds=0.5, events=[MEMORY, VALIDATION, END, BUBBLE]))
    figures = {"steps": 4, "tokens": 40, "ms/step": 500, "tokens/s": 20, "MFU": 0.4, "time": 2}
    # A tenth of four steps is less than one: nothing is averaged.
    known = {"loss": 1.0, "val": 1.5, "bits/byte": 0.75, "memory": 3 * 2**30, "idle": 0.25}
    assert r.values == figures | known
    assert (r.notes, r.total_steps, r.state, r.why) == ([], 4, "stopped", "SIGTERM")
    resumed = write(
        tmp_path / "resumed", events=[END, BUBBLE], steps=9, tail='{"step": 5, "loss": 0.5}\n'
    )
    assert read_run(resumed).state == "broke off"


def test_steps_without_targets_have_no_loss_and_no_note(tmp_path):
    directory = write(tmp_path / "run", losses=(4.0, 3.0, 2.0, 1.0), events=[END])
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    for i in (0, 3):
        del lines[i]["loss"]
        lines[i]["targets"] = 0
    write_lines(directory, lines)
    r = read_run(directory)
    assert (r.values["loss"], r.notes) == (2.0, []), "of the last step that has one"
    lines[1]["loss"] = "NaN"
    write_lines(directory, lines)
    assert read_run(directory).notes == ["loss not finite at 1 step, first at step 2"]
    write_lines(directory, [{k: x for k, x in line.items() if k != "loss"} for line in lines])
    assert np.isnan(read_run(directory).values["loss"])


def test_slow_steps_and_validations_do_not_count_as_speed(tmp_path):
    directory = write(tmp_path / "run", losses=[3.0] * 21)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    lines[3]["seconds"] = 9.0  # as a profiled step
    lines[10]["seconds"] = 60.0  # as a step with a validation beside it
    for line in lines[1:]:
        line["data_seconds"] = line["seconds"] / 4  # unlike these, it counts all time
    write_lines(directory, [*lines, {"step": 11, "event": "validation", "loss": 3.5}])
    values = read_run(directory).values
    assert values["data"] == pytest.approx(0.25)
    assert values["ms/step"] == 500
    assert values["time"] == 21 * 0.5


def test_time_on_the_clock_is_that_of_all_starts_with_compiling(tmp_path):
    start, compiled = {"event": "start"}, lambda seconds: {"event": "compiled", "seconds": seconds}
    first = [{"step": 0, "unix_time": 100} | start, {"step": 0, "unix_time": 115} | compiled(12)]
    first += [{"step": n, "loss": 1.0, "tokens": n, "unix_time": 115 + n} for n in (1, 2)]
    second = [{"step": 2, "unix_time": 500} | start, {"step": 2, "unix_time": 505.5} | compiled(3)]
    write_lines(
        tmp_path, first + second + [{"step": 3, "loss": 1.0, "tokens": 3, "unix_time": 507}]
    )
    values = read_run(tmp_path).values
    assert (values["wall"], values["compile"], values["steps"]) == (17 + 7, 15, 3)
    text = printed(run=str(tmp_path), output=str(tmp_path / "o.html"))
    assert "0:00:24" in text
    assert "0:00:15" in text


def test_averages_against_a_loop():
    losses = np.random.default_rng(0).normal(3, 1, 57)
    ends = [i + min(i, 2) + 1 for i in range(57)]
    expected = [losses[max(0, i - 2) : end].mean() for i, end in enumerate(ends)]
    np.testing.assert_allclose(averaged(losses), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("sort", "order"), [("loss", "bca"), ("tokens/s", "acb"), ("time", "acb"), ("run", "abc")]
)
def test_sorted_best_first_and_unknown_last(tmp_path, sort, order):
    write(tmp_path / "a", [3.0] * 4, 0.1, learning_rate=0.1)
    write(tmp_path / "b", [1.0] * 4, 0.9, learning_rate=0.01)
    write(tmp_path / "c", [2.0] * 4, 0.3, learning_rate=0.001)
    write(tmp_path / "d", ["NaN"], learning_rate=9.0)  # one step: a loss that is none, and no speed
    c = compared(tmp_path, sort)
    assert "".join(r.directory.name for r in c.runs) == order + "d"


@pytest.mark.parametrize(
    ("nats", "first", "order"), [(2.0, "loss", "ba"), (3.0, "bits/byte", "ab")]
)
def test_runs_with_other_tokens_are_compared_by_bits(tmp_path, nats, first, order):
    """Run a has more nats a token, and fewer bits a byte if its tokens are longer than those
    of b.
    """
    for name, losses, loss in (("a", (4.0, 2.0), nats), ("b", (4.0, 1.0), 1.5)):
        events = [
            VALIDATION
            | {"loss": loss, "bits_per_byte": 1.0 if name == "a" else 0.75 if nats == 2 else 1.5}
        ]
        write(tmp_path / name, losses=losses, events=events, steps=2 if name == "a" else 9)
    c = compared(tmp_path, None)
    assert c.metrics[0] == first
    assert "".join(map(c.name, c.runs)) == order
    wide = [panel.title.partition(",")[0] for panel in panels_of(c) if panel.wide]
    assert wide == ["Validation loss" if first == "bits/byte" else "Loss"]
    assert [c.heading(name) for name in c.differing] == ["training.steps"], "steps is a metric"


def test_runs_that_broke_off_are_compared_and_said(tmp_path):
    write(tmp_path / "whole", events=[VALIDATION, MEMORY | {"source": "compiler"}])
    write(tmp_path / "half", [4.0, "NaN", 2.0], tail='{"step": 3, "lo', steps=1000)
    write(tmp_path / "empty", [])
    (tmp_path / "nothing").mkdir()
    (write(tmp_path / "without") / "config.yaml").unlink()
    text = printed(run=str(tmp_path), output=str(tmp_path / "out.html"))
    runs = re.split(
        r"^ +\d+  ", text.partition("Runs in ")[2].partition("Report:")[0], flags=re.MULTILINE
    )
    said = {run.split()[0].split("/")[-1]: run for run in runs[1:]}
    for name, notes in {
        "half": [
            "unfinished: 3 of 1,000 steps",
            "1 unreadable line",
            "loss not finite at 1 step, first at step 2",
        ],
        "empty": ["no step was logged"],
        "nothing": ["the run did not start"],
        "without": ["no config.yaml"],
    }.items():
        assert all(note in said[name] for note in notes), said[name]
        assert name in (tmp_path / "out.html").read_text()
    assert "3/1,000" in text
    assert "~3.00 GiB" in text  # predicted
    assert said["whole"].split() == ["whole"]


def test_the_page_takes_the_place_of_a_link(tmp_path):
    (tmp_path / "key").write_text("secret")
    (write(tmp_path / "run") / "report.html").symlink_to(tmp_path / "key")
    printed(run=str(tmp_path / "run"))
    assert (tmp_path / "key").read_text() == "secret"
    assert not (tmp_path / "run" / "report.html").is_symlink()


def test_runs_by_directory_pattern_and_sweep(tmp_path):
    for name in ("sweep/a", "sweep/b", "single", "other"):
        write(tmp_path / name)
    (tmp_path / "sweep" / "multirun.yaml").touch()
    for name, target in {"l1": "..", "l2": ".", "latest": "a"}.items():
        # links to directories are not followed
        (tmp_path / "sweep" / name).symlink_to(target)

    def names(*patterns):
        return [
            str(d.relative_to(tmp_path)) for d in find_runs([str(tmp_path / p) for p in patterns])
        ]

    assert names("sweep", "single", "sweep/b") == ["sweep/a", "sweep/b", "single"]
    assert names("s*") == ["single", "sweep/a", "sweep/b"]
    with pytest.raises(ValueError, match="non\\*', which matches no run"):
        names("non*")


def test_tasks_and_the_loss_of_the_average_are_drawn(tmp_path):
    """A failed task is a note, and no curve."""
    events = [
        {"event": "evals", "cloze/accuracy": 0.5},
        {"event": "evals", "failed": "demo: ValueError: no digit"},
    ]
    write(tmp_path / "run", events=[*events, VALIDATION | {"average_loss": 1.25}])
    c = compared(tmp_path, "run")
    traces = {panel.title: panel.traces for panel in panels_of(c)}
    (drawn,) = traces["cloze/accuracy"]
    assert (list(drawn["y"]), list(drawn["meta"]["x"]["steps"])) == ([0.5], [4])
    average = {trace["name"]: trace for trace in traces["Loss, nats a token"]}[
        "validation of the average"
    ]
    assert list(average["y"]) == [1.25]
    assert not {"failed", "unix_time", "evals"} & traces.keys()
    assert (
        "evaluations of tasks failed: 1, the last: demo: ValueError: no digit" in c.only_run.notes
    )


def test_the_circle_of_a_validation_is_at_the_end_of_its_step(tmp_path):
    for name in "ab":
        write(tmp_path / name, seconds=2.0, events=[VALIDATION | {"step": 3}])
    loss, *_ = panels_of(compared(tmp_path, "run"))
    circles = [trace for trace in loss.traces if trace.get("mode") == "markers"]
    at = [{axis: [*x] for axis, x in trace["meta"]["x"].items()} for trace in circles]
    assert at == [{"steps": [3], "tokens": [30], "minutes of training": [4 / 60]}] * 2
    assert [[*trace["y"]] for trace in circles] == [[1.5]] * 2


def test_metrics_of_the_users_own_are_plotted(tmp_path):
    for name, layers in (("a", 2), ("b", 3)):
        (tmp_path / name).mkdir()

        def own(i, layers=layers):
            return {"noise": 0.5 * i, "stream": [i + 2 * j for j in range(layers)]}

        write_lines(tmp_path / name, [{"step": i + 1, "loss": 3 - i} | own(i) for i in range(4)])
    *_, noise, stream = panels_of(compared(tmp_path))
    assert [panel.title for panel in (noise, stream)] == ["noise", "stream"]
    np.testing.assert_array_equal(noise.traces[0]["y"], [0, 0.5, 1, 1.5])
    np.testing.assert_array_equal(stream.traces[0]["y"], [1, 2, 3, 4])  # the mean of its layers
    np.testing.assert_array_equal(stream.traces[2]["y"], [2, 3, 4, 5])


def test_the_learning_rate_is_drawn_as_it_is(tmp_path):
    steps = np.arange(1000)
    drawn = {
        "learning_rate": np.float32(
            np.minimum((steps + 1) / 100, 0.5 + 0.5 * np.cos(np.pi * steps / 1000)) * 3e-4
        ),
        "loss": 3 + np.random.default_rng(0).normal(0, 0.1, 1000),
    }
    write_lines(
        tmp_path,
        [{"step": int(i) + 1} | {name: float(x[i]) for name, x in drawn.items()} for i in steps],
    )
    traces = {panel.title: panel.traces for panel in panels_of(compared(tmp_path))}
    (only,) = traces["Learning rate"]
    np.testing.assert_array_equal(only["y"], drawn["learning_rate"])
    assert len(traces["Loss, nats a token"]) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sort": "speed"}, "sort is 'speed'; it must be one of loss, tokens/s"),
        ({"output": "x.txt"}, r"output is x.txt; its name must end in .html"),
        (
            {"output": "{}/run/metrics.jsonl/x.html"},
            r"x\.html cannot be written: .*\. Give output=<another file>",
        ),
    ],
)
def test_wrong_settings_are_refused(tmp_path, settings, message):
    write(tmp_path / "run")
    with pytest.raises(ValueError, match=message):
        show_report(
            Settings(
                **{
                    key: value.format(tmp_path)
                    for key, value in ({"run": "{}/run"} | settings).items()
                }
            )
        )


EVIL = "\x1b]0;owned\x07\u202e[bold]<script>alert(1)</script>\"'&"
"""What a terminal, rich and a browser would each obey."""


def test_names_of_strangers_are_text_on_the_terminal(tmp_path):
    for name, value in ((EVIL.replace("/", ""), EVIL), ("b", "plain")):
        run = write(tmp_path / name, events=[VALIDATION | {EVIL: EVIL}])
        saved = json.loads((run / "config.yaml").read_text())
        saved["model"][EVIL] = value
        (run / "config.yaml").write_text(json.dumps(saved))
    text = printed(run=str(tmp_path), output=str(tmp_path / "a.html"))
    assert not {"\x1b", "\x07", "\u202e"} & set(text)
    assert "[bold]<script>" in text


def test_no_word_is_broken_at_80_columns_and_each_figure_is_there(tmp_path):
    names = ("d_model", "n_layers", "d_ff", "n_kv")
    for i in range(12):
        run = write(
            tmp_path / str(i),
            learning_rate=(i + 1) / 1000,
            t=i + 1,
            events=[MEMORY, VALIDATION, BUBBLE],
        )
        saved = json.loads((run / "config.yaml").read_text())
        saved["model"] |= dict.fromkeys(names, 1024 * (i + 1))
        (run / "config.yaml").write_text(json.dumps(saved))
    text = printed(80, run=str(tmp_path), output=str(tmp_path / "out.html"))
    table, _, after = text.partition("loss: mean of the last steps")
    assert "time: of the steps" in after
    c = compared(tmp_path)
    assert {*names, "learning_rate", "mesh.t", *c.metrics} == {
        *re.findall(r"[a-zA-Z/_.]{3,}", table)
    } - {"GiB"}
    assert max(map(len, table.splitlines())) <= 80
    assert (
        len(re.findall(r"^12  ", table, re.MULTILINE))
        == len(re.findall(r"^#  ", table, re.MULTILINE))
        > 1
    )


def test_the_page_links_to_the_pages_of_the_runs(tmp_path):
    for name in ("a", "b:c d"):
        write(tmp_path / "runs" / name, learning_rate=len(name))
    (tmp_path / "runs/b:c d/report.html").touch()
    printed(run=str(tmp_path / "runs"), output=str(tmp_path / "elsewhere.html"))
    assert re.findall('<a href="([^#"]+)">', (tmp_path / "elsewhere.html").read_text()) == [
        "runs/b%3Ac%20d/report.html"
    ]


def test_the_last_start_in_the_log_has_the_provenance_though_the_clock_was_set_back(tmp_path):
    run = write(
        tmp_path / "run", events=[{"step": at, "event": "start", "unix_time": 1} for at in (0, 2)]
    )
    for start, at in ((0, "2026-01-02"), (2, "2026-01-01")):
        (run / f"source/{start:010}").mkdir(parents=True)
        (run / f"source/{start:010}/provenance.json").write_text(
            json.dumps({"started": at, "command": [start]})
        )
    assert read_run(run).about["command"] == [2]


def test_exports_are_noted_and_one_that_was_made_later_did_not_fail(tmp_path):
    events = [
        {"step": n, "event": "export_failed", "why": "no space", "unix_time": 1} for n in (1, 2)
    ]
    events += [{"step": n, "event": "export", "path": "exports", "unix_time": 2} for n in (2, 4)]
    notes = read_run(write(tmp_path / "run", events=events)).notes
    assert "exports: 2, the last after step 4" in notes
    assert "exports failed: 1, the last after step 1: no space" in notes
