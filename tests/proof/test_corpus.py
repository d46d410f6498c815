"""The corpus is what it says: right programs compute what they are meant to on every mesh, wrong ones do not."""

import collections

import pytest

from tests.support import mutated_programs
from tests.support.corpus import RIGHT, WRITTEN, WRONG
from tests.support.running import cases, distance, intended, run

EQUAL, DIFFERENT = 1e-4, 1e-2
"""A right program differs by rounding only. A wrong one differs by far more, so that nothing lies between."""


def test_the_corpus_is_large():
    names = collections.Counter(program.name for program in RIGHT + WRONG)
    assert max(names.values()) == 1, names.most_common(3)
    assert len(WRITTEN) >= 150
    assert len(WRONG) >= 500
    assert len(RIGHT) >= 100
    assert all(program.reason for program in RIGHT if program.escape)


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
    found = [mutant.name for mutant in mutated_programs.all_mutants() if mutated_programs.differs(mutant)]
    assert mutated_programs.text_of(found) == mutated_programs.MUTANTS.read_text(), mutated_programs.__doc__
