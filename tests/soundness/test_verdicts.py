"""What the analysis says of the corpus: right programs are accepted, wrong ones refused, with texts that help."""

import dataclasses

import jax
import pytest
from soundness import bad_operands, right_programs, wrong_programs, wrong_subtly
from soundness.running import Program, abstract_mesh, traced
from soundness.test_corpus import cases

from shardlib import shardops
from shardlib.soundness.check import prove


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


@pytest.mark.parametrize("use", bad_operands.USES)
def test_no_primitive_makes_a_block_of_what_is_none(use):
    accepted = [p.name for p in bad_operands.PROGRAMS if p.name.startswith(f"{use}: ") and not refusals(p)]
    assert not accepted


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
