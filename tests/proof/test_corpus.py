"""The corpus is what it says: right programs compute what they are meant to on every mesh, wrong ones do not."""

import collections

import pytest
import right_functions
import right_methods
import right_programs
import wrong_neighbours
import wrong_programs
import wrong_recipes
import wrong_subtly
from running import cases, distance, intended, run, traced

RIGHT, METHODS = right_programs.PROGRAMS, right_methods.PROGRAMS + right_functions.PROGRAMS
WRONG = wrong_programs.PROGRAMS + wrong_recipes.PROGRAMS + wrong_subtly.PROGRAMS + wrong_neighbours.PROGRAMS
EQUAL, DIFFERENT = 1e-4, 1e-2
"""A right program differs by rounding only. A wrong one differs by far more, so that nothing lies between."""


def test_the_corpus_is_large():
    names = collections.Counter(program.name for program in RIGHT + METHODS + WRONG)
    assert max(names.values()) == 1, names.most_common(3)
    assert len(WRONG) >= 130
    assert len(RIGHT) >= 50
    assert all(program.reason for program in RIGHT + METHODS if program.escape)


@pytest.mark.long
@pytest.mark.parametrize("programs", [RIGHT, METHODS, WRONG], ids=["right", "methods", "wrong"])
def test_each_program_is_one_shard_map(programs):
    for program in programs:
        assert [str(eqn.primitive) for eqn in traced(program, program.meshes[0]).eqns] == ["shard_map"], program


@pytest.mark.long
@cases(RIGHT)
def test_right_programs_compute_what_is_meant(program):
    assert distance(run(program, program.meshes[0]), intended(program)) < EQUAL


@pytest.mark.slow
@cases(RIGHT)
def test_right_programs_compute_what_is_meant_on_other_meshes_and_inputs(program):
    meant = intended(program, seed=1)
    for sizes in program.meshes[1:]:
        assert distance(run(program, sizes, seed=1), meant) < EQUAL, sizes


@pytest.mark.slow
@cases(METHODS)
def test_methods_compute_what_they_compute_on_one_device(program):
    for seed, sizes in enumerate(program.meshes):
        assert distance(run(program, sizes, seed), intended(program, seed)) < EQUAL, sizes


@pytest.mark.slow
@cases([program for program in WRONG if not program.hangs])
def test_wrong_programs_compute_something_else(program):
    meant = intended(program)
    assert any(distance(run(program, sizes), meant) > DIFFERENT for sizes in program.meshes)
