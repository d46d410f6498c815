"""The programs of tests/programs: what they compute on several devices and on one, and what the proof says of them.

Right programs are accepted, wrong ones refused, with their problem at their line and a remedy.
"""

import collections
import dataclasses
import functools
import inspect
import linecache
import os
import re
from pathlib import Path

import jax
import pytest

from shardlib import shardops
from shardlib.proof.check import prove_function
from tests.programs import bad_operands, mutated
from tests.programs.corpus import MUTATED, RIGHT, WRITTEN, WRONG
from tests.programs.program import Program, abstract_mesh, cases, distance, intended, run, traced
from tests.support.golden import without_context

EQUAL, DIFFERENT = 1e-4, 1e-2
"""A right program differs by rounding only. A wrong one differs by far more, so that nothing lies between."""
FILES = {inspect.getsourcefile(program.body) for program in RIGHT + WRITTEN}
REMEDIES = Path(__file__).parents[1] / "programs" / "remedies.txt"
"""Each problem with its remedy. `GOLDEN=write python -m pytest tests/proof/test_programs.py -k remedy` renews it."""


def test_the_corpus_is_large():
    names = collections.Counter(program.name for program in RIGHT + WRONG)
    assert max(names.values()) == 1, names.most_common(3)
    assert len(WRITTEN) >= 130
    assert len(WRONG) >= 450
    assert len(RIGHT) >= 70


# ---- what they compute --------------------------------------------------------------------------------------------


@pytest.mark.long
@cases(RIGHT)
def test_right_programs_compute_what_is_meant(program):
    assert distance(run(program, program.meshes[0]), intended(program)) < EQUAL


@pytest.mark.slow
@cases(RIGHT)
def test_right_programs_compute_what_is_meant_on_other_meshes_and_inputs(program):
    for seed, sizes in enumerate(program.meshes[1:], 1):
        assert distance(run(program, sizes, seed), intended(program, seed)) < EQUAL, sizes


@pytest.mark.slow
@cases([program for program in WRITTEN if not program.hangs])
def test_wrong_programs_compute_something_else(program):
    meant = intended(program)
    assert any(distance(run(program, sizes), meant) > DIFFERENT for sizes in program.meshes)


@pytest.mark.slow
def test_so_do_the_mutants_that_are_named():
    found = [mutant.name for mutant in mutated.all_mutants() if mutated.differs(mutant)]
    assert mutated.text_of(found) == mutated.MUTANTS.read_text(), mutated.__doc__


# ---- what the proof says ------------------------------------------------------------------------------------------


@functools.cache
def refusals(program: Program, mesh: tuple[int, ...] | None = None) -> tuple[str, ...]:
    """What the proof finds wrong with a program on a mesh; None: of two devices along each axis."""
    mesh = mesh or (2,) * len(program.axes)

    def trace():
        return traced(program, jax.sharding.get_abstract_mesh().axis_sizes)

    return tuple(map(str, prove_function(trace, abstract_mesh(program, mesh))))


def first_refusal(program: Program) -> str | None:
    """Of the smallest mesh that shows that a program is wrong.

    A ring of two turns is right on two devices, and wrong on four; an axis for another, where their sizes differ.
    """
    found = next((found for mesh in (None, *program.meshes[1:]) if (found := refusals(program, mesh))), [None])[0]
    return found and re.sub(r"~\d+", "~", found)  # numbers of orders and rings, which count on


def test_right_programs_are_accepted():
    assert {p.name: found for p in RIGHT if not p.escape and (found := refusals(p))} == {}


def is_at_its_line(program: Program, file: str, line: int) -> bool:
    """At the line that ends in `# here`, in the program or in what it calls; without one, anywhere in the program."""
    (path,) = (path for path in FILES if path.endswith(file))
    source, start = inspect.getsourcelines(program.body)
    is_inside = path == inspect.getsourcefile(program.body) and start < line < start + len(source)
    is_marked = linecache.getline(path, line).rstrip().endswith("# here")
    return is_marked or (is_inside and not any(text.rstrip().endswith("# here") for text in source))


def judged(program: Program) -> str:
    """What is wrong with the verdict on a wrong program; "" if it is the problem that the program names."""
    found = first_refusal(program)
    if not found:
        return "accepted"
    place, file, line = re.match(r"((\S+):(\d+): )?", found).groups()
    if place and not is_at_its_line(program, file, int(line)):
        return f"at another line: {found}"
    return "" if found.removeprefix(place or "").startswith(program.problem) else found


def test_wrong_programs_are_refused_with_their_problem_at_their_line():
    assert {program.name: text for program in WRITTEN if (text := judged(program))} == {}


def test_each_problem_has_its_remedy():
    """Once for all axes, numbers and operations."""

    def plain(text):
        text = re.sub(r"(?<![\w'/])[dt]~?(, [dt]~?)*(?![\w'])", "AXES", without_context(text))
        return re.sub(r"^[\w-]+: ", "", re.sub(r"(?<!\*)\b(\d+\.\d+|[1-9]\d*)\b(?!\*)", "N", text))

    text = "\n\n".join(sorted({plain(first_refusal(program)) for program in WRITTEN})) + "\n"
    if os.environ.get("GOLDEN") == "write":
        REMEDIES.write_text(text)
    assert text == REMEDIES.read_text()


def kind_of(mutant: Program) -> str:
    """Its edit: `t for d` of `softmax: t for d (2)`."""
    return mutant.name.rpartition(": ")[2].rpartition(" (")[0]


ONE_OF_EACH_KIND = [*{kind_of(program): program for program in reversed(MUTATED)}.values()]
OTHERS = [program for program in MUTATED if program not in ONE_OF_EACH_KIND]


@pytest.mark.parametrize(
    "programs", [ONE_OF_EACH_KIND, pytest.param(OTHERS, marks=pytest.mark.long)], ids=["some", "others"]
)
def test_mutants_are_refused(programs):
    assert [program.name for program in programs if not first_refusal(program)] == []


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.long)])
def test_no_primitive_makes_a_block_of_what_is_none(every):
    assert [program.name for program in bad_operands.PROGRAMS[::every] if not refusals(program)] == []


def wrapped(program: Program) -> Program:
    """The program with its body marked as per-device on purpose."""
    spec = ", ".join(str(t.spec) for t in jax.tree.leaves(program.outs))

    def body(*args):
        return shardops.per_device(spec, program.body, *args, reason=program.escape)

    return dataclasses.replace(program, body=body)


def test_programs_that_differ_between_devices_on_purpose_have_to_say_so():
    on_purpose = [program for program in RIGHT if program.escape]
    assert [program.name for program in on_purpose if not refusals(program) or refusals(wrapped(program))] == []
