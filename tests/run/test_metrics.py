import json
import math
import time
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from shardlib.layers import LayerMetrics
from shardwright.program.flops import PeakFlops, Speed
from shardwright.run.metrics import RunLog, check_metrics
from tests.support.full_disk import files_of_at_most

SPEED = Speed(64, 1000, PeakFlops(1e9, "test"))


def run_log(directory, print_every=10):
    return RunLog(directory, total_steps=25, start_step=0, speed=SPEED, print_every=print_every)


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
    loss, rate = float(np.float32(1 / 3)), float(np.float32(3e-4))
    assert first == {"step": 1, "learning_rate": rate, "loss": loss, "tokens": 64}
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


def test_what_the_log_cannot_write_is_refused():
    given = metrics(1.0) | {"layers": None}
    check_metrics(SimpleNamespace(**given))
    with pytest.raises(ValueError, match="use the name 'mfu', which is taken by the log or"):
        check_metrics(SimpleNamespace(**given, mfu=jnp.float32(1)))
    given["layers"] = LayerMetrics(jnp.zeros((1, 2)), ("loss",))
    with pytest.raises(ValueError, match="the LayerAux of a layer, use the name 'loss'"):
        check_metrics(SimpleNamespace(**given))


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


def test_losses_that_are_not_finite_are_valid_json_and_written_one_step_late(tmp_path):
    with run_log(tmp_path) as log:
        for step, loss in enumerate([1.0, math.nan, math.inf, -math.inf]):
            log.log(step, metrics(loss))
            assert len(read(tmp_path)) == step
    assert [line["loss"] for line in read(tmp_path)] == [1.0, "NaN", "Infinity", "-Infinity"]


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


def test_a_log_that_cannot_be_finished_says_so(tmp_path):
    log = run_log(tmp_path)
    log.log(0, metrics(3.0))
    said = "File too large; the metrics of the last steps are lost"
    with files_of_at_most(10), pytest.raises(OSError, match=said):
        log.close()
    log.close()  # nothing more to close
