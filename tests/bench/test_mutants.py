"""Faults that bench.mutants plants: where they are found, how they are addressed, and what is left out."""

import ast
import dataclasses
import textwrap

import pytest

from bench.mutants.__main__ import LIST
from bench.mutants.faults import Fault, faults, is_one, planted, read_list, write_list
from bench.mutants.trees import failures

pytestmark = pytest.mark.quick
MODULE = textwrap.dedent('''
    """A module."""

    from dataclasses import dataclass

    LIMIT = 1000


    @dataclass(frozen=True)
    class Meter:
        """Counts."""

        total: int = 0

        def add(self, number: "int | None", least: int) -> None:
            """Adds a number."""
            if not number:
                raise ValueError(f"{number + 1} is wrong")
            self.total += min(number, least)
            print("added", number + 1)
            self.room = 2**20

        def read(self, first: int, last: int) -> list:
            return [
                x  # of both
                for x in range(first, last, step=2)
                if x < last and x < last
            ]
''')


def found(module: str = MODULE) -> set[tuple[str, str, str]]:
    return {(fault.kind, fault.source, fault.after) for fault in faults("m.py", module) if is_one(module, fault)}


def test_the_faults_of_a_module():
    """All of them, by hand: nothing in text, messages, annotations, decorators and limits."""
    both = "x < last and x < last"
    assert found() == {
        ("constant", "total: int = 0", "total: int = 1"),
        ("not", "not number", "number"),
        ("statement dropped", 'raise ValueError(f"{number + 1} is wrong")', "pass"),
        ("statement dropped", "self.total += min(number, least)", "pass"),
        ("statement dropped", "self.room = 2**20", "pass"),
        ("plus, minus", "self.total += min(number, least)", "self.total -= min(number, least)"),
        ("function", "self.total += min(number, least)", "self.total += max(number, least)"),
        ("constant", "range(first, last, step=2)", "range(first, last, step=3)"),
        ("keyword dropped", "range(first, last, step=2)", "range(first, last, )"),
        ("comparison", both, "x <= last and x < last"),
        ("comparison", both, "x < last and x <= last"),
        ("and, or", both, "x < last or x < last"),
    }


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("-(-a // b)", "-a // b"),
        ("round_up = (a + 1) // (b * c)", "round_up = -(-(a + 1) // (b * c))"),
        ("y = one if several else another", "one if not several else another"),
        ("first = numbers[: counted]", "first = numbers[: counted - 1]"),
        ("is_known = a is not None", "is_known = a is None"),
        ("call(a, keepdims=True)", "call(a, keepdims=False)"),
        ("jnp.minimum(first, second)", "jnp.maximum(first, second)"),
        ("table[first_name] = number", "pass"),
    ],
)
def test_kinds_of_faults(before, after):
    assert after in {after for _, _, after in found(before)}


def test_a_fault_is_found_after_edits_elsewhere():
    fault = Fault("m.py", "f", "constant", "g(1, 2)", "g(1, 3)", occurrence=2)
    text, lines = planted("def f():\n    g(1, 2)\n    h(g(1,\n  2), g(1, 2))\n", fault)
    assert text == "def f():\n    g(1, 2)\n    h((g(1, 3)\n), g(1, 2))\n"
    assert lines == range(3, 5)
    text, lines = planted("\n\ndef e():\n    g(1, 2)\ndef f(): h(g(1, 2), g(1, 2))\n", fault)
    assert text.endswith("h(g(1, 2), g(1, 3))\n")
    assert lines == range(5, 6)
    assert planted("def f():\n    g(1, 2)\n", fault) is None


def test_a_planted_fault_keeps_the_number_of_lines():
    for fault in faults("m.py", MODULE):
        if is_one(MODULE, fault):
            text, _ = planted(MODULE, fault)
            ast.parse(text)
            assert text.count("\n") == MODULE.count("\n")


def test_the_list_is_written_as_it_was_read(tmp_path):
    known = [dataclasses.replace(fault, tests=None, note='it\'s a "note"') for fault in read_list(LIST)]
    write_list(tmp_path / "list.toml", known, "# head\n")
    assert read_list(tmp_path / "list.toml") == known


def test_what_failed():
    ended = {"test": "a", "failed": False}, {"test": "b", "failed": True}
    assert failures([{"test": "a"}, ended[0], {"test": "b"}, ended[1], {"test": "c"}]) == ["b", "c (hangs)"]
