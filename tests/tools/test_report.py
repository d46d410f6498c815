"""tools.report on metrics written by hand, whose figures are known: the table, the plots, several
runs.
"""

import json
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


def write_lines(directory: Path, lines: list[dict], tail: str = "") -> None:
    directory.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (directory / "metrics.jsonl").write_text(text + tail)


def lines_of(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def write(
    directory: Path, losses=(4.0, 3.0, 2.0, 1.0), seconds=0.5, events=(), tail="", **settings
) -> Path:
    """A run of ten tokens a step; the first step has no time, as after any start."""
    lines = []
    for step, loss in enumerate(losses, 1):
        line = {"step": step, "loss": loss, "tokens": 10 * step}
        if step > 1:
            line |= {"seconds": seconds, "tokens_per_second": 10 / seconds, "mfu": 0.2 / seconds}
        lines.append(line)
    write_lines(directory, lines + [{"step": len(losses)} | event for event in events], tail)
    config = {
        "model": {"vocab": 64, "layers": 2},
        "optimizer": {"learning_rate": settings.pop("learning_rate", 0.001)},
        "mesh": {"d": -1, "t": settings.pop("t", 1)},
        "training": {"batch_size": 2, "seq_len": 5, "steps": 4} | settings,
        "paths": {"root_working_dir": "runs", "model_name": "its own"},
    }
    (directory / "config.yaml").write_text(json.dumps(config))
    return directory


def compared(directory: Path, sort: str | None = "loss"):
    return compare_runs([read_run(run) for run in find_runs([str(directory)])], sort)


def printed(width: int = 200, **settings) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        show_report(Settings(**settings), console)
    return console.export_text()


# ---- figures -------------------------------------------------------------------------------------


def test_the_figures_are_those_of_the_metrics(tmp_path):
    r = read_run(write(tmp_path / "run", seconds=0.5, events=[MEMORY, VALIDATION, END, BUBBLE]))
    figures = {"steps": 4, "tokens": 40, "ms/step": 500, "tokens/s": 20, "MFU": 0.4, "time": 2}
    # A tenth of four steps is less than one: nothing is averaged.
    known = {"loss": 1.0, "val": 1.5, "bits/byte": 0.75, "memory": 3 * 2**30, "idle": 0.25}
    assert r.values == figures | known
    assert (r.notes, r.total_steps, r.state, r.why) == ([], 4, "stopped", "SIGTERM")
    tail = '{"step": 5, "loss": 0.5}\n'
    resumed = write(tmp_path / "resumed", events=[END, BUBBLE], steps=9, tail=tail)
    assert read_run(resumed).state == "broke off"


def test_slow_steps_and_validations_do_not_count_as_speed(tmp_path):
    """The loss is the mean of the last tenth."""
    lines = lines_of(write(tmp_path, losses=[*[3.0] * 19, 2.0, 1.0]))
    lines[3]["seconds"] = 9.0  # as a profiled step
    lines[10]["seconds"] = 60.0  # as a step with a validation beside it
    for line in lines[1:]:
        line["data_seconds"] = line["seconds"] / 4  # unlike these, it counts all time
    write_lines(tmp_path, lines)
    values = read_run(tmp_path).values
    assert values["data"] == pytest.approx(0.25)
    assert (values["ms/step"], values["time"], values["loss"]) == (500, 21 * 0.5, 1.5)


def test_time_on_the_clock_is_that_of_all_starts_with_compiling(tmp_path):
    start, compiled = {"event": "start"}, lambda seconds: {"event": "compiled", "seconds": seconds}
    first = [{"step": 0, "unix_time": 100} | start, {"step": 0, "unix_time": 115} | compiled(12)]
    first += [{"step": n, "loss": 1.0, "tokens": n, "unix_time": 115 + n} for n in (1, 2)]
    second = [{"step": 2, "unix_time": 500} | start, {"step": 2, "unix_time": 505.5} | compiled(3)]
    second.append({"step": 3, "loss": 1.0, "tokens": 3, "unix_time": 507})
    write_lines(tmp_path, first + second)
    values = read_run(tmp_path).values
    assert (values["wall"], values["compile"], values["steps"]) == (17 + 7, 15, 3)


# ---- several runs --------------------------------------------------------------------------------


def test_sorted_best_first_and_unknown_last(tmp_path):
    write(tmp_path / "a", [3.0] * 4, 0.1, learning_rate=0.1)
    write(tmp_path / "b", [1.0] * 4, 0.9, learning_rate=0.01)
    write(tmp_path / "c", [2.0] * 4, 0.3, learning_rate=0.001)
    write(tmp_path / "d", ["NaN"], learning_rate=9.0)  # one step: a loss that is none, and no speed
    for sort, order in (("loss", "bcad"), ("tokens/s", "acbd"), ("time", "acbd"), ("run", "abcd")):
        assert "".join(r.directory.name for r in compared(tmp_path, sort).runs) == order, sort


@pytest.mark.parametrize(
    ("nats", "first", "order"), [(2.0, "loss", "ba"), (3.0, "bits/byte", "ab")]
)
def test_runs_with_other_tokens_are_compared_by_bits(tmp_path, nats, first, order):
    """Run a has more nats a token, and fewer bits a byte if its tokens are longer."""
    bits = 0.75 if nats == 2 else 1.5
    write(tmp_path / "a", (4.0, 2.0), events=[VALIDATION | {"loss": nats, "bits_per_byte": 1}])
    write(tmp_path / "b", (4.0, 1.0), events=[VALIDATION | {"bits_per_byte": bits}], steps=9)
    c = compared(tmp_path, None)
    assert c.metrics[0] == first
    assert "".join(map(c.name, c.runs)) == order
    wide = [panel.title.partition(",")[0] for panel in panels_of(c) if panel.wide]
    assert wide == ["Validation loss" if first == "bits/byte" else "Loss"]
    assert [c.heading(name) for name in c.differing] == ["training.steps"], "steps is a metric"


SCREEN = """\
#  learning_rate  training.steps   loss    val  bits/byte  tokens/s    MFU
1          0.002               4  1.000  1.500      0.750        20  40.0%
2          0.001            1000  2.000      –          –        20  40.0%
3              ?               ?  5.000      –          –        20  40.0%
4          0.001               4      –      –          –         –      –
5              ?               ?      –      –          –         –      –

#     memory    idle    steps  tokens     time
1  ~3.00 GiB  25.00%        4      40  0:00:02
2          –       –  3/1,000      30  0:00:02
3          –       –        4      40  0:00:02
4          –       –        –       –        –
5          –       –        –       –        –

loss: mean of the last steps, at most 50
time: of the steps, without start and pauses

Runs in {0}:
  1  whole
  2  half
     1 unreadable line in metrics.jsonl
     unfinished: 3 of 1,000 steps
     loss not finite at 1 step, first at step 2
  3  without
     no config.yaml
  4  empty
     no step was logged in metrics.jsonl
  5  nothing
     no config.yaml
     no metrics.jsonl: the run did not start

Report: {0}/out.html
"""


def test_runs_that_broke_off_are_compared_on_80_columns(tmp_path):
    predicted = MEMORY | {"source": "compiler"}
    write(tmp_path / "whole", events=[VALIDATION, predicted, BUBBLE, END], learning_rate=0.002)
    write(tmp_path / "half", [4.0, "NaN", 2.0], tail='{"step": 3, "lo', steps=1000)
    write(tmp_path / "empty", [])
    (tmp_path / "nothing").mkdir()
    (write(tmp_path / "without", [5.0] * 4) / "config.yaml").unlink()
    text = printed(80, run=str(tmp_path), output=str(tmp_path / "out.html"))
    assert text == SCREEN.format(tmp_path)


# ---- plots ---------------------------------------------------------------------------------------


def test_averages_against_a_loop():
    losses = np.random.default_rng(0).normal(3, 1, 57)
    ends = [i + min(i, 2) + 1 for i in range(57)]
    expected = [losses[max(0, i - 2) : end].mean() for i, end in enumerate(ends)]
    np.testing.assert_allclose(averaged(losses), expected, rtol=1e-12)
