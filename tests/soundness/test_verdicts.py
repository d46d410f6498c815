"""What the analysis says of the corpus: right programs are accepted, wrong ones refused, with texts that help."""

import dataclasses

import jax
import right_programs
import wrong_programs
import wrong_subtly
from running import Program, abstract_mesh, cases, traced

from shardlib import shardops
from soundness.check import prove


def refusals(program: Program) -> tuple[str, ...]:
    """What the analysis finds wrong with a program on a mesh of two devices along each axis."""
    trace = lambda: {"": traced(program, jax.sharding.get_abstract_mesh().axis_sizes)}
    return tuple(map(str, prove(trace, abstract_mesh(program, (2,) * len(program.axes)))))


@cases([program for program in right_programs.PROGRAMS if not program.escape])
def test_right_programs_are_accepted(program):
    assert not refusals(program)


@cases(wrong_programs.PROGRAMS + wrong_subtly.PROGRAMS)
def test_wrong_programs_are_refused(program):
    assert refusals(program)


def spec_of(outs) -> str:
    return ", ".join(str(t.spec) for t in jax.tree.leaves(outs))


def wrapped(program: Program) -> Program:
    """The program with its body marked as per-device on purpose."""

    def body(*args):
        return shardops.per_device(spec_of(program.outs), program.body, *args, reason=program.reason)

    return dataclasses.replace(program, body=body)


@cases([program for program in right_programs.PROGRAMS if program.escape])
def test_programs_that_differ_between_devices_on_purpose_have_to_say_so(program):
    assert refusals(program)
    assert not refusals(wrapped(program))
