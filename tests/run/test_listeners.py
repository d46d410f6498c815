"""The listeners of a run: in which order they are told what, and what each of them prints and logs."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.run import forecast
from shardwright.run.listeners import STANDARD, Ending, Forecast, Listener, Listeners, Report, Skips, Summary
from tests.support import tiny

pytestmark = pytest.mark.quick


class Told(Listener):
    """Keeps what it is told in a list that several share."""

    def __init__(self, name: str, told: list, fails: str = ""):
        self._name, self._told, self._fails = name, told, fails

    def begin(self, run):
        if self._fails:
            raise ValueError(self._fails)
        self._told.append((self._name, "begin"))

    def before(self, step, state, batch):
        self._told.append((self._name, "before", step))

    def after(self, step, metrics):
        self._told.append((self._name, "after", step))

    def see(self, step, values):
        self._told.append((self._name, "see", step))

    def wait(self):
        self._told.append((self._name, "wait"))

    def end(self, how):
        self._told.append((self._name, how.state))

    def close(self):
        self._told.append((self._name, "close"))


def test_listeners_are_told_in_the_order_of_their_list():
    told: list = []
    with Listeners([Told("a", told), Told("b", told)]) as listeners:
        run: Any = None
        listeners.begin(run)
        listeners.before(0, None, None)
        listeners.after(0, None)
        listeners.see(0, {})
        listeners.wait()
        listeners.end(Ending("finished"))
    events = [("begin",), ("before", 0), ("after", 0), ("see", 0), ("wait",), ("finished",)]
    assert told[:12] == [(name, *event) for event in events for name in "ab"]
    assert told[12:] == [("b", "close"), ("a", "close")]


def test_only_listeners_that_have_begun_are_closed():
    told: list = []
    run: Any = None
    with (
        pytest.raises(ValueError, match="no such file"),
        Listeners([Told("a", told), Told("b", told, "no such file")]) as x,
    ):
        x.begin(run)
    assert told == [("a", "begin"), ("a", "close")]


@pytest.fixture
def run(tmp_path) -> Any:
    """What listeners read of a run that has done 3 of 3 steps."""
    events: list = []
    log = SimpleNamespace(
        add_event=lambda step, event, values: events.append((step, event, values)),
        log_event=lambda step, event, values: events.append((step, event, values)),
        speed=SimpleNamespace(tokens_after=lambda step: 10 * (step + 1)),
    )
    c = tiny.config(tiny.model(), steps=3, max_skipped=None, report=False)
    loader = SimpleNamespace(documents=lambda batch: {"a": [(batch, batch + 1)]})
    found = SimpleNamespace(config=c, whole=c, directory=tmp_path, loader=loader, log=log, events=events, skips={})
    found.__dict__.update(
        start=0, done=3, total=3, end_step=3, is_over=True, compiled_s=2.0, checkpoints="here/checkpoints"
    )
    found.batch_of = lambda step: step + 5
    return found


def test_a_skipped_step_is_told_with_its_documents(run, capsys):
    skips = Skips()
    skips.begin(run)
    skips.see(0, {"loss": 3.0, "grad_norm": 1.0})
    skips.see(1, {"loss": "NaN", "grad_norm": 1.0, "skipped": True})
    why = {"why": "loss NaN, gradient norm 1", "batch": 6, "documents": {"a": [(6, 7)]}}
    assert run.events == [(1, "skipped", why)]
    assert "skipped step 2: loss NaN, gradient norm 1; batch 6, documents a 6 to 7" in capsys.readouterr().out
    skips.end(Ending("stopped", "SIGTERM"))
    assert capsys.readouterr().out == ""
    skips.end(Ending("finished"))
    assert capsys.readouterr().out.startswith("skipped    1 steps")


def test_a_run_of_skipped_steps_alone_does_not_finish(run):
    skips = Skips()
    skips.begin(run)
    for step in range(3):
        skips.see(step, {"loss": "NaN", "skipped": True})
    with pytest.raises(FloatingPointError, match="all 3 steps of this start were skipped"):
        skips.end(Ending("finished"))


def test_the_summary_of_a_finished_run(run, capsys, monkeypatch):
    monkeypatch.setattr("shardwright.run.listeners.peak_memory", lambda program, metrics: {"peak_memory_bytes": 7})
    run.program = None
    summary = Summary()
    summary.begin(run)
    for step in range(3):
        summary.after(step, SimpleNamespace(loss=3.0 - step))
    assert run.events == [(0, "memory", {"peak_memory_bytes": 7})]
    summary.end(Ending("failed", "no memory"))
    assert capsys.readouterr().out == ""
    summary.end(Ending("finished"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("time       0:00:0")
    assert lines[1:] == ["loss       1.000 nats a token at the last step", "checkpoint here/checkpoints/0000000003"]


def test_losses_are_compared_with_their_forecast(run, capsys, monkeypatch):
    bound = forecast.Bound(2.0, 1.5, 2.5)

    class Watch:
        def __init__(self, source, directory, size, tokens, tell):
            self.tell, self.losses = tell, []

        def see(self, step, tokens, loss):
            self.losses.append((tokens, loss))

        def end_part(self):
            self.tell(2, 0, self.losses[-1][1], bound)

    monkeypatch.setattr("shardwright.run.listeners.Watch", Watch)
    monkeypatch.setattr("shardwright.run.listeners.parameters_without_embeddings", lambda model: 1)
    run.config.training.forecast, run.is_over, run.model = "forecast.json", False, None
    compared = Forecast()
    compared.begin(run)
    compared.see(0, {"loss": 3.0})
    compared.end(Ending("finished"))
    assert "is ABOVE its forecast, 1.500 to 2.500" in capsys.readouterr().out
    assert run.events == [(2, "forecast", {"part": 1, "loss": 3.0, "inside": False, "low": 1.5, "high": 2.5})]


@pytest.mark.parametrize("state", ["finished", "stopped", "failed", "paused"])
def test_how_a_run_ends_is_its_last_event(run, capsys, state):
    (run.directory / "metrics.jsonl").write_text("")
    report = Report()
    report.begin(run)
    report.end(Ending(state, "SIGTERM" * (state == "stopped")))
    report.close()
    expected = {"state": state} | ({"why": "SIGTERM"} if state == "stopped" else {})
    assert run.events == ([] if state == "paused" else [(2, "end", expected)])
    assert ("metrics.jsonl" in capsys.readouterr().out) == (state != "paused")


def test_the_standard_listeners_need_nothing_to_be_made():
    assert [type(listener()) for listener in STANDARD] == [*STANDARD]
    json.dumps([listener.__doc__ for listener in STANDARD])
