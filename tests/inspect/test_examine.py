"""What a run has examined before its first step: all that it may run, as it runs."""

from types import ModuleType, SimpleNamespace

import jax
import pytest

from shardlib.shardtypes import ShardError
from shardwright import testing
from shardwright.inspect import examine, soundness
from shardwright.modeling.model import load_model
from shardwright.program.step import Step, trace_step
from tests.support import examples, tiny
from tests.support.edits import Change
from tests.support.recipes import SOURCE, module_of

pytestmark = pytest.mark.usefixtures("not_remembered")

LOSS = "cross_entropy(logits, targets.ids, config.z_loss)"
OVER_ITS_LARGEST = Change(LOSS, "FOUND / jnp.max(FOUND)", within="training_loss")


def step_of(trainer: ModuleType, **training) -> Step:
    c = tiny.config(tiny.model(module="changed_train", layers=1), **training)
    return trace_step(c, load_model(c.model), spec=trainer.SPEC)


@pytest.mark.long
def test_the_loss_in_chunks_is_proved_on_one_device_too(monkeypatch):
    monkeypatch.setattr(examine, "describe_causality", lambda step: "")
    monkeypatch.setattr(soundness, "NAMES", ("training",))
    source = OVER_ITS_LARGEST.apply(SOURCE)
    with module_of(source) as trainer, jax.set_mesh(tiny.mesh("one device")):
        step = step_of(trainer, loss_chunk=8)
        with pytest.raises(ShardError):
            examine.check([step])


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
def test_the_example_of_assert_sound(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names = {"assert_sound": testing.assert_sound}
    assert examples.run("assert_sound", testing.assert_sound.__doc__, names) == 2
