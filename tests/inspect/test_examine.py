"""What a run has examined before its first step: all that it may run, as it runs."""

import contextlib
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import jax
import pytest

from shardlib.shardtypes import ShardError
from shardwright import testing
from shardwright.inspect import examine, soundness
from shardwright.inspect.statistics.rerun import saved_points
from shardwright.modeling.model import load_model
from shardwright.program.step import Step, trace_step
from tests.support import examples, tiny
from tests.support.edits import Change, place_of, saved_in
from tests.support.recipes import SOURCE, module_of

DOWN = 'shardops.matmul("B/b L/c F/t, F/t M -> B/b L/c M +t", hidden, w_down)'
LOSS = "cross_entropy(logits, targets.ids, config.z_loss)"
EDITS = {
    "chunk": Change(LOSS, "FOUND / jnp.max(FOUND)", within="training_loss"),
    "saved": Change(DOWN, "save_for_backward(FOUND)", within="Llama.mlp"),
}


@contextlib.contextmanager
def edited(edit: str, mesh: str) -> Iterator[ModuleType]:
    with module_of(EDITS[edit].apply(SOURCE)) as trainer, jax.set_mesh(tiny.mesh(mesh)):
        yield trainer


def step_of(trainer: ModuleType, **training) -> Step:
    c = tiny.config(tiny.model(module="changed_train", layers=1), **training)
    return trace_step(c, load_model(c.model), spec=trainer.SPEC)


@pytest.mark.long
def test_the_loss_in_chunks_is_proved_on_one_device_too(monkeypatch):
    monkeypatch.setattr(examine, "describe_causality", lambda step: "")
    monkeypatch.setattr(soundness, "NAMES", ("training",))
    with edited("chunk", "one device") as trainer, pytest.raises(ShardError):
        examine.check([step_of(trainer, loss_chunk=8)])


def test_the_causality_of_later_settings_is_checked_before_the_first_step(monkeypatch):
    asked, checked = [], []
    verdict = SimpleNamespace(how="")
    monkeypatch.setattr(examine, "check_steps", lambda step: checked.append(step) or verdict)
    monkeypatch.setattr(examine, "describe_causality", lambda step: asked.append(step) or "")
    with jax.set_mesh(tiny.mesh("one device")):
        steps = [tiny.step(tiny.config(seq_len=length)) for length in (16, 32)]
        examine.check(steps)
    assert asked == checked == steps


@pytest.mark.long
def test_a_saved_partial_sum_has_no_statistics():
    with edited("saved", "d=4 t=2") as trainer:
        names = [point.name for point in saved_points(step_of(trainer).jaxpr)]
        assert {*saved_in("Llama.mlp")} <= {*names}
        assert place_of("Llama.mlp", DOWN)[0] not in names


@pytest.mark.long
def test_the_example_of_assert_sound(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names = {"assert_sound": testing.assert_sound}
    assert examples.run("assert_sound", testing.assert_sound.__doc__, names) == 2
