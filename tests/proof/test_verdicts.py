"""What the analysis says of the corpus: right programs are accepted, wrong ones refused, with texts that help."""

import dataclasses
import inspect
import re

import jax
import pytest

from shardlib import shardops
from shardlib.proof.check import prove_function
from tests.support import bad_operands
from tests.support.corpus import MUTATED, RIGHT, WRITTEN
from tests.support.running import Program, abstract_mesh, gradient_of, traced


def refusals(program: Program, mesh: tuple[int, ...] | None = None) -> tuple[str, ...]:
    """What the analysis finds wrong with a program on a mesh; None: of two devices along each axis."""
    mesh = mesh or (2,) * len(program.axes)

    def trace():
        return traced(program, jax.sharding.get_abstract_mesh().axis_sizes)

    return tuple(map(str, prove_function(trace, abstract_mesh(program, mesh))))


def test_right_programs_are_accepted():
    assert {p.name: found for p in RIGHT if not p.escape and (found := refusals(p))} == {}


REFUSED_GRADIENTS = {"rows mapped one by one", "gradient through rows mapped one by one"}
"""Loops over a device's own rows: JAX puts the reductions of their gradients into the loop."""
REFUSED_GRADIENTS |= {"ring attention", "attention over keys in a ring unrolled", "nearest key of all in a ring"}
REFUSED_GRADIENTS |= {"matmul whose rows pass around in a loop", "gathered matmul of passing blocks"}
"""The gradient of a ring turns the other way, and its turns are not compared with one device's."""
REFUSED_GRADIENTS |= {"matmul scattered around a ring", "embedding masked after a projection"}
REFUSED_GRADIENTS |= {"tokens sorted by expert and back"}
"""The gradient scatters to where it looked up, before the mask."""


@pytest.mark.slow
def test_gradients_of_right_programs_are_accepted():
    refused, count = [], 0
    for program in RIGHT:
        if program.escape or not program.vma or program.name in REFUSED_GRADIENTS:
            continue
        try:
            refused += refusals(gradient_of(program))
        except (NotImplementedError, ValueError, TypeError):  # of pmax; of a while loop; of integers
            continue
        count += 1
    assert not refused
    assert count > 75, count


def kind_of(mutated: Program) -> str:
    """Its edit: `t for d` of `softmax: t for d (2)`."""
    return mutated.name.rpartition(": ")[2].rpartition(" (")[0]


ONE_OF_EACH_KIND = {kind_of(program): program for program in reversed(MUTATED)}
QUICK = [*WRITTEN, *ONE_OF_EACH_KIND.values()]
OTHERS = [program for program in MUTATED if ONE_OF_EACH_KIND[kind_of(program)] is not program]


@pytest.mark.parametrize("programs", [QUICK, pytest.param(OTHERS, marks=pytest.mark.long)], ids=["some", "others"])
def test_wrong_programs_are_refused(programs):
    # A ring of two turns is right on two devices, and wrong on four; an axis for another, where their sizes differ.
    def is_refused(program):
        return refusals(program) or any(refusals(program, mesh) for mesh in program.meshes[1:])

    assert [program.name for program in programs if not is_refused(program)] == []


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.long)])
def test_no_primitive_makes_a_block_of_what_is_none(every):
    assert [program.name for program in bad_operands.PROGRAMS[::every] if not refusals(program)] == []


TEXTS = {
    "softmax over vocabulary": "sub: a maximum over this device's block is used before it is taken over t",
    "square block transposed": "result 0 is f32[16/t 16/d], and is declared f32[16/d 16/t]",
    "fused gate and up split": "split: an array is split along dim 1, which is sharded over t: each device sees "
    "only its own block",
    "mean divided by local rows": "div: a number that depends on the mesh was multiplied into a value: it is 2 times "
    "what it is on one device",
    "sinusoidal positions": "arange: positions count from the start of this device's block, and are used at LINE",
    "dropout with one key": "random_bits: dim 0 of the result has 4 entries here and 8 on one device",
    "activation before the psum": "max: max of a partial sum over t: the sum of the results is not the result of the "
    "sum",
    "bias added before the psum": "add: a partial sum over t is combined with a value that is not one, which each "
    "device would count once",
    "gather on the wrong dim": "all_gather: it gathers dim 0 over t, but it is not sharded",
    "replicated value returned as sharded": "result 0 is f32[8 16], and is declared f32[8 32/t]",
    "psum over the batch axis too": "psum: a sum over d adds different blocks of a sharded dim, entry by entry",
    "least by the largest negative of unsigned": "neg: a minimum over this device's block is used before it is taken "
    "over d",
    "product summed over devices in eight bits": "astype: each device rounds its term of a sum to "
    "float8_e4m3fn, so that the sum depends on the mesh",
    "masked by other ids": "where: entries are masked by another index than the one they were looked up by",
}
"""The first line of what is said of a program, after file and line."""


def test_a_refusal_says_where_and_what():
    found = {}
    for program in (program for program in WRITTEN if program.name in TEXTS):
        place, _, text = refusals(program)[0].splitlines()[0].partition(": ")
        file, _, line = place.rpartition(":")
        source, start = inspect.getsourcelines(program.body)
        assert inspect.getsourcefile(program.body).endswith(file)
        assert start < int(line) < start + len(source), program.name
        found[program.name] = re.sub(r"\S+\.py:\d+", "LINE", text)
    assert found == TEXTS


def spec_of(outs) -> str:
    return ", ".join(str(t.spec) for t in jax.tree.leaves(outs))


def wrapped(program: Program) -> Program:
    """The program with its body marked as per-device on purpose."""

    def body(*args):
        return shardops.per_device(spec_of(program.outs), program.body, *args, reason=program.reason)

    return dataclasses.replace(program, body=body)


def test_programs_that_differ_between_devices_on_purpose_have_to_say_so():
    on_purpose = [program for program in RIGHT if program.escape]
    assert [program.name for program in on_purpose if not refusals(program) or refusals(wrapped(program))] == []
