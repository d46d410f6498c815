"""The listeners of a run: what they save, hold, print and log."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from shardwright.program.resume import Validated, best_of
from shardwright.run.listeners import Listeners, Skips, Validation
from shardwright.run.listeners import checkpoints as saving_module
from shardwright.run.listeners import validation as validation_module
from tests.support import tiny

pytestmark = pytest.mark.quick


@pytest.fixture
def run(tmp_path) -> Any:
    """What listeners read of a run."""
    events: list = []

    def add(step, event, values):
        events.append((step, event, values))

    c = tiny.config(tiny.model(), steps=3, max_skipped=None)
    return SimpleNamespace(
        config=c,
        whole=c,
        directory=tmp_path,
        loader=SimpleNamespace(documents=lambda batch: {"a": [(batch, batch + 1)]}),
        log=SimpleNamespace(add_event=add, log_event=add),
        events=events,
        skips={},
        start=0,
        done=3,
        found=SimpleNamespace(best=None),
        batch_of=lambda step: step + 5,
        checkpoints=SimpleNamespace(store=SimpleNamespace(url="here/checkpoints")),
    )


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
    run.listeners.of(Skips).see(0, {"loss": "NaN", "skipped": True})
    after(run, checkpoints, 2)
    run.listeners.of(Skips).see(1, {"loss": 3.0})
    after(run, checkpoints, 3)
    assert [held for *_, held in written.saved] == [[], [7, 8], []]
    assert written.saved[1][1] != written.saved[0][1], "the checkpoint knows of the skipped step"


@pytest.mark.parametrize(
    ("known", "fails", "saved", "best"),
    [
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
    is_other = known is not None and known.text == 8
    assert ("best       no longer 0000000000" in capsys.readouterr().out) == is_other


def test_a_best_that_is_gone_or_of_another_program_is_dropped():
    checkpoints: Any = SimpleNamespace(steps=lambda: [3, 5])
    about = {"source": {}, "traced_by": "jax", "programs": {"evaluation": "same"}}
    for best, program, is_kept in [(3, "same", True), (2, "same", False), (3, "other", False)]:
        metadata = {"provenance": about, "best": {"step": best, "loss": 2.0, "text": 7}}
        found = best_of(checkpoints, metadata, about | {"programs": {"evaluation": program}})
        assert found == (Validated(3, 2.0, 7) if is_kept else None)


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
