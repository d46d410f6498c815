import json
import math
import re
import time
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from shardlib.layers import LayerMetrics
from shardwright.program.files import read_records
from shardwright.program.flops import PeakFlops, Speed
from shardwright.run.metrics import RunLog, check_metrics
from tests.support.full_disk import files_of_at_most

SPEED = Speed(64, 1000, PeakFlops(1e9, "test"))


def run_log(directory, **changes):
    arguments = {"total_steps": 25, "start_step": 0, "speed": SPEED, "print_every": 10}
    return RunLog(directory, **arguments | changes)


def metrics(loss):
    return {"learning_rate": jnp.float32(3e-4), "loss": jnp.float32(loss)}


def read(directory):
    def reject(constant):
        raise ValueError(f"{constant} is no JSON")

    return [
        json.loads(line, parse_constant=reject)
        for line in (directory / "metrics.jsonl").read_text().splitlines()
    ]


def test_a_line_a_step(tmp_path):
    with run_log(tmp_path) as log:
        for step in range(5):
            log.add_wait(0.001 * step)
            log.log(step, metrics(1 / (step + 3)))
            time.sleep(0.01)
    first, *others = read(tmp_path)
    assert first.pop("unix_time") == pytest.approx(time.time(), abs=60)
    assert first == {
        "step": 1,
        "learning_rate": float(np.float32(3e-4)),
        "loss": float(np.float32(1 / 3)),
        "tokens": 64,
    }
    assert [line["step"] for line in others] == [2, 3, 4, 5]
    for step, line in enumerate(others, start=2):
        assert line["loss"] == float(np.float32(1 / (step + 2)))
        assert line["tokens"] == 64 * step
        assert line["tokens_per_second"] == pytest.approx(64 / line["seconds"])
        assert line["mfu"] == pytest.approx(64 / line["seconds"] * 1000 / 1e9)
    assert all(line["seconds"] >= 0.01 for line in others[:3])
    # A step ends while the next one, which has its batch, has been dispatched; the last one ends at
    # once.
    assert [line["data_seconds"] for line in others] == pytest.approx([0.002, 0.003, 0.004, 0])


def test_targets_are_logged_where_they_are_fewer_and_no_loss_without_any(tmp_path, capsys):
    seen = []
    with run_log(
        tmp_path, total_steps=3, print_every=1, see=lambda step, values: seen.append({*values})
    ) as log:
        for step, targets in enumerate((64, 16, 0)):
            log.log(step, metrics(2.0) | {"targets": jnp.float32(targets)})
    lines = read(tmp_path)
    assert [line.get("targets") for line in lines] == [None, 16, 0]
    assert (
        ["loss" in line for line in lines]
        == ["loss" in values for values in seen]
        == [True, True, False]
    )
    first, second, third = capsys.readouterr().out.splitlines()
    assert "targets" not in first
    assert all(text in second for text in ("loss 2 ", "62% targets")), "64 and 16 of 64"
    assert all(text in third for text in ("no targets", "42% targets"))
    assert "loss" not in third


def test_vectors_are_lists_and_layers_have_their_names(tmp_path, capsys):
    layers = LayerMetrics(jnp.float32([[1, 2, 3], [4, jnp.nan, 6]]), ("size", "slope"))
    with run_log(tmp_path, total_steps=1) as log:
        log.log(
            0, metrics(2.0) | {"each": jnp.float32([0.5, 1.5]), "layers": layers, "nothing": None}
        )
    (line,) = read(tmp_path)
    assert [line[name] for name in ("each", "size", "slope")] == [
        [0.5, 1.5],
        [1, 2, 3],
        [4, "NaN", 6],
    ]
    assert not {"layers", "nothing"} & line.keys()
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("each 1 ", "size 2 ", "slope nan"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mfu": jnp.float32(1)}, "use the name 'mfu', which is taken by the log or the step"),
        (
            {"table": jnp.zeros((2, 3))},
            r"the step's Metrics have table of shape \(2, 3\); the log takes scalars and",
        ),
        (
            {"layers": LayerMetrics(jnp.zeros((1, 2)), ("loss",))},
            "the LayerAux of a layer, use the name 'loss', which",
        ),
    ],
)
def test_what_the_log_cannot_write_is_refused(given, message):
    check_metrics(SimpleNamespace(**metrics(1.0), layers=None))
    with pytest.raises(ValueError, match=message):
        check_metrics(SimpleNamespace(**metrics(1.0) | {"layers": None} | given))


