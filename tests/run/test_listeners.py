"""The listeners of a run: in which order they are told what, and what each of them prints and
logs.
"""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from shardwright.program.resume import Validated, best_of
from shardwright.run.listeners import (
    Ending,
    Listener,
    Listeners,
    Report,
    Skips,
    Summary,
    Validation,
)
from shardwright.run.listeners import checkpoints as saving_module
from shardwright.run.listeners import validation as validation_module
from tests.support import tiny

pytestmark = pytest.mark.quick


class Told(Listener):
    """Records its calls in a list that several share, and fails in the call `fails`."""

    def __init__(self, name: str, told: list, fails: str = ""):
        self._name, self._told, self._fails = name, told, fails

    def _add(self, event):
        self._told.append((self._name, event))
        if event == self._fails:
            raise OSError("no space")

    def begin(self, run):
        self._add("begin")

    def end(self, how):
        self._add(how.state)

    def close(self):
        self._add("close")


def test_listeners_begin_and_end_in_order_and_those_that_began_are_closed():
    told: list = []
    run: Any = None
    with Listeners([Told("a", told), Told("b", told)]) as listeners:
        listeners.begin(run)
        listeners.end(Ending("finished"))
    assert told[:4] == [(name, event) for event in ("begin", "finished") for name in "ab"]
    assert told[4:] == [("b", "close"), ("a", "close")]
    told.clear()
    failing = Listeners([Told("a", told), Told("b", told, "begin")])
    with pytest.raises(OSError, match="no space"), failing:
        failing.begin(run)
    assert told == [("a", "begin"), ("b", "begin"), ("a", "close")]


def test_an_error_in_the_end_of_one_reaches_the_others_as_the_only_end():
    told: list = []
    fail = {"b": "finished", "c": "failed"}
    listeners = Listeners([Told(name, told, fail.get(name, "")) for name in "abcd"])
    with pytest.raises(OSError, match="no space"):
        listeners.end(Ending("finished"))
    listeners.end(Ending("failed", "OSError: no space"))  # what a run does then
    assert told == [("a", "finished"), ("b", "finished"), ("c", "failed"), ("d", "failed")]


@pytest.fixture
def run(tmp_path) -> Any:
    """What listeners read of a run that has done 3 of 3 steps."""
    events: list = []

    def add(step, event, values):
        events.append((step, event, values))

    speed = SimpleNamespace(tokens_after=lambda step: 10 * (step + 1))
    c = tiny.config(tiny.model(), steps=3, max_skipped=None, report=False)
    return SimpleNamespace(
        config=c,
        whole=c,
        directory=tmp_path,
        loader=SimpleNamespace(documents=lambda batch: {"a": [(batch, batch + 1)]}),
        log=SimpleNamespace(add_event=add, log_event=add, speed=speed),
        events=events,
        skips={},
        start=0,
        done=3,
        total=3,
        end_step=3,
        is_over=True,
        compiled_s=2.0,
        found=SimpleNamespace(best=None),
        batch_of=lambda step: step + 5,
        checkpoints=SimpleNamespace(store=SimpleNamespace(url="here/checkpoints")),
    )


def test_a_skipped_step_is_told_with_its_documents(run, capsys):
    skips = Skips()
    skips.begin(run)
    skips.see(0, {"loss": 3.0, "grad_norm": 1.0})
    skips.see(1, {"loss": "NaN", "grad_norm": 1.0, "skipped": True})
    why = {"why": "loss NaN, gradient norm 1", "batch": 6, "documents": {"a": [(6, 7)]}}
    assert run.events == [(1, "skipped", why)]
    assert (
        "skipped step 2: loss NaN, gradient norm 1; batch 6, documents a 6 to 7"
        in capsys.readouterr().out
    )
    skips.end(Ending("stopped", "SIGTERM"))
    assert capsys.readouterr().out == ""
    skips.end(Ending("finished"))
    assert capsys.readouterr().out.startswith("skipped    1 steps")


def test_a_spike_is_told_with_how_to_replay_it(run, capsys):
    """Steps without targets are neither spikes nor skipped."""
    run.config.training.spike_factor, run.config.training.max_skipped = 1.5, 1
    skips = Skips()
    skips.begin(run)
    for step in range(19):
        skips.see(step, {"loss": 3.0, "grad_norm": 1.0} if step % 3 else {"grad_norm": 0.0})
    assert run.events == []
    skips.see(19, {"loss": 9.0, "grad_norm": 1.0})
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("spike")]
    assert line.startswith("spike at step 20: loss 9")
    assert line.endswith(f"python -m tools.replay run={run.directory} step=20 shows them")
    ((step, event, values),) = run.events
    assert (step, event, values["batch"]) == (19, "spike", 24)


