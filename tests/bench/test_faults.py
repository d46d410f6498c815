"""The faults that bench.faults plants: each has its place and its test."""

import ast

import pytest

from tests.support.edits import ROOT, faults


@pytest.mark.quick
@pytest.mark.parametrize("fault", faults(), ids=str)
def test_a_fault_has_its_place_and_its_test(fault):
    """Else correct it in faults.toml, or remove it."""
    (changed,) = fault.files.values()
    (change,) = fault.changes
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse((ROOT / change.file).read_text()))
    file, _, name = fault.test.partition("::")
    assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text()
