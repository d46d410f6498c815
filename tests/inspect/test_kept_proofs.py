"""A kept proof passes no other program: here the wrong one differs from the right one on one device only."""

import importlib
import os
import shutil
import sys

import jax
import pytest

import train
from shardlib.parsing import ShardError
from shardwright.inspect import fresh, soundness
from shardwright.run import loaded_code, provenance, schedule
from shardwright.run.step import Step
from tests.support import tiny

RIGHT = """
import runpy

import train
from shardlib import shardops

ONE = 2.0


def factor(one=2.0):
    return 2.0


class Model(train.Llama):
    one = 2.0

    def layer(self, x, *rest):
        return x * factor()
"""
WRONG = RIGHT.replace("return 2.0", "return 2.0 if shardops.axis_size('d') > 1 else 1.0")
BESIDE = RIGHT + "\n\nfactor = runpy.run_path(__file__.replace('_model', '_number'))['factor']\n"
BY_DEFAULT = RIGHT.replace("return 2.0", "return 2.0 if shardops.axis_size('d') > 1 else one")
BY_VALUE = BY_DEFAULT.replace("else one", "else Model.one")


@pytest.fixture
def records(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "kept_programs", lambda name: tmp_path / "kept" / name)
    return tmp_path / "kept"


@pytest.fixture
def start(records, tmp_path, monkeypatch):
    """Starts a run of the model in a file, and returns how many proofs it makes; it raises as a run does."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(soundness, "NAMES", ("evaluation",))
    monkeypatch.setattr(loaded_code, "NAMES", soundness.NAMES)
    monkeypatch.setattr(soundness, "OTHER_VALUES", set())
    monkeypatch.setattr(fresh, "OTHER_VALUES", soundness.OTHER_VALUES)
    proofs, prove = [], soundness.prove
    monkeypatch.setattr(soundness, "prove", lambda *given: proofs.append(1) or prove(*given))

    def start(texts: dict[str, str], then=lambda module: None, folder: str = "") -> int:
        for name, text in texts.items():
            path = tmp_path / folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path / folder))
        sys.modules.pop("a_model", None)
        importlib.invalidate_caches()
        module = importlib.import_module("a_model")
        then(module)
        proofs.clear()
        c = tiny.config(tiny.model(layers=1), attention="einsum")
        with jax.set_mesh(tiny.mesh("d=2")):
            soundness.check_steps(Step(c, module.Model(c.model), jax.sharding.get_mesh(), train.SPEC))
        return len(proofs)

    return start


def rejected(start, *given, match: str = "a number that depends on the mesh", **options) -> None:
    with pytest.raises(ShardError, match=match):
        start(*given, **options)


@pytest.mark.long
@pytest.mark.quick
def test_a_kept_proof_does_not_pass_a_program_that_only_differs_on_one_device(start):
    """The program on the mesh is that of the proof. A comment costs no proof."""
    assert start({"a_model.py": RIGHT}) == 1
    assert start({"a_model.py": f"# a comment\n\n{RIGHT}"}) == 0
    rejected(start, {"a_model.py": WRONG})


@pytest.mark.long
def test_a_kept_proof_does_not_pass_another_file_run_by_runpy(start):
    number = RIGHT.partition("class")[0]
    assert start({"a_model.py": BESIDE, "a_number.py": number}) == 1
    rejected(start, {"a_model.py": BESIDE, "a_number.py": WRONG.partition("class")[0]})


@pytest.mark.long
def test_a_kept_proof_does_not_pass_an_edited_package(start):
    assert start({"a_model.py": RIGHT}, folder="site-packages") == 1
    rejected(start, {"a_model.py": WRONG}, folder="site-packages")


@pytest.mark.long
def test_a_kept_proof_does_not_pass_another_value(start, records, capsys):
    assert start({"a_model.py": BY_VALUE}) == 1
    rejected(start, {"a_model.py": BY_VALUE.replace("one = 2.0", "one = 1.0")})
    capsys.readouterr()
    edited = {"then": lambda module: setattr(module.Model, "one", 1.0)}
    assert start({"a_model.py": BY_VALUE}, **edited) == 1, "the proof is of the file"
    assert "a_model.py has other values when it is imported again" in capsys.readouterr().out
    assert len([*records.glob("*/*")]) == 1, "and not kept"


@pytest.mark.long
def test_functions_that_a_file_no_longer_has_are_not_proved(start, tmp_path):
    """The file is edited between import and proof, or the function changed at run time."""

    def edit(module) -> None:
        (tmp_path / "a_model.py").write_text(RIGHT)

    def change(module) -> None:
        module.factor.__defaults__ = (1.0,)

    match = "a_model.py: its functions are not those that this process loaded"
    rejected(start, {"a_model.py": WRONG}, then=edit, match=match)
    rejected(start, {"a_model.py": WRONG})
    rejected(start, {"a_model.py": BY_DEFAULT}, then=change, match=match)


@pytest.mark.long
def test_a_stale_pyc_keeps_no_proof_for_its_file(start, tmp_path, monkeypatch):
    """Python loads the right text although the file has the wrong one, of equal size and time."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    size = len(WRONG)
    path = tmp_path / "a_model.py"
    for text in (RIGHT.ljust(size, "#"), WRONG):
        path.write_text(text)
        os.utime(path, ns=(0, 0))
        sys.modules.pop("a_model", None)
        importlib.invalidate_caches()
        stale = importlib.import_module("a_model")
    assert stale.factor.__code__.co_consts == (None, 2.0)
    assert start({}) == 1
    shutil.rmtree(tmp_path / "__pycache__")
    rejected(start, {})


def test_hashes_of_plain_programs_are_kept_for_the_code_too(records, tmp_path, monkeypatch):
    """Other code may give the same program on this mesh, and another one on the device of the plain programs."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(loaded_code, "NAMES", ("evaluation",))
    traced, hashed = [], provenance._hashed
    monkeypatch.setattr(provenance, "_hashed", lambda *given: traced.append(1) or hashed(*given))
    c = tiny.config(tiny.model(layers=1), attention="einsum")
    found = []
    for text in (RIGHT, RIGHT, WRONG):
        (tmp_path / "a_model.py").write_text(text)
        sys.modules.pop("a_model", None)
        importlib.invalidate_caches()
        module = importlib.import_module("a_model")
        with jax.set_mesh(tiny.mesh("d=2")):
            step = Step(c, module.Model(c.model), jax.sharding.get_mesh(), train.SPEC)
            found.append((schedule.provenance_of_run(step)["programs"], step.other(name="evaluation").digest))
            assert found[-1][0] == provenance.provenance_of(step)["programs"]
    assert len(traced) == 2 + 3
    (first, on_mesh), again, (other, also_on_mesh) = found
    assert (first, on_mesh) == again
    assert on_mesh == also_on_mesh
    assert first != other


def test_hashes_are_made_again_after_an_error(records, monkeypatch):
    c = tiny.config(tiny.model(layers=1), attention="einsum")
    hashed = provenance._hashed
    with jax.set_mesh(tiny.mesh("d=2")):
        step = tiny.step(c)
        monkeypatch.setattr(provenance, "_hashed", lambda *_: {"programs": {}, "untraced": "MemoryError: once"})
        assert schedule.provenance_of_run(step)["untraced"] == "MemoryError: once"
        monkeypatch.setattr(provenance, "_hashed", hashed)
        assert set(schedule.provenance_of_run(step)["programs"]) == {"training", "evaluation"}
