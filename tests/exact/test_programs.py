"""The programs of tests/programs: what they compute on several devices and on one, and what the
check says of them.
"""

import collections
from collections.abc import Sequence

import jax
import pytest

from shardlib.exact.verdicts import find_in
from shardlib.findings import Finding
from tests.programs.corpus import RIGHT, WRONG, is_at_its_line
from tests.programs.program import Program, abstract_mesh, cases, distance, intended, run, traced

EQUAL, DIFFERENT = 1e-4, 1e-2
"""A right program differs by rounding only. A wrong one differs by far more, so that nothing lies
between."""
UNDECIDED = {"callback that sorts local rows", "numbers by the rbg key of each row"}
"""Wrong programs that cannot be run."""
NAMED_LATER = {
    "array added to on each device",
    "exchange on the first device alone",
    "partial sums convolved with sharded features",
    "repeated partial sum contracted",
    "reversed on several devices",
}
"""Wrong programs of which another line is named first."""


def test_each_program_has_its_name():
    names = collections.Counter(program.name for program in RIGHT + WRONG)
    assert max(names.values()) == 1, names.most_common(3)


# ---- what they compute ---------------------------------------------------------------------------


@pytest.mark.long
@cases(RIGHT)
def test_right_programs_compute_what_is_meant(program):
    assert distance(run(program, program.meshes[0]), intended(program)) < EQUAL


@pytest.mark.long
@cases([program for program in WRONG if not program.hangs])
def test_wrong_programs_compute_something_else(program):
    meant = intended(program)
    assert any(distance(run(program, sizes), meant) > DIFFERENT for sizes in program.meshes)


# ---- what the check says -------------------------------------------------------------------------


def findings(program: Program, sizes: Sequence[int] | None = None) -> list[Finding]:
    """What is found wrong with a program on a mesh; None: of two devices along each axis."""
    sizes = tuple(sizes or (2,) * len(program.axes))

    def trace():
        return traced(program, jax.sharding.get_abstract_mesh().axis_sizes)

    return find_in(trace, abstract_mesh(program, sizes))


def found(program: Program) -> str:
    """What is said of a program on the first mesh that shows that it is wrong; "" if none does.

    A ring of two turns is right on two devices, and wrong on four; an axis for another, where their
    sizes differ.
    """
    found = next(
        (found for sizes in (None, *program.meshes[1:]) if (found := findings(program, sizes))), []
    )
    is_sure = all(finding.is_wrong for finding in found)
    assert is_sure != (program.name in UNDECIDED), found
    return "\n".join(map(str, found))


@pytest.mark.long
def test_right_programs_are_accepted():
    assert {program.name: text for program in RIGHT if (text := found(program))} == {}


def is_named(program: Program) -> bool:
    text = found(program)
    file, _, line = text.partition(": ")[0].rpartition(":")
    return bool(text) and is_at_its_line(program, file, int(line))


@pytest.mark.long
def test_wrong_programs_are_refused_at_their_line():
    assert {program.name for program in WRONG if not is_named(program)} <= NAMED_LATER


def test_some_of_each_in_seconds():
    assert {program.name for program in RIGHT[::6] if found(program)} == set()
    assert {program.name for program in WRONG[::12] if not found(program)} == set()
