"""What is proved once is proved again when it may differ."""

import os
import sys

import jax
import pytest
import tiny

import train
from shardwright.inspect import causality, soundness
from shardwright.run import provenance
from shardwright.run.background import run_at_low_priority
from shardwright.run.provenance import bytes_of
from shardwright.run.step import Step

pytestmark = pytest.mark.quick
MODULE = "class Model:\n    c = None\n"


@pytest.mark.parametrize("what", ["the step", "causality"])
def test_a_model_of_an_installed_package_is_checked_again_when_it_changes(tmp_path, monkeypatch, what):
    """Its file is none of those that are hashed as source."""
    file = tmp_path / "a_model_of_a_package.py"
    file.write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(provenance, "kept_programs", lambda name: tmp_path / "kept" / name)
    monkeypatch.setattr(provenance, "own_modules", list)
    checks, c, source = [], tiny.config(), provenance.source_of()
    found = lambda *_: checks.append(1) or []
    monkeypatch.setattr(soundness, "find_unsound", found)
    monkeypatch.setattr(causality, "_findings", found)
    monkeypatch.setattr(Step, "calls", [])
    step = Step(c, __import__(file.stem).Model(), tiny.mesh("one device"), train)

    def check() -> int:
        checks.clear()
        if what == "causality":
            causality.check_causal(step, source)
        else:
            soundness.check_steps(step, source)
        return len(checks)

    assert [check(), check()] == [1, 0]
    file.write_text(MODULE + "# sharded in another way\n")
    assert [check(), check()] == [1, 1], "whether this is what runs is not known"
    bytes_of.cache_clear()  # as another start
    assert [check(), check()] == [1, 0]
    del sys.modules[file.stem]
    file.unlink()
    assert [check(), check()] == [1, 1]


def test_nothing_is_kept_of_a_check_that_imports_more_source(tmp_path, monkeypatch):
    """Such as a helper of a sharded mesh alone: the hashes of the next start do not have it before its check."""
    (tmp_path / "a_helper_of_a_mesh.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(provenance, "kept_programs", lambda name: tmp_path / "kept" / name)
    imported = []
    monkeypatch.setattr(soundness, "find_unsound", lambda _: imported.append(__import__("a_helper_of_a_mesh")) or [])
    with jax.set_mesh(tiny.mesh("d=4 t=2")):
        step, source = tiny.step(tiny.config()), provenance.source_of()
        for known in (source, source):
            soundness.check_steps(step, known)
        assert len(imported) == 2
        for _ in range(2):  # once it is among the source
            soundness.check_steps(step, provenance.source_of())
    assert len(imported) == 3


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
def test_a_finding_says_in_which_form_the_step_was_traced(mesh, attention, traced):
    c = tiny.config(tiny.model(layers=2), attention=attention, microbatches=2)
    with jax.set_mesh(tiny.mesh(mesh)):
        found = soundness.find_unsound(Step(c, PerDevice(c.model), jax.sharding.get_mesh(), train))
    assert found
    assert {str(x).partition("traced with: ")[2] for x in found} == {traced}


def test_programs_beside_the_training_find_its_packages(tmp_path, monkeypatch):
    """Where they come by PYTHONPATH, as by the modules of a cluster."""
    (tmp_path / "a_program_beside.py").write_text("print('found')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run_at_low_priority("a_program_beside") == "found\n"


def test_a_program_beside_gives_way_and_outlives_ctrl_c(tmp_path, monkeypatch):
    """If it had a session of its own, Linux would share the processors equally between it and the training."""
    program = "import os; print(os.getsid(0), os.getpgid(0), os.getpid(), os.nice(0))"
    (tmp_path / "a_patient_program.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    session, group, own, nice = map(int, run_at_low_priority("a_patient_program").split())
    assert (session, group, nice) == (os.getsid(0), own, 19)


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