def test_resuming_replaces_later_and_torn_lines(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    earlier = [{"step": step, "loss": 1.5} for step in range(1, 5)] + [
        {"step": 4, "event": "validation"}
    ]
    later = [{"step": 5, "loss": 7.0}, {"step": 5, "event": "validation"}, {"step": 6, "loss": 7.0}]
    path.write_text(
        "".join(json.dumps(line) + "\n" for line in earlier + later) + '{"step": 6, "lo'
    )
    with run_log(tmp_path, start_step=4) as log:
        assert read(tmp_path) == earlier
        log.log(4, metrics(2.0))
    assert [line["step"] for line in read_records(path)] == [1, 2, 3, 4, 4, 5]
    assert read(tmp_path)[-1]["loss"] == 2.0
    assert (
        "4 lines, torn or of steps to be redone, are moved to metrics.jsonl.left"
        in capsys.readouterr().out
    )
    assert (tmp_path / "metrics.jsonl.left").read_text().endswith('{"step": 6, "lo\n')
    assert {file.name for file in tmp_path.iterdir()} == {"metrics.jsonl", "metrics.jsonl.left"}


def test_events_are_told_apart(tmp_path, capsys):
    with run_log(tmp_path, print_every=1) as log:
        log.log(0, metrics(2.0))
        log.log_event(0, "validation", {"loss": jnp.float32(1.25), "tokens": 640, "of": "tiny"})
        log.log(1, metrics(1.0))
    lines = read(tmp_path)
    assert lines[1].pop("unix_time") >= lines[0]["unix_time"]
    assert lines[1] == {"step": 1, "event": "validation", "loss": 1.25, "tokens": 640, "of": "tiny"}
    assert ["event" in line for line in lines] == [False, True, False]
    printed = capsys.readouterr().out
    assert "step 1  validation  loss 1.25  tokens 640  of tiny\n" in printed
    assert "step 2/25  ETA 0:00:00  loss 1  " in printed


def test_an_interval_with_compiling_is_not_expected_again(tmp_path, monkeypatch, capsys):
    """Steps end after these seconds; the second began with compiling.

    The step in progress comes on top.
    """
    ends = iter([100.0, 103.0, 104.0, 105.0])
    monkeypatch.setattr("shardwright.run.metrics.time.perf_counter", lambda: next(ends))
    with run_log(tmp_path, print_every=1) as log:
        expected = []
        for step in range(4):
            log.log(step, metrics(1.0))
            expected.append(log.seconds_of(2))
        log.flush()
        assert expected == [0, 0, 9, 3]
        assert log.seconds_of(2) == 2
    etas = re.findall(r"ETA (\S+)", capsys.readouterr().out)
    assert etas == ["0:01:09", "0:00:22", "0:00:21"], "3 s for 23 steps, then 1 s for 22 and 21"


def test_losses_that_are_not_finite_are_valid_json_and_written_one_step_late(tmp_path):
    with run_log(tmp_path) as log:
        for step, loss in enumerate([1.0, math.nan, math.inf, -math.inf]):
            log.log(step, metrics(loss))
            assert len(read(tmp_path)) == step
    assert [line["loss"] for line in read(tmp_path)] == [1.0, "NaN", "Infinity", "-Infinity"]


def test_printed_lines(tmp_path, capsys):
    with run_log(tmp_path) as log:
        for step in range(25):
            log.log(step, metrics(step + 0.123))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["1/25", "10/25", "20/25", "25/25"]
    assert lines[0] == "step 1/25  loss 0.123  learning_rate 0.0003"
    assert re.match(
        r"step 10/25  ETA 0:00:00  loss 9.123  speed [\d,]+ tokens/s  MFU .*%  learning_rate "
        r"0.0003$",
        lines[1],
    )


# ---- files that cannot be written ----------------------------------------------------------------


def test_lines_wait_while_the_disk_is_full_and_none_is_torn(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    with run_log(tmp_path) as log:
        log.log(0, metrics(3.0))
        log.log(1, metrics(2.0))
        log.sync()
        size = path.stat().st_size
        with files_of_at_most(size + 10):
            log.log(2, metrics(1.0))
            log.log(3, metrics(0.5))
            assert path.stat().st_size == size + 10
            with pytest.raises(OSError, match=f"^{path} cannot be written: File too large$"):
                log.sync()
        log.log_event(3, "sample", {"text": "x"})
        log.sync()
    assert [line["step"] for line in read(tmp_path)] == [1, 2, 3, 4, 4]
    said = [line for line in capsys.readouterr().out.splitlines() if str(path) in line]
    assert said == [
        f"WARNING: {path} cannot be written: File too large; its lines are kept in memory",
        f"{path} can be written again; nothing is lost",
    ]


@pytest.mark.parametrize("why", ["File too large", "No such file or directory"])
def test_a_log_that_cannot_be_finished_says_so(tmp_path, why, capsys):
    log = run_log(tmp_path)
    log.log(0, metrics(3.0))
    if why != "File too large":
        (tmp_path / "metrics.jsonl").unlink()
        log.log(1, metrics(3.0))
    expected = (
        rf"^{tmp_path}/metrics.jsonl cannot be written: {why}; the metrics of the last "
        rf"steps are lost\.$"
    )
    with files_of_at_most(10), pytest.raises(OSError, match=expected):
        log.close()
    log.close()  # nothing more to close
