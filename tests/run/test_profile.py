import gzip
import json
import time
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardwright.inspect.examine import read_trace
from shardwright.program.flops import PeakFlops, Speed
from shardwright.run.listeners import profile
from shardwright.run.metrics import RunLog

SPEED = Speed(100, 1e6, PeakFlops(1e9, "the source of the peak"))


@jax.jit
def profiled_step(x):
    return jnp.tanh(x @ x) / 8


@pytest.fixture(autouse=True)
def _of_this_program(monkeypatch):
    monkeypatch.setattr(profile, "MODULE", "jit_profiled_step")
    monkeypatch.setattr(profile.examine, "read_trace", read_trace)  # which profiler_of sets


def read_at_once(*_):
    """In place of the program that reads a trace, which takes seconds to start."""
    return {"step_bubble": 0.25, "gap_seconds": 1.0, "step_seconds": 4.0}, ""


def profiler_of(log: RunLog, read, settle=lambda: None) -> profile.Profile:
    """The profiler of a run, which reads traces with `read`."""
    run: Any = SimpleNamespace(
        log=log, directory=log.directory, start=log.start_step, end_step=log.total_steps
    )
    run.settle, run.hlo = settle, None
    profile.examine.read_trace = read
    found = profile.Profile()
    found.begin(run)
    return found


def train(directory, steps, done=None, fetch_s=0.0, start=0, sample_after=None, read=read_trace):
    with RunLog(directory, total_steps=start + steps, start_step=start, speed=SPEED) as log:
        profiler = profiler_of(log, read)
        x = jax.block_until_ready(profiled_step(jnp.ones((64, 64))))
        for i in range(steps if done is None else done):
            profiler.before(start + i, None, None)
            time.sleep(fetch_s)
            with jax.profiler.TraceAnnotation(f"this is step {i}"):
                x = profiled_step(x)
            profiler.after(start + i, None, x)
            if i == sample_after:
                log.log_event(start + i, "sample", {"text": "a"})
        profiler.close()
    found = "perfetto_trace.json.gz" if read is read_trace else "*.xplane.pb"
    return next(directory.glob(f"plugins/profile/*/{found}"), None)


def events(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_the_third_to_the_sixth_step_are_traced_and_the_time_between_them(tmp_path, capsys):
    trace = train(tmp_path, 8, fetch_s=0.2, start=10)
    assert trace.parent.parent == tmp_path / "plugins" / "profile"
    written = json.loads(gzip.decompress(trace.read_bytes()))
    assert "metadata" not in written
    names = {event.get("name", "") for event in written["traceEvents"]}
    steps = {name for name in names if name.startswith("this is step")}
    assert steps == {f"this is step {i}" for i in (2, 3, 4, 5)}
    assert not any(name.startswith("$") for name in names), "frames of Python"
    (found,) = events(tmp_path)
    about = found["event"], found["step"], found["steps"], found["devices"]
    assert about == ("step_bubble", 16, 4, 1)
    assert 0.2 <= found["gap_seconds"] < min(0.6, found["step_seconds"])
    assert found["step_bubble"] == pytest.approx(found["gap_seconds"] / found["step_seconds"])
    gap, step = (1000 * found[name] for name in ("gap_seconds", "step_seconds"))
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"idle       {100 * found['step_bubble']:.2f}% of the time: devices wait between steps, "
        f"{gap:.2f} of {step:.1f} ms"
    )


def test_a_run_that_ends_within_the_profile(tmp_path, capsys):
    assert train(tmp_path, 9, done=3, read=read_at_once) is None
    assert (
        capsys.readouterr().out
        == "profile: the run ended within the profiled steps, so there is no measurement\n"
    )
    assert train(
        tmp_path / "next", 1, read=read_at_once
    ).is_file()  # the trace was ended, and a short run profiles its last steps


def test_what_stops_the_training_among_the_steps_is_no_bubble(tmp_path, capsys):
    for after, among in ((1, False), (2, True)):
        directory = tmp_path / str(after)
        train(directory, 8, sample_after=after, read=read_at_once)
        told = sorted(event["event"] for event in events(directory))
        assert told == (["sample"] if among else ["sample", "step_bubble"])
        line = "idle       not measured, because training paused during these steps for: sample"
        assert (line in capsys.readouterr().out.splitlines()) == among
