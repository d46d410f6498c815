"""What is proved once is proved again when it may differ."""

import sys

import pytest

from shardwright.run import soundness
from shardwright.run.beside import run_beside

pytestmark = pytest.mark.quick
MODULE = "class Model:\n    pass\n"


def test_a_model_of_an_installed_package_is_checked_again_when_it_changes(tmp_path, monkeypatch):
    """Its file is none of those that are hashed as source."""
    file = tmp_path / "a_model_of_a_package.py"
    file.write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(soundness, "kept_programs", lambda name: tmp_path / "kept" / name)
    model = __import__(file.stem).Model()
    checks = []

    def check() -> int:
        soundness.refuse(lambda: checks.append(1) or [], {"train.py": "a hash"}, soundness.text_of(model))
        return len(checks)

    assert [check(), check()] == [1, 1]
    file.write_text(MODULE + "# sharded in another way\n")
    assert [check(), check()] == [2, 2]
    monkeypatch.delitem(sys.modules, file.stem)
    file.unlink()
    assert [check(), check()] == [3, 4]


def test_programs_beside_the_training_find_its_packages(tmp_path, monkeypatch):
    """Where they come by PYTHONPATH, as by the modules of a cluster."""
    (tmp_path / "a_program_beside.py").write_text("print('found')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run_beside("a_program_beside", timeout=60) == "found\n"
