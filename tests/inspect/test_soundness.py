"""What is proved once is proved again when it may differ."""

import importlib
import os
import shutil
import sys
from pathlib import Path

import jax
import pytest

import train
from shardwright.inspect import causality, soundness
from shardwright.run import provenance
from shardwright.run.background import run_at_low_priority
from shardwright.run.step import Step
from tests.support import tiny

pytestmark = pytest.mark.quick
MODULE = """
import runpy
import sys

import train


class Model(train.Llama):
    def layer(self, x, *rest):
        return super().layer(x * FACTOR, *rest)


FACTOR = 1.0
"""
BESIDE = MODULE.replace("FACTOR = 1.0", "FACTOR = runpy.run_path(__file__.replace('_model', '_number'))['FACTOR']")
LATER = MODULE.replace("FACTOR, *rest", "__import__('a_number').FACTOR, *rest")


@pytest.fixture
def records(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "kept_programs", lambda name: tmp_path / "kept" / name)
    return tmp_path / "kept"


def loaded(folder: Path, texts: dict[str, str]) -> type:
    """The class Model that a start loads from these files. It sees their last edit."""
    for name, text in texts.items():
        (folder / name).write_text(text)
        sys.modules.pop(name.removesuffix(".py"), None)
    provenance.bytes_of.cache_clear()
    importlib.invalidate_caches()
    return importlib.import_module("a_model").Model


WAYS = ("edited once loaded", "a stale .pyc", "runpy.run_path", "an installed package", "imported as it is traced")


@pytest.mark.parametrize("way", WAYS)
def test_a_proof_is_kept_for_what_ran_whatever_file_it_came_from(tmp_path, monkeypatch, records, way):
    """A start loads 1.0. The next one loads 0.5, and the files of both are the same when their source is hashed."""
    folder = tmp_path / ("site-packages" if way == "an installed package" else "mine")
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "dont_write_bytecode", way != "a stale .pyc")
    text = {"runpy.run_path": BESIDE, "imported as it is traced": LATER}.get(way, MODULE)
    texts = {"a_model.py": text, "a_number.py": "FACTOR = 1.0"}
    now = {name: text.replace("1.0", "0.5") for name, text in texts.items()}
    checks, found = [], lambda *_: checks.append(1) or []
    monkeypatch.setattr(soundness, "find_unsound", found)
    monkeypatch.setattr(soundness, "NAMES", ("evaluation",))
    monkeypatch.setattr(causality, "_findings", found)

    def start(Model: type) -> int:
        """How many proofs a start makes."""
        checks.clear()
        c = tiny.config(tiny.model(layers=1))
        step, source = Step(c, Model(c.model), tiny.mesh("one device"), train.SPEC), provenance.source_of()
        soundness.check_steps(step, source)
        causality.check_causal(step, source)
        sys.modules.pop("a_number", None)
        return len(checks)

    Model = loaded(folder, texts)
    if way == "edited once loaded":
        (folder / "a_model.py").write_text(now["a_model.py"])
    if way == "a stale .pyc":
        for text in (texts["a_model.py"], now["a_model.py"]):
            (folder / "a_model.py").write_text(text)
            os.utime(folder / "a_model.py", ns=(0, 0))
            del sys.modules["a_model"]
            Model = importlib.import_module("a_model").Model
        assert Model.layer.__globals__["FACTOR"] == 1.0
    assert [start(Model), start(Model)] == [2, 0]
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    assert start(loaded(folder, now)) == 2


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
        found = soundness.find_unsound(Step(c, PerDevice(c.model), jax.sharding.get_mesh(), train.SPEC))
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
