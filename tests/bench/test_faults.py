"""bench.faults: each fault has its place and its test, and one that its test misses is named."""

import ast
import types

import pytest

from bench import faults as program
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


@pytest.mark.parametrize(
    ("broken", "status", "said"),
    [
        (False, 1, "2 faults planted, 1 caught; missed:\n    {}\n"),
        (True, 1, "Tests fail without a fault:\n\n"),
    ],
)
def test_a_fault_that_its_test_misses_and_tests_that_fail_without_one_are_named(
    monkeypatch, capsys, broken, status, said
):
    caught, missed = faults()[:2]

    def run_tests(copy, tests, files=None, patience=None):
        failed = broken if files is None else files == caught.files
        return types.SimpleNamespace(returncode=int(failed), stdout="", stderr="")

    monkeypatch.setattr(program, "faults", lambda: [caught, missed])
    monkeypatch.setattr(program, "copied", lambda path: path)
    monkeypatch.setattr(program, "run_tests", run_tests)
    assert program.main([]) == status
    assert capsys.readouterr().out.endswith(said.format(missed))
