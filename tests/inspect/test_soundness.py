"""What the proof of a step says, and what runs beside a training."""

import jax
import pytest

import train
from shardwright.inspect import soundness
from shardwright.run.step import Step
from tests.support import tiny

pytestmark = pytest.mark.quick


class PerDevice(train.Llama):
    """Multiplies by the number of sequences on a device."""

    def layer(self, x, *rest):
        return super().layer(x * x.shape[0], *rest)


@pytest.mark.parametrize(
    ("mesh", "attention", "traced"),
    [
        ("d=4 t=2", "einsum", ""),
        ("d=4 t=2", "blockwise", "einsum attention"),
        pytest.param("p=2 d=2", "blockwise", "einsum attention, layers in order", marks=pytest.mark.long),
    ],
)
def test_a_finding_says_in_which_form_the_step_was_traced(mesh, attention, traced, monkeypatch):
    monkeypatch.setattr(soundness, "NAMES", ("evaluation",))
    c = tiny.config(tiny.model(layers=2), attention=attention, microbatches=2)
    with jax.set_mesh(tiny.mesh(mesh)):
        found = soundness.find_unsound(Step(c, PerDevice(c.model), jax.sharding.get_mesh(), train.SPEC))
    assert found
    assert {str(x).partition("traced with: ")[2] for x in found} == {traced}


@pytest.mark.parametrize(
    ("head", "body"),
    [
        ("import jax as j", "return j.device_count()"),
        ("", "from jax import device_count\n        return device_count()"),
        ("import jax\nN: int = jax.device_count()", "return N"),
        ("import jax\nN, M = jax.local_device_count(), 1", "return N"),
        ("import jax\nN = jax.device_count()", None),
    ],
)
def test_questions_about_the_machine_are_found_however_they_are_written(tmp_path, monkeypatch, head, body):
    """A number that no step reads is none of them."""
    name = f"a_model_that_asks_{abs(hash((head, body)))}"
    (tmp_path / f"{name}.py").write_text(
        f"{head}\n\n\nclass Model:\n    def layer(self):\n        {body or 'return 1'}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    found = [str(finding) for finding in soundness._machines(__import__(name).Model)]
    assert bool(found) == (body is not None)
    assert all("device_count is the same on all meshes" in text for text in found)
