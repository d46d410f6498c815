"""bench.faults: each fault has its place and its test, and one that its test misses is named."""

import ast
import dataclasses

import pytest

from bench import faults as program
from tests.support.edits import FAULTS, ROOT, faults

ONE = next(fault for fault in faults() if fault.test.startswith("tests/flat_tokens/"))


@pytest.mark.quick
@pytest.mark.parametrize("fault", faults(), ids=str)
def test_a_fault_has_its_place_and_its_test(fault):
    """Else correct it in faults.toml, or remove it."""
    (changed,) = fault.files.values()
    (change,) = fault.changes
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse((ROOT / change.file).read_text()))
    file, _, name = fault.test.partition("::")
    assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text()


@pytest.mark.quick
def test_the_list_is_sorted():
    names = [fault.id for fault in faults()]
    assert names == sorted(names), FAULTS


@pytest.mark.long
def test_a_fault_that_its_test_misses_is_named(monkeypatch, capsys):
    (change,) = ONE.changes
    harmless = dataclasses.replace(
        ONE, id="missed", changes=(dataclasses.replace(change, put=change.find),)
    )
    monkeypatch.setattr(program, "faults", lambda: [ONE, harmless])
    assert program.main([]) == 1
    assert capsys.readouterr().out.endswith("2 faults planted, 1 caught; missed:\n    missed\n")


@pytest.mark.long
def test_tests_that_fail_without_a_fault_end_it(monkeypatch, capsys):
    broken = dataclasses.replace(
        ONE, test="tests/flat_tokens/test_flat_tokens.py::test_that_is_not_there"
    )
    monkeypatch.setattr(program, "faults", lambda: [broken])
    assert program.main([]) == 1
    assert capsys.readouterr().out.startswith("Tests fail without a fault:\n")