def test_the_summary_of_a_finished_run(run, capsys, monkeypatch):
    monkeypatch.setattr(
        "shardwright.run.listeners.standard.peak_memory",
        lambda program, metrics: {"peak_memory_bytes": 3 * 2**20, "source": "device"},
    )
    run.program = None
    run.listeners = Listeners([Validation()])
    run.listeners.of(Validation).last = Validated(3, 1.25, 7)
    summary = Summary()
    summary.begin(run)
    for step in range(3):
        summary.after(step, None, None)
        summary.see(step, {"loss": 3.0 - step})
    assert run.events == [(0, "memory", {"peak_memory_bytes": 3 * 2**20, "source": "device"})]
    summary.end(Ending("failed", "no memory"))
    assert capsys.readouterr().out == ""
    summary.end(Ending("finished"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("time       0:00:0")
    assert lines[1:] == [
        "loss       1.000 nats a token at the last step",
        "validation 1.250 nats a token",
        "memory     3.0 MiB, the peak of the fullest device",
        "checkpoint here/checkpoints/0000000003",
    ]


@pytest.mark.parametrize("state", ["finished", "stopped", "paused"])
def test_how_a_run_ends_is_its_last_event(run, capsys, state):
    (run.directory / "metrics.jsonl").write_text("")
    report = Report()
    report.begin(run)
    report.end(Ending(state, "SIGTERM" * (state == "stopped")))
    report.close()
    expected = {"state": state} | ({"why": "SIGTERM"} if state == "stopped" else {})
    assert run.events == ([] if state == "paused" else [(2, "end", expected)])
    assert ("metrics.jsonl" in capsys.readouterr().out) == (state != "paused")


@pytest.mark.parametrize(
    ("ended", "writes"),
    [
        (None, True),  # killed before its end
        ("finished", False),
        ("stopped", True),  # with exports missing, which are made now
    ],
)
def test_a_start_with_nothing_left_to_do_writes_the_end_that_is_missing(run, ended, writes):
    lines = ['{"step": 3, "unix_time": 1.0}']
    if ended:
        lines.append(f'{{"step": 3, "unix_time": 1.0, "event": "end", "state": "{ended}"}}')
    (run.directory / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    run.start = 3
    report = Report()
    report.begin(run)
    report.end(Ending("finished"))
    assert run.events == ([(2, "end", {"state": "finished"})] if writes else [])


class Checkpointer:
    """Records what is saved; the first `fails` saves fail."""

    saving = None
    store = SimpleNamespace(url="here/checkpoints")

    def __init__(self, fails: int = 0):
        self.saved, self.fails, self.complete = [], fails, []

    def steps(self):
        return self.complete

    def wait(self):
        if self.saved and self.fails:
            self.fails -= 1
            raise OSError("the disk is full.")

    def save(self, done, state, metadata, orders, check):
        check()
        self.saved.append((done, metadata["skips"], self.held()))
        self.metadata = metadata

    def rotate(self):
        pass


@pytest.fixture
def saving(run, monkeypatch):
    """Starts Checkpoints that save to a Checkpointer, with settings of training; gives both."""
    monkeypatch.setattr(saving_module, "AGAIN_S", 0.0)
    monkeypatch.setattr(saving_module, "stack_orders", lambda placement, kind, state: {})

    def start(*, fails=0, **training):
        for name, value in training.items():
            setattr(run.config.training, name, value)
        run.log.note = run.log.sync = run.signal = lambda *_: None
        run.record, run.carried, run.provenance = {}, {}, {}
        run.placement = run.stopped_by = None
        run.checkpoints = Checkpointer(fails)
        run.clock = SimpleNamespace(seconds=7.0)
        run.loader.state = lambda batch: {"batch": batch}
        run.listeners = Listeners([Skips(), Validation()])
        checkpoints = saving_module.Checkpoints()
        for listener in (*run.listeners, checkpoints):
            listener.begin(run)
        return checkpoints, run.checkpoints

    return start


def after(run, checkpoints, done):
    run.done = done
    run.is_over = done == 3
    run.due = lambda interval: run.is_over or (interval is not None and done % interval == 0)
    checkpoints.after(done - 1, {}, None)


def test_older_checkpoints_stay_after_a_skipped_step(run, saving):
    checkpoints, written = saving(checkpoint_interval=1)
    written.complete = [7, 8]
    after(run, checkpoints, 1)
    for listener in run.listeners:
        listener.see(0, {"loss": "NaN", "skipped": True})
    after(run, checkpoints, 2)
    for listener in run.listeners:
        listener.see(1, {"loss": 3.0})
    after(run, checkpoints, 3)
    assert [held for *_, held in written.saved] == [[], [7, 8], []]
    assert written.saved[1][1] != written.saved[0][1], "the checkpoint knows of the skipped step"


def test_a_save_that_fails_is_told_and_the_last_one_is_tried_again(run, saving, capsys):
    checkpoints, written = saving(fails=2, checkpoint_interval=1)
    for done in (1, 2, 3):
        after(run, checkpoints, done)
    assert [done for done, *_ in written.saved] == [1, 2, 3]
    told = capsys.readouterr().out
    assert told.count("WARNING: the disk is full. Training continues") == 2
    checkpoints, written = saving(fails=2, checkpoint_interval=1)
    after(run, checkpoints, 3)
    assert [done for done, *_ in written.saved] == [3, 3, 3]
    assert capsys.readouterr().out.count("Retrying.") == 2
    checkpoints, written = saving(fails=3, checkpoint_interval=1)
    with pytest.raises(OSError, match=r"the disk is full\. 3 checkpoints in a row were not saved"):
        after(run, checkpoints, 3)


@pytest.mark.parametrize(
    ("known", "fails", "saved", "best"),
    [
        (None, 0, [1, 2], (2, 2.0)),
        (Validated(0, 1.5, 7), 0, [], (0, 1.5)),  # a resumed run knows the best one before
        (Validated(0, 1.5, 8), 0, [1, 2], (2, 2.0)),  # whose loss was that of other text
        (None, 1, [1, 2, 4], (4, 2.5)),  # 2 is not written, so the next better one than 1 is
    ],
)
def test_the_checkpoint_with_the_best_validation_is_saved_and_held(
    run, saving, capsys, known, fails, saved, best
):
    """Losses after steps 1 to 4. The best is one that is complete."""
    checkpoints, written = saving(checkpoint_interval=100, keep_best=True)
    written.complete = [0] if known else []
    checkpoints._best = known
    validation = run.listeners.of(Validation)
    for done, loss in enumerate((3.0, 2.0, np.nan, 2.5), start=1):
        validation.last = Validated(done, loss, 7)
        run.done, run.is_over, run.due = done, False, lambda interval: False
        checkpoints.after(done - 1, {}, None)
        written.fails = fails if done == 2 else 0
        checkpoints._has_ended("Training continues.")
        written.complete = [0, *(x for x, *_ in written.saved if not (fails and x == 2))]
    assert [done for done, *_ in written.saved] == saved
    if saved:
        assert written.metadata["best"] == {"step": best[0], "loss": best[1], "text": 7}
    assert written.held() == [best[0]]
    checkpoints.end(Ending("finished"))
    told = capsys.readouterr().out
    assert f"best       {best[0]:010} of here/checkpoints: validation loss {best[1]:g}" in told
    assert ("best       no longer 0000000000, validation loss 1.5: " in told) == (
        known is not None and known.text == 8
    )


def test_a_best_that_is_gone_or_of_another_program_is_dropped(capsys):
    checkpoints: Any = SimpleNamespace(steps=lambda: [3, 5])
    about = {"source": {}, "traced_by": "jax", "programs": {"evaluation": "same"}}
    assert best_of(checkpoints, {}, about) is None
    for best, program, dropped in [
        (3, "same", ""),
        (2, "same", "best       no longer 0000000002, validation loss 2: it is gone"),
        (3, "other", "best       no longer 0000000003, "),
    ]:
        metadata = {"provenance": about, "best": {"step": best, "loss": 2.0, "text": 7}}
        found = best_of(checkpoints, metadata, about | {"programs": {"evaluation": program}})
        assert found == (None if dropped else Validated(3, 2.0, 7))
        told = capsys.readouterr().out
        assert told.startswith(dropped) if dropped else not told


def test_a_validation_that_fails_is_an_event(run, monkeypatch):
    run.log.flush = lambda: None
    run.due = lambda interval, epochs: True
    run.validation = object()
    losses = {"loss": 2.0, "checksum": 7}, {"loss": 1.5, "checksum": 7, "bits_per_byte": 0.5}
    evaluated = Mock(side_effect=[*losses, OSError("no file\nmore")])
    monkeypatch.setattr(validation_module, "evaluate", evaluated)
    validation = validation_module.Validation()
    validation._step = None
    validation.begin(run)
    validation.after(1, SimpleNamespace(weights=1, average=2), None)
    validation.after(2, SimpleNamespace(weights=1, average=None), None)
    values = {"loss": 2.0, "average_loss": 1.5, "average_bits_per_byte": 0.5}
    assert run.events == [
        (1, "validation", values),
        (2, "validation_failed", {"why": "OSError: no file"}),
    ]
